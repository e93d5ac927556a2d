// Test problems of the indexer's selection of blocks with their expected results, for the emulator
// and for tests/kernels/gpu. All values are small integers, so every sum is exact, many logits are
// equal, and the results must match bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "indexer/indexer.h"

namespace indexer_blocks_problem {

using jax_dsa::IndexerDType;

enum class Starts { kNone, kDocuments, kAny };

struct Options {
  bool shared = false;  // whether the heads of a query have one list
  bool relu = false, scaled = false;
  Starts starts = Starts::kNone;
  int64_t sinks = 0, locals = 1;
  int page_size = 0;     // 0 means no pages
  int capacity = 0;      // queries per chunk; 0 means all
  bool causal = true;    // whether query t sees the keys up to keys - queries + t; otherwise any
  bool special = false;  // whether some visible keys give NaN or infinite logits
};

struct Case {
  const char* name;
  int batch, queries, keys, heads, channels;
  IndexerDType dtype;
  int64_t block_size;
  int k;
  Options with = {};
};

constexpr auto kBF16 = IndexerDType::kBF16, kE4M3 = IndexerDType::kE4M3;

inline const Case kCases[] = {
    {"bf16 C128", 1, 70, 600, 4, 128, kBF16, 128, 3},
    {"bf16 C128, specials", 2, 33, 500, 4, 128, kBF16, 128, 3, {.causal = false, .special = true}},
    {"e4m3 C128, scales", 1, 40, 450, 3, 128, kE4M3, 128, 2, {.scaled = true}},
    {"bf16 C64, blocks of 64, relu", 2, 45, 300, 4, 64, kBF16, 64, 3, {.relu = true}},
    {"e4m3 C64, blocks of 64, scales, specials",
     1,
     30,
     333,
     5,
     64,
     kE4M3,
     64,
     3,
     {.relu = true, .scaled = true, .causal = false, .special = true}},
    {"bf16 C32, blocks of 200", 2, 50, 700, 2, 32, kBF16, 200, 2, {.causal = false}},
    {"bf16 C32, blocks of 300, specials",
     1,
     40,
     900,
     1,
     32,
     kBF16,
     300,
     2,
     {.causal = false, .special = true}},
    {"bf16 C32, blocks of 96, sinks", 1, 40, 500, 8, 32, kBF16, 96, 4, {.sinks = 1, .locals = 2}},
    {"e4m3 C32, one block", 1, 20, 333, 3, 32, kE4M3, 333, 2},
    {"documents", 1, 400, 400, 2, 64, kBF16, 64, 2, {.starts = Starts::kDocuments}},
    {"documents, blocks of 128",
     2,
     300,
     300,
     4,
     32,
     kBF16,
     128,
     2,
     {.starts = Starts::kDocuments, .special = true}},
    {"any starts", 2, 20, 300, 3, 32, kBF16, 100, 2, {.starts = Starts::kAny, .causal = false}},
    {"pages", 3, 2, 512, 4, 128, kBF16, 128, 2, {.page_size = 64, .causal = false}},
    {"pages, e4m3, blocks of 64",
     2,
     5,
     384,
     4,
     64,
     kE4M3,
     64,
     3,
     {.scaled = true, .page_size = 128}},
    {"chunks of queries", 1, 150, 300, 4, 32, kBF16, 64, 2, {.capacity = 70}},
    {"chunks of entries", 5, 7, 200, 4, 32, kBF16, 64, 2, {.capacity = 15}},
    {"few blocks", 1, 9, 100, 4, 32, kBF16, 64, 5},
    {"all forced", 1, 30, 500, 2, 32, kBF16, 64, 3, {.sinks = 1 << 20, .locals = INT32_MAX}},
    {"none forced", 1, 30, 1000, 2, 32, kBF16, 64, 3, {.locals = 0, .causal = false}},
    {"one query, one key", 2, 1, 1, 1, 32, kBF16, 1, 2},
    {"no keys", 1, 3, 0, 2, 32, kBF16, 1, 2},
    {"many blocks", 1, 2, 9000, 1, 32, kBF16, 20, 20, {.causal = false}},
    {"more blocks", 1, 1, 33000, 1, 32, kBF16, 24, 70, {.causal = false, .special = true}},
    {"heads together", 1, 24, 400, 5, 32, kBF16, 128, 2, {.shared = true, .relu = true}},
    {"heads together, scales, specials",
     2,
     20,
     400,
     16,
     32,
     kBF16,
     7,
     9,
     {.shared = true, .scaled = true, .causal = false, .special = true}},
    {"heads together, documents",
     1,
     200,
     200,
     3,
     32,
     kBF16,
     16,
     3,
     {.shared = true, .relu = true, .starts = Starts::kDocuments}},
    {"heads together, pages",
     2,
     9,
     256,
     4,
     32,
     kBF16,
     64,
     2,
     {.shared = true, .relu = true, .page_size = 64}},
    {"heads together, chunks",
     1,
     50,
     130,
     4,
     32,
     kBF16,
     8,
     4,
     {.shared = true, .relu = true, .capacity = 20}},
};

struct Expected {
  int block = -1;
  float logit = -INFINITY;
  int key = -1;
};

// Selects from the logits of one list; those of keys outside the range are -inf.
inline std::vector<Expected> select(const Case& c, const std::vector<float>& logits, int start,
                                    int end) {
  const Options& o = c.with;
  std::vector<Expected> blocks;
  for (int64_t first = start; first < end; first += c.block_size) {
    Expected x = {static_cast<int>(blocks.size())};
    for (int64_t s = first; s < std::min<int64_t>(first + c.block_size, end); ++s) {
      if (std::isnan(x.logit)) break;
      if (!(logits[s] <= x.logit)) x.logit = logits[s], x.key = static_cast<int>(s);
    }
    blocks.push_back(x);
  }
  int last = -1;
  for (const auto& x : blocks) last = x.logit == -INFINITY ? last : x.block;
  const auto rank = [&](const Expected& x) -> double {  // -inf: cannot be selected
    const bool seen = x.logit != -INFINITY;
    if (seen && (x.block > last - o.locals || x.block < o.sinks)) return INFINITY;
    return std::isnan(x.logit) ? -INFINITY : std::min(double(x.logit), 1e300);
  };
  std::erase_if(blocks, [&](const Expected& x) { return rank(x) == -INFINITY; });
  std::stable_sort(blocks.begin(), blocks.end(),
                   [&](const Expected& x, const Expected& y) { return rank(x) > rank(y); });
  blocks.resize(std::min<size_t>(blocks.size(), c.k));
  std::sort(blocks.begin(), blocks.end(),
            [](const Expected& x, const Expected& y) { return x.block < y.block; });
  blocks.resize(c.k);
  return blocks;
}

// An element of q or k: an integer from -2 to 2, or NaN or infinity.
inline std::vector<uint8_t> bytes_of(const std::vector<float>& x, IndexerDType dtype) {
  std::vector<uint8_t> bytes;
  for (const float y : x) {
    if (dtype == IndexerDType::kBF16) {
      uint32_t bits;
      memcpy(&bits, &y, 4);
      bytes.push_back(bits >> 16 & 0xff), bytes.push_back(bits >> 24);
    } else {
      const int size = std::isnan(y) ? 0x7f : y == 0 ? 0 : std::fabs(y) == 1 ? 0x38 : 0x40;
      bytes.push_back(size | (std::signbit(y) ? 0x80 : 0));
    }
  }
  return bytes;
}

// Runs a case and compares the results. `Memory` provides `put`, `room` (returns poisoned memory),
// `get` and `require`.
template <typename Memory>
bool run(const Case& c, uint64_t seed, Memory& memory) {
  const Options& o = c.with;
  std::mt19937_64 random(seed);
  const auto draw = [&](int n) { return static_cast<int>(random() % n); };
  const int64_t tokens = int64_t{c.batch} * c.queries, keys = int64_t{c.batch} * c.keys;
  std::vector<float> q(tokens * c.heads * c.channels), k(keys * c.channels), weights, scale;
  for (size_t i = 0; i < q.size(); ++i) q[i] = i % c.channels ? draw(5) - 2.f : 1.f;
  for (auto& x : k) x = draw(5) - 2.f;
  for (int64_t i = 0; i < tokens * c.heads; ++i) weights.push_back(draw(4) - 1.f);
  for (int64_t i = 0; i < keys; ++i) scale.push_back(std::exp2(draw(3) - 1.f));
  // A key that is 0 except for an infinite first channel has infinite logits.
  for (int64_t i = 0; i < keys && o.special; ++i) {
    const int which = draw(60);
    const bool infinite = c.dtype == IndexerDType::kBF16 && !o.shared;
    if (which > (infinite ? 2 : 0)) continue;
    float* const key = &k[i * c.channels];
    if (which > 0) std::fill_n(key, c.channels, 0.f);
    key[0] = which == 0 ? NAN : which == 1 ? INFINITY : -INFINITY;
  }
  std::vector<int32_t> starts, ends;
  for (int64_t t = 0; t < tokens; ++t) {
    const int query = t % c.queries;
    int start = 0, end = o.causal ? c.keys - c.queries + query + 1 : draw(c.keys + 9) - 3;
    if (o.starts == Starts::kAny) start = draw(c.keys + 9) - 4;
    if (o.starts == Starts::kDocuments && query > 0) start = draw(40) ? starts.back() : query;
    starts.push_back(start);
    ends.push_back(end);
  }
  const bool paged = o.page_size > 0;
  const auto mapped = [&](int s) { return !paged || s / o.page_size != 1; };
  const auto seen = [&](int64_t t, int s) {
    return s >= starts[t] && s < ends[t] && s < c.keys && mapped(s);
  };
  for (int64_t i = 0; i < keys; ++i) {
    bool used = false;
    for (int t = 0; t < c.queries; ++t) used |= seen(i / c.keys * c.queries + t, i % c.keys);
    if (!used) std::fill_n(&k[i * c.channels], c.channels, NAN), scale[i] = NAN;
  }

  jax_dsa::IndexerBlockTopkParams p = {};
  auto& in = p.logits;
  in.q = memory.put(bytes_of(q, c.dtype));
  in.starts = o.starts == Starts::kNone && !o.shared ? nullptr : memory.put(starts);
  in.ends = memory.put(ends);
  in.weights = o.shared ? memory.put(weights) : nullptr;
  in.batch = c.batch, in.queries = c.queries, in.keys = c.keys, in.heads = c.heads;
  in.channels = c.channels, in.dtype = c.dtype, in.relu = o.relu;
  if (paged) {  // The second page of each request is unmapped. Pages lie in reverse order.
    const int own = c.keys / o.page_size, pages = c.batch * own + 1;
    std::vector<float> pool(int64_t{pages} * o.page_size * c.channels, NAN);
    std::vector<float> pool_scale(int64_t{pages} * o.page_size, NAN);
    std::vector<int32_t> table;
    for (int i = 0; i < c.batch * own; ++i) {
      const int page = pages - 1 - i;
      table.push_back(i % own == 1 ? (i < own ? -1 : pages) : page);
      const int64_t rows = o.page_size;
      std::copy_n(&k[i * rows * c.channels], rows * c.channels, &pool[page * rows * c.channels]);
      std::copy_n(&scale[i * rows], rows, &pool_scale[page * rows]);
    }
    in.k = memory.put(bytes_of(pool, c.dtype));
    in.k_scale = o.scaled ? memory.put(pool_scale) : nullptr;
    in.page_table = memory.put(table);
    in.pools = 1, in.pages = pages, in.pages_per_request = own, in.page_size = o.page_size;
  } else {
    in.k = memory.put(bytes_of(k, c.dtype));
    in.k_scale = o.scaled ? memory.put(scale) : nullptr;
  }
  const int64_t lists = o.shared ? 1 : c.heads;
  const int64_t blocks = jax_dsa::indexer_blocks(c.keys, c.block_size), size = tokens * lists * c.k;
  p.capacity = o.capacity ? o.capacity : tokens;
  if (o.shared) in.out = memory.template room<float>(p.capacity * c.keys);
  p.scores = reinterpret_cast<jax_dsa::BlockScore*>(
      memory.template room<uint64_t>(p.capacity * lists * blocks));
  p.block_size = c.block_size, p.sink_blocks = o.sinks, p.local_blocks = o.locals, p.k = c.k;
  p.indices = memory.template room<int32_t>(size);
  p.values = memory.template room<float>(size);
  p.keys = memory.template room<int32_t>(size);
  memory.require(jax_dsa::launch_indexer_block_topk(p, nullptr));

  const auto indices = memory.get(p.indices, size), best = memory.get(p.keys, size);
  const auto values = memory.get(p.values, size);
  int64_t bad = 0;
  std::vector<float> all_logits;  // of one list after the other
  for (int64_t list = 0; list < tokens * lists; ++list) {
    const int64_t t = list / lists;
    std::vector<float> logits(c.keys, -INFINITY);
    for (int s = 0; s < c.keys; ++s) {
      if (!seen(t, s)) continue;
      const int64_t key = t / c.queries * c.keys + s;
      float sum = 0;
      for (int j = 0; j < c.heads; ++j) {
        if (!o.shared && j != list % lists) continue;
        float x = 0;
        for (int i = 0; i < c.channels; ++i) {
          x += q[(t * c.heads + j) * c.channels + i] * k[key * c.channels + i];
        }
        if (o.relu && !(x > 0) && !std::isnan(x)) x = 0;
        sum += o.shared ? weights[t * c.heads + j] * x : x;
      }
      logits[s] = o.scaled ? sum * scale[key] : sum;
    }
    const auto expected = select(c, logits, std::max(starts[t], 0), std::min(ends[t], c.keys));
    // Logits outside of a range must not be read.
    for (int s = 0; s < c.keys; ++s) all_logits.push_back(seen(t, s) ? logits[s] : INFINITY);
    for (int i = 0; i < c.k; ++i) {
      const int64_t at = list * c.k + i;
      const Expected& x = expected[i];
      const bool same = values[at] == x.logit || (std::isnan(values[at]) && std::isnan(x.logit));
      const bool good = indices[at] == x.block && best[at] == x.key && same;
      if (!good && bad++ < 3) {
        printf("list %lld slot %d: %d %g %d, expected %d %g %d\n", (long long)list, i, indices[at],
               values[at], best[at], x.block, x.logit, x.key);
      }
    }
  }
  if (o.shared && !paged) {  // the same blocks from the logits
    const jax_dsa::BlockTopkParams given = {
        .logits = memory.put(all_logits),
        .starts = in.starts,
        .ends = in.ends,
        .scores = p.scores,
        .capacity = p.capacity,
        .rows = tokens,
        .keys = c.keys,
        .block_size = c.block_size,
        .sink_blocks = o.sinks,
        .local_blocks = o.locals,
        .indices = memory.template room<int32_t>(size),
        .k = c.k,
    };
    memory.require(jax_dsa::launch_block_topk(given, nullptr));
    const auto again = memory.get(given.indices, size);
    const bool same = again == indices;
    if (!same) printf("other blocks from the logits\n");
    bad += !same;
  }
  printf("%-4s %s, seed %llu\n", bad ? "BAD" : "ok", c.name, (unsigned long long)seed);
  fflush(stdout);
  return bad == 0;
}

}  // namespace indexer_blocks_problem
