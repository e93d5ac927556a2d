// Random problems for mqa_decode and their float64 results. The tests of its kernels share them on
// the emulator and on a GPU.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "mqa_decode/mqa_decode.h"
#include "problems/sparse_mla_cache.h"

namespace mqa_decode_problem {

using bf16 = __nv_bfloat16;

struct Extras {
  bool separate_values = false;  // values in an array of their own, as wide as keys
  int page_size = 0;             // 0: flat; otherwise a divisor of the number of keys
  bool holes = false;            // some pages are not mapped
  bool pools = false;            // each request has its own page pool
  int window = -1;               // a query sees this many keys before its own; -1: all
  int starts = 0;                // random starts; 1: one per request, 2: one per query
  int sinks = 0;                 // 1: [N], 2: [B, N]
  bool normalized = true;        // otherwise float32 results
  bool infinite = false;         // the newest key of some requests has infinite values
  float q_size = 1.f;
  bool full = false;     // all requests have all keys
  bool shared = false;   // all requests read the first request's keys; flat only
  bool records = false;  // keys are FP8 records
  float huge = 0.f;      // the score of every third key, or of all keys of every second request
  bool exact_max = false;
};

struct Case {
  const char* name;
  int batch, queries, keys, heads, groups, dim;
  Extras with = {};
};

struct Problem {
  Case c;
  std::vector<bf16> q, k, v;     // as the kernel reads them
  std::vector<uint8_t> records;  // used instead of k
  std::vector<int32_t> starts, ends, page_table;
  std::vector<float> sinks;
  int pages = 0;
  float scale;

