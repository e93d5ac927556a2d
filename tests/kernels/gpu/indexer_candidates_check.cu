// Tests the indexer inside candidate blocks against its kernels for all keys, or times both.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o indexer_candidates_check tests/kernels/gpu/indexer_candidates_check.cu \
//       cuda/indexer/*.cu cuda/indexer/tiers.cc cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./indexer_candidates_check [test|small|bench] [seed]
// `bench` draws 16384 candidate keys per query at random, or lets 64 neighbouring queries share
// them.
#include <algorithm>
#include <string>

#include "gpu/indexer_data.cuh"
#include "problems/indexer_candidates_problem.h"
#include "topk/topk.h"

namespace {

using indexer_candidates_problem::IndexerCandidatesParams;
using indexer_candidates_problem::kBF16;
using indexer_candidates_problem::kE4M3;
using Problem = indexer_candidates_problem::Case;

// Draws `slots` of the blocks that each query sees, in ascending order: one of each of as many
// intervals. `shared` consecutive queries have the same list.
__global__ void draw_lists(int32_t* lists, const int32_t* ends, int64_t queries, int slots,
                           int block_size, int shared) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < queries * slots;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t query = i / slots / shared * shared, slot = i % slots;
    const int64_t blocks = ends[query] / block_size;
    const int64_t low = slot * blocks / slots, high = (slot + 1) * blocks / slots;
    lists[i] = static_cast<int32_t>(low + mix(query * slots + slot) % max(high - low, int64_t{1}));
  }
}

void bench(IndexerDType dtype, int64_t queries, int64_t keys) {
  constexpr int kHeads = 64, kChannels = 128, kCandidates = 16384;
  Memory memory;
  const int bytes = dtype == kBF16 ? 2 : 1;
  IndexerCandidatesParams params = {};
  IndexerFwdParams& p = params.logits;
  auto* const q = memory.room(queries * kHeads * kChannels * bytes);
  auto* const k = memory.room(keys * kChannels * bytes);
  auto* const weights = memory.room<float>(queries * kHeads);
  fill<<<1024, 256>>>(q, dtype, queries * kHeads * kChannels, 1);
  fill<<<1024, 256>>>(k, dtype, keys * kChannels, 2);
  fill_f32<<<1024, 256>>>(weights, queries * kHeads, 3, false);
  std::vector<int32_t> starts(queries, 0), ends;
  for (int64_t t = 0; t < queries; ++t) ends.push_back(static_cast<int>(keys - queries + 1 + t));
  p.q = q, p.k = k, p.weights = weights;
  p.starts = memory.put(starts), p.ends = memory.put(ends);
  p.batch = 1, p.queries = queries, p.keys = keys, p.heads = kHeads, p.channels = kChannels;
  p.dtype = dtype, p.relu = true;
  params.k = 2048;
  params.indices = memory.room<int32_t>(queries * params.k);
  params.values = memory.room<float>(queries * params.k);
  constexpr int64_t kAllWords = 36'000'000;
  auto* const workspace = memory.room<float>(kAllWords);
  p.out = workspace;
  const jax_dsa::IndexerTopkParams all = {
      .logits = p,
      .capacity = kAllWords,
      .indices = params.indices,
      .values = params.values,
      .k = params.k,
  };
  const float all_ms = best_milliseconds([&] { CHECK(launch_indexer_topk(all, nullptr)); });
  const std::string shape = std::string(dtype == kBF16 ? "bf16" : "fp8 ") + " T" +
                            std::to_string(queries) + " S" + std::to_string(keys) + " K2048";
  printf("%s, all keys                        %8.3f ms\n", shape.c_str(), all_ms);
  for (const int block_size : {8, 128}) {
    params.block_size = block_size;
    params.slots = kCandidates / block_size;
    auto* const lists = memory.room<int32_t>(queries * params.slots);
    params.candidates = lists;
    params.workspace = workspace;
    for (const int mib : {16, 64, 128}) {
      params.capacity = int64_t{mib} << 18;
      for (const int shared : {1, 64}) {
        draw_lists<<<4096, 256>>>(lists, p.ends, queries, static_cast<int>(params.slots),
                                  block_size, shared);
        const float ms =
            best_milliseconds([&] { CHECK(jax_dsa::launch_indexer_candidates(params, nullptr)); });
        printf("%s, %3d MiB, blocks of %3d, %-9s %8.3f ms, %.2f times as fast, %.2f TB/s of keys\n",
               shape.c_str(), mib, block_size, shared > 1 ? "shared" : "random", ms, all_ms / ms,
               1e-9 * queries * kCandidates * kChannels * bytes / ms);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what == "bench") {
    for (const auto dtype : {kBF16, kE4M3}) bench(dtype, 8192, 131072);
    return 0;
  }
  int bad = 0;
  const auto check = [&](const Problem& c) {
    Memory memory;
    bad += !indexer_candidates_problem::run(c, seed, memory, [](const IndexerFwdParams& p) {
      return jax_dsa::launch_indexer_fwd(p, nullptr);
    });
  };
  for (const Problem& c : indexer_candidates_problem::kCases) check(c);
  if (what == "test") {  // more work units than CTAs, and several chunks
    for (const auto dtype : {kBF16, kE4M3}) {
      check({"J64 C128, many", dtype, 128, 64, 2, 300, 20000, 700, 8, 2048, true});
      check({"J64 C128, many, chunks", dtype, 128, 64, 3, 100, 9000, 30, 128, 512, false, true, 0,
             false, 70});
      check({"J17 C64, many", dtype, 64, 17, 1, 500, 5000, 3000, 1, 100});
      check({"J33 C32, pages", dtype, 32, 33, 40, 3, 4096, 100, 8, 300, true, false, 64});
    }
  }
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}
