// Tests the exactness of the top-k kernels and times them, without JAX.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o topk_check tests/kernels/gpu/topk_check.cu cuda/topk/cluster.cu cuda/topk/dispatch.cu
//
// topk_check test            compares every kernel with a CPU reference, bit for bit
// topk_check small           the same for a few small shapes, for compute-sanitizer
// topk_check bench [shape]   times all shapes, or one by number
// topk_check once S V        launches variant V on shape S three times, for a profiler

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "problems/topk_problem.h"
#include "topk/fwd.cuh"
#include "topk/resident.cuh"
#include "topk/split.cuh"

using namespace jax_dsa;
using namespace topk_problem;

#define CHECK(expr)                                                           \
  do {                                                                        \
    const cudaError_t status_ = (expr);                                       \
    if (status_ != cudaSuccess) {                                             \
      printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      exit(1);                                                                \
    }                                                                         \
  } while (false)

namespace {

// ---- variants ----------------------------------------------------------------------------------

struct Variant {
  std::string name;
  std::function<cudaError_t(const TopkParams&)> run;
};

template <typename T>
Variant variant(std::string name, int ranks, double list_room = 1) {
  return {name, [=](const TopkParams& p) {
            const int64_t wanted = std::min(p.k, p.size);
            const int64_t extra =
                std::max<int64_t>(T::kTile, static_cast<int64_t>(wanted * list_room));
            return topk::launch<T>(p, static_cast<int>((wanted + extra + 3) / 4 * 4), ranks, 0);
          }};
}

template <typename T>
Variant resident(std::string name) {
  return {name, [](const TopkParams& p) {
            return topk::fits<T>(p) ? topk::launch_resident<T>(p, 0) : cudaErrorInvalidValue;
          }};
}

// Returns the parameters with a workspace of so many bytes, which later calls use, too.
TopkParams with_workspace(TopkParams p, int64_t bytes) {
  static void* workspace = nullptr;
  static int64_t has = 0;
  if (bytes > has) {
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(workspace));
    CHECK(cudaMalloc(&workspace, bytes));
    has = bytes;
  }
  p.workspace = workspace, p.workspace_bytes = bytes;
  return p;
}

// The kernels without clusters, with `ranks` CTAs per row.
Variant splits(std::string name, int ranks) {
  return {name, [=](const TopkParams& p) {
            const int64_t wanted = std::min(p.k, p.size), rows = topk::Wide::kTile + wanted;
            const int capacity = static_cast<int>((std::max(2 * wanted, rows) + 3) / 4 * 4);
            const TopkParams all = with_workspace(p, topk::split_bytes(p.rows, wanted, ranks));
            return topk::launch_splits<topk::Wide>(all, capacity, ranks, 0);
          }};
}

// JAX_DSA_TIER=portable makes "dispatch" choose among the kernels without clusters.
std::vector<Variant> variants() {
  return {
      {"dispatch",
       [](const TopkParams& p) {
         return launch_topk(with_workspace(p, topk_workspace_bytes(p.rows, p.size, p.k)), 0);
       }},
      variant<topk::Throughput>("throughput", 1),
      resident<topk::Resident>("resident"),
      variant<topk::Wide>("wide", 1),
      variant<topk::Latency>("latency x2", 2),
      variant<topk::Latency>("latency x4", 4),
      variant<topk::Latency>("latency x8", 8),
      splits("splits x2", 2),
      splits("splits x4", 4),
      splits("splits x8", 8),
      splits("splits x16", 16),
  };
}

// ---- data --------------------------------------------------------------------------------------

__global__ void fill(float* x, Kind kind, uint64_t seed, int64_t rows, int64_t size, int64_t k) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * size;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = sample(kind, seed, i / size, i % size, size, k);
  }
}

