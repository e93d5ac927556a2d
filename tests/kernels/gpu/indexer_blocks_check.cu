// Tests the indexer's selection of blocks against the CPU, bit for bit, and times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o indexer_blocks_check tests/kernels/gpu/indexer_blocks_check.cu \
//       cuda/indexer/*.cu cuda/indexer/tiers.cc cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./indexer_blocks_check [test|small|bench]
// Rates count the pairs of a query and a key that it sees.
#include <string>

#include "gpu/check.cuh"
#include "gpu/random_bf16.cuh"
#include "indexer/block_max.h"
#include "problems/indexer_blocks_problem.h"

namespace {

using namespace indexer_blocks_problem;
using jax_dsa::IndexerBlockTopkParams;
using jax_dsa::IndexerFwdParams;
using jax_dsa::IndexerTopkParams;

// Fills 8-byte words with e4m3 numbers below 2, none of them NaN.
__global__ void fill_e4m3(uint64_t* x, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += int64_t{gridDim.x} * 256) {
    x[i] = mix(i) & 0xbfbfbfbfbfbfbfbfull;
  }
}
const void* random_e4m3(uint64_t* x, int64_t n) {
  fill_e4m3<<<2048, 256>>>(x, n / 8);
  CHECK(cudaGetLastError());
  return x;
}

template <typename F>
float print(const char* name, double flops, F launch) {
  constexpr int kLaunches = 5;
  const float ms = best_milliseconds([&] {
                     for (int i = 0; i < kLaunches; ++i) CHECK(launch());
                   }) /
                   kLaunches;
  printf("  %-44s %8.3f ms  %4.0f TFLOPS\n", name, ms, flops / ms * 1e-9);
  return ms;
}

// Times T8192 J4 C128, causal, with blocks of 128 and of 64 keys, beside the selection of keys.
void bench(int64_t keys) {
  constexpr int64_t kQueries = 8192, kHeads = 4, kChannels = 128, kK = 16, kTopK = 2048;
  constexpr int64_t kBytes = int64_t{60} << 20, kTopkFloats = 36000000;
  Memory memory;
  std::vector<int32_t> starts(kQueries), ends;
  std::vector<float> weights(kQueries * kHeads, 1.f);
  double pairs = 0;
  for (int64_t t = 0; t < kQueries; ++t) {
    ends.push_back(static_cast<int32_t>(keys - kQueries + t + 1));
    pairs += ends.back();
  }
  const double flops = pairs * 2 * kHeads * kChannels;
  printf("T%lld S%lld J%lld C%lld\n", (long long)kQueries, (long long)keys, (long long)kHeads,
         (long long)kChannels);
  IndexerFwdParams in = {};
  in.q = fill_random_bf16(memory.room<uint16_t>(kQueries * kHeads * kChannels),
                          kQueries * kHeads * kChannels, 1);
  in.k = fill_random_bf16(memory.room<uint16_t>(keys * kChannels), keys * kChannels, 2);
  in.ends = memory.put(ends);
  in.batch = 1, in.queries = kQueries, in.keys = keys, in.heads = kHeads, in.channels = kChannels;
  const void* const q8 = random_e4m3(memory.room<uint64_t>(kQueries * kHeads * kChannels / 8),
                                     kQueries * kHeads * kChannels);
  const void* const k8 = random_e4m3(memory.room<uint64_t>(keys * kChannels / 8), keys * kChannels);
  const auto* const zeros = memory.put(starts);
  const auto* const ones = memory.put(weights);
  IndexerBlockTopkParams p = {};
  auto* const space = memory.room<uint8_t>(kBytes);
  p.scores = reinterpret_cast<jax_dsa::BlockScore*>(space);
  p.k = kK, p.local_blocks = 1;
  p.indices = memory.room<int32_t>(kQueries * kHeads * kK);
  p.values = memory.room<float>(kQueries * kHeads * kK);
  p.keys = memory.room<int32_t>(kQueries * kHeads * kK);

  IndexerTopkParams keys_topk = {};
  keys_topk.logits = in;
  keys_topk.logits.starts = zeros, keys_topk.logits.weights = ones;
  keys_topk.logits.out = memory.room<float>(kTopkFloats), keys_topk.capacity = kTopkFloats;
  keys_topk.k = kTopK;
  keys_topk.indices = memory.room<int32_t>(kQueries * kTopK);
  keys_topk.values = memory.room<float>(kQueries * kTopK);
  const float base = print("keys, heads together, K2048", flops,
                           [&] { return jax_dsa::launch_indexer_topk(keys_topk, nullptr); });

  for (const IndexerDType dtype : {kBF16, kE4M3}) {
    for (const int64_t block : {128, 64, 512}) {
      p.logits = in, p.logits.dtype = dtype, p.block_size = block;
      if (dtype == kE4M3) p.logits.q = q8, p.logits.k = k8;
      const int64_t blocks = jax_dsa::indexer_blocks(keys, block);
      p.capacity = std::min(kQueries, kBytes / (8 * kHeads * blocks));
      const std::string name = "blocks of " + std::to_string(block) + ", a list for each head, " +
                               (dtype == kBF16 ? "bf16" : "e4m3");
      const float ms = print(name.c_str(), flops,
                             [&] { return jax_dsa::launch_indexer_block_topk(p, nullptr); });
      printf("  %44s %.2f of the rate of the selection of keys\n", "", base / ms);
      // Only the scores of the blocks, for as many queries as fit.
      jax_dsa::indexer::BlockMaxParams max = {p.logits, p.scores, blocks, static_cast<int>(block)};
      max.in.queries = p.capacity;
      const double part = flops * p.capacity / kQueries * (keys - kQueries + p.capacity / 2.) /
                          (keys - kQueries / 2.);
      print("  only the scores of one chunk", part,
            [&] { return jax_dsa::launch_block_max(max, nullptr); });
    }
  }
  p.logits = keys_topk.logits, p.logits.dtype = kBF16, p.block_size = 128;
  const int64_t query_bytes = 4 * keys + 8 * jax_dsa::indexer_blocks(keys, 128);
  p.capacity = std::min(kQueries, kBytes / query_bytes);
  p.logits.out = keys_topk.logits.out;
  print("blocks of 128, heads together, bf16", flops,
        [&] { return jax_dsa::launch_indexer_block_topk(p, nullptr); });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what == "bench") {
    bench(8192);
    bench(131072);
    return 0;
  }
  int bad = 0;
  const auto check = [&](const Case& c, uint64_t seed) {
    Memory memory;
    bad += !run(c, seed, memory);
  };
  for (const Case& c : kCases) check(c, 1);
  if (what == "test") {  // more work tiles than CTAs, and more lists than fit on the GPU
    for (uint64_t seed = 2; seed < 12; ++seed) {
      for (const Case& c : kCases) check(c, seed);
    }
    check({"many queries", 2, 4000, 4000, 4, 32, kBF16, 128, 6}, 1);
    check({"many documents", 1, 6000, 6000, 4, 32, kBF16, 64, 4, {.starts = Starts::kDocuments}},
          1);
    check({"many requests", 200, 3, 1500, 4, 32, kE4M3, 128, 4, {.special = true}}, 1);
    check({"many queries, heads together", 1, 3000, 3000, 4, 32, kBF16, 128, 4, {.shared = true}},
          1);
  }
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}
