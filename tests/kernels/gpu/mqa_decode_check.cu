// Tests the mqa_decode kernels against float64 results of the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o mqa_decode_check tests/kernels/gpu/mqa_decode_check.cu cuda/mqa_decode/*.cu \
//       cuda/mqa_decode/tiers.cc
//   ./mqa_decode_check [test|small|bench|calls|records|profile] [seed]
// `small` is for compute-sanitizer. `calls` times how small calls are divided, and calls with a
// plan. `records` runs those cases of `bench` that have FP8 records.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "gpu/cache_bench.cuh"
#include "gpu/call_graph.cuh"
#include "gpu/check.cuh"
#include "mqa_decode/tuning.h"
#include "problems/mqa_decode_problem.h"

using namespace jax_dsa;
using namespace mqa_decode_problem;

// How calls divide their work, and the plan that they get.
enum class Plan { kNone, kOwn, kOtherLengths };
struct Division {
  mqa_decode::Tuning tuning;
  Plan plan = Plan::kNone;
};

// Makes a plan, or zeros for the portable kernels.
void make_plan(const MqaDecodeParams& p, const mqa_decode::Tuning& tuning, MqaDecodeRange* plan,
               cudaStream_t stream) {
  const cudaError_t made = mqa_decode::launch_plan(p, tuning, plan, stream);
  CHECK(made == cudaErrorNotSupported
            ? cudaMemsetAsync(plan, 0, kMqaDecodePlanRanges * sizeof(MqaDecodeRange), stream)
            : made);
}

// Memory for partial results.
struct Workspace {
  float* partial;
  float2* rows;
  int2* split_tiles;
  int64_t count, columns, cta_groups;

  explicit Workspace(const MqaDecodeParams& p) : columns(p.value_dim) {
    const auto room =
        mqa_decode_workspace(mqa_decode_rows(p.queries, p.heads, p.groups, p.dim, p.records));
    count = room.rows, cta_groups = room.split_tiles;
    partial = device<float>(count * columns);
    rows = device<float2>(count);
    split_tiles = device<int2>(cta_groups);
  }
  void poison() const {
    CHECK(cudaMemset(partial, 0xff, count * columns * 4));
    CHECK(cudaMemset(rows, 0xff, count * sizeof(float2)));
    CHECK(cudaMemset(split_tiles, 0xff, cta_groups * sizeof(int2)));
  }
  void give_to(MqaDecodeParams& p) const {
    p.partial = partial, p.partial_rows = rows, p.split_tiles = split_tiles;
  }
  void free() const {
    for (void* x : {(void*)partial, (void*)rows, (void*)split_tiles}) CHECK(cudaFree(x));
  }
};

// ---- test --------------------------------------------------------------------------------------

// The float64 results of some rows, or of all rows if there are few.
struct References {
  std::vector<int64_t> rows;
  std::vector<Row> want;

