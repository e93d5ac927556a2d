// Tests the kernels of the indexer's losses against float64 on the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -o losses_check \
//       benchmarks/micro/losses_check.cu cuda/losses/*.cu
//   ./losses_check [test|small|bench]
// Rates of rows count the bytes of logits, teacher and gradient, 12 a slot; the copy's, those read
// and written.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "../../tests/emulator/kl_rows_problem.h"
#include "check.cuh"
#include "losses/kl_rows.cuh"

namespace {

using jax_dsa::KlRowsParams;
using jax_dsa::losses::Mask;

__global__ void fill_uniform(float* x, int64_t n, uint64_t seed, float low, float high) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = low + (high - low) * static_cast<float>(mix(seed + i) >> 40) * 0x1p-24f;
  }
}

// ---- rows --------------------------------------------------------------------------------------

bool run_rows(const kl_rows_problem::Case& c) {
  using namespace kl_rows_problem;
  const Problem x = make(c, 1);
  const int64_t n = c.rows * c.slots;
  float* const logits = device<float>(n + 4) + c.offset;
  float* const teacher = device<float>(n + 4) + c.offset;
  float* const grad = c.in_place ? logits : device<float>(n + 4) + c.offset;
  float* const kl = device<float>(c.rows);
  uint8_t *const counts = device<uint8_t>(c.rows), *const valid = upload(x.valid);
  int32_t *const starts = upload(x.starts), *const ends = upload(x.ends);
  CHECK(cudaMemset(grad, 0xff, n * 4));
  CHECK(cudaMemcpy(logits, x.logits.data(), n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(teacher, x.teacher.data(), n * 4, cudaMemcpyHostToDevice));
  KlRowsParams p = {};
  p.logits = logits, p.teacher = teacher, p.kl = kl, p.counts = reinterpret_cast<bool*>(counts);
  p.valid = c.mask == kValid ? reinterpret_cast<bool*>(valid) : nullptr;
  p.starts = c.mask == kRanges ? starts : nullptr, p.ends = c.mask == kRanges ? ends : nullptr;
  p.grad = grad, p.rows = c.rows, p.slots = c.slots;
  CHECK(launch_kl_rows(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  std::vector<float> got = download(grad, n);
  const double worst =
      worst_error(x, expected(x), download(kl, c.rows), download(counts, c.rows), got);
  CHECK(jax_dsa::launch_scale_rows({grad, kl, grad, c.rows, c.slots}, nullptr));  // in place
  const std::vector<float> factor = download(kl, c.rows), scaled = download(grad, n);
  bool right = true;
  for (int64_t i = 0; i < n; ++i) {
    const float want = got[i] * factor[i / c.slots];
    right = right && (scaled[i] == want || (std::isnan(scaled[i]) && std::isnan(want)));
  }
  const bool good = worst < 4e-6 && right;
  printf("%-4s rows: %-24s error %.1e%s\n", good ? "ok" : "BAD", c.name, worst,
         right ? "" : ", scaled wrong");
  for (float* x : {logits - c.offset, teacher - c.offset, kl}) CHECK(cudaFree(x));
  if (!c.in_place) CHECK(cudaFree(grad - c.offset));
  for (void* x : {(void*)counts, (void*)valid, (void*)starts, (void*)ends}) CHECK(cudaFree(x));
  return good;
}

template <Mask kMask, int kThreads, int kPerThread>
void launch_variant(const KlRowsParams& p) {
  using namespace jax_dsa::losses;
  kl_rows_kernel<kMask, kThreads, kPerThread, 4, true>
      <<<p.rows, kThreads, sizeof(KlShared<kThreads>)>>>(p);
  CHECK(cudaGetLastError());
}

// Medians of launches that take turns, so that clocks and heat are the same for all.
struct Timed {
  std::string name;
  std::function<void()> launch;
  double work;  // what `unit` counts, a launch
  const char* unit;
  std::vector<float> ms = {};
};
void time_in_turn(std::vector<Timed> all, int turns = 3) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int turn = 0; turn < turns; ++turn) {
    for (Timed& t : all) {
      usleep(100000);
      for (int i = 0; i < 6; ++i) {
        CHECK(cudaEventRecord(a));
        t.launch();
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float x;
        CHECK(cudaEventElapsedTime(&x, a, b));
        if (i > 0) t.ms.push_back(x);
      }
    }
  }
  for (Timed& t : all) {
    std::sort(t.ms.begin(), t.ms.end());
    const float mid = t.ms[t.ms.size() / 2];
    printf("  %-44s %8.4f ms  %7.1f %s  (best %.4f, worst %.4f)\n", t.name.c_str(), mid,
           t.work / mid * 1e3, t.unit, t.ms[0], t.ms.back());
  }
  fflush(stdout);
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
}

void bench_rows(int64_t rows, int64_t slots) {
  const int64_t n = rows * slots;
  float *const logits = device<float>(n), *const teacher = device<float>(n);
  float *const grad = device<float>(n), *const kl = device<float>(rows);
  uint8_t *const counts = device<uint8_t>(rows), *const valid = device<uint8_t>(n);
  fill_uniform<<<1024, 256>>>(logits, n, 1, -4.f, 4.f);
  fill_uniform<<<1024, 256>>>(teacher, n, 2, 0.f, 1.f);
  CHECK(cudaMemset(valid, 1, n));
  KlRowsParams p = {};
  p.logits = logits, p.teacher = teacher, p.grad = grad, p.kl = kl;
  p.counts = reinterpret_cast<bool*>(counts), p.rows = rows, p.slots = slots;
  KlRowsParams masked = p;
  masked.valid = reinterpret_cast<bool*>(valid);
  const jax_dsa::ScaleRowsParams scale = {grad, kl, grad, rows, slots};
  const double bytes = 12e-9 * n;
  printf("rows: %lld of %lld slots\n", (long long)rows, (long long)slots);
  std::vector<Timed> all = {
      {"copy", [&] { CHECK(cudaMemcpyAsync(grad, logits, n * 4, cudaMemcpyDeviceToDevice)); },
       8e-9 * n, "GB/s"},
      {"KL and gradient", [&] { CHECK(launch_kl_rows(p, nullptr)); }, bytes, "GB/s"},
      {"the same with a mask", [&] { CHECK(launch_kl_rows(masked, nullptr)); }, bytes, "GB/s"},
      {"scaled", [&] { CHECK(launch_scale_rows(scale, nullptr)); }, 8e-9 * n, "GB/s"},
      {"KL, gradient, then scaled",
       [&] {
         CHECK(launch_kl_rows(p, nullptr));
         CHECK(launch_scale_rows(scale, nullptr));
       },
       bytes, "GB/s"},
  };
  if (slots == 2048) {
    const auto add = [&](const char* name, auto launch) {
      all.push_back({name, [&p, launch] { launch(p); }, bytes, "GB/s"});
    };
    add("64 threads", launch_variant<Mask::kLogits, 64, 32>);
    add("256 threads", launch_variant<Mask::kLogits, 256, 8>);
    add("512 threads", launch_variant<Mask::kLogits, 512, 4>);
  }
  time_in_turn(all);
  for (float* x : {logits, teacher, grad, kl}) CHECK(cudaFree(x));
  for (uint8_t* x : {counts, valid}) CHECK(cudaFree(x));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  if (what == "bench") {
    bench_rows(8192, 2048);
    bench_rows(8192, 512);
    bench_rows(4096, 4096);
    bench_rows(1024, 32768);
    return 0;
  }
  int bad = 0;
  for (const auto& c : kl_rows_problem::kCases) bad += !run_rows(c);
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}
