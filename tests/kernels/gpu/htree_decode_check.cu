// Tests the decode kernels of hierarchical tree attention against float64 on the CPU, then times
// them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o htree_decode_check tests/kernels/gpu/htree_decode_check.cu cuda/htree/decode.cu
//   ./htree_decode_check [test|small|bench] [seed or T]
// `bench` times a step as a CUDA graph, then each of its kernels by itself, many times in a row.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/htree_call.cuh"
#include "htree/decode_launch.cuh"
#include "problems/htree_findings.h"

using namespace jax_dsa;
using namespace htree_problem;

namespace {

struct DecodeCall : Memory {
  HTreeDecodeParams d = {};
  HTreeFwdParams& p = d.fwd;

  DecodeCall(int64_t batch, int64_t tokens, int64_t queries, int64_t heads, int64_t groups,
             int64_t dim, int64_t compression, int64_t top_k) {
    p.batch = batch, p.tokens = tokens, p.queries = queries, p.heads = heads, p.groups = groups;
    p.dim = dim, p.compression = compression, p.top_k = top_k;
    p.scale = 1.f / std::sqrt(static_cast<float>(dim)), d.rope_base = 10000;
    const int64_t nodes = batch * htree_cache_nodes(tokens, compression, top_k) * groups * dim;
    d.k = room<bf16>(nodes), d.v = room<bf16>(nodes);
    p.q = room<bf16>(batch * queries * heads * dim);
    p.positions = room<int32_t>(batch * queries);
    p.out = room<bf16>(batch * queries * heads * dim);
    p.max_logit = room<float>(batch * queries * heads);
    p.log_sum = room<float>(batch * queries * heads);
    const int64_t layers = htree_layers(tokens, compression, top_k).count - 1;
    p.selected = room<int16_t>(batch * queries * groups * layers * top_k);
    p.workspace_bytes = htree_decode_workspace(d);
    p.workspace = room<uint8_t>(p.workspace_bytes);
  }
};

// Runs the case `runs` times; the results must have the same bits.
bool run_case(const Case& c, uint64_t seed, int runs) {
  Problem x = make(c, seed);
  x.decodes = true;
  DecodeCall call(c.batch, c.tokens, c.queries, c.heads, c.groups, c.dim, c.compression, c.top_k);
  HTreeFwdParams& p = call.p;
  p.scale = x.scale;
  put(p.q, x.q), put(p.positions, x.positions);
  put(call.d.k, cache(x, true)), put(call.d.v, cache(x, false));
  const int64_t layers = x.layers.count - 1, tokens = int64_t{c.batch} * c.queries;
  const int64_t rows = tokens * c.groups, heads = c.heads / c.groups;
  std::vector<bf16> out[2];
  std::vector<float> max_logit, log_sum[2];
  bool same = true;
  for (int run = 0; run < runs; ++run) {
    CHECK(cudaMemset(p.out, 0xff, tokens * c.heads * c.dim * 2));
    CHECK(launch_htree_decode(call.d, nullptr));
    CHECK(cudaDeviceSynchronize());
    out[run > 0] = download(static_cast<bf16*>(p.out), tokens * c.heads * c.dim);
    max_logit = download(p.max_logit, tokens * c.heads);
    log_sum[run > 0] = download(p.log_sum, tokens * c.heads);
    if (run == 0) continue;
    same &= memcmp(out[0].data(), out[1].data(), out[0].size() * 2) == 0;
    same &= memcmp(log_sum[0].data(), log_sum[1].data(), log_sum[0].size() * 4) == 0;
  }
  const auto selected = download(p.selected, rows * layers * c.top_k);
  htree::DecodePlan plan = {};
  std::vector<float> importance;
  if (rows > 0) {
    CHECK(htree::make_decode_plan(call.d, plan));
    if (layers > 0) importance = download(plan.importance + rows * plan.width, rows * plan.width);
  }
  Findings found;
  int64_t inexact = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int b = static_cast<int>(row / c.queries / c.groups),
              t = static_cast<int>(row % c.queries);
    const int g = static_cast<int>(row / c.queries % c.groups);
    const int64_t head = x.token(b, t) * c.heads + g * heads;
    const int16_t* chosen = selected.data() + (x.token(b, t) * c.groups + g) * layers * c.top_k;
    const float* row_importance = importance.empty() ? nullptr : &importance[row * plan.width];
    inexact += row_importance && !selects_exactly(x, b, t, row_importance, chosen);
    found += check(x, b, t, g, chosen, &out[0][head * c.dim], &max_logit[head], &log_sum[0][head],
                   row_importance);
  }
  const bool good = inexact == 0 && found.good(c.size) && same;
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

// Returns the microseconds per launch of the best of 10 series of 20 launches. Short series fit
// between the time slices of other processes.
template <typename F>
float each(cudaStream_t stream, F launch) {
  constexpr int kTimes = 20;
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  float best = 1e9f;
  for (int row = 0; row < 10; ++row) {
    CHECK(cudaEventRecord(a, stream));
    for (int i = 0; i < kTimes; ++i) CHECK(launch());
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    best = std::min(best, ms * 1000 / kTimes);
  }
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  return best;
}

void bench(int64_t batch, int64_t tokens, int64_t queries, double copy) {
  const int64_t heads = 16;
  DecodeCall call(batch, tokens, queries, heads, 1, 128, 16, 512);
  const int64_t nodes = batch * htree_cache_nodes(tokens, 16, 512) * 128;
  fill<<<2048, 256>>>(static_cast<bf16*>(const_cast<void*>(call.d.k)), nodes, 1, 128, 1, 0.f);
  fill<<<2048, 256>>>(static_cast<bf16*>(const_cast<void*>(call.d.v)), nodes, 2, 128, 1, 0.f);
  fill<<<256, 256>>>(static_cast<bf16*>(const_cast<void*>(call.p.q)), batch * queries * heads * 128,
                     3, 128, 1, 0.f);
  CHECK(cudaGetLastError());
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < batch * queries; ++i) {
    positions.push_back(static_cast<int32_t>(tokens - queries + i % queries));
  }
  put(call.p.positions, positions);

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t step;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(launch_htree_decode(call.d, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&step, graph, 0));
  const float us = each(stream, [&] { return cudaGraphLaunch(step, stream); });
  const double dense = 2. * batch * tokens * 128 * 2 / copy / 1e6;
  printf(
      "B%lld T%lld S%lld N16 G1 D128 r16 K512: %.1f us per step; all keys and values at the copy's"
      " bandwidth %.1f us, ratio %.3f;",
      (long long)batch, (long long)queries, (long long)tokens, us, dense, us / dense);
  htree::DecodePlan x = {};
  CHECK(htree::make_decode_plan(call.d, x));
  for (int layer = x.plan.layers.count - 1; layer >= 0; --layer) {
    printf(" layer %d %.1f us,", layer,
           each(stream, [&] { return htree::launch_layer<128, 16>(x, layer, stream); }));
  }
  printf(" combine %.1f us; %d CTAs per row\n",
         each(stream, [&] { return htree::launch_combine<128>(x, stream); }), x.splits);
  fflush(stdout);
  CHECK(cudaGraphExecDestroy(step));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
}

