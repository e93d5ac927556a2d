// Tests FP8 quantisation and dequantisation against the CPU, bit for bit, and times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o fp8_check \
//       tests/kernels/gpu/fp8_check.cu cuda/fp8/quantize.cu cuda/fp8/quantize_tiles.cu \
//       cuda/fp8/dequantize.cu
//   ./fp8_check [test|small|bench] [seed]
#include <algorithm>
#include <ctime>
#include <string>

#include "gpu/rates.cuh"
#include "problems/fp8_problem.h"

using namespace fp8_problem;

void bench_all(Rates& rates, int64_t rows, int64_t cols) {
  const int64_t n = rows * cols;
  auto* const x = device<uint8_t>(n * 4);
  auto *const q = device<uint8_t>(n), *const q_t = device<uint8_t>(n);
  auto *const scale = device<float>(n / 128), *const scale_t = device<float>(n / 128);
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(x), n);
  const std::string shape = "[" + std::to_string(rows) + ", " + std::to_string(cols) + "] ";
  for (const bool f32 : {false, true}) {
    const DType dtype = f32 ? DType::kF32 : DType::kBF16;
    const std::string prefix = shape + (f32 ? "f32 " : "bf16 ");
    const double values = double(n) * bytes_of(dtype), scales = double(n) / 32;
    rates.print(prefix + "rows", values + n + scales, [&] {
      return jax_dsa::launch_quantize({x, q, scale, rows, cols, dtype, false}, nullptr);
    });
    rates.print(prefix + "tiles", values + n, [&] {
      return jax_dsa::launch_quantize_tiles({x, q, nullptr, scale, 1, rows, cols, dtype, false},
                                            nullptr);
    });
    rates.print(prefix + "tiles and transpose", values + 2 * n, [&] {
      return jax_dsa::launch_quantize_tiles({x, q, q_t, scale, 1, rows, cols, dtype, false},
                                            nullptr);
    });
    rates.print(prefix + "rows and transposed tiles", values + 2 * n + scales, [&] {
      return jax_dsa::launch_quantize_transpose(
          {x, q, scale, q_t, scale_t, 1, rows, cols, dtype, false}, nullptr);
    });
    rates.print(prefix + "columns", values + n + scales, [&] {
      return jax_dsa::launch_quantize_columns({x, q_t, scale_t, 1, rows, cols, dtype, false},
                                              nullptr);
    });
    rates.print(prefix + "dequantise", values + n + scales, [&] {
      return jax_dsa::launch_dequantize({q, scale, x, 1, rows, cols, 1, dtype}, nullptr);
    });
    rates.print(prefix + "dequantise tiles", values + n, [&] {
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
    if (what == "test") {  // more tiles than run at the same time
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
      const bool good = run(c, seed, memory);
      printf("%-4s %s\n", good ? "ok" : "BAD", c.name);
      bad += !good;
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  Rates rates(5, 34);
  bench_all(rates, 8192, 8192);
  bench_all(rates, 32768, 7168);
  return 0;
}
