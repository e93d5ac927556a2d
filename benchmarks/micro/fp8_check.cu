// Tests the FP8 quantisers and dequantisation against the CPU, bit for bit, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -o fp8_check \
//       benchmarks/micro/fp8_check.cu cuda/fp8/quantize.cu cuda/fp8/quantize_tiles.cu \
//       cuda/fp8/dequantize.cu
//   ./fp8_check [test|small|bench] [seed]
#include <algorithm>
#include <ctime>
#include <string>

#include "../../tests/emulator/fp8_problem.h"
#include "check.cuh"

using namespace fp8_problem;

struct Memory {
  static constexpr uint8_t kPoison = 0xff;  // NaN where it is read
  std::vector<void*> all;

  ~Memory() {
    for (void* p : all) CHECK(cudaFree(p));
  }
  uint8_t* room(size_t bytes, int offset) {
    uint8_t* const p = device<uint8_t>(bytes + offset);
    all.push_back(p);
    CHECK(cudaMemset(p, kPoison, bytes + offset));
    return p + offset;
  }
  const uint8_t* put(const std::vector<uint8_t>& x, int offset) {
    uint8_t* const to = room(x.size(), offset);
    CHECK(cudaMemcpy(to, x.data(), x.size(), cudaMemcpyHostToDevice));
    return to;
  }
  template <typename T>
  std::vector<T> get(const T* from, size_t n) {
    return download(from, n);
  }
  void require(cudaError_t status) {
    CHECK(status);
    CHECK(cudaDeviceSynchronize());
  }
};

__global__ void fill(uint32_t* x, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    // Two bf16, or an f32, of sizes from 2^-3 to 2.
    x[i] = static_cast<uint32_t>(mix(i)) & 0x81ff81ffu | 0x3e003e00u;
  }
}

double copy_rate = 0;  // bytes read and written, a second

template <typename F>
void bench(const std::string& name, double bytes, F launch) {
  const float ms = best_milliseconds([&] {
    for (int i = 0; i < 5; ++i) CHECK(launch());
  });
  const double rate = 5e3 * bytes / ms;
  if (copy_rate == 0) copy_rate = rate;
  printf("%-34s %8.1f us  %.2f TB/s, %.2f of the copy\n", name.c_str(), 200 * ms, rate * 1e-12,
         rate / copy_rate);
}

void bench_all(int64_t rows, int64_t cols) {
  const int64_t n = rows * cols;
  auto* const x = device<uint8_t>(n * 4);
  auto *const q = device<uint8_t>(n), *const q_t = device<uint8_t>(n);
  auto *const scale = device<float>(n / 128), *const scale_t = device<float>(n / 128);
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(x), n);
  const std::string shape = "[" + std::to_string(rows) + ", " + std::to_string(cols) + "] ";
  for (const bool f32 : {false, true}) {
    const DType dtype = f32 ? DType::kF32 : DType::kBF16;
    const std::string of = shape + (f32 ? "f32 " : "bf16 ");
    const double values = double(n) * bytes_of(dtype), scales = double(n) / 32;
    bench(of + "rows", values + n + scales, [&] {
      return jax_dsa::launch_quantize({x, q, scale, rows, cols, dtype, false}, nullptr);
    });
    bench(of + "tiles", values + n, [&] {
      return jax_dsa::launch_quantize_tiles({x, q, nullptr, scale, 1, rows, cols, dtype, false},
                                            nullptr);
    });
    bench(of + "tiles and transpose", values + 2 * n, [&] {
      return jax_dsa::launch_quantize_tiles({x, q, q_t, scale, 1, rows, cols, dtype, false},
                                            nullptr);
    });
    bench(of + "transpose", values + 2 * (n + scales), [&] {
      return jax_dsa::launch_quantize_transpose(
          {x, q, scale, q_t, scale_t, 1, rows, cols, dtype, false}, nullptr);
    });
    bench(of + "columns", values + n + scales, [&] {
      return jax_dsa::launch_quantize_transpose(
          {x, nullptr, nullptr, q_t, scale_t, 1, rows, cols, dtype, false}, nullptr);
    });
    bench(of + "dequantise", values + n + scales, [&] {
      return jax_dsa::launch_dequantize({q, scale, x, 1, rows, cols, 1, dtype}, nullptr);
    });
    bench(of + "dequantise tiles", values + n, [&] {
      return jax_dsa::launch_dequantize({q, scale, x, 1, rows, cols, 128, dtype}, nullptr);
    });
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(x), n);
  }
  CHECK(cudaDeviceSynchronize());
  for (void* p : {(void*)x, (void*)q, (void*)q_t, (void*)scale, (void*)scale_t}) {
    CHECK(cudaFree(p));
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : time(nullptr);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("seed %llu\n", (unsigned long long)seed);
  if (what != "bench") {
    std::vector<Case> cases(std::begin(kCases), std::end(kCases));
    if (what == "test") {  // more tiles than run at a time
      cases.push_back({"many tiles", 16, 24, DType::kBF16, false, 0, kTiles, 1000});
      cases.push_back(
          {"many tiles and transposes", 8, 24, DType::kF32, false, 0, kTilesTranspose, 900});
      cases.push_back({"many transposes", 16, 8, DType::kBF16, false, 0, kTranspose, 1000});
      cases.push_back({"many transposes, f32", 16, 8, DType::kF32, true, 0, kTranspose, 700});
      cases.push_back({"many columns", 16, 24, DType::kF16, false, 0, kColumns, 1000});
    }
    int bad = 0;
    for (const Case& c : cases) {
      Memory memory;
      const bool right = run(c, seed, memory);
      printf("%-4s %s\n", right ? "ok" : "BAD", c.name);
      bad += !right;
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const size_t bytes = size_t{1} << 30;
  auto *const a = device<uint8_t>(bytes), *const b = device<uint8_t>(bytes);
  bench("device copy", 2. * bytes,
        [&] { return cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice); });
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  bench_all(8192, 8192);
  bench_all(32768, 7168);
  return 0;
}
