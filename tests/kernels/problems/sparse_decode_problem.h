// Test problems of sparse attention over caches and their solutions in float64, for the emulator
// and the GPU.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "problems/fp8_problem.h"
#include "problems/values_16.h"
#include "sparse_attention/decode.h"

namespace sparse_decode_problem {

struct Extras {
  int page_size = 0;   // 0: flat; otherwise a divisor of the number of keys
  bool pools = false;  // each request has a page pool of its own
  int sinks = 0;       // 1: [N], 2: [B, N]
  bool fp8 = false;
  bool factors = false;  // of FP8 rows
  bool full = false;     // all requests have all keys and list blocks that exist
  bool poison = false;   // the last key of the first query has a NaN in its values
  bool batch_invariant = false;
  float q_size = 1.f;
  int splits = 0;
};

struct Case {
  const char* name;
  int batch, queries, keys, heads, groups, dim, slots, block_size;
  Extras with = {};
};

struct Problem {
  Case c;
  float scale;
  std::vector<uint16_t> q;
  std::vector<uint8_t> k, v;  // rows as the kernel reads them
  std::vector<float> k_scale, v_scale, sinks;
  std::vector<int32_t> blocks, ends, page_table;
  int pages = 0;

  int bytes() const { return c.with.fp8 ? 1 : 2; }
  int per_group() const { return c.heads / c.groups; }
  int64_t num_rows() const { return int64_t{c.batch} * c.queries * c.heads; }
  // Returns the row of a request's key in the caches, or -1.
  int64_t row(int batch, int key) const {
    if (c.with.page_size == 0) return int64_t{batch} * c.keys + key;
    const int page = page_table[batch * (c.keys / c.with.page_size) + key / c.with.page_size];
    if (page < 0 || page >= pages) return -1;
    return int64_t{(c.with.pools ? batch * pages : 0) + page} * c.with.page_size +
           key % c.with.page_size;
  }
  // Returns the rows that a KV head of query `token` sees, as often as they count.
  std::vector<int64_t> seen(int64_t token, int group) const {
    std::vector<int64_t> rows;
    for (int i = 0; i < c.slots; ++i) {
      const int64_t block = blocks[(token * c.groups + group) * c.slots + i];
      for (int64_t key = block * c.block_size; block >= 0 && key < (block + 1) * c.block_size;
           ++key) {
        if (key >= std::min(ends[token], c.keys)) break;
        const int64_t at = row(token / c.queries, key);
        if (at >= 0) rows.push_back(at);
      }
    }
    return rows;
  }
  double value(const std::vector<uint8_t>& rows, const std::vector<float>& factors, int64_t row,
               int group, int d) const {
    const int64_t head = row * c.groups + group, at = head * c.dim + d;
    if (c.with.fp8)
      return double(fp8_problem::e4m3_value(rows[at])) * (c.with.factors ? factors[head] : 1.f);
    uint16_t bits;
    memcpy(&bits, &rows[at * 2], 2);
    return jax_dsa::from_16(jax_dsa::DType::kBF16, bits);
  }
};

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  p.scale = 0.8f / std::sqrt(float(c.dim));
  int64_t rows = int64_t{c.batch} * c.keys;
  if (c.with.page_size > 0) {
    const int slots = c.batch * (c.keys / c.with.page_size);
    p.pages = slots + 3;
    rows = int64_t{p.pages} * c.with.page_size * (c.with.pools ? c.batch : 1);
    for (int i = 0; i < p.pages; ++i) p.page_table.push_back(i);
    std::shuffle(p.page_table.begin(), p.page_table.end(), random);
    p.page_table.resize(slots);
    const int odd[] = {INT_MIN, -1, p.pages, INT_MAX};
    for (int32_t& page : p.page_table) {
      if (random() % 4 == 0) page = odd[random() % 4];
    }
  }
  const auto bf16 = [](float x) { return jax_dsa::to_16(jax_dsa::DType::kBF16, x); };
  p.q.resize(p.num_rows() * c.dim);
  for (uint16_t& x : p.q) x = bf16(normal(random) * c.with.q_size);
  const int64_t values = rows * c.groups * c.dim;
  for (auto* cache : {&p.k, &p.v}) {
    cache->resize(values * p.bytes());
    for (int64_t i = 0; i < values; ++i) {
      if (c.with.fp8) {
        (*cache)[i] = static_cast<uint8_t>(random());  // all codes, but no NaN
        if (((*cache)[i] & 0x7f) >= 0x60) (*cache)[i] -= 0x40;
      } else {
        const uint16_t x = bf16(normal(random));
        memcpy(&(*cache)[i * 2], &x, 2);
      }
    }
  }
  if (c.with.factors) {
    for (auto* factors : {&p.k_scale, &p.v_scale}) {
      for (int64_t i = 0; i < rows * c.groups; ++i) {
        factors->push_back(std::exp2(normal(random)) * (i % 5 == 4 ? -0.3f : 0.7f));
      }
    }
  }
  for (int b = 0; b < c.batch; ++b) {
    int length = static_cast<int>(random() % (c.keys + 1));
    if (b % 5 == 3) length = static_cast<int>(random() % 3);
    if (c.with.full || b % 5 == 4) length = c.keys + static_cast<int>(random() % 3);
    for (int t = 0; t < c.queries; ++t) p.ends.push_back(length - c.queries + t + 1);
  }
  const int count = (c.keys + c.block_size - 1) / c.block_size;
  const int odd[] = {INT_MIN, -1, count, INT_MAX};
  p.blocks.resize(int64_t{c.batch} * c.queries * c.groups * c.slots);
  for (int32_t& block : p.blocks) {
    block = static_cast<int32_t>(random() % std::max(count, 1));
    if (!c.with.full && random() % 4 == 0) block = odd[random() % 4];
  }
  p.sinks.resize(c.with.sinks == 2 ? c.batch * c.heads : c.heads);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    p.sinks[i] = i % 7 == 2 ? INFINITY : i % 7 == 4 ? -INFINITY : normal(random) * 2;
  }
  // Keys that no query sees become NaN.
  std::vector<bool> seen(rows * c.groups);
  for (int64_t token = 0; token < int64_t{c.batch} * c.queries; ++token) {
    for (int g = 0; g < c.groups; ++g) {
      for (const int64_t row : p.seen(token, g)) seen[row * c.groups + g] = true;
    }
  }
  const int64_t row_bytes = int64_t{c.dim} * p.bytes();
  for (int64_t i = 0; i < rows * c.groups; ++i) {
    if (seen[i]) continue;
    for (auto* cache : {&p.k, &p.v}) memset(&(*cache)[i * row_bytes], 0xff, row_bytes);
    if (c.with.factors) p.k_scale[i] = p.v_scale[i] = NAN;
  }
  if (c.with.poison) {
    for (int g = 0; g < c.groups; ++g) {
      const auto rows_of_first = p.seen(0, g);
      if (rows_of_first.empty()) continue;
      memset(&p.v[(rows_of_first.back() * c.groups + g) * row_bytes], 0xff, p.bytes());
    }
  }
  return p;
}