  References(const Problem& x, size_t count, uint64_t seed) {
    const int64_t all = int64_t{x.c.batch} * x.c.queries * x.c.heads;
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < std::min<size_t>(all, count); ++i) {
      rows.push_back(all <= static_cast<int64_t>(count) ? i : random() % all);
    }
    want.resize(rows.size());
    std::atomic<size_t> next = 0;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::max(std::thread::hardware_concurrency(), 1u); ++i) {
      threads.emplace_back([&] {
        for (size_t i; (i = next++) < rows.size();) {
          want[i] = attend(x, rows[i] / x.c.heads, rows[i] % x.c.heads);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
};

struct Replay {
  std::vector<uint8_t> out;
  std::vector<float> max_logit, log_sum;

  float value(const Problem& x, int64_t i) const {
    return x.c.with.normalized ? __bfloat162float(reinterpret_cast<const bf16*>(out.data())[i])
                               : reinterpret_cast<const float*>(out.data())[i];
  }
  Errors errors(const Problem& x, const References& all) const {
    Errors errors;
    const int E = x.value_dim();
    for (size_t i = 0; i < all.rows.size(); ++i) {
      std::vector<float> row(E);
      for (int d = 0; d < E; ++d) row[d] = value(x, all.rows[i] * E + d);
      errors.add(x, all.want[i], row, max_logit[all.rows[i]], log_sum[all.rows[i]]);
    }
    return errors;
  }
};

// Captures one launch per division. Replays it with half of the lengths, then twice with the case's
// lengths.
int run_case(const Case& c, const std::vector<Division>& divisions, uint64_t seed) {
  const Problem x = make(c, seed);
  Problem half = x;
  for (int32_t& end : half.ends) end /= 2;
  const References wanted(x, 200, seed), half_wanted(half, 50, seed + 1);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads, E = x.value_dim();
  const int64_t tokens = int64_t{c.batch} * c.queries;
  const int out_bytes = c.with.normalized ? 2 : 4;
  MqaDecodeParams p = shapes(x);
  const Workspace space(p);
  bf16 *q = upload(x.q), *k = upload(x.k), *v = upload(x.v);
  int32_t *starts = upload(x.starts), *ends = upload(x.ends), *table = upload(x.page_table);
  float* sinks = upload(x.sinks);
  float *max_logit = device<float>(rows), *log_sum = device<float>(rows);
  auto* out = device<uint8_t>(rows * E * out_bytes);
  uint8_t* records = upload(x.records);
  p.q = q, p.v = c.with.separate_values ? v : nullptr, p.starts = starts, p.ends = ends;
  p.k = c.with.records ? static_cast<const void*>(records) : k;
  p.sinks = c.with.sinks ? sinks : nullptr;
  p.page_table = c.with.page_size > 0 ? table : nullptr;
  p.out = out, p.max_logit = max_logit, p.log_sum = log_sum;
  space.give_to(p);
  auto* plan = device<MqaDecodeRange>(kMqaDecodePlanRanges);
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  int bad = 0;
  for (const auto& [tuning, planned] : divisions) {
    if (planned == Plan::kOtherLengths) make_plan(p, tuning, plan, stream);
    CHECK(cudaStreamSynchronize(stream));
    p.plan = planned == Plan::kNone ? nullptr : plan;
    const CallGraph call(1, stream, [&](int) {
      if (planned == Plan::kOwn) make_plan(p, tuning, plan, stream);
      return mqa_decode::launch(p, tuning, stream);
    });
    const auto replay = [&](const std::vector<int32_t>& its_ends) {
      CHECK(cudaMemset(out, 0xff, rows * E * out_bytes));
      CHECK(cudaMemset(max_logit, 0xff, rows * 4));
      CHECK(cudaMemset(log_sum, 0xff, rows * 4));
      space.poison();
      CHECK(cudaMemcpy(ends, its_ends.data(), tokens * 4, cudaMemcpyHostToDevice));
      CHECK(cudaDeviceSynchronize());
      call.replay();
      CHECK(cudaStreamSynchronize(stream));
      return Replay{download(out, rows * E * out_bytes), download(max_logit, rows),
                    download(log_sum, rows)};
    };
    const Replay other = replay(half.ends), got = replay(x.ends), again = replay(x.ends);
    const bool same =
        got.out == again.out && !std::memcmp(got.log_sum.data(), again.log_sum.data(), rows * 4);
    const Errors errors = got.errors(x, wanted), others = other.errors(half, half_wanted);
    int64_t nans = 0;
    for (int64_t i = 0; i < rows * E && !c.with.infinite; ++i) nans += std::isnan(got.value(x, i));
    const bool good = same && nans == 0 && errors.good() && others.good();
    printf("%-4s %-30s lse %.1e of %.1e  out %.1e of %.1e  nan %lld  %s%s%s\n", good ? "ok" : "BAD",
           c.name, errors.lse.worst, errors.lse.top, errors.out.worst, errors.out.top,
           (long long)nans, same ? "repeats" : "DIFFERS",
           errors.poison_kept && others.poison_kept ? "" : "  NaN lost",
           others.good() ? "" : "  wrong with other lengths");
    fflush(stdout);
    bad += !good;
  }
  CHECK(cudaStreamDestroy(stream));
  space.free();
  CHECK(cudaFree(plan));
  for (void* x : {(void*)q, (void*)k, (void*)v, (void*)starts, (void*)ends, (void*)table,
                  (void*)sinks, (void*)max_logit, (void*)log_sum, (void*)out, (void*)records}) {
    CHECK(cudaFree(x));
  }
  return bad;
}

// name, B, T, S, N, G, D
const Case kCases[] = {
    {"one tile", 1, 1, 64, 64, 1, 576, {.full = true}},
    {"one request", 1, 1, 500, 64, 1, 576, {.full = true}},
    {"two row tiles", 1, 1, 450, 100, 1, 576, {.full = true}},
    {"sinks", 2, 1, 300, 40, 1, 576, {.sinks = 1}},
    {"window", 9, 1, 200, 40, 1, 576, {.window = 90, .sinks = 2}},
    {"queries", 4, 3, 260, 20, 1, 576, {.infinite = true}},
    {"five row tiles", 2, 5, 200, 57, 1, 512, {.window = 70, .infinite = true}},
    {"starts, groups", 3, 4, 200, 24, 2, 576, {.starts = 2, .sinks = 1}},
    {"pages of 64", 3, 2, 256, 40, 1, 576, {.page_size = 64, .holes = true, .infinite = true}},
    {"pages of 7, sharp",
     3,
     1,
     210,
     48,
     1,
     512,
     {.page_size = 7, .holes = true, .starts = 1, .q_size = 12.f}},
    {"floats", 3, 2, 260, 33, 1, 576, {.window = 130, .normalized = false}},
    {"few", 4, 1, 400, 16, 1, 576, {.sinks = 1}},
    {"few, shared keys", 3, 1, 300, 30, 2, 512, {.starts = 1, .shared = true}},
    {"few, queries", 5, 4, 300, 8, 1, 576, {.sinks = 2, .infinite = true}},
    {"few, starts, pages",
     3,
     3,
     256,
     20,
     2,
     512,
     {.page_size = 128, .holes = true, .starts = 2, .infinite = true}},
    {"few, pages of 1", 6, 1, 150, 5, 1, 576, {.page_size = 1, .window = 64}},
    {"few, floats", 3, 2, 260, 16, 1, 576, {.starts = 1, .normalized = false, .q_size = 6.f}},
    {"separate values 128",
     4,
     2,
     330,
     32,
     4,
     128,
     {.separate_values = true, .sinks = 1, .infinite = true}},
    {"separate values 128, many heads",
     2,
     1,
     300,
     80,
     1,
     128,
     {.separate_values = true, .window = 100}},
    {"separate values 256, pages",
     3,
     3,
     192,
     36,
     2,
     256,
     {.separate_values = true, .page_size = 64, .holes = true, .starts = 2, .infinite = true}},
    {"separate values 64", 3, 4, 600, 9, 1, 64, {.separate_values = true, .normalized = false}},
    {"records", 3, 1, 300, 40, 1, 576, {.sinks = 1, .records = true}},
    {"records, queries, pages",
     4,
     3,
     256,
     24,
     2,
     576,
     {.page_size = 16, .holes = true, .starts = 2, .infinite = true, .records = true}},
    {"records, 8 requests", 8, 1, 3000, 128, 1, 576, {.records = true}},
    {"few, records", 4, 1, 400, 16, 1, 576, {.sinks = 1, .records = true}},
    {"few, records, queries",
     3,
     3,
     260,
     10,
     2,
     576,
     {.window = 130, .normalized = false, .infinite = true, .records = true}},
    {"few, records, pages",
     5,
     1,
     2048,
     8,
     1,
     576,
     {.page_size = 64, .holes = true, .pools = true, .records = true}},
    {"no keys", 2, 2, 0, 40, 1, 576},
    {"one long request", 1, 1, 9000, 128, 1, 576},
    {"8 requests", 8, 1, 3000, 128, 1, 576, {.sinks = 1}},
    {"70 requests", 70, 2, 900, 128, 1, 512, {.window = 600}},
    {"140 requests, pages", 140, 1, 768, 64, 1, 576, {.page_size = 64, .holes = true}},
    {"few, 300 requests", 300, 1, 700, 16, 1, 576, {.sinks = 1}},
    {"few, long, pages", 2, 4, 8192, 8, 1, 576, {.page_size = 16, .holes = true}},
    {"8 queries", 6, 8, 1500, 128, 1, 576, {.infinite = true}},
    {"separate values 128, groups", 33, 1, 2000, 32, 8, 128, {.separate_values = true}},
};

// ---- bench -------------------------------------------------------------------------------------

// Multiplies random tiles in shared memory and does nothing else, with two warpgroups per SM.
constexpr int kProducts = 4096;
__global__ void __launch_bounds__(256, 1) multiply(const bf16* from, float* to) {
  struct alignas(1024) Tiles {
    uint8_t a[2][kBlockBytes], b[4][kBlockBytes];
  };
  auto& shared = dynamic_shared<Tiles>();
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Tiles) / 2); i += 256) {
    reinterpret_cast<bf16*>(&shared)[i] = from[i];
  }
  fence_async_proxy();
  __syncthreads();
  const uint64_t a = k_major_descriptor(smem_address(shared.a[threadIdx.x / 128]));
  const uint64_t b = k_major_descriptor(smem_address(shared.b));
  float d[128];
#pragma unroll 1
  for (int i = 0; i < kProducts; i += 4) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_bf16<kKMajor, kKMajor>(d, a + k * 2, b + k * 2, i + k > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }
  wgmma_pin(d);
  float sum = 0;
#pragma unroll
  for (float x : d) sum += x;
  to[blockIdx.x * 256 + threadIdx.x] = sum;
}
double product_rate() {
  constexpr int kBytes = 6 * kBlockBytes;
  auto* from = device<bf16>(kBytes / 2);
  auto* to = device<float>(num_sms() * 256);
  fill_bf16<<<64, 256>>>(from, kBytes / 2, 9);
  const float best = best_milliseconds(
      [&] { CHECK(launch_blocks(multiply, num_sms(), 256, kBytes, nullptr, from, to)); });
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
  return 2. * num_sms() * 2 * kProducts * 64 * 256 * 16 / best * 1e-9;  // TFLOPS
}

