// Test problems of the indexer inside candidate blocks, for the emulator and for tests/kernels/gpu.
// The expected result is the top-k of the logits of all keys, which the caller's kernel computes,
// with -inf outside of the candidate blocks. The kernels must return it bit for bit. So must the
// kernel for the logits of named keys, which has the same operands.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "indexer/indexer.h"
#include "problems/topk_problem.h"
#include "problems/values_16.h"

namespace indexer_candidates_problem {

using jax_dsa::IndexerCandidatesParams;
using jax_dsa::IndexerDType;
using jax_dsa::IndexerFwdParams;

struct Case {
  const char* name;
  IndexerDType dtype;
  int channels, heads;
  int64_t batch, queries, keys, slots;
  int block_size;
  int64_t k;
  bool scale = false, relu = true;
  int page_size = 0;       // 0: no pages
  bool own_pools = false;  // whether each request has a pool of its own
  int64_t at_once = 0;     // queries that fit in the workspace; 0: all of them
};

inline constexpr auto kBF16 = IndexerDType::kBF16, kE4M3 = IndexerDType::kE4M3;
inline const Case kCases[] = {
    {"bf16 J64, blocks of 8", kBF16, 128, 64, 1, 5, 700, 30, 8, 40},
    {"e4m3 J64, blocks of 8, chunks", kE4M3, 128, 64, 2, 3, 600, 40, 8, 64, true, true, 0, false,
     4},
    {"e4m3 J40, blocks of 128", kE4M3, 128, 40, 1, 3, 1000, 4, 128, 100, true},
    {"bf16 J32 C64, single keys", kBF16, 64, 32, 2, 3, 300, 90, 1, 200, true, false},
    {"e4m3 J9 C32, blocks of 3", kE4M3, 32, 9, 3, 4, 301, 50, 3, 70, false, true, 0, false, 5},
    {"bf16 J16 C32, blocks of 48", kBF16, 32, 16, 1, 3, 500, 6, 48, 33},
    {"e4m3 J32 C64, one block", kE4M3, 64, 32, 2, 2, 190, 2, 190, 20, true},
    {"bf16 J64 paged", kBF16, 128, 64, 2, 2, 512, 20, 8, 30, true, true, 128},
    {"e4m3 J64 pools", kE4M3, 128, 64, 2, 2, 576, 9, 24, 50, true, true, 64, true},
    {"bf16 C32, more slots than keys", kBF16, 32, 16, 1, 3, 20, 300, 8, 33},
    {"bf16 C32, no slots", kBF16, 32, 16, 1, 2, 20, 0, 8, 5},
    {"bf16 C32, no keys", kBF16, 32, 16, 1, 2, 0, 3, 1, 5},
    {"bf16 C32, no queries", kBF16, 32, 16, 1, 0, 20, 3, 8, 5},
};

// Compares the logits of named keys with those of all keys. Some indices name no key. `params` are
// the operands of a case without pages, and `slots` the keys of each query.
template <typename Memory, typename Launch>
bool check_selected(const char* name, IndexerFwdParams p, int64_t slots, std::mt19937_64& random,
                    Memory& memory, Launch launch_logits) {
  const int64_t tokens = p.batch * p.queries;
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < tokens * slots; ++i) {
    const int32_t unusual[] = {-1, INT_MAX, INT_MIN, static_cast<int>(p.keys)};
    indices.push_back(p.keys == 0 || random() % 8 == 0 ? unusual[random() % 4]
                                                       : static_cast<int>(random() % p.keys));
  }
  p.starts = memory.put(std::vector<int32_t>(tokens, 0));
  p.ends = memory.put(std::vector<int32_t>(tokens, static_cast<int>(p.keys)));
  if (tokens * p.keys > 0) memory.require(launch_logits(p));
  const std::vector<float> all = memory.get(p.out, tokens * p.keys);
  p.starts = p.ends = nullptr;
  p.out = memory.template room<float>(tokens * slots);
  memory.require(jax_dsa::launch_indexer_selected({p, memory.put(indices), slots}, nullptr));
  const std::vector<float> got = memory.get(p.out, tokens * slots);
  int64_t wrong = 0, named = 0;
  for (int64_t i = 0; i < tokens * slots; ++i) {
    const bool is_key = indices[i] >= 0 && indices[i] < p.keys;
    const float expected = is_key ? all[i / slots * p.keys + indices[i]] : -INFINITY;
    wrong += std::isnan(expected) ? !std::isnan(got[i]) : memcmp(&expected, &got[i], 4) != 0;
    named += is_key;
  }
  printf("%-4s %-34s %lld of %lld named keys wrong\n", wrong == 0 ? "ok" : "BAD", name,
         (long long)wrong, (long long)named);
  fflush(stdout);
  return wrong == 0;
}