struct Solution {
  std::vector<double> out, max_logit, log_sum;
};

inline Solution solve(const Problem& p) {
  const Case& c = p.c;
  Solution y = {std::vector<double>(p.num_rows() * c.dim),
                std::vector<double>(p.num_rows(), -INFINITY), std::vector<double>(p.num_rows())};
  for (int64_t r = 0; r < p.num_rows(); ++r) {
    const int head = static_cast<int>(r % c.heads), group = head / p.per_group();
    const int64_t token = r / c.heads;
    const std::vector<int64_t> rows = p.seen(token, group);
    std::vector<double> scores;
    for (const int64_t row : rows) {
      double sum = 0;
      for (int d = 0; d < c.dim; ++d) {
        sum += jax_dsa::from_16(jax_dsa::DType::kBF16, p.q[r * c.dim + d]) *
               p.value(p.k, p.k_scale, row, group, d);
      }
      scores.push_back(sum * p.scale);
      y.max_logit[r] = std::max(y.max_logit[r], scores.back());
    }
    if (rows.empty()) continue;
    double total = 0;
    for (const double s : scores) total += std::exp(s - y.max_logit[r]);
    y.log_sum[r] = std::log(total);
    if (c.with.sinks) {
      const double sink = p.sinks[(c.with.sinks == 2 ? token / c.queries * c.heads : 0) + head];
      total += std::exp(sink - y.max_logit[r]);
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      const double weight = std::exp(scores[i] - y.max_logit[r]) / total;
      for (int d = 0; d < c.dim; ++d) {
        y.out[r * c.dim + d] += weight * p.value(p.v, p.v_scale, rows[i], group, d);
      }
    }
  }
  return y;
}

// The largest errors of a result. Values that should be NaN and are count as correct.
struct Errors {
  double out = 0, max_logit, log_sum;

