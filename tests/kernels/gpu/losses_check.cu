// Tests the kernels of the indexer's losses against float64 on the CPU, or times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o losses_check tests/kernels/gpu/losses_check.cu cuda/losses/*.cu \
//       cuda/losses/tiers.cc cuda/indexer/*.cu cuda/indexer/tiers.cc cuda/topk/cluster.cu \
//       cuda/topk/dispatch.cu
//   ./losses_check [test|small|bench]
// Rates of rows count the bytes of logits, teacher and gradient, 12 per slot. The rate of the copy
// counts the bytes that it reads and writes. Rates of products count the flops of each pair of a
// query and a key that it sees: 2 N D for each of the teacher's two products, 2 J C for each
// product with the indexer's heads.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "common/launch.cuh"
#include "gpu/check.cuh"
#include "indexer/indexer.h"
#include "losses/index_grads.cuh"
#include "losses/kl_rows.cuh"
#include "problems/dense_loss_problem.h"
#include "problems/kl_rows_problem.h"

namespace {

using jax_dsa::KlRowsParams;
using jax_dsa::losses::Mask;

__global__ void fill_uniform(float* x, int64_t n, uint64_t seed, float low, float high) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = low + (high - low) * static_cast<float>(mix(seed + i) >> 40) * 0x1p-24f;
  }
}