  int value_dim() const { return c.with.separate_values ? c.dim : 512; }
  // Returns the row of a request's key in `k`, or -1.
  int64_t row(int batch, int key) const {
    if (c.with.page_size == 0) return (c.with.shared ? 0 : int64_t{batch} * c.keys) + key;
    const int page = page_table[batch * (c.keys / c.with.page_size) + key / c.with.page_size];
    if (page < 0 || page >= pages) return -1;
    const int64_t pool = c.with.pools ? int64_t{batch} * pages : 0;
    return (pool + page) * c.with.page_size + key % c.with.page_size;
  }
  bool sees(int64_t token, int key) const { return starts[token] <= key && key < ends[token]; }
  const bf16* key(int64_t row, int group) const { return &k[(row * c.groups + group) * c.dim]; }
  const bf16* value(int64_t row, int group) const {
    return c.with.separate_values ? &v[(row * c.groups + group) * c.dim] : key(row, group);
  }
};

// Makes the last dimension of queries and keys alone the score, with a scale that rounds: `huge`
// for every third key, and for all keys of every second request.
inline void make_huge(Problem& p) {
  const Case& c = p.c;
  p.scale = 0.9f;
  for (size_t i = 0; i < p.q.size(); ++i) {
    p.q[i] = __float2bfloat16(i % c.dim == size_t(c.dim) - 1 ? 1.f : 0.f);
  }
  for (int b = 0; b < c.batch; ++b) {
    for (int key = 0; key < c.keys; ++key) {
      const int64_t row = p.row(b, key);
      for (int g = 0; g < c.groups && row >= 0 && (b % 2 == 1 || key % 3 == 0); ++g) {
        p.k[(row * c.groups + g + 1) * c.dim - 1] = __float2bfloat16(c.with.huge);
      }
    }
  }
}

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto normal = [](std::mt19937_64& random) {  // nearly normal: a sum of four numbers, which
                                                     // is fast
    const uint64_t x = random();
    const int sum = (x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48);
    return (sum - 131070) / 37837.f;
  };
  Problem p = {c};
  p.scale = 0.8f / std::sqrt(float(c.dim));  // not the usual scale, so that a kernel cannot take it
                                             // for granted
  int64_t rows = int64_t{c.with.shared ? 1 : c.batch} * c.keys;
  if (c.with.page_size > 0) {
    const int slots = c.batch * (c.keys / c.with.page_size);
    p.pages = slots + 3;
    rows = int64_t{p.pages} * c.with.page_size * (c.with.pools ? c.batch : 1);
    std::vector<int32_t> free;
    for (int i = 0; i < p.pages; ++i) free.push_back(i);
    std::shuffle(free.begin(), free.end(), random);
    const int odd[] = {INT_MIN, -1, p.pages, INT_MAX};
    for (int i = 0; i < slots; ++i) {
      const bool hole = c.with.holes && random() % 3 == 0;
      p.page_table.push_back(hole ? odd[random() % 4] : free[i]);
    }
  }
  p.q.resize(int64_t{c.batch} * c.queries * c.heads * c.dim);
  for (auto& x : p.q) x = __float2bfloat16(normal(random) * c.with.q_size);
  p.k.resize(rows * c.groups * c.dim + 8);
  if (c.with.separate_values) p.v.resize(p.k.size());
  for (auto* all : {&p.k, &p.v}) {
    for (auto& x : *all) x = __float2bfloat16(normal(random));
  }
  std::vector<int> lengths;
  for (int b = 0; b < c.batch; ++b) {
    int length = static_cast<int>(random() % (c.keys + 1));
    if (c.with.full) length = c.keys;
    if (!c.with.full && b % 7 == 3) length = static_cast<int>(random() % 3);
    if (!c.with.full && b % 7 == 5) length = c.keys + static_cast<int>(random() % 3);
    lengths.push_back(length);
    const int first = static_cast<int>(random() % (length + 3)) - 1;
    for (int t = 0; t < c.queries; ++t) {
      const int at = length - c.queries + t;
      int start = c.with.starts == 1 ? first : 0;
      if (c.with.starts == 2) start = static_cast<int>(random() % (length + 3)) - 1;
      if (c.with.window >= 0) start = std::max(start, at - c.with.window);
      p.starts.push_back(c.with.starts && t % 5 == 4 ? INT_MIN : start);
      p.ends.push_back(c.with.starts == 2 && random() % 4 == 0 ? INT_MIN : at + 1);
    }
  }
  const auto record = [&](int64_t i) { return &p.records[i * jax_dsa::kMlaRecordBytes]; };
  const int64_t width = int64_t{c.groups} * c.dim;
  if (c.with.records) {
    p.records.resize(rows * c.groups * jax_dsa::kMlaRecordBytes);
    for (int64_t i = 0; i < rows * c.groups; ++i) {
      sparse_mla_problem::round_to_record(&p.k[i * c.dim], record(i),
                                          sparse_mla_problem::kLeastPowers, random());
    }
  }
  p.sinks.resize(c.with.sinks == 2 ? c.batch * c.heads : c.heads);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    p.sinks[i] = i % 7 == 2 ? INFINITY : i % 7 == 4 ? -INFINITY : normal(random) * 2;
  }
  if (c.with.huge != 0.f) make_huge(p);
  // Keys that no query sees become NaN.
  std::vector<bool> seen(rows * c.groups);
  for (int b = 0; b < c.batch; ++b) {
    for (int i = 0; i < c.keys * c.groups; ++i) {
      const int key = i / c.groups, group = i % c.groups;
      const int64_t row = p.row(b, key);
      for (int t = 0; t < c.queries && row >= 0; ++t) {
        if (p.sees(int64_t{b} * c.queries + t, key)) seen[row * c.groups + group] = true;
      }
    }
  }
  for (auto* all : {&p.k, &p.v}) {
    for (int64_t i = 0; i < rows * c.groups && !all->empty(); ++i) {
      if (!seen[i]) std::fill_n(all->begin() + i * c.dim, c.dim, __float2bfloat16(NAN));
    }
  }
  for (int64_t i = 0; i < rows * c.groups && c.with.records; ++i) {
    if (!seen[i]) std::fill_n(record(i), jax_dsa::kMlaRecordBytes, 0xff);
  }
  for (int b = 0; b < c.batch && c.with.infinite; b += 2) {
    const int key = lengths[b] - 1 - b % 3;
    const int64_t row = key >= 0 && key < c.keys ? p.row(b, key) : -1;
    if (row < 0) continue;
    if (c.with.records) {
      const int group = random() % c.groups, value = random() % 512;
      p.k[row * width + group * c.dim + value] = __float2bfloat16(NAN);
      record(row * c.groups + group)[value] |= 0x7f;
      continue;
    }
    auto& all = c.with.separate_values ? p.v : p.k;
    all[row * width + random() % width] = __float2bfloat16(b % 4 ? NAN : -INFINITY);
    all[row * width] = __float2bfloat16(INFINITY);
  }
  return p;
}

// The result of one head of a token; NaN if a value that it sees is not finite.
struct Row {
  std::vector<double> out;  // with the sink's gate
  double lse = -INFINITY, top = -INFINITY, lse_above_top = 0;
};

