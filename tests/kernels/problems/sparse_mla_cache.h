// Decode steps of sparse MLA: problems whose keys lie in one or two caches.
#pragma once

#include <cuda_fp8.h>

#include <cstring>

#include "problems/sparse_mla_problem.h"
#include "sparse_mla/sparse_mla_decode.h"

namespace sparse_mla_problem {

// How the scales of records are chosen: the smallest powers of two that fit the values; the
// smallest scales that fit (not for page records); powers of two, and others except for page
// records, that do not fit; as the first, with a NaN here and there among the values and the scales
// of page records.
enum Scales { kLeastPowers, kLeast, kWide, kWithNans };

struct Layout {
  bool records = false;  // with D 512, page records
  int page_size = 0;     // 0: flat; otherwise a divisor of the number of keys
  bool holes = false;    // some pages are not mapped
  Scales scales = kLeastPowers;
  bool pools = false;  // each request has its own page pool
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

inline void round_to_page_record(bf16* key, uint8_t* values, uint8_t* scales, Scales kind,
                                 uint64_t random) {
  const int wide[] = {7, 8, -3, -126, -127};
  for (int i = 0; i < 7; ++i) {
    float top = 1e-4f;
    for (int d = i * 64; d < i * 64 + 64; ++d) {
      top = std::fmax(top, std::fabs(__bfloat162float(key[d])));
    }
    const int exponent =
        kind == kWide ? wide[(random + i) % 5] : static_cast<int>(std::ceil(std::log2(top / 448)));
    scales[i] = static_cast<uint8_t>(exponent + 127);
    float scale = std::ldexp(1.f, exponent);
    if (kind == kWithNans && random % 64 == 1 && static_cast<int>(random / 64 % 7) == i) {
      scales[i] = 255, scale = NAN;
    }
    for (int d = i * 64; d < i * 64 + 64; ++d) {
      __nv_fp8_e4m3 x(std::isnan(scale) ? 1.f : __bfloat162float(key[d]) / scale);
      if (kind == kWithNans && random % 64 == 0 && d == static_cast<int>(random / 64 % 448)) {
        x.__x |= 0x7f;
      }
      values[d] = x.__x;
      key[d] = __float2bfloat16(float(x) * scale);
    }
  }
  scales[7] = static_cast<uint8_t>(random >> 32);  // readers ignore it
  std::memcpy(values + 448, key + 448, 128);
}

inline int row_bytes(int dim, const Layout& layout) {
  if (!layout.records) return dim * 2;
  return dim == 512 ? jax_dsa::kMlaPageRecordBytes : jax_dsa::kMlaRecordBytes;
}

// Stores the problem's keys in a cache and rounds them to what the cache holds. Removes slots from
// the problem that select unmapped pages; the cache's copy of the indices keeps them.
inline Cache store(Problem& p, const Layout& layout, uint64_t seed) {
  const Case& c = p.c;
  std::mt19937_64 random(seed);
  const int64_t width = row_bytes(c.dim, layout);
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
  cache.rows.assign(rows * c.groups * width, 0xff);  // NaN
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
        uint8_t* to = &cache.rows[(row * c.groups + g) * width];
        if (layout.records && c.dim == 512) {
          const int64_t size = int64_t{layout.page_size} * c.groups;
          const int64_t place = (row * c.groups + g) % size;
          uint8_t* const page = to - place * width;
          round_to_page_record(key, page + place * 576, page + size * 576 + place * 8,
                               layout.scales, random());
        } else if (layout.records) {
          round_to_record(key, to, layout.scales, random());
        } else {
          std::memcpy(to, key, width);
        }
      }
    }
  }
  const int64_t per_batch = int64_t{c.queries} * c.groups * c.slots;
  for (int64_t i = 0; layout.holes && i < c.batch * per_batch; ++i) {
    int32_t& key = p.indices[i];
    if (key < 0 || key >= c.keys) continue;
    const int page = cache.page_table[i / per_batch * cache.page_slots + key / layout.page_size];
    if (page < 0 || page >= cache.pages) key = -1;
  }
  return cache;
}