struct Ceilings {
  double copy, products;
};

// A shape to time. Lengths are log-uniform in 64..S if `uneven`, otherwise all S.
struct Shape {
  int B, T, S, N, G, D;
  int page_size = 0;
  bool separate_values = false, uneven = false, records = false;
};

std::vector<int> lengths_of(const Shape& s) {
  std::vector<int> all;
  for (int b = 0; b < s.B; ++b) {
    const double u = (mix(77 + b) >> 11) * 0x1p-53;
    all.push_back(s.uneven ? static_cast<int>(64 * std::exp2(u * std::log2(s.S / 64.))) : s.S);
  }
  return all;
}

// Times one call, in microseconds. A graph of calls alternates between enough keys to miss the L2.
void bench(const Shape& s, const Ceilings& ceilings, const std::vector<Division>& divisions) {
  const int E = s.separate_values ? s.D : 512;
  const int64_t rows = int64_t{s.B} * s.S, tokens = int64_t{s.B} * s.T;
  const std::vector<int> lengths = lengths_of(s);
  int64_t keys = 0, pairs = 0;  // keys that are read; (query, key) pairs
  std::vector<int32_t> starts(tokens), ends;
  for (int length : lengths) {
    keys += length;
    for (int t = 0; t < s.T; ++t) {
      ends.push_back(length - s.T + 1 + t);
      pairs += ends.back();
    }
  }
  const int64_t k_bytes = int64_t{s.G} * (s.records ? kMlaRecordBytes : s.D * 2);
  const int64_t row_bytes = k_bytes + (s.separate_values ? int64_t{s.G} * E * 2 : 0);
  const int sets =
      static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / (keys * row_bytes) + 1, 2, 32));
  auto* k = device<uint8_t>(sets * rows * k_bytes);
  auto* v = device<bf16>(s.separate_values ? sets * rows * s.G * E : 0);
  auto *q = device<bf16>(tokens * s.N * s.D), *out = device<bf16>(tokens * s.N * E);
  auto* max_logit = device<float>(tokens * s.N);
  auto* log_sum = device<float>(tokens * s.N);
  int32_t *starts_there = upload(starts), *ends_there = upload(ends);
  const int pages = s.page_size > 0 ? static_cast<int>(rows / s.page_size) : 0;
  auto* table = device<int32_t>(pages);
  if (s.records) {
    fill_records<<<2048, 128>>>(k, sets * rows * s.G, 1.f, 1);
  } else {
    fill_bf16<<<2048, 256>>>(reinterpret_cast<bf16*>(k), sets * rows * s.G * s.D, 1);
  }
  if (s.separate_values) fill_bf16<<<2048, 256>>>(v, sets * rows * s.G * E, 4);
  fill_bf16<<<2048, 256>>>(q, tokens * s.N * s.D, 2);
  if (pages > 0) fill_table<<<256, 256>>>(table, pages);
  CHECK(cudaDeviceSynchronize());
  MqaDecodeParams p = {};
  p.q = q, p.starts = starts_there, p.ends = ends_there, p.out = out, p.max_logit = max_logit,
  p.log_sum = log_sum;
  p.batch = s.B, p.queries = s.T, p.keys = s.S, p.heads = s.N, p.groups = s.G, p.dim = s.D;
  p.records = s.records;
  p.value_dim = E, p.scale = 1 / std::sqrt(float(s.D)), p.batch_rows = pages > 0 ? 0 : s.S;
  p.page_table = pages > 0 ? table : nullptr;
  p.page_size = s.page_size, p.pages = pages, p.page_slots = pages > 0 ? s.S / s.page_size : 0;
  const Workspace space(p);
  space.give_to(p);
  const double bytes = keys * row_bytes + tokens * s.N * (s.D + E) * 2.;
  const double flops = 2. * pairs * s.N * (s.D + E);
  printf("B%d T%d S%d N%d G%d D%d%s%s%s%s: bytes take %.1f us, products %.1f us\n", s.B, s.T, s.S,
         s.N, s.G, s.D, s.separate_values ? " separate_values" : "", s.uneven ? " uneven" : "",
         s.records ? " records" : "",
         s.page_size > 0 ? (" pages of " + std::to_string(s.page_size)).c_str() : "",
         bytes / ceilings.copy * 1e-6, flops / ceilings.products * 1e-6);
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  auto* plan = device<MqaDecodeRange>(kMqaDecodePlanRanges);
  for (const auto& [tuning, planned] : divisions) {
    make_plan(p, tuning, plan, stream);
    CHECK(cudaStreamSynchronize(stream));
    p.plan = planned == Plan::kNone ? nullptr : plan;
    const CallGraph calls(sets, stream, [&](int i) {
      p.k = k + i * rows * k_bytes;
      p.v = s.separate_values ? v + i * rows * s.G * E : nullptr;
      return mqa_decode::launch(p, tuning, stream);
    });
    const std::vector<float> us = calls.times(10);
    const double mid = us[us.size() / 2];
    printf(
        "  combine cost %-7d min range %d max static %-2d splits per tile %-3d max cluster "
        "tiles %-2d%s %8.1f us (best %.1f, worst %.1f)  %.2f TB/s = %.2f of the copy  %.0f TFLOPS "
        "= %.2f of products\n",
        tuning.combine_cost, tuning.min_range_tiles, tuning.max_static_tiles,
        tuning.splits_per_tile, tuning.max_cluster_tiles,
        planned == Plan::kNone ? "     " : " plan", mid, us[0], us.back(), bytes / mid * 1e-6,
        bytes / mid * 1e-6 / ceilings.copy, flops / mid * 1e-6,
        flops / mid * 1e-6 / ceilings.products);
    fflush(stdout);
  }
  CHECK(cudaStreamDestroy(stream));
  space.free();
  CHECK(cudaFree(plan));
  for (void* x : {(void*)k, (void*)v, (void*)q, (void*)out, (void*)max_logit, (void*)log_sum,
                  (void*)starts_there, (void*)ends_there, (void*)table}) {
    CHECK(cudaFree(x));
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20240607;
  printf("seed %llu\n", (unsigned long long)seed);
  const mqa_decode::Tuning usual, split_all = {0, 1, -1, 10, 0}, whole = {1 << 20, 3, -1, 10, 0},
                                  divide_all = {0, 1, 1 << 20, 1000, 0},
                                  clusters = {.max_cluster_tiles = 1 << 20};
  if (what == "test" || what == "small") {
    int bad = 0;
    for (const Case& c : kCases) {
      if (what == "small" && int64_t{c.batch} * c.keys > 1500) continue;
      bad += run_case(c,
                      {{usual},
                       {split_all},
                       {whole},
                       {divide_all},
                       {clusters},
                       {split_all, Plan::kOwn},
                       {split_all, Plan::kOtherLengths}},
                      seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const Ceilings ceilings = {copy_rate(), product_rate()};
  printf("device copy %.2f TB/s, products from shared memory %.0f TFLOPS\n", ceilings.copy,
         ceilings.products);
  if (what == "profile") {
    bench({64, 1, 8192, 128, 1, 576}, ceilings, {{usual}});
    return 0;
  }
  const auto min_range_tiles = [](int tiles) {
    return mqa_decode::Tuning{
        .min_range_tiles = tiles, .max_static_tiles = -1, .max_cluster_tiles = 0};
  };
  const mqa_decode::Tuning always = {.combine_cost = 0},
                           by_lengths = {.max_static_tiles = -1, .max_cluster_tiles = 0};
  const std::vector<Division> one = {{usual}};
  const auto splits_per_tile = [](int splits) {
    return Division{
        {.max_static_tiles = 1 << 20, .splits_per_tile = splits, .max_cluster_tiles = 0}};
  };
  if (what == "calls") {
    const std::vector<Division> few = {{usual},
                                       {by_lengths},
                                       {by_lengths, Plan::kOwn},
                                       splits_per_tile(2),
                                       splits_per_tile(10),
                                       splits_per_tile(50),
                                       {clusters}};
    for (int N : {128, 16}) {
      bench({1, 1, 640, N, 1, 576}, ceilings, few);
      bench({8, 1, 2048, N, 1, 576}, ceilings, few);
      bench({1, 1, 8192, N, 1, 576}, ceilings, few);
      bench({8, 1, 8192, N, 1, 576}, ceilings, few);
    }
    for (int B : {64, 128}) {
      bench({B, 1, 8192, 128, 1, 576}, ceilings, {{by_lengths}, {by_lengths, Plan::kOwn}});
    }
    return 0;
  }
  const std::vector<Division> shared = {{min_range_tiles(1)},
                                        {min_range_tiles(2)},
                                        {min_range_tiles(3)},
                                        {min_range_tiles(4)},
                                        {min_range_tiles(8)}};
  const auto records = [&] {
    for (int N : {16, 64, 128}) {
      bench({.B = 64, .T = 1, .S = 8192, .N = N, .G = 1, .D = 576, .records = true}, ceilings, one);
    }
  };
  if (what == "records") {
    records();
    return 0;
  }
  // These cases decide when requests are split, and how finely.
  bench({64, 1, 8192, 128, 1, 576}, ceilings, {{usual}, {always}});
  bench({128, 1, 8192, 128, 1, 576}, ceilings, {{usual}, {always}});
  bench({64, 1, 65536, 128, 1, 576, 0, false, true}, ceilings, one);
  bench({64, 1, 8192, 64, 1, 576}, ceilings, one);
  bench({1, 1, 8192, 128, 1, 576}, ceilings, shared);
  bench({8, 1, 8192, 128, 1, 576}, ceilings, one);
  bench({1, 1, 640, 64, 1, 576}, ceilings,
        {{usual}, {min_range_tiles(1)}, {min_range_tiles(2)}, {min_range_tiles(3)}});
  for (int B : {64, 128}) bench({B, 1, 8192, 16, 1, 576}, ceilings, one);
  bench({1, 1, 8192, 16, 1, 576}, ceilings, shared);
  bench({8, 1, 8192, 16, 1, 576}, ceilings, shared);
  bench({64, 1, 8192, 32, 1, 576}, ceilings, one);
  records();
  for (int page_size : {256, 64, 16, 1}) {
    bench({64, 1, 8192, 128, 1, 576, page_size}, ceilings, one);
    bench({64, 1, 8192, 16, 1, 576, page_size}, ceilings, one);
  }
  for (int T : {2, 4, 8}) {
    bench({64, T, 8192, 16, 1, 576}, ceilings, one);
    bench({64, T, 8192, 128, 1, 576}, ceilings, one);
  }
  bench({64, 1, 8192, 128, 1, 512}, ceilings, one);
  bench({64, 1, 65536, 16, 1, 576, 0, false, true}, ceilings, one);
  bench({64, 1, 8192, 32, 8, 128, 0, true}, ceilings, one);
  bench({64, 1, 8192, 64, 8, 64, 0, true}, ceilings, one);
  bench({64, 1, 8192, 16, 2, 256, 0, true}, ceilings, one);
  return 0;
}