template <typename T>
struct Array {
  T* p = nullptr;
  size_t n;
  explicit Array(size_t n) : n(n) { CHECK(cudaMalloc(&p, std::max<size_t>(n * sizeof(T), 16))); }
  ~Array() { cudaFree(p); }
  Array(const Array&) = delete;
  std::vector<T> host(size_t from, size_t count) const {
    std::vector<T> out(count);
    CHECK(cudaMemcpy(out.data(), p + from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  void poison() { CHECK(cudaMemset(p, 0x7b, n * sizeof(T))); }
};

// ---- test --------------------------------------------------------------------------------------

int failures = 0, checked = 0;

void test(int64_t rows, int64_t size, int64_t k, Kind kind, bool ranges, uint64_t seed, int offset,
          int reruns, const std::vector<Variant>& all, int64_t checked_rows) {
  Array<float> store(rows * size + 3), values(rows * k);
  Array<int> indices(rows * k), starts(rows), ends(rows);
  float* x = store.p + offset;
  fill<<<1024, 256>>>(x, kind, seed, rows, size, k);
  CHECK(cudaGetLastError());
  std::vector<int> s(rows, 0), e(rows, static_cast<int>(size));
  if (ranges) std::tie(s, e) = random_ranges(rows, size, seed);
  CHECK(cudaMemcpy(starts.p, s.data(), rows * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(ends.p, e.data(), rows * 4, cudaMemcpyHostToDevice));
  std::vector<int64_t> test_rows(std::min(rows, checked_rows));
  for (size_t i = 0; i < test_rows.size(); ++i) test_rows[i] = i * rows / test_rows.size();
  if (!test_rows.empty()) test_rows.back() = rows - 1;
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<int>> expected;
  for (const int64_t r : test_rows) {
    std::vector<float> row(size);
    CHECK(cudaMemcpy(row.data(), x + r * size, size * 4, cudaMemcpyDeviceToHost));
    expected.push_back(reference(row, k, s[r], e[r]));
    logits.push_back(std::move(row));
  }
  TopkParams p = {
      x, ranges ? starts.p : nullptr, ranges ? ends.p : nullptr, indices.p, values.p, rows, size,
      k};
  for (const Variant& v : all) {
    std::vector<int> first;
    for (int run = 0; run <= reruns; ++run) {
      indices.poison(), values.poison();
      const cudaError_t status = v.run(p);
      if (status == cudaErrorInvalidValue) break;
      CHECK(status);
      CHECK(cudaDeviceSynchronize());
      if (run > 0) {
        failures += first != indices.host(0, rows * k);
        continue;
      }
      if (reruns > 0) first = indices.host(0, rows * k);
      for (size_t i = 0; i < test_rows.size(); ++i) {
        const auto got = indices.host(test_rows[i] * k, k);
        const auto got_values = values.host(test_rows[i] * k, k);
        ++checked;
        if (!matches(logits[i], expected[i], got.data(), got_values.data()) && failures++ < 20) {
          size_t at = 0;
          while (at < got.size() && got[at] == expected[i][at]) ++at;
          printf(
              "FAIL %s: %s rows %ld size %ld k %ld ranges %d row %ld [%d, %d): slot %zu is %d, "
              "expected %d\n",
              v.name.c_str(), kNames[static_cast<int>(kind)], rows, size, k, ranges, test_rows[i],
              s[test_rows[i]], e[test_rows[i]], at, at < got.size() ? got[at] : 0,
              at < got.size() ? expected[i][at] : 0);
        }
      }
    }
  }
}

// ---- timing ------------------------------------------------------------------------------------

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// Returns the median microseconds of a single call, and of one of ten calls back to back.
std::pair<double, double> time_us(const std::function<void(int)>& call, int reps) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  int n = 0;
  for (int i = 0; i < 3; ++i) call(n++);
  std::vector<double> single, batch;
  for (int i = 0; i < reps; ++i) {
    for (const int calls : {1, 10}) {
      CHECK(cudaEventRecord(a));
      for (int j = 0; j < calls; ++j) call(n++);
      CHECK(cudaEventRecord(b));
      CHECK(cudaEventSynchronize(b));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, a, b));
      (calls == 1 ? single : batch).push_back(1e3 * ms / calls);
    }
  }
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  return {median(single), median(batch)};
}

struct Shape {
  int64_t rows, size, k;
};
const Shape kShapes[] = {{64, 32768, 2048},    {4096, 8192, 2048},  {4096, 32768, 2048},
                         {1024, 131072, 2048}, {8, 131072, 2048},   {1, 1 << 20, 2048},
                         {128, 8192, 2048},    {512, 131072, 2048}, {4096, 32768, 512},
                         {8192, 131072, 2048}};

// Launches one variant a few times, for a profiler.
void once(const Shape& shape, const Variant& v) {
  const auto [rows, size, k] = shape;
  Array<float> x(rows * size);
  Array<int> indices(rows * k);
  fill<<<2048, 256>>>(x.p, Kind::kNormal, 17, rows, size, k);
  CHECK(cudaGetLastError());
  for (int i = 0; i < 3; ++i)
    CHECK(v.run({x.p, nullptr, nullptr, indices.p, nullptr, rows, size, k}));
  CHECK(cudaDeviceSynchronize());
}

void bench(int only) {
  {
    const size_t bytes = size_t{1} << 30;
    Array<char> a(bytes), b(bytes);
    const auto us = time_us(
        [&](int) { CHECK(cudaMemcpyAsync(b.p, a.p, bytes, cudaMemcpyDeviceToDevice)); }, 10);
    printf("device copy %.2f TB/s, read + written\n", 2 * bytes / us.second * 1e-6);
  }
  for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i) {
    const auto [rows, size, k] = kShapes[i];
    if (only >= 0 && i != only) continue;
    for (const Kind kind :
         {Kind::kNormal, Kind::kRelu, Kind::kPlateau, Kind::kEqual, Kind::kAscending}) {
      // Use so many copies of the rows that they do not fit in L2.
      const int64_t bytes = rows * size * 4;
      const int copies = static_cast<int>(std::max<int64_t>(1, (256 << 20) / bytes));
      Array<float> x(rows * size * copies);
      Array<int> indices(rows * k);
      fill<<<2048, 256>>>(x.p, kind, 17, rows * copies, size, k);
      CHECK(cudaGetLastError());
      for (const Variant& v : variants()) {
        const auto call = [&](int n) {
          const TopkParams p = {
              x.p + n % copies * rows * size, nullptr, nullptr, indices.p, nullptr, rows, size, k};
          CHECK(v.run(p));
        };
        if (v.run({x.p, nullptr, nullptr, indices.p, nullptr, rows, size, k}) ==
            cudaErrorInvalidValue)
          continue;
        const auto us = time_us(call, rows * size > (1 << 26) ? 5 : 15);
        printf("[%ld, %ld] k %ld %-9s %-12s %8.1f us, back to back %8.1f us, %.2f TB/s\n", rows,
               size, k, kNames[static_cast<int>(kind)], v.name.c_str(), us.first, us.second,
               (bytes + rows * k * 4.) / us.second * 1e-6);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "test";
  if (mode == "bench") {
    bench(argc > 2 ? atoi(argv[2]) : -1);
    return 0;
  }
  if (mode == "once") {
    once(kShapes[atoi(argv[2])], variants()[atoi(argv[3])]);
    return 0;
  }
  const bool small = mode == "small";
  const uint64_t seed = std::random_device{}();
  printf("seed %lu\n", seed);
  const auto all = variants();
  const std::vector<int64_t> sizes =
      small ? std::vector<int64_t>{213, 4096, 8191, 33003}
            : std::vector<int64_t>{1, 3, 62, 213, 1000, 4097, 8192, 20001, 40004, 131075};
  for (const int64_t size : sizes) {
    for (const int64_t k :
         small ? std::vector<int64_t>{2048} : std::vector<int64_t>{1, 62, 512, 2048, 4096, 10000}) {
      for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
        if (small && kind % 3 != 2) continue;
        for (const bool ranges : {false, true}) {
          const int64_t rows = small ? 2 : size > 30000 ? 6 : 13;
          test(rows, size, k, static_cast<Kind>(kind), ranges, seed + size + k, (size + k) % 4, 0,
               all, rows);
        }
      }
    }
  }
  if (!small) {
    for (const Kind kind : {Kind::kDigits, Kind::kPlateau, Kind::kNormal})
      test(100, 33001, 2048, kind, true, seed, 1, 20, all, 20);
    test(3, (1 << 20) + 1, 4096, Kind::kNormal, true, seed, 1, 0, all, 3);
    test(3, (1 << 20) + 1, 2048, Kind::kAscending, true, seed, 1, 0, all, 3);
    test(20000, 131075, 512, Kind::kNormal, true, seed, 0, 0, {all[0], all[1], all[3], all[5]}, 12);
    test(8200, 70, 2048, Kind::kNormal, true, seed, 0, 0, all, 50);
  }
  test(0, 10, 3, Kind::kNormal, false, seed, 0, 0, {all[0]}, 0);
  printf("%d rows checked, %d failures\n", checked, failures);
  return failures != 0;
}