  Errors(const Solution& want, const std::vector<uint16_t>& out_16,
         const std::vector<float>& max_logits, const std::vector<float>& log_sums)
      : max_logit(jax_dsa::row_difference(max_logits, want.max_logit)),
        log_sum(jax_dsa::row_difference(log_sums, want.log_sum)) {
    for (size_t i = 0; i < out_16.size(); ++i) {
      const double got = jax_dsa::from_16(jax_dsa::DType::kBF16, out_16[i]);
      if (std::isnan(got) && std::isnan(want.out[i])) continue;
      const double error = std::fabs(got - want.out[i]) / (1 + std::fabs(want.out[i]));
      out = std::max(out, std::isnan(error) ? INFINITY : error);
    }
  }
  bool good() const { return out < 0.02 && std::max(max_logit, log_sum) < 2e-4; }
};

// Sets all parameters except pointers to data.
inline jax_dsa::SparseAttentionDecodeParams shapes(const Problem& x) {
  const Case& c = x.c;
  jax_dsa::SparseAttentionDecodeParams p = {};
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.dim = c.dim, p.slots = c.slots, p.block_size = c.block_size;
  p.batch_rows = c.with.page_size == 0 ? c.keys
                 : c.with.pools        ? int64_t{x.pages} * c.with.page_size
                                       : 0;
  p.pages = x.pages, p.page_size = c.with.page_size;
  p.page_slots = c.with.page_size > 0 ? c.keys / c.with.page_size : 0;
  p.sinks_stride = c.with.sinks == 2 ? c.heads : 0;
  p.scale = x.scale, p.fp8 = c.with.fp8, p.batch_invariant = c.with.batch_invariant;
  p.splits = c.with.splits;
  return p;
}

// name, B, T, S, N, G, D, slots, block size
inline const Case kCases[] = {
    {"one request", 1, 1, 1000, 64, 4, 128, 6, 128, {.full = true}},
    {"blocks of 64, pages of 48", 3, 1, 960, 12, 2, 64, 5, 64, {.page_size = 48, .sinks = 1}},
    {"blocks of 4, 256 dims", 2, 2, 250, 24, 2, 256, 70, 4, {.page_size = 10, .sinks = 2}},
    {"blocks of 1, pools", 3, 1, 96, 5, 1, 128, 90, 1, {.page_size = 8, .pools = true}},
    {"32 heads", 4, 2, 300, 32, 1, 128, 9, 32, {.q_size = 3.f}},
    {"80 heads", 2, 1, 200, 80, 1, 64, 7, 32, {.sinks = 1, .poison = true}},
    {"32 heads, 256 dims", 2, 1, 300, 32, 1, 256, 3, 128},
    {"many requests", 12, 2, 130, 2, 1, 64, 4, 16, {.sinks = 1}},
    {"invariant", 5, 1, 1500, 16, 2, 128, 12, 128, {.batch_invariant = true}},
    {"16 splits", 1, 1, 1100, 16, 1, 128, 20, 64, {.sinks = 1, .splits = 16}},
    {"no slots", 2, 1, 100, 4, 1, 64, 0, 16},
    {"no keys", 2, 2, 0, 4, 1, 64, 3, 16},
    {"fp8", 1, 1, 1000, 64, 4, 128, 6, 128, {.fp8 = true, .factors = true, .full = true}},
    {"fp8, pages",
     3,
     2,
     320,
     12,
     2,
     64,
     9,
     32,
     {.page_size = 20, .sinks = 1, .fp8 = true, .factors = true}},
    {"fp8, 256 dims, no factors",
     2,
     1,
     300,
     6,
     1,
     256,
     40,
     16,
     {.fp8 = true, .poison = true, .q_size = 0.2f}},
    {"fp8, 32 heads", 2, 1, 260, 30, 1, 128, 9, 64, {.fp8 = true, .factors = true, .poison = true}},
    {"fp8, 32 heads, 256 dims",
     2,
     1,
     400,
     32,
     1,
     256,
     4,
     64,
     {.page_size = 100, .fp8 = true, .factors = true}},
    {"fp8, 16 splits, 32 heads", 1, 1, 900, 20, 1, 64, 40, 32, {.fp8 = true, .splits = 16}},
    {"fp8, invariant",
     4,
     1,
     1200,
     16,
     1,
     64,
     20,
     64,
     {.fp8 = true, .factors = true, .batch_invariant = true}},
};

}  // namespace sparse_decode_problem
