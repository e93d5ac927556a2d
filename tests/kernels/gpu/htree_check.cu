// Tests the forward kernels of hierarchical tree attention against float64 on the CPU, then
// times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o htree_check tests/kernels/gpu/htree_check.cu cuda/htree/*.cu cuda/htree/tiers.cc \
//       cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./htree_check [test|small|bench|once|build] [seed or T]
// With JAX_DSA_TIER=portable the portable kernels run.
// How to read the output of `test`: a wrong tree explains all other errors. Then look at "gap"
// (a candidate that was not selected is more important than a selected one: the scores are
// wrong), "inexact" (top-k or lists are wrong) and "out" (the attention is wrong). `bench` times
// every kernel for two chunk sizes, on queries that all select differently and on neighbors that
// select the same; also the portable kernels, with the shared memory of every GPU. `build` times
// the build alone.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/htree_call.cuh"
#include "htree/launch.cuh"
#include "htree/portable_walk.cuh"
#include "problems/htree_findings.h"

using namespace jax_dsa;
using namespace htree_problem;

namespace {

bool run_case(const Case& c, uint64_t seed, int64_t samples) {
  const Problem x = make(c, seed);
  Call call(c.batch, c.tokens, c.queries, c.heads, c.groups, c.dim, c.compression, c.top_k, true,
            c.chunk);
  HTreeFwdParams& p = call.p;
  p.scale = x.scale;
  put(call.build.k, x.k), put(call.build.v, x.v), put(p.q, x.q), put(p.positions, x.positions);
  CHECK(launch_htree_build(call.build, nullptr));
  const int64_t layers = x.layers.count - 1, heads = c.heads / c.groups;
  const int64_t tokens = int64_t{c.batch} * c.queries, slots = tokens * c.groups * layers * c.top_k;
  std::vector<bf16> out[2];
  std::vector<float> max_logit, log_sum;
  std::vector<int16_t> selected;
  for (auto& got : out) {
    CHECK(cudaMemset(p.out, 0xff, tokens * c.heads * c.dim * 2));
    CHECK(launch_htree_fwd(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    got = download(static_cast<bf16*>(p.out), tokens * c.heads * c.dim);
    max_logit = download(p.max_logit, tokens * c.heads);
    log_sum = download(p.log_sum, tokens * c.heads);
    selected = download(p.selected, slots);
  }
  const bool same = memcmp(out[0].data(), out[1].data(), out[0].size() * 2) == 0;

  Findings found;
  int64_t inexact = 0;
  htree::Plan plan = htree::make_plan(p);
  std::vector<float> importance;
  if (layers > 0 && c.chunk == 0 && tokens > 0) {
    htree::set_chunk(plan, {0, c.batch, 0, c.queries});
    importance = download(plan.chunk.importance, plan.chunk.rows * plan.chunk.width);
  }
  const int64_t rows = tokens * c.groups, step = std::max<int64_t>(rows / samples, 1);
  for (int64_t row = 0; row < rows; ++row) {
    const int b = static_cast<int>(row / c.queries / c.groups),
              t = static_cast<int>(row % c.queries);
    const int g = static_cast<int>(row / c.queries % c.groups);
    const int64_t head = x.token(b, t) * c.heads + g * heads;
    const int16_t* chosen = selected.data() + (x.token(b, t) * c.groups + g) * layers * c.top_k;
    const float* row_importance =
        importance.empty() ? nullptr : &importance[row * plan.chunk.width];
    inexact += row_importance && !selects_exactly(x, b, t, row_importance, chosen);
    if (row % step == 0)
      found += check(x, b, t, g, chosen, &out[1][head * c.dim], &max_logit[head], &log_sum[head],
                     row_importance);
  }
  const bool good = inexact == 0 && found.good(c.size, true) && same;
  printf(
      "%-4s %-26s T %d, %d layers: out %.1e (exactly %.1e), lse %.1e, gap %.1e, importance "
      "%.1e%s%s%s%s\n",
      good ? "ok" : "BAD", c.name, c.tokens, x.layers.count, found.close, found.exact, found.lse,
      found.gap, found.importance, inexact ? "  INEXACT SELECTION" : "",
      found.partition ? "" : "  NO PARTITION", found.complete ? "" : "  INCOMPLETE",
      same ? "" : "  DIFFERS");
  fflush(stdout);
  return good;
}

// ---- timing ------------------------------------------------------------------------------------

// Returns how many times more nodes below the top layer would be loaded query by query than CTAs
// load for their query tiles.
double overlap(const htree::Plan& plan) {
  const int64_t k = plan.p.top_k;
  const auto nodes =
      download(plan.chunk.nodes,
               plan.chunk.rows * k);  // selected in layer 1: the parents of layer 0's blocks
  double taken = 0, gathered = 0;
  for (int64_t row = 0; row + plan.tile_queries <= plan.chunk.rows && row < 50 * plan.tile_queries;
       row += plan.tile_queries) {
    std::vector<int32_t> all(nodes.begin() + row * k,
                             nodes.begin() + (row + plan.tile_queries) * k);
    all.erase(std::remove(all.begin(), all.end(), -1), all.end());
    std::sort(all.begin(), all.end());
    taken += all.size();
    gathered += std::unique(all.begin(), all.end()) - all.begin();
  }
  return gathered > 0 ? taken / gathered : 1;
}

// S is the shape of the CTAs that score, A of those that attend. They have up to `shared_bytes` of
// shared memory.
template <typename S, typename A>
void time_shape(const char* name, const HTreeFwdParams& p, int64_t queries, int shared_bytes) {
  htree::Plan plan = htree::make_plan(p);
  Timer all, scores, best, list, attend;
  double shared = 1;
  for (int run = 0; run < 2; ++run) {  // the first run warms up
    for (int64_t first = 0; first < p.queries; first += queries) {
      htree::set_chunk(plan, {0, 1, first, std::min(queries, p.queries - first)});
      all([&] {
        for (int layer = plan.layers.count - 1; layer > 0; --layer) {
          scores(
              [&] { return htree::launch_scores<S, 128, 16>(plan, layer, shared_bytes, nullptr); });
          best([&] { return htree::launch_best(plan, nullptr); });
          list([&] { return htree::launch_list(plan, layer, false, nullptr); });
        }
        attend([&] { return htree::launch_attend<A, 128, 16>(plan, shared_bytes, nullptr); });
        return cudaSuccess;
      });
      if (run == 1 && first + queries >= p.queries && plan.layers.count > 1) {
        shared = overlap(plan.shaped<A>());
      }
    }
    const float sum = all.total(), a = scores.total(), b = best.total(), c = list.total(),
                d = attend.total();
    if (run == 0) continue;
    const std::array<double, 2> pairs = count_pairs(p.queries, p.top_k, plan.layers.count);
    const double cycles = 132 * 1.7e6;  // per millisecond, at about the clock under load
    printf(
        "  %-22s %8.2f ms: scores %.2f (%.0f cycles a block), top-k %.2f, lists %.2f, attention "
        "%.2f (%.0f cycles a block); selections overlap %.2f times\n",
        name, sum, a, pairs[1] > 0 ? a * cycles / pairs[1] : 0., b, c, d, d * cycles / pairs[0],
        shared);
    fflush(stdout);
  }
}

void bench(int64_t tokens, const std::string& what) {
  const int64_t heads = 16, queries = 6336;  // at a time: 4 waves of 12 queries on 132 SMs
  Call call(1, tokens, tokens, heads, 1, 128, 16, 512, false, 2 * queries);
  HTreeFwdParams& p = call.p;
  auto* const q = static_cast<bf16*>(const_cast<void*>(p.q));
  const int64_t row = 128, n = tokens * row;
  fill<<<2048, 256>>>(static_cast<bf16*>(const_cast<void*>(call.build.k)), n, 1, row, 1, 0.f);
  fill<<<2048, 256>>>(static_cast<bf16*>(const_cast<void*>(call.build.v)), n, 2, row, 1, 0.f);
  count_up<<<1024, 256>>>(const_cast<int32_t*>(p.positions), tokens);
  CHECK(cudaGetLastError());
  const float build = best_milliseconds([&] { CHECK(launch_htree_build(call.build, nullptr)); });
  const double built = 4. * n + htree_tree_bytes(call.build) + htree_rotation_bytes(call.build);
  const float copy = best_milliseconds(
      [&] { CHECK(cudaMemcpyAsync(p.out, p.q, n * 2 * 16, cudaMemcpyDeviceToDevice)); });
  const double rate = 64. * n / copy;
  printf("T %lld N16 G1 D128 r16 K512: build %.3f ms, %.2f TB/s, %.2f of a large copy's %.2f\n",
         (long long)tokens, build, built / build / 1e9, built / build / rate, rate / 1e9);
  if (what == "build") return;
  for (const bool alike : {false, true}) {
    fill<<<2048, 256>>>(q, n * heads, 3, row * heads, alike ? 64 : 1, alike ? 0.1f : 0.f);
    CHECK(cudaGetLastError());
    printf(" %s\n", alike ? "neighbors alike" : "every query by itself");
    using htree::AttendShape;
    using Scores = htree::ScoresShape;
    time_shape<Scores, AttendShape>("6336 queries", p, queries, kMaxSharedBytes);
    for (const int kib : {227, 163, 99}) {
      const std::string name = "portable, " + std::to_string(kib) + " KiB";
      time_shape<htree::PortableScoresShape, htree::PortableAttendShape>(name.c_str(), p, queries,
                                                                         kib * 1024);
    }
    if (what == "once") continue;
    time_shape<Scores, AttendShape>("12672 queries", p, 2 * queries, kMaxSharedBytes);
  }
}

const Case kLargeCases[] = {
    {"one token", 1, 1, 1, 16, 1, 128, 16, 512},
    {"15 tokens", 1, 15, 15, 16, 1, 128, 16, 512},
    {"16 tokens", 1, 16, 16, 16, 1, 128, 16, 512},
    {"17 tokens", 2, 17, 17, 32, 2, 64, 16, 512},
    {"dense", 1, 8191, 600, 16, 1, 128, 16, 512, 8191},
    {"one layer more", 1, 8193, 600, 16, 1, 128, 16, 512, 8193},
    {"ties", 1, 20000, 1000, 16, 1, 128, 16, 512, 19990, false, 0.f, 1, true},
    {"sharp", 1, 20000, 600, 16, 1, 128, 16, 512, 19990, false, 0.f, 4},
    {"all queries, in chunks", 1, 9000, 9000, 4, 1, 64, 16, 512, 0, false, 0.f, 1, false, 5000},
    {"K 1024, r 8", 2, 9001, 300, 40, 2, 128, 8, 1024, 9000, true},
    {"K 64, r 32", 1, 70000, 300, 64, 1, 128, 32, 64, 69000},
    {"three layers", 1, 131073, 300, 16, 1, 128, 16, 512, 131073},
    {"K 64, four layers", 1, 300001, 300, 16, 1, 64, 16, 64, 299990},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t number = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  if (what == "test" || what == "small") {
    return report(number, [&](uint64_t seed) {
      int bad = 0;
      for (const Case& c : kSmallCases) bad += !run_case(c, seed, 1000);
      for (const Case& c : kLargeCases) {
        if (what == "test") bad += !run_case(c, seed, 4);
      }
      return bad;
    });
  }
  if (number) {
    bench(static_cast<int64_t>(number), what);
    return 0;
  }
  for (const int64_t tokens : {16384, 65536, 131072, 262144, 1048576}) bench(tokens, what);
  return 0;
}