const Case kLargeCases[] = {
    {"two layers", 2, 20000, 2, 16, 1, 128, 16, 512, 19990},
    {"dense", 1, 8191, 2, 16, 1, 128, 16, 512, 8191},
    {"one layer more", 1, 8193, 2, 16, 1, 128, 16, 512, 8193},
    {"three layers", 1, 131073, 3, 16, 1, 128, 16, 512, 131073},
    {"ties", 1, 40000, 4, 8, 2, 64, 16, 512, 39990, false, 0.f, 1, true},
    {"K 1024, r 32", 1, 70000, 1, 64, 2, 128, 32, 1024, 69000},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t number = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  if (what == "test" || what == "small") {
    return report(number, [&](uint64_t seed) {
      int bad = 0;
      for (const Case& c : kDecodeCases) {
        // racecheck takes minutes for many tokens.
        if (what == "test") bad += !run_case(c, seed, 100);
        if (what == "small" && c.tokens <= 1100) bad += !run_case(c, seed, 2);
      }
      for (const Case& c : kLargeCases) {
        if (what == "test") bad += !run_case(c, seed, 100);
      }
      return bad;
    });
  }
  const size_t bytes = size_t{1} << 30;
  char* const room = device<char>(2 * bytes);
  const float ms = best_milliseconds(
      [&] { CHECK(cudaMemcpyAsync(room, room + bytes, bytes, cudaMemcpyDeviceToDevice)); });
  CHECK(cudaFree(room));
  const double copy = 2. * bytes / ms / 1e9;  // TB/s
  printf("copy %.2f TB/s\n", copy);
  for (const int64_t tokens : {16384, 131072, 1048576}) {
    if (number && static_cast<int64_t>(number) != tokens) continue;
    for (const auto [batch, queries] : {std::pair{1, 1}, {1, 4}, {32, 1}}) {
      bench(batch, tokens, queries, copy);
    }
  }
  return 0;
}