struct DecodeCase {
  Case c;
  Layout layout;
  int splits;  // 0: sparse_mla_decode_splits chooses
  // A second cache, if it has slots.
  int extra_keys = 0, extra_slots = 0;
  Layout extra = {};
};

// What the kernel reads of one cache and its list.
struct Source {
  Case c;
  Layout layout;
  Cache cache;
  std::vector<int32_t> ends, lengths;

  Source(Problem& p, const Layout& layout, uint64_t seed)
      : c(p.c), layout(layout), cache(store(p, layout, seed)), ends(p.ends), lengths(p.lengths) {}

  bool paged() const { return layout.page_size > 0; }
  int64_t row_bytes() const {
    return int64_t{c.groups} * sparse_mla_problem::row_bytes(c.dim, layout);
  }
  // Sets all fields of SparseMlaDecodeParams or SparseMlaExtraKeys except pointers to data.
  template <typename Keys>
  void set_shapes(Keys& p) const {
    p.keys = c.keys, p.slots = c.slots;
    p.batch_rows = paged() ? 0 : c.keys;
    if (layout.pools) p.batch_rows = int64_t{cache.pages} * layout.page_size;
    p.pages = cache.pages, p.page_size = layout.page_size, p.page_slots = cache.page_slots;
  }
};

// Returns a problem whose keys and slots are those of two problems. Its slots select the second
// problem's keys behind the first one's, and are -1 where they do not count.
inline Problem join(const Problem& a, const Problem& b) {
  Problem p = a;
  p.c.keys = a.c.keys + b.c.keys, p.c.slots = a.c.slots + b.c.slots;
  p.c.ends = p.c.lengths = false;
  p.kv.clear(), p.indices.clear();
  for (int i = 0; i < a.c.batch; ++i) {
    for (const Problem* x : {&a, &b}) {
      const int64_t count = int64_t{x->c.keys} * x->c.groups * x->c.dim;
      p.kv.insert(p.kv.end(), x->kv.begin() + i * count, x->kv.begin() + (i + 1) * count);
    }
  }
  for (int64_t list = 0; list < int64_t{a.c.batch} * a.c.queries * a.c.groups; ++list) {
    const int64_t token = list / a.c.groups;
    const int group = static_cast<int>(list % a.c.groups);
    for (const Problem* x : {&a, &b}) {
      for (int k = 0; k < x->c.slots; ++k) {
        const int first = x == &a ? 0 : a.c.keys;
        p.indices.push_back(x->counts(token, group, k) ? first + x->index(token, group, k) : -1);
      }
    }
  }
  return p;
}

// A decode step: the problem over all keys as the caches hold them, and what the kernel reads.
struct Step {
  Problem problem;
  std::vector<Source> sources;
};
inline Step make_step(const DecodeCase& x, uint64_t seed) {
  Step step = {make(x.c, seed), {}};
  step.sources.emplace_back(step.problem, x.layout, seed);
  if (x.extra_slots > 0) {
    Case c = x.c;
    c.keys = x.extra_keys, c.slots = x.extra_slots, c.infinite = false;
    Problem other = make(c, seed + 1);
    step.sources.emplace_back(other, x.extra, seed + 1);
    step.problem = join(step.problem, other);
  }
  return step;
}

// Returns all parameters except pointers to data.
inline jax_dsa::SparseMlaDecodeParams decode_shapes(const Step& step, int splits) {
  const Case& c = step.problem.c;
  jax_dsa::SparseMlaDecodeParams p = {};
  p.batch = c.batch, p.queries = c.queries, p.heads = c.heads, p.groups = c.groups;
  p.dim = c.dim, p.scale = step.problem.scale;
  p.sinks_stride = c.sinks == 2 ? c.heads : 0;
  p.records = step.sources[0].layout.records, p.splits = splits;
  step.sources[0].set_shapes(p);
  if (step.sources.size() > 1) step.sources[1].set_shapes(p.extra);
  return p;
}

}  // namespace sparse_mla_problem
