// The cases of mqa_decode and their comparison with float64 results, for programs of the emulator.
#pragma once

#include <functional>

#include "emulator.h"
#include "far_rows.h"
#include "mqa_decode/tuning.h"
#include "problems/mqa_decode_problem.h"

namespace {

using namespace jax_dsa;
using namespace mqa_decode_problem;

// Which plan a call gets.
enum class Plan {
  kNone,
  kOwn,
  kOtherLengths,  // a plan for requests of other lengths
  kOtherSizes,    // a plan for fewer requests
  kNoise,         // random numbers
  kForged,        // random numbers that look like a plan; the results are undefined
};

struct DecodeCase {
  Case c;
  int num_sms;
  mqa_decode::Tuning tuning;
  Plan plan = Plan::kNone;
};

using Launch =
    std::function<cudaError_t(const MqaDecodeParams&, const mqa_decode::Tuning&, cudaStream_t)>;
using LaunchPlan = std::function<cudaError_t(const MqaDecodeParams&, const mqa_decode::Tuning&,
                                             MqaDecodeRange*, cudaStream_t)>;

int failures = 0;

// Returns the plan for a call with the parameters `p`.
std::vector<MqaDecodeRange> make_plan(const DecodeCase& tried, MqaDecodeParams p,
                                      const LaunchPlan& launch, uint64_t seed) {
  std::vector<MqaDecodeRange> plan(kMqaDecodePlanRanges);
  std::mt19937_64 random(seed);
  const auto up_to = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  const int odd[] = {INT_MIN, -1, 0, 1, 7, INT_MAX};
  const std::vector<int32_t> none(p.batch * p.queries);
  std::vector<int32_t> other;
  for (const int32_t end : std::vector(p.ends, p.ends + p.batch * p.queries)) {
    other.push_back(random() % 3 ? up_to(static_cast<int>(p.keys)) : end);
  }
  if (tried.plan == Plan::kNoise) {
    for (auto& x : plan) {
      for (int* field : {&x.first, &x.last, &x.from, &x.to, &x.splits_of_last})
        *field = odd[up_to(5)];
      x.work_tiles = odd[up_to(5)], x.cta_groups = odd[up_to(5)], x.mark = odd[up_to(5)];
    }
    return plan;
  }
  if (tried.plan == Plan::kOtherLengths) p.starts = none.data(), p.ends = other.data();
  if (tried.plan == Plan::kOtherSizes) --p.batch;
  emulator::require(launch(p, tried.tuning, plan.data(), nullptr));
  for (auto& x : plan) {
    if (tried.plan != Plan::kForged || x.mark == 0) continue;
    x.first = up_to(x.work_tiles), x.last = up_to(2) ? up_to(x.work_tiles - 1) : odd[up_to(5)];
    x.from = up_to(2) ? up_to(9) : odd[up_to(5)], x.to = up_to(2) ? up_to(9) : odd[up_to(5)];
    x.splits_of_last = up_to(2) ? up_to(9) : odd[up_to(5)];
  }
  return plan;
}

// The kernel's keys follow `far` others that no query sees, in each request or page pool.
void run(const DecodeCase& tried, const emulator::Options& options, const Launch& launch,
         const LaunchPlan& launch_plan, int64_t far = 0) {
  const Case& c = tried.c;
  const Problem x = make(c, options.seed);
  const bool paged = c.with.page_size > 0;
  const int64_t key_bytes = c.with.records ? kMlaRecordBytes : c.dim * 2;
  const auto far_rows = [&](const void* from, int64_t row_bytes) {
    const int64_t blocks = c.with.shared || (paged && !c.with.pools) ? 1 : c.batch;
    const int64_t rows = paged ? int64_t{x.pages} * c.with.page_size : c.keys;
    return std::make_unique<emulator::FarRows>(from, blocks, rows * c.groups * row_bytes,
                                               far * c.groups * row_bytes);
  };
  const auto k =
      far_rows(c.with.records ? static_cast<const void*>(x.records.data()) : x.k.data(), key_bytes);
  const auto v = c.with.separate_values ? far_rows(x.v.data(), c.dim * 2) : nullptr;
  std::vector<int32_t> starts = x.starts, ends = x.ends, page_table = x.page_table;
  if (paged) {
    page_table = emulator::far_positions(page_table, far / c.with.page_size);
  } else if (far) {
    for (int32_t& start : starts) start = std::max(start, 0) + far;
    for (int32_t& end : ends) end = std::max(end, 0) + far;
  }
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads, E = x.value_dim();
  std::vector<bf16> out(rows * E, __float2bfloat16(NAN));
  std::vector<float> floats(rows * E, NAN), max_logit(rows, NAN), log_sum(rows, NAN);
  const MqaDecodeWorkspace room =
      mqa_decode_workspace(mqa_decode_rows(c.queries, c.heads, c.groups, c.dim, c.with.records));
  std::vector<float4> partial(room.rows * E / 4, make_float4(NAN, NAN, NAN, NAN));
  std::vector<float2> partial_rows(room.rows, make_float2(NAN, NAN));
  std::vector<int2> split_tiles(room.split_tiles, make_int2(-1, -1));
  MqaDecodeParams p = shapes(x);
  if (paged) p.pages += far / c.with.page_size;
  if (!paged) p.keys += far;
  if (p.batch_rows > 0) p.batch_rows += far;
  p.q = x.q.data(), p.k = k->data(), p.v = v ? v->data() : nullptr;
  p.starts = starts.data(), p.ends = ends.data();
  p.sinks = c.with.sinks ? x.sinks.data() : nullptr;
  p.page_table = paged ? page_table.data() : nullptr;
  p.out = c.with.normalized ? static_cast<void*>(out.data()) : floats.data();
  p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
  p.partial = reinterpret_cast<float*>(partial.data());
  p.partial_rows = partial_rows.data(), p.split_tiles = split_tiles.data();
  emulator::machine.options = options, emulator::machine.num_sms = tried.num_sms;
  std::vector<MqaDecodeRange> plan;
  if (tried.plan != Plan::kNone) {
    plan = make_plan(tried, p, launch_plan, options.seed);
    p.plan = plan.data();
  }
  emulator::require(launch(p, tried.tuning, nullptr));
  Errors errors;
  for (int64_t r = 0; r < rows && tried.plan != Plan::kForged; ++r) {
    std::vector<float> got(E);
    for (int d = 0; d < E; ++d) {
      got[d] = c.with.normalized ? __bfloat162float(out[r * E + d]) : floats[r * E + d];
    }
    errors.add(x, attend(x, r / c.heads, r % c.heads), got, max_logit[r], log_sum[r]);
  }
  int split = 0, splits = 0;
  for (const int2& x : split_tiles) split += x.y > 0, splits = std::max(splits, x.y);
  const bool good = errors.good();
  printf(
      "%-4s %-32s%s %2d split in up to %2d, %s %s seed %llu  lse %.1e of %.1e  out %.1e of "
      "%.1e%s\n",
      good ? "ok" : "BAD", c.name, far ? " far" : "", split, splits,
      options.late_wgmma ? "late wgmma, " : "early wgmma,",
      options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
      errors.lse.worst, errors.lse.top, errors.out.worst, errors.out.top,
      errors.poison_kept ? "" : "  NaN lost");
  fflush(stdout);
  failures += !good;
}

// kUsual divides small calls by clusters or static splits, kStatic all that have few work tiles by
// static splits, kClusters these by clusters.
constexpr mqa_decode::Tuning kSplitAll = {0, 1, -1, 10, 0}, kWhole = {1 << 20, 3, -1, 10, 0},
                             kUsual = {}, kStatic = {0, 1, 1 << 20, 1000, 0},
                             kNoClusters = {.max_cluster_tiles = 0},
                             kClusters = {.max_cluster_tiles = 1 << 20};

// name, B, T, S, N, G, D; separate_values, page size, holes, window, starts, sinks, normalized,
// infinite, size of q, full, shared; SMs, tuning, plan
const DecodeCase kCases[] = {
    {{"one request", 1, 1, 500, 64, 1, 576, {.full = true}}, 3, kSplitAll},
    {{"one request, several splits", 1, 1, 500, 64, 1, 576, {.full = true}}, 6, kSplitAll},
    {{"one request, two row tiles", 1, 1, 450, 100, 1, 576, {.full = true}}, 4, kSplitAll},
    {{"few requests", 2, 1, 300, 40, 1, 576, {.sinks = 1}}, 3, kUsual},
    {{"few requests, equally long", 2, 1, 500, 40, 1, 576, {.full = true}}, 6, kUsual},
    {{"few, equally long, pages", 3, 2, 420, 12, 1, 512, {.page_size = 7, .window = 300}},
     5,
     kSplitAll},
    {{"many, whole", 8, 1, 200, 33, 1, 512, {.sinks = 2}}, 3, kWhole},
    {{"many, split", 9, 1, 200, 40, 1, 576, {.window = 90, .sinks = 1}}, 3, kSplitAll},
    {{"queries", 4, 3, 260, 20, 1, 576, {.infinite = true}}, 3, kSplitAll},
    {{"queries, five row tiles", 2, 5, 200, 57, 1, 512, {.window = 70, .infinite = true}},
     3,
     kSplitAll},
    {{"starts, groups", 3, 4, 200, 24, 2, 576, {.starts = 2, .sinks = 1}}, 4, kSplitAll},
    {{"pages of 64", 3, 2, 256, 40, 1, 576, {.page_size = 64, .holes = true, .infinite = true}},
     3,
     kSplitAll},
    {{"pages of 7, sharp",
      3,
      1,
      210,
      48,
      1,
      512,
      {.page_size = 7, .holes = true, .starts = 1, .q_size = 12.f}},
     3,
     kSplitAll},
    {{"pools", 3, 1, 256, 40, 1, 576, {.page_size = 64, .holes = true, .pools = true}},
     3,
     kSplitAll},
    {{"few, pools", 3, 2, 210, 12, 1, 512, {.page_size = 7, .pools = true}}, 3, kSplitAll},
    {{"floats", 3, 2, 260, 33, 1, 576, {.window = 130, .normalized = false}}, 3, kSplitAll},
    {{"few", 4, 1, 400, 16, 1, 576, {.sinks = 1}}, 3, kSplitAll},
    {{"few, one request", 1, 1, 700, 16, 1, 576, {.full = true}}, 4, kSplitAll},
    {{"few, shared", 3, 1, 300, 30, 2, 512, {.starts = 1, .shared = true}}, 3, kUsual},
    {{"few, queries", 5, 4, 300, 8, 1, 576, {.sinks = 2, .infinite = true}}, 3, kSplitAll},
    {{"whole, an infinity", 7, 1, 200, 40, 1, 576, {.sinks = 1, .infinite = true}}, 3, kWhole},
    {{"few, whole, an infinity", 7, 1, 200, 30, 1, 512, {.sinks = 1, .infinite = true}}, 3, kWhole},
    {{"separate values 128, whole, a NaN",
      3,
      1,
      150,
      16,
      1,
      128,
      {.separate_values = true, .sinks = 1, .infinite = true}},
     3,
     kWhole},
    {{"few, starts, pages",
      3,
      3,
      256,
      20,
      2,
      512,
      {.page_size = 128, .holes = true, .starts = 2, .infinite = true}},
     3,
     kSplitAll},
    {{"few, pages of 1", 6, 1, 150, 5, 1, 576, {.page_size = 1, .window = 64}}, 3, kWhole},
    {{"few, floats", 3, 2, 260, 16, 1, 576, {.starts = 1, .normalized = false, .q_size = 6.f}},
     3,
     kSplitAll},
    {{"separate values 128",
      4,
      2,
      330,
      32,
      4,
      128,
      {.separate_values = true, .sinks = 1, .infinite = true}},
     3,
     kSplitAll},
    {{"separate values 128, many heads",
      2,
      1,
      300,
      80,
      1,
      128,
      {.separate_values = true, .window = 100}},
     4,
     kSplitAll},
    {{"separate values 256, pages",
      3,
      3,
      192,
      36,
      2,
      256,
      {.separate_values = true, .page_size = 64, .holes = true, .starts = 2, .infinite = true}},
     3,
     kSplitAll},
    {{"separate values 64, queries",
      3,
      4,
      300,
      16,
      2,
      64,
      {.separate_values = true, .starts = 2, .infinite = true}},
     3,
     kUsual},
    {{"separate values 64", 3, 1, 600, 9, 1, 64, {.separate_values = true, .normalized = false}},
     3,
     kSplitAll},
    {{"many splits", 1, 1, 1100, 64, 1, 576, {.sinks = 1, .full = true}}, 20, kSplitAll},
    {{"few, many splits, floats", 1, 1, 2600, 4, 1, 512, {.normalized = false, .full = true}},
     20,
     kSplitAll},
    {{"requests", 300, 1, 70, 2, 1, 64, {.separate_values = true}}, 3, kSplitAll},
    {{"requests, whole", 300, 1, 70, 2, 1, 64, {.separate_values = true}}, 5, kWhole},
    {{"records", 3, 1, 300, 40, 1, 576, {.sinks = 1, .records = true}}, 3, kUsual},
    {{"records, one request", 1, 1, 450, 100, 1, 576, {.full = true, .records = true}},
     4,
     kSplitAll},
    {{"records, queries, pages",
      4,
      3,
      256,
      24,
      2,
      576,
      {.page_size = 16, .holes = true, .starts = 2, .infinite = true, .records = true}},
     3,
     kSplitAll},
    {{"few, records", 4, 1, 400, 16, 1, 576, {.sinks = 1, .records = true}}, 3, kSplitAll},
    {{"few, records, queries",
      3,
      3,
      260,
      10,
      2,
      576,
      {.window = 130, .normalized = false, .infinite = true, .records = true}},
     3,
     kSplitAll},
    {{"few, records, pages",
      3,
      1,
      256,
      8,
      1,
      576,
      {.page_size = 64, .holes = true, .pools = true, .records = true}},
     3,
     kUsual},
    {{"infinite key by itself", 1, 1, 65, 64, 1, 576, {.infinite = true, .full = true}},
     3,
     kSplitAll},
    {{"few, infinite key by itself", 1, 1, 65, 16, 1, 576, {.infinite = true, .full = true}},
     3,
     kSplitAll},
    {{"infinite key, whole", 1, 1, 1, 64, 1, 576, {.infinite = true, .full = true}}, 1, kWhole},
    {{"no keys", 2, 2, 0, 40, 1, 576}, 3, kSplitAll},
    {{"huge scores", 4, 2, 300, 40, 1, 576, {.sinks = 1, .huge = -1e9f}}, 3, kSplitAll},
    {{"few, huge scores", 4, 1, 400, 16, 1, 576, {.huge = -3e38f, .exact_max = true}},
     3,
     kSplitAll},
    {{"few, huge scores, queries", 3, 3, 200, 10, 1, 576, {.huge = -1e9f}}, 3, kUsual},
    {{"great scores",
      4,
      2,
      300,
      33,
      1,
      576,
      {.normalized = false, .huge = 1e5f, .exact_max = true}},
     3,
     kSplitAll},
    {{"few, no keys", 3, 1, 0, 4, 2, 128, {.separate_values = true}}, 3, kSplitAll},
    {{"static, one request", 1, 1, 500, 100, 1, 576, {.sinks = 1, .full = true}}, 9, kUsual},
    {{"static", 3, 2, 420, 40, 1, 512, {.page_size = 7, .window = 300, .infinite = true}},
     14,
     kStatic},
    {{"static, ten splits", 1, 1, 640, 64, 1, 576, {.full = true}}, 40, kNoClusters},
    {{"static, many splits", 1, 1, 1200, 33, 1, 576, {.full = true}}, 21, kStatic},
    {{"static, whole", 5, 1, 260, 64, 1, 576, {.normalized = false}}, 6, kStatic},
    {{"static, row passes", 2, 5, 200, 57, 1, 512, {.window = 70, .infinite = true}}, 22, kStatic},
    {{"static, few", 4, 1, 400, 16, 1, 576, {.holes = true, .sinks = 2}}, 10, kStatic},
    {{"static, few, many splits", 1, 1, 1300, 4, 1, 512, {.normalized = false}}, 12, kStatic},
    {{"static, separate values",
      3,
      2,
      330,
      32,
      2,
      128,
      {.separate_values = true, .starts = 2, .infinite = true}},
     12,
     kStatic},
    {{"static, records", 3, 1, 300, 40, 1, 576, {.sinks = 1, .records = true}}, 9, kStatic},
    {{"static, no keys", 2, 2, 0, 40, 1, 576}, 6, kStatic},
    {{"clusters", 3, 2, 420, 40, 1, 512, {.page_size = 7, .window = 300, .infinite = true}},
     60,
     kClusters},
    {{"clusters, ten splits", 1, 1, 640, 64, 1, 576, {.full = true}}, 40, kUsual},
    {{"clusters, sinks", 2, 1, 500, 60, 1, 576, {.sinks = 1}}, 40, kClusters},
    {{"clusters, floats", 3, 2, 260, 33, 1, 576, {.window = 130, .normalized = false}},
     45,
     kClusters},
    {{"clusters, queries", 2, 5, 200, 58, 2, 512, {.window = 70, .infinite = true}},
     120,
     kClusters},
    {{"clusters, few", 4, 1, 400, 16, 1, 576, {.holes = true, .sinks = 2}}, 20, kClusters},
    {{"clusters, few, 16 splits", 1, 1, 1000, 4, 1, 512, {.normalized = false}}, 24, kUsual},
    {{"clusters, separate values",
      3,
      2,
      330,
      32,
      2,
      128,
      {.separate_values = true, .starts = 2, .infinite = true}},
     48,
     kClusters},
    {{"clusters, separate values 64", 2, 1, 600, 9, 1, 64, {.separate_values = true, .sinks = 1}},
     14,
     kClusters},
    {{"clusters, records", 2, 1, 200, 40, 1, 576, {.records = true}}, 12, kClusters},
    {{"clusters, few, records", 3, 1, 300, 10, 1, 576, {.sinks = 1, .records = true}},
     9,
     kClusters},
    {{"clusters, infinite key by itself", 1, 1, 65, 64, 1, 576, {.infinite = true, .full = true}},
     8,
     kClusters},
    {{"clusters, huge scores", 3, 1, 400, 16, 1, 576, {.huge = -3e38f, .exact_max = true}},
     9,
     kClusters},
    {{"plan", 9, 1, 200, 40, 1, 576, {.window = 90, .sinks = 1}}, 4, kSplitAll, Plan::kOwn},
    {{"plan, one request", 1, 1, 500, 100, 1, 576, {.full = true}}, 10, kSplitAll, Plan::kOwn},
    {{"plan, whole", 8, 1, 200, 33, 1, 512, {.sinks = 2}}, 3, kWhole, Plan::kOwn},
    {{"plan, few", 5, 4, 300, 8, 1, 576, {.sinks = 2, .infinite = true}}, 3, kSplitAll, Plan::kOwn},
    {{"plan, requests", 300, 1, 70, 2, 1, 64, {.separate_values = true}}, 3, kSplitAll, Plan::kOwn},
    {{"plan of other lengths", 9, 1, 200, 40, 1, 576}, 4, kSplitAll, Plan::kOtherLengths},
    {{"few, plan of other lengths", 6, 2, 330, 8, 2, 512, {.starts = 2}},
     3,
     kSplitAll,
     Plan::kOtherLengths},
    {{"plan of other sizes", 4, 3, 260, 20, 1, 576}, 3, kSplitAll, Plan::kOtherSizes},
    {{"noise for a plan", 3, 1, 300, 16, 1, 576, {.sinks = 1}}, 3, kSplitAll, Plan::kNoise},
    {{"static, unused plan", 3, 1, 300, 16, 1, 576}, 5, kUsual, Plan::kOwn},
    {{"forged plan", 5, 1, 200, 33, 1, 512}, 4, kSplitAll, Plan::kForged},
    {{"few, forged plan", 5, 1, 300, 8, 2, 512}, 4, kSplitAll, Plan::kForged},
};

}  // namespace