inline Row attend(const Problem& p, int64_t token, int head) {
  const Case& c = p.c;
  const int batch = static_cast<int>(token / c.queries), group = head / (c.heads / c.groups);
  const int E = p.value_dim();
  Row row = {std::vector<double>(E)};
  const bf16* q = &p.q[(token * c.heads + head) * c.dim];
  std::vector<double> scores(c.keys, -INFINITY);
  bool poisoned = false;
  for (int key = 0; key < c.keys; ++key) {
    const int64_t at = p.sees(token, key) ? p.row(batch, key) : -1;
    if (at < 0) continue;
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) {
      sum += double(__bfloat162float(q[d])) * __bfloat162float(p.key(at, group)[d]);
    }
    scores[key] = c.with.huge != 0.f ? double(float(sum) * p.scale) : sum * p.scale;
    for (int d = 0; d < E && c.with.infinite; ++d) {
      poisoned |= !std::isfinite(__bfloat162float(p.value(at, group)[d]));
    }
    row.top = std::max(row.top, scores[key]);
  }
  if (poisoned) {
    row.out.assign(E, NAN);
    return row;
  }
  if (row.top == -INFINITY) return row;
  double total = 0;
  for (double s : scores) total += std::exp(s - row.top);
  row.lse_above_top = std::log(total), row.lse = row.top + row.lse_above_top;
  double gate = 1;
  if (c.with.sinks) {
    const double sink = p.sinks[(c.with.sinks == 2 ? batch * c.heads : 0) + head];
    gate = 1 / (1 + std::exp(sink - row.top - row.lse_above_top));
  }
  for (int key = 0; key < c.keys; ++key) {
    if (scores[key] == -INFINITY) continue;
    const double weight = gate * std::exp(scores[key] - row.top - row.lse_above_top);
    const bf16* value = p.value(p.row(batch, key), group);
    for (int d = 0; d < E; ++d) row.out[d] += weight * __bfloat162float(value[d]);
  }
  return row;
}

// The largest error of a result, and the largest expected magnitude.
struct Error {
  double worst = 0, top = 0;
  void add(double got, double want) {
    const double e = got == want ? 0 : std::fabs(got - want);
    worst = std::max(worst, std::isnan(e) ? INFINITY : e);
    if (std::isfinite(want)) top = std::max(top, std::fabs(want));
  }
  bool good(double relative) const { return worst <= relative * top + 1e-6; }
};

struct Errors {
  Error out, lse, top;  // lse beyond the largest score
  bool poison_kept =
      true;  // whether rows that should be NaN have at least one value that is not finite

  // `out` holds a row's values as floats.
  void add(const Problem& p, const Row& want, const std::vector<float>& got, float max_logit,
           float log_sum) {
    if (std::isnan(want.out[0])) {
      bool any = false;
      for (float x : got) any |= !std::isfinite(x);
      poison_kept &= any && (p.c.with.normalized || !std::isfinite(max_logit));
      return;
    }
    // The pair has the sum of probabilities even where the largest score hides it in lse.
    const double sum = want.top == -INFINITY ? 0 : want.lse_above_top;
    const double below = want.top == max_logit ? 0 : want.top - max_logit;
    lse.add(log_sum, sum + below);
    top.add(p.c.with.exact_max ? below : std::max(0., below - 5.6), 0);
    for (size_t d = 0; d < got.size(); ++d) out.add(got[d], want.out[d]);
  }
  bool good() const { return out.good(6e-3) && lse.good(3e-4) && top.worst < 1e-3 && poison_kept; }
};

// Returns all parameters except pointers to data.
inline jax_dsa::MqaDecodeParams shapes(const Problem& x) {
  const Case& c = x.c;
  jax_dsa::MqaDecodeParams p = {};
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.dim = c.dim, p.value_dim = x.value_dim(), p.scale = x.scale;
  p.sinks_stride = c.with.sinks == 2 ? c.heads : 0;
  p.records = c.with.records;
  p.out_float = !c.with.normalized, p.exact_max = c.with.exact_max;
  p.batch_rows = c.with.page_size > 0 || c.with.shared ? 0 : c.keys;
  if (c.with.pools) p.batch_rows = int64_t{x.pages} * c.with.page_size;
  p.pages = x.pages, p.page_size = c.with.page_size;
  p.page_slots = c.with.page_size > 0 ? c.keys / c.with.page_size : 0;
  return p;
}

}  // namespace mqa_decode_problem