// Measures medians of launches. Rounds over all launches are repeated, so that changes of clock and
// temperature affect all of them equally.
struct Timed {
  std::string name;
  std::function<void()> launch;
  double work;  // amount that `unit` counts, per launch
  const char* unit;
  std::vector<float> ms = {};
};
void time_in_rounds(std::vector<Timed> all, int rounds = 3) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int round = 0; round < rounds; ++round) {
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
  p.grad = grad, p.row_weight = kRowWeight, p.rows = c.rows, p.slots = c.slots;
  CHECK(launch_kl_rows(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  const std::vector<float> got = download(grad, n), factor = factors(c.rows);
  const double worst =
      worst_error(x, expected(x), download(kl, c.rows), download(counts, c.rows), got);
  float* const by = upload(factor);
  CHECK(jax_dsa::launch_scale_rows({grad, by, kRowWeight, grad, c.rows, c.slots}, nullptr));
  const bool right = good_scaled(c, got, factor, download(grad, n));
  const bool good = worst < 4e-6 && right;
  printf("%-4s rows: %-24s error %.1e%s\n", good ? "ok" : "BAD", c.name, worst,
         right ? "" : ", scaled wrong");
  for (float* x : {logits - c.offset, teacher - c.offset, kl, by}) CHECK(cudaFree(x));
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

void bench_rows(int64_t rows, int64_t slots) {
  const int64_t n = rows * slots;
  float *const logits = device<float>(n), *const teacher = device<float>(n);
  float *const grad = device<float>(n), *const kl = device<float>(rows);
  float* const ones = upload(std::vector<float>(rows, 1.f));
  uint8_t *const counts = device<uint8_t>(rows), *const valid = device<uint8_t>(n);
  fill_uniform<<<1024, 256>>>(logits, n, 1, -4.f, 4.f);
  fill_uniform<<<1024, 256>>>(teacher, n, 2, 0.f, 1.f);
  CHECK(cudaMemset(valid, 1, n));
  KlRowsParams p = {};
  p.logits = logits, p.teacher = teacher, p.grad = grad, p.kl = kl;
  p.counts = reinterpret_cast<bool*>(counts), p.row_weight = 1.f, p.rows = rows, p.slots = slots;
  KlRowsParams masked = p;
  masked.valid = reinterpret_cast<bool*>(valid);
  const jax_dsa::ScaleRowsParams scale = {grad, kl, 1.f, grad, rows, slots};
  const jax_dsa::ScaleRowsParams nothing = {grad, ones, 1.f, grad, rows, slots};
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
      {"the same, no row needs scaling",
       [&] {
         CHECK(launch_kl_rows(p, nullptr));
         CHECK(launch_scale_rows(nothing, nullptr));
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
  time_in_rounds(all);
  for (float* x : {logits, teacher, grad, kl, ones}) CHECK(cudaFree(x));
  for (uint8_t* x : {counts, valid}) CHECK(cudaFree(x));
}

// ---- warm-up loss ------------------------------------------------------------------------------

using jax_dsa::DenseLossParams;

// Cases that are too large for the emulator.
const dense_loss_problem::Case kLargeCases[] = {
    {"three rounds of CTAs", 1, 400, 400, 128, 1, 576, 64, 128},
    {"many keys, ranges", 2, 60, 1500, 64, 1, 512, 64, 128, false, true, true},
    {"many segments", 1, 1000, 300, 16, 1, 512, 32, 64},
};

template <typename T>
const void* uploaded(const std::vector<T>& x, std::vector<void*>* all) {
  all->push_back(upload(x));
  return all->back();
}

bool run_dense(const dense_loss_problem::Case& c) {
  using namespace dense_loss_problem;
  const Problem x = make(c, 1);
  const Loss want = loss(x);
  Results first(x);
  bool good = true;
  const int64_t all = jax_dsa::dense_loss_bytes(c.batch, c.queries, c.keys, c.channels, c.heads);
  const int64_t chunk =
      jax_dsa::dense_loss_bytes(1, (c.queries + 2) / 3, c.keys, c.channels, c.heads);
  for (int run = 0; run < 3; ++run) {  // the last run in chunks
    const int64_t capacity = run < 2 ? all : chunk;
    Results got(x);
    DenseLossParams p = params(x, got);
    std::vector<void*> memory;
    const auto to_device = [&](auto* pointer, size_t n) {
      using T = std::remove_cv_t<std::remove_pointer_t<decltype(pointer)>>;
      memory.push_back(upload(std::vector<T>(pointer, pointer + n)));
      return static_cast<T*>(memory.back());
    };
    const int64_t tokens = x.tokens();
    p.index.q = uploaded(x.index_q, &memory), p.index.k = uploaded(x.index_k, &memory);
    p.teacher.q = uploaded(x.q, &memory), p.teacher.kv = uploaded(x.kv, &memory);
    p.index.weights = to_device(p.index.weights, x.weights.size());
    if (c.scaled) p.index.k_scale = to_device(p.index.k_scale, x.k_scale.size());
    p.index.starts = to_device(p.index.starts, tokens);
    p.index.ends = to_device(p.index.ends, tokens);
    p.index.dq = to_device(p.index.dq, got.q.size());
    p.index.dk = to_device(p.index.dk, got.k.size());
    p.index.dweights = to_device(p.index.dweights, got.weights.size());
    if (c.scaled) p.index.dk_scale = to_device(p.index.dk_scale, got.k_scale.size());
    p.kl = to_device(p.kl, got.kl.size()), p.rows = to_device(p.rows, got.rows.size());
    memory.push_back(p.workspace = device<char>(capacity));
    p.capacity = capacity;
    CHECK(cudaMemset(p.workspace, 0x7f, capacity));
    CHECK(launch_dense_loss(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    got.q = download(p.index.dq, got.q.size()), got.k = download(p.index.dk, got.k.size());
    got.weights = download(p.index.dweights, got.weights.size());
    if (c.scaled) got.k_scale = download(p.index.dk_scale, got.k_scale.size());
    got.kl = download(p.kl, got.kl.size()), got.rows = download(p.rows, got.rows.size());
    good = report(c.name, x, want, got) && good;
    if (run == 0) first = got;
    if (run == 1 && !(first == got)) {
      printf("BAD  %-24s DIFFERS\n", c.name);
      good = false;
    }
    for (void* m : memory) CHECK(cudaFree(m));
  }
  return good;
}

__global__ void fill_normal(__nv_bfloat16* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = mix(seed * 0x1000003 + i);
    int sum = 0;
    for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
    x[i] = __float2bfloat16(static_cast<float>(sum - 131070) * (1.f / 37837.f));
  }
}
__global__ void fill_causal(int32_t* starts, int32_t* ends, int queries, int keys) {
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < queries; t += gridDim.x * blockDim.x) {
    starts[t] = 0;
    ends[t] = keys - queries + t + 1;
  }
}

// Times the loss with workspaces of several sizes. With `apart`, also times each kernel alone, over
// all queries at once.
void bench_dense(int T, int S, int N, int D, int J, int C, bool apart) {
  using namespace jax_dsa;
  std::vector<void*> memory;
  const auto bf16s = [&](int64_t n, uint64_t seed) {
    auto* x = device<__nv_bfloat16>(n);
    fill_normal<<<1024, 256>>>(x, n, seed);
    memory.push_back(x);
    return x;
  };
  const auto floats = [&](int64_t n) {
    auto* x = device<float>(n);
    fill_uniform<<<1024, 256>>>(x, n, 5, 0.f, 0.1f);
    memory.push_back(x);
    return x;
  };
  DenseLossParams p = {};
  p.index.q = bf16s(int64_t{T} * J * C, 1), p.index.k = bf16s(int64_t{S} * C, 2);
  p.teacher.q = bf16s(int64_t{T} * N * D, 3), p.teacher.kv = bf16s(int64_t{S} * D, 4);
  p.index.weights = floats(int64_t{T} * J);
  p.index.dq = floats(int64_t{T} * J * C), p.index.dk = floats(int64_t{S} * C);
  p.index.dweights = floats(int64_t{T} * J);
  int32_t *const starts = device<int32_t>(T), *const ends = device<int32_t>(T);
  fill_causal<<<64, 256>>>(starts, ends, T, S);
  memory.push_back(starts), memory.push_back(ends);
  p.index.starts = starts, p.index.ends = ends;
  p.index.batch = 1, p.index.queries = T, p.index.keys = S, p.index.heads = J;
  p.index.channels = C, p.index.relu = true;
  p.teacher.heads = N, p.teacher.groups = 1, p.teacher.dim = D;
  p.teacher.scale = 1.f / std::sqrt(static_cast<float>(D));
  p.kl = floats(1), memory.push_back(p.rows = device<int32_t>(1));

  const double pairs = T * (S - T + 0.5 * (T + 1));
  const double teacher_work = 4e-12 * pairs * N * D, index_work = 2e-12 * pairs * J * C;
  printf("warm-up loss: T%d S%d N%d D%d J%d C%d, causal\n", T, S, N, D, J, C);
  std::vector<Timed> all;
  const int64_t whole = dense_loss_bytes(1, T, S, C, N);
  char* const workspace = device<char>(std::min(whole, int64_t{1} << 30));
  memory.push_back(workspace);
  for (const int64_t mib : {128, 256, 512, 1024}) {
    DenseLossParams some = p;
    some.workspace = workspace, some.capacity = std::min(whole, mib << 20);
    char name[64];
    snprintf(name, sizeof name, "all, workspace of %lld MiB", (long long)(some.capacity >> 20));
    all.push_back({name, [some] { CHECK(launch_dense_loss(some, nullptr)); },
                   teacher_work + 5 * index_work, "TFLOPS"});
    if (some.capacity == whole) break;
  }
  if (apart) {
    float *const logits = floats(int64_t{T} * S), *const probabilities = floats(int64_t{T} * S);
    float* const kl = floats(T);
    auto* const counts = device<bool>(T);
    memory.push_back(counts);
    TeacherParams teacher = p.teacher;
    teacher.batch = 1, teacher.queries = T, teacher.keys = S, teacher.out = probabilities,
    teacher.pairs = reinterpret_cast<float2*>(floats(int64_t{T} * N * 2));
    teacher.starts = starts, teacher.ends = ends;
    IndexerFwdParams scores = {};
    scores.q = p.index.q, scores.k = p.index.k, scores.weights = p.index.weights;
    scores.starts = starts, scores.ends = ends, scores.out = logits;
    scores.batch = 1, scores.queries = T, scores.keys = S, scores.heads = J, scores.channels = C;
    scores.dtype = IndexerDType::kBF16, scores.relu = true;
    const KlRowsParams rows = {.logits = logits,
                               .teacher = probabilities,
                               .starts = starts,
                               .ends = ends,
                               .kl = kl,
                               .counts = counts,
                               .grad = logits,
                               .row_weight = 1.f,
                               .rows = T,
                               .slots = S};
    IndexGradsParams index = p.index;
    const int64_t segments = ceil_div(T, kIndexGradsSegment);
    index.grad = logits, index.partial_dk = floats(segments * S * C);
    memory.push_back(index.partial_used = device<bool>(segments * ceil_div(S, kIndexGradsKeys)));
    index.first = index.last = true;
    all.push_back(
        {"teacher", [=] { CHECK(launch_teacher(teacher, nullptr)); }, teacher_work, "TFLOPS"});
    all.push_back(
        {"logits", [=] { CHECK(launch_indexer_fwd(scores, nullptr)); }, index_work, "TFLOPS"});
    all.push_back({"KL and gradient of rows", [=] { CHECK(launch_kl_rows(rows, nullptr)); },
                   12e-9 * pairs, "GB/s"});
    all.push_back({"gradients of the index, both",
                   [=] { CHECK(launch_index_grads(index, nullptr)); }, 4 * index_work, "TFLOPS"});
    if (C == 128) {
      using namespace jax_dsa::index_grads;
      const auto one = [=](auto kernel) {
        CHECK((launch_persistent<Shared<128>>(kernel, INT32_MAX, kThreads, nullptr, index)));
      };
      all.push_back({"queries alone", [=] { one(index_grads_kernel<128, Gradient::kQueries>); },
                     2 * index_work, "TFLOPS"});
      all.push_back({"keys alone, segments not summed",
                     [=] { one(index_grads_kernel<128, Gradient::kKeys>); }, 2 * index_work,
                     "TFLOPS"});
    }
  }
  time_in_rounds(all, apart ? 3 : 1);
  for (void* m : memory) CHECK(cudaFree(m));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  if (what == "bench") {
    bench_rows(8192, 2048);
    bench_rows(8192, 512);
    bench_rows(4096, 4096);
    bench_rows(1024, 32768);
    bench_dense(4096, 4096, 128, 576, 64, 128, true);
    bench_dense(4096, 8192, 64, 512, 32, 128, true);
    bench_dense(32768, 32768, 128, 576, 64, 128, false);
    return 0;
  }
  int bad = 0;
  for (const auto& c : kl_rows_problem::kCases) bad += !run_rows(c);
  for (const auto& c : dense_loss_problem::kCases) bad += !run_dense(c);
  for (const auto& c : kLargeCases) bad += what != "small" && !run_dense(c);
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}