// Runs a case. `Memory` provides `put`, `room` (returns poisoned memory), `get` and `require`;
// launch_logits(params) computes the logits of all keys.
template <typename Memory, typename Launch>
bool run(const Case& c, uint64_t seed, Memory& memory, Launch launch_logits) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const bool is_bf16 = c.dtype == kBF16, paged = c.page_size > 0;
  const int64_t tokens = c.batch * c.queries;
  const auto append = [&](std::vector<uint8_t>& x, bool is_nan) {
    if (is_bf16) {
      const uint16_t bits = jax_dsa::to_16(jax_dsa::DType::kBF16, is_nan ? NAN : normal(random));
      x.push_back(bits & 0xff), x.push_back(bits >> 8);
    } else {
      x.push_back(is_nan ? 0x7f : random() % 64 | random() % 2 << 7);  // at most 1.875
    }
  };
  std::vector<uint8_t> q, k;
  std::vector<float> weights, scale;
  for (int64_t i = 0; i < tokens * c.heads * c.channels; ++i) append(q, false);
  for (int64_t i = 0; i < tokens * c.heads; ++i) weights.push_back(normal(random));
  const int64_t blocks = c.keys / c.block_size + 1;
  std::vector<int32_t> starts, ends, candidates;
  std::vector<bool> is_candidate(tokens * c.keys), is_used(c.batch * c.keys);
  for (int64_t t = 0; t < tokens; ++t) {
    starts.push_back(t % 3 ? 0 : static_cast<int>(random() % (c.keys + 9)) - 4);
    ends.push_back(t % 7 == 5 ? -3 : static_cast<int>(random() % (c.keys + 9)));
    const int64_t first = std::max(starts[t], 0);
    for (int64_t i = 0; i < c.slots; ++i) {
      const int32_t unusual[] = {-1, INT_MAX, INT_MIN, static_cast<int>(blocks)};
      const int32_t block =
          static_cast<int32_t>(random() % 8 == 0 ? unusual[random() % 4] : random() % blocks);
      candidates.push_back(block);
      if (block < 0) continue;
      const int64_t begin = first + int64_t{block} * c.block_size;
      for (int64_t s = begin; s < std::min({begin + c.block_size, c.keys, int64_t{ends[t]}}); ++s) {
        is_candidate[t * c.keys + s] = is_used[t / c.queries * c.keys + s] = true;
      }
    }
  }
  // Keys that are no candidates are NaN. In a paged cache, keys lie in reverse order of pages, and
  // the second page of each request is unmapped.
  const int64_t page = paged ? c.page_size : std::max(c.keys, int64_t{1});
  const int64_t per_request = c.keys / page;
  for (int64_t at = 0; at < c.batch * c.keys; ++at) {
    const int64_t request = at / c.keys, key = at % c.keys;
    const int64_t from = c.own_pools || !paged ? request : c.batch - 1 - request;
    const int64_t here = paged ? (per_request - 1 - key / page) * page + key % page : key;
    const bool is_nan = !is_used[from * c.keys + here];
    for (int i = 0; i < c.channels; ++i) append(k, is_nan);
    scale.push_back(is_nan ? NAN : normal(random));
  }
  std::vector<int32_t> table;
  const int64_t pages = c.own_pools ? per_request : c.batch * per_request;
  for (int64_t i = 0; i < c.batch * per_request; ++i) {
    const int64_t at = c.own_pools ? per_request - 1 - i % per_request : pages - 1 - i;
    table.push_back(static_cast<int32_t>(i % per_request == 1 ? (i % 2 ? -1 : pages) : at));
  }

  IndexerCandidatesParams params = {};
  IndexerFwdParams& p = params.logits;
  p.q = memory.put(q), p.k = memory.put(k), p.weights = memory.put(weights);
  p.k_scale = c.scale ? memory.put(scale) : nullptr;
  p.starts = memory.put(starts), p.ends = memory.put(ends);
  p.out = memory.template room<float>(tokens * c.keys);
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys;
  p.heads = c.heads, p.channels = c.channels, p.dtype = c.dtype, p.relu = c.relu;
  p.whole_rows = true;
  if (paged) {
    p.page_table = memory.put(table);
    p.pools = c.own_pools ? c.batch : 1, p.pages = static_cast<int>(pages);
    p.pages_per_request = per_request, p.page_size = c.page_size;
  }
  if (tokens * c.keys > 0) memory.require(launch_logits(p));
  std::vector<float> logits = memory.get(p.out, tokens * c.keys);
  for (int64_t i = 0; i < tokens * c.keys; ++i) {
    if (!is_candidate[i]) logits[i] = -INFINITY;
  }

  params.candidates = memory.put(candidates), params.slots = c.slots;
  params.block_size = c.block_size;
  const int64_t at_once = c.at_once > 0 ? c.at_once : std::max(tokens, int64_t{1});
  params.capacity = at_once * jax_dsa::indexer_candidates_row_words(c.keys, c.slots, c.block_size);
  params.workspace = memory.template room<float>(params.capacity);
  params.indices = memory.template room<int32_t>(tokens * c.k);
  params.values = memory.template room<float>(tokens * c.k);
  params.k = c.k;
  memory.require(jax_dsa::launch_indexer_candidates(params, nullptr));
  const std::vector<int32_t> indices = memory.get(params.indices, tokens * c.k);
  const std::vector<float> values = memory.get(params.values, tokens * c.k);
  int64_t wrong = 0, selected = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<float> row(logits.begin() + t * c.keys, logits.begin() + (t + 1) * c.keys);
    const auto expected = topk_problem::reference(row, c.k, 0, static_cast<int>(c.keys));
    wrong += !topk_problem::matches(row, expected, &indices[t * c.k], &values[t * c.k]);
    selected += std::count_if(expected.begin(), expected.end(), [](int s) { return s >= 0; });
  }
  printf("%-4s %-34s seed %llu, %lld of %lld rows wrong, %lld keys selected\n",
         wrong == 0 ? "ok" : "BAD", c.name, (unsigned long long)seed, (long long)wrong,
         (long long)tokens, (long long)selected);
  fflush(stdout);
  const bool good = paged || check_selected(c.name, p, c.slots, random, memory, launch_logits);
  return wrong == 0 && good;
}

}  // namespace indexer_candidates_problem
