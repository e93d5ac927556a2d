// A problem's keys as caches hold them, for the tests of sparse MLA decode.
#pragma once

#include <cuda_fp8.h>

#include <cstring>

#include "problems/sparse_mla_problem.h"
#include "sparse_mla/sparse_mla_decode.h"

namespace sparse_mla_problem {

// Of records: the least powers of two; the least; powers of two that do not fit their values, and
// others; the first with a NaN here and there among the values.
enum Scales { kLeastPowers, kLeast, kWide, kWithNans };

struct Layout {
  bool records = false;
  int page_size = 0;   // 0: flat. Else a divisor of the number of keys
  bool holes = false;  // some pages are not mapped
  Scales scales = kLeastPowers;
  bool pools = false;  // each request has pages of its own
};

struct Cache {
  std::vector<uint8_t> rows;
  std::vector<int32_t> indices, page_table;
  int pages = 0, page_slots = 0;
};

inline void round_to_record(bf16* key, uint8_t* record, Scales kind, uint64_t random) {
  const float wide[] = {0x1p7f, 0x1p8f, 0x1p-3f, 0x1p-126f, 0x1.8p-9f};
  float scales[4];
  for (int i = 0; i < 4; ++i) {
    float top = 1e-4f;
    for (int d = 0; d < 128; ++d) {
      top = std::fmax(top, std::fabs(__bfloat162float(key[i * 128 + d])));
    }
    scales[i] = kind == kWide    ? wide[(random + i) % 5]
                : kind == kLeast ? top / 448
                                 : std::exp2(std::ceil(std::log2(top / 448)));
    for (int d = i * 128; d < i * 128 + 128; ++d) {
      __nv_fp8_e4m3 x(__bfloat162float(key[d]) / scales[i]);
      if (kind == kWithNans && random % 64 == 0 && d == random / 64 % 512) x.__x |= 0x7f;
      record[d] = x.__x;
      key[d] = __float2bfloat16(float(x) * scales[i]);
    }
  }
  std::memcpy(record + 512, scales, 16);
  std::memcpy(record + 528, key + 512, 128);
}

// Rounds the problem's keys to what the cache holds, and takes the slots out of it that point to
// pages which are not mapped; the cache keeps all its indices.
inline Cache store(Problem& p, const Layout& layout, uint64_t seed) {
  const Case& c = p.c;
  std::mt19937_64 random(seed);
  const int64_t row_bytes = layout.records ? jax_dsa::kMlaRecordBytes : c.dim * 2;
  Cache cache;
  cache.indices = p.indices;
  int64_t rows = int64_t{c.batch} * c.keys;
  if (layout.page_size > 0) {
    cache.page_slots = c.keys / layout.page_size;
    cache.pages = c.batch * cache.page_slots + 3;
    rows = int64_t{cache.pages} * layout.page_size * (layout.pools ? c.batch : 1);
    std::vector<int32_t> free;
    for (int i = 0; i < cache.pages; ++i) free.push_back(i);
    std::shuffle(free.begin(), free.end(), random);
    const int odd[] = {INT_MIN, -1, cache.pages, INT_MAX};
    for (int i = 0; i < c.batch * cache.page_slots; ++i) {
      const bool hole = layout.holes && random() % 3 == 0;
      cache.page_table.push_back(hole ? odd[random() % 4] : free[i]);
    }
  }
  cache.rows.assign(rows * c.groups * row_bytes, 0xff);  // NaN
  for (int b = 0; b < c.batch; ++b) {
    for (int s = 0; s < c.keys; ++s) {
      int64_t row = int64_t{b} * c.keys + s;
      if (layout.page_size > 0) {
        const int page = cache.page_table[b * cache.page_slots + s / layout.page_size];
        if (page < 0 || page >= cache.pages) continue;
        const int64_t pool = layout.pools ? int64_t{b} * cache.pages : 0;
        row = (pool + page) * layout.page_size + s % layout.page_size;
      }
      for (int g = 0; g < c.groups; ++g) {
        bf16* key = &p.kv[((int64_t{b} * c.keys + s) * c.groups + g) * c.dim];
        uint8_t* to = &cache.rows[(row * c.groups + g) * row_bytes];
        if (layout.records) {
          round_to_record(key, to, layout.scales, random());
        } else {
          std::memcpy(to, key, row_bytes);
        }
      }
    }
  }
  const int64_t a_batch = int64_t{c.queries} * c.groups * c.slots;
  for (int64_t i = 0; layout.holes && i < c.batch * a_batch; ++i) {
    int32_t& key = p.indices[i];
    if (key < 0 || key >= c.keys) continue;
    const int page = cache.page_table[i / a_batch * cache.page_slots + key / layout.page_size];
    if (page < 0 || page >= cache.pages) key = -1;
  }
  return cache;
}

// Everything but pointers to data.
inline jax_dsa::SparseMlaDecodeParams decode_shapes(const Problem& x, const Layout& layout,
                                                    const Cache& cache, int splits) {
  jax_dsa::SparseMlaDecodeParams p = {};
  p.batch = x.c.batch, p.queries = x.c.queries, p.keys = x.c.keys, p.heads = x.c.heads;
  p.groups = x.c.groups, p.slots = x.c.slots, p.dim = x.c.dim, p.scale = x.scale;
  p.sinks_stride = x.c.sinks == 2 ? x.c.heads : 0;
  p.batch_rows = layout.page_size > 0 ? 0 : x.c.keys;
  if (layout.pools) p.batch_rows = int64_t{cache.pages} * layout.page_size;
  p.records = layout.records, p.splits = splits;
  p.pages = cache.pages, p.page_size = layout.page_size, p.page_slots = cache.page_slots;
  return p;
}

}  // namespace sparse_mla_problem
