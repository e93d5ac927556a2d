// Test problems of masked attention and their solutions in float64, for the emulator and the GPU.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "masked_attention/masked_attention.h"
#include "problems/values_16.h"

namespace jax_dsa {

enum Ranges { kNoRanges, kCausal, kWindow, kRandom, kShared };

struct AttentionCase {
  const char* name;
  int batch, queries, keys, heads, groups, dim, value_dim;
  Ranges ranges = kNoRanges;
  bool segments = false;
  int map_heads = 0, map_batch = 1;  // no block mask if map_heads is 0
  int block_q = 128;
  DType dtype = DType::kBF16;
  float softcap = 0.f;
  float scale = 0.f;                   // 0 means dim^-1/2
  int first_row = 0;                   // row of the first query in the block mask
  int bias_heads = 0, bias_batch = 1;  // no bias if bias_heads is 0
  bool bias_rows = true;               // whether each query has a row of biases, or all share one
  float masking_bias = 0.f;            // a bias value that masks single keys and whole rows, or 0
  float level = 0.f;                   // q.k of the first half of the keys, or 0 for random keys
  bool sinks = false;
  bool nan = false;  // the first KV head's first key has a NaN value, and the last one's is NaN
};

struct AttentionProblem {
  AttentionCase c;
  float scale;
  std::vector<uint16_t> q, k, v, bias;
  std::vector<float> sinks;  // [batch, heads], or empty
  std::vector<int32_t> starts, ends, q_segments, kv_segments, rows, tiles;
  std::vector<uint8_t> bits;
  int64_t slots = 0;
  int tile_rows = 0, tile_columns = 0;
  static constexpr int kBlockK = 128;

  float at(const std::vector<uint16_t>& x, int64_t i) const { return from_16(c.dtype, x[i]); }

  bool in_map(int b, int n, int t, int s) const {
    const int64_t map_index =
        (c.map_batch == 1 ? 0 : b) * c.map_heads + n / (c.heads / c.map_heads);
    const int row = rows[t];
    const int kind = tiles[(map_index * tile_rows + row / c.block_q) * tile_columns + s / kBlockK];
    if (kind < 0) return kind == -1;
    const int64_t bit_row = (map_index * slots + kind) * c.block_q + row % c.block_q;
    return bits[bit_row * (kBlockK / 8) + s % kBlockK / 8] >> (s % 8) & 1;
  }
  bool visible(int b, int n, int t, int s) const {
    if (c.ranges != kNoRanges) {
      const int64_t at = (c.ranges == kShared ? 0 : b) * int64_t{c.queries} + t;
      if (s < starts[at] || s >= ends[at]) return false;
    }
    if (c.segments &&
        q_segments[b * int64_t{c.queries} + t] != kv_segments[b * int64_t{c.keys} + s]) {
      return false;
    }
    return c.map_heads == 0 || in_map(b, n, t, s);
  }
  int bias_row() const { return (c.keys + 7) / 8 * 8; }
  int64_t bias_size() const {
    return int64_t{c.bias_batch} * c.bias_heads * (c.bias_rows ? c.queries : 1) * bias_row();
  }
  int64_t bias_at(int b, int n, int t, int s) const {
    const int64_t head = (c.bias_batch == 1 ? 0 : b) * c.bias_heads + n / (c.heads / c.bias_heads);
    return (head * (c.bias_rows ? c.queries : 1) + (c.bias_rows ? t : 0)) * bias_row() + s;
  }
  // Returns whether several scores share a bias.
  bool shares_bias() const {
    return c.bias_heads &&
           (!c.bias_rows || c.queries == 1 || c.bias_heads != c.heads || c.bias_batch != c.batch);
  }
  AttentionBias attention_bias(const void* x) const {
    if (!c.bias_heads) return {};
    return {x, c.bias_rows ? c.queries : 1, c.bias_batch, c.bias_heads};
  }
  double score(int b, int n, int t, int s) const {
    const int64_t row = ((int64_t{b} * c.queries + t) * c.heads + n) * c.dim;
    const int64_t key = ((int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups)) * c.dim;
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) sum += double(at(q, row + d)) * at(k, key + d);
    sum *= scale;
    // In float32, a product is lost when it is added to a bias that masks its key.
    if (c.bias_heads) sum += at(bias, bias_at(b, n, t, s));
    sum = static_cast<float>(sum);
    return c.softcap > 0 ? c.softcap * std::tanh(sum / c.softcap) : sum;
  }
  AttentionMask mask() const {
    AttentionMask m = {};
    if (c.ranges != kNoRanges) {
      m.starts = starts.data(), m.ends = ends.data();
      m.range_stride = c.ranges == kShared ? 0 : c.queries;
    }
    if (c.segments) m.q_segments = q_segments.data(), m.kv_segments = kv_segments.data();
    if (c.map_heads) {
      m.map_rows = rows.data(), m.tiles = tiles.data(), m.bits = bits.data();
      m.slots = slots, m.map_batch = c.map_batch, m.map_heads = c.map_heads;
      m.tile_rows = tile_rows, m.tile_columns = tile_columns;
      m.block_q = c.block_q, m.block_k = kBlockK;
    }
    return m;
  }
};

inline AttentionProblem make_attention(const AttentionCase& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  AttentionProblem p = {c};
  p.scale = c.scale != 0.f ? c.scale : 1 / std::sqrt(float(c.dim));
  const auto fill = [&](std::vector<uint16_t>& x, int64_t n) {
    x.resize(n + 8);
    for (auto& y : x) y = to_16(c.dtype, normal(random));
  };
  fill(p.q, int64_t{c.batch} * c.queries * c.heads * c.dim);
  fill(p.k, int64_t{c.batch} * c.keys * c.groups * c.dim);
  fill(p.v, int64_t{c.batch} * c.keys * c.groups * c.value_dim);
  if (c.level != 0.f) {  // Two dimensions alone make the scores. Those of 1e9 are then exact.
    for (size_t i = 0; i < p.q.size(); ++i) p.q[i] = to_16(c.dtype, i % c.dim < 2 ? 1.f : 0.f);
    for (int b = 0; b < c.batch; ++b) {
      for (int s = 0; s < c.keys * c.groups; ++s) {
        uint16_t* const x = &p.k[(int64_t{b} * c.keys * c.groups + s) * c.dim];
        if (s / c.groups >= c.keys / 2) continue;
        x[0] = to_16(c.dtype, c.level), x[1] = to_16(c.dtype, s % 3 * 64.f);
      }
    }
  }
  if (c.nan) p.v[3] = p.k[(c.groups - 1) * c.dim] = to_16(c.dtype, NAN);
  if (c.sinks) {
    for (int i = 0; i < c.batch * c.heads; ++i) {
      p.sinks.push_back(i % 4 == 1 ? INFINITY : i % 4 == 2 ? -INFINITY : 3 * normal(random));
    }
  }
  for (int b = 0; b < c.batch; ++b) {
    for (int t = 0; t < c.queries; ++t) {
      int start = 0, end = c.keys;
      if (c.ranges == kCausal || c.ranges == kShared) end = t + 1;
      if (c.ranges == kWindow) start = t - 70, end = t + 10;
      if (c.ranges == kRandom) {
        start = static_cast<int>(random() % (c.keys + 40)) - 30;
        end = random() % 9 == 0 ? INT_MIN : start + static_cast<int>(random() % 150) - 20;
        if (random() % 9 == 0) start = INT_MIN, end = INT_MAX;
      }
      p.starts.push_back(start), p.ends.push_back(end);
      p.q_segments.push_back(t / 60 - (t % 50 == 7 ? 100 : 0));
    }
    for (int s = 0; s < c.keys; ++s) p.kv_segments.push_back(s % 40 == 3 ? 77 : s / 60);
  }
  if (c.map_heads) {
    for (int t = 0; t < c.queries; ++t) p.rows.push_back(c.first_row + t);
    const int bit_rows = c.first_row + c.queries;
    p.tile_rows = (bit_rows + c.block_q - 1) / c.block_q, p.tile_columns = (c.keys + 127) / 128;
    p.slots = int64_t{p.tile_rows} * p.tile_columns;
    const int64_t maps = int64_t{c.map_batch} * c.map_heads;
    p.tiles.resize(maps * p.slots);
    p.bits.resize(maps * p.slots * c.block_q * 16);
    for (int64_t m = 0; m < maps; ++m) {
      int next = 0;
      for (int64_t i = 0; i < p.slots; ++i) {
        const int kind = static_cast<int>(random() % 4);
        p.tiles[m * p.slots + i] = kind == 0 ? -2 : kind == 1 ? -1 : next++;
      }
    }
    for (auto& x : p.bits) x = static_cast<uint8_t>(random() & random());
  }
  if (c.bias_heads) {  // Biases are NaN where no query sees the key, and -inf at random places and
                       // in one whole row.
    fill(p.bias, p.bias_size());
    for (size_t i = 0; i < p.bias.size(); ++i) {
      const bool row = c.bias_rows && static_cast<int>(i / p.bias_row()) == c.queries / 2;
      if (row || random() % 20 == 0) p.bias[i] = to_16(c.dtype, -INFINITY);
      if (c.masking_bias != 0.f && (i / p.bias_row() % 7 == 3 || random() % 20 == 0)) {
        p.bias[i] = to_16(c.dtype, c.masking_bias);
      }
    }
    std::vector<bool> seen(p.bias_size());
    for (int b = 0; b < c.batch; ++b) {
      for (int n = 0; n < c.heads; ++n) {
        for (int t = 0; t < c.queries; ++t) {
          for (int s = 0; s < c.keys; ++s) {
            if (p.visible(b, n, t, s)) seen[p.bias_at(b, n, t, s)] = true;
          }
        }
      }
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      if (!seen[i]) p.bias[i] = to_16(c.dtype, NAN);
    }
  }
  // Keys and values that no query of their group sees, and queries that see no key, are NaN.
  const int heads_per_group = c.heads / c.groups;
  for (int b = 0; b < c.batch; ++b) {
    for (int g = 0; g < c.groups; ++g) {
      for (int s = 0; s < c.keys; ++s) {
        bool seen = false;
        for (int n = g * heads_per_group; n < (g + 1) * heads_per_group && !seen; ++n) {
          for (int t = 0; t < c.queries && !seen; ++t) seen = p.visible(b, n, t, s);
        }
        const int64_t key = (int64_t{b} * c.keys + s) * c.groups + g;
        for (int d = 0; d < c.dim && !seen; ++d) p.k[key * c.dim + d] = to_16(c.dtype, NAN);
        for (int d = 0; d < c.value_dim && !seen; ++d) {
          p.v[key * c.value_dim + d] = to_16(c.dtype, s % 2 ? NAN : INFINITY);
        }
      }
    }
    for (int t = 0; t < c.queries; ++t) {
      for (int n = 0; n < c.heads; ++n) {
        bool sees = false;
        for (int s = 0; s < c.keys && !sees; ++s) sees = p.visible(b, n, t, s);
        const int64_t row = (int64_t{b} * c.queries + t) * c.heads + n;
        for (int d = 0; d < c.dim && !sees; ++d) p.q[row * c.dim + d] = to_16(c.dtype, NAN);
      }
    }
  }
  return p;
}

// ---- solutions ---------------------------------------------------------------------------------

struct ForwardResult {
  std::vector<double> out, max_logit, log_sum;
};

inline ForwardResult solve_forward(const AttentionProblem& x) {
  const AttentionCase& c = x.c;
  ForwardResult y;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  y.out.resize(rows * c.value_dim), y.max_logit.resize(rows, -INFINITY), y.log_sum.resize(rows);
  std::vector<double> scores(c.keys);
  for (int64_t row = 0; row < rows; ++row) {
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double max_score = -INFINITY, total = 0;
    for (int s = 0; s < c.keys; ++s) {
      scores[s] = x.visible(b, n, t, s) ? x.score(b, n, t, s) : -INFINITY;
      max_score = std::isnan(scores[s]) ? NAN : std::max(max_score, scores[s]);
    }
    if (max_score == -INFINITY) continue;
    for (int s = 0; s < c.keys; ++s) {
      if (scores[s] == -INFINITY) continue;
      const double p = std::exp(scores[s] - max_score);
      total += p;
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      for (int e = 0; e < c.value_dim; ++e) {
        y.out[row * c.value_dim + e] += p * x.at(x.v, key * c.value_dim + e);
      }
    }
    const double sink = c.sinks ? std::exp(x.sinks[b * c.heads + n] - max_score) : 0;
    for (int e = 0; e < c.value_dim; ++e) y.out[row * c.value_dim + e] /= total + sink;
    y.max_logit[row] = max_score, y.log_sum[row] = std::log(total);
  }
  return y;
}

struct Gradients {
  std::vector<double> dq, dk, dv, dbias;
};

// The results of the forward pass, and the gradients of these results.
struct BackwardInputs {
  std::vector<uint16_t> out, dout;
  std::vector<float> max_logit, log_sum, dlse;
};

inline BackwardInputs make_backward_inputs(const AttentionProblem& x, uint64_t seed) {
  const AttentionCase& c = x.c;
  std::mt19937_64 random(seed + 1000);
  std::normal_distribution<float> normal;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  BackwardInputs y;
  y.out.resize(rows * c.value_dim + 8), y.dout.resize(rows * c.value_dim + 8);
  y.max_logit.resize(rows, -INFINITY), y.log_sum.resize(rows), y.dlse.resize(rows);
  std::vector<double> out(c.value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double total = 0, max_score = -INFINITY;
    std::vector<double> scores(c.keys, -INFINITY);
    for (int s = 0; s < c.keys; ++s) {
      if (x.visible(b, n, t, s)) scores[s] = x.score(b, n, t, s);
      max_score = std::max(max_score, scores[s]);
    }
    std::fill(out.begin(), out.end(), 0);
    for (int s = 0; s < c.keys; ++s) {
      if (scores[s] == -INFINITY) continue;
      const double p = std::exp(scores[s] - max_score);
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      total += p;
      for (int e = 0; e < c.value_dim; ++e) out[e] += p * x.at(x.v, key * c.value_dim + e);
    }
    y.max_logit[row] = static_cast<float>(max_score);
    y.log_sum[row] = total > 0 ? static_cast<float>(std::log(total)) : 0.f;
    y.dlse[row] = normal(random);
    for (int e = 0; e < c.value_dim; ++e) {
      y.out[row * c.value_dim + e] = to_16(c.dtype, total > 0 ? out[e] / total : 0);
      y.dout[row * c.value_dim + e] = to_16(c.dtype, total > 0 ? normal(random) : NAN);
    }
    if (total == 0) y.dlse[row] = NAN;
  }
  return y;
}

inline Gradients solve_backward(const AttentionProblem& x, const BackwardInputs& inputs) {
  const AttentionCase& c = x.c;
  Gradients y;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  const int64_t keys = int64_t{c.batch} * c.keys * c.groups;
  y.dq.resize(rows * c.dim), y.dk.resize(keys * c.dim), y.dv.resize(keys * c.value_dim);
  y.dbias.resize(x.bias_size());
  for (int64_t row = 0; row < rows; ++row) {
    if (inputs.max_logit[row] == -INFINITY) continue;
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double delta = -inputs.dlse[row];
    for (int e = 0; e < c.value_dim; ++e) {
      const int64_t i = row * c.value_dim + e;
      delta += double(x.at(inputs.out, i)) * x.at(inputs.dout, i);
    }
    for (int s = 0; s < c.keys; ++s) {
      if (!x.visible(b, n, t, s)) continue;
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      const double score = x.score(b, n, t, s);
      const double p = std::exp(score - inputs.max_logit[row] - inputs.log_sum[row]);
      double dp = 0;
      for (int e = 0; e < c.value_dim; ++e) {
        const double g = x.at(inputs.dout, row * c.value_dim + e);
        dp += g * x.at(x.v, key * c.value_dim + e);
        y.dv[key * c.value_dim + e] += p * g;
      }
      double ds = p * (dp - delta);
      if (c.softcap > 0) ds *= 1 - score / c.softcap * (score / c.softcap);
      if (c.bias_heads) y.dbias[x.bias_at(b, n, t, s)] += ds;
      ds *= x.scale;
      for (int d = 0; d < c.dim; ++d) {
        y.dq[row * c.dim + d] += ds * x.at(x.k, key * c.dim + d);
        y.dk[key * c.dim + d] += ds * x.at(x.q, row * c.dim + d);
      }
    }
  }
  return y;
}

// Returns the difference of the gradients of q. The first two dimensions are left out if they are
// sums of huge keys.
inline double query_difference(const AttentionProblem& x, std::vector<uint16_t> got,
                               std::vector<double> expected) {
  if (x.c.level != 0.f) {
    for (size_t i = 0; i < got.size(); i += x.c.dim) {
      got[i] = got[i + 1] = 0, expected[i] = expected[i + 1] = 0;
    }
  }
  return difference(x.c.dtype, got, expected);
}

// Returns the difference of bias gradients, without the padding of their rows.
inline double bias_difference(const AttentionProblem& x, const std::vector<uint16_t>& got,
                              const std::vector<double>& expected) {
  std::vector<uint16_t> own;
  std::vector<double> other;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<int>(i % x.bias_row()) >= x.c.keys) continue;
    own.push_back(got[i]), other.push_back(expected[i]);
  }
  return difference(x.c.dtype, own, other);
}

// Returns the largest relative error that gradients may have. With keys of up to 3e38, dQ is a sum
// of products that cancel, because dS sums up to zero over the keys.
inline double gradient_tolerance(const AttentionCase& c) { return c.level != 0.f ? 0.1 : 0.03; }

inline const AttentionCase kAttentionCases[] = {
    {"one query, one key", 1, 1, 1, 1, 1, 64, 64},
    {"dense", 1, 200, 300, 2, 1, 128, 128},
    {"dense, whole tiles", 1, 256, 256, 1, 1, 64, 64},
    {"causal", 1, 300, 300, 2, 2, 128, 128, kCausal},
    {"shared causal, f16, softcap", 2, 200, 200, 2, 1, 96, 96, kShared, false, 0, 1, 128,
     DType::kF16, 2.f},
    {"window, 192 and 128", 1, 200, 200, 2, 1, 192, 128, kWindow},
    {"200 dims, segments, softcap", 1, 150, 100, 1, 1, 200, 136, kRandom, true, 0, 1, 128,
     DType::kF16, 3.f},
    {"256 dims", 2, 150, 200, 3, 1, 256, 256, kCausal},
    {"window over many tiles", 1, 4200, 4200, 1, 1, 64, 64, kWindow},
    {"random ranges, odd dims", 2, 213, 333, 2, 2, 72, 40, kRandom},
    {"segments and ranges", 2, 213, 213, 1, 1, 64, 64, kRandom, true},
    {"one map for all heads", 2, 300, 400, 2, 2, 64, 64, kNoRanges, false, 1, 1},
    {"map of each head, shifted", 1, 200, 300, 4, 2, 64, 64, kCausal, false, 4, 1, 128,
     DType::kBF16, 0.f, 0.f, 70},
    {"map of groups, blocks of 40", 2, 150, 300, 4, 2, 64, 64, kNoRanges, true, 2, 2, 40,
     DType::kF16},
    {"negative scale", 1, 100, 150, 1, 1, 64, 64, kCausal, false, 0, 1, 128, DType::kBF16, 0.f,
     -0.2f},
    {"bias", 1, 200, 300, 2, 1, 128, 128, kNoRanges, false, 0, 1, 128, DType::kBF16, 0.f, 0.f, 0,
     2},
    {"bias, causal", 2, 200, 213, 2, 1, 64, 64, kCausal, false, 0, 1, 128, DType::kBF16, 0.f, 0.f,
     0, 2, 2},
    {"bias of groups, map, f16", 2, 150, 300, 4, 2, 72, 128, kNoRanges, false, 2, 2, 40,
     DType::kF16, 0.f, 0.f, 0, 2, 2},
    {"bias of a batch, softcap", 2, 200, 150, 2, 1, 128, 64, kRandom, true, 0, 1, 128, DType::kBF16,
     2.f, 0.f, 0, 2, 1},
    {.name = "one row of biases a group",
     .batch = 2,
     .queries = 213,
     .keys = 333,
     .heads = 4,
     .groups = 2,
     .dim = 128,
     .value_dim = 128,
     .ranges = kRandom,
     .bias_heads = 2,
     .bias_batch = 2,
     .bias_rows = false},
    {.name = "one row of biases, 256 dims",
     .batch = 1,
     .queries = 150,
     .keys = 200,
     .heads = 2,
     .groups = 1,
     .dim = 192,
     .value_dim = 128,
     .ranges = kCausal,
     .bias_heads = 1,
     .bias_rows = false},
    {"bias, 256 dims", 1, 150, 100, 2, 1, 256, 256, kWindow, false, 0, 1, 128, DType::kF16, 3.f,
     -0.1f, 0, 2},
    {"bias of all heads, 256 dims", 1, 150, 100, 2, 1, 256, 256, kCausal, false, 0, 1, 128,
     DType::kBF16, 0.f, 0.f, 0, 1},
    {.name = "bias that masks by -1e9",
     .batch = 1,
     .queries = 200,
     .keys = 150,
     .heads = 2,
     .groups = 1,
     .dim = 64,
     .value_dim = 64,
     .bias_heads = 2,
     .masking_bias = -1e9f},
    {.name = "bias that masks by -1e10",
     .batch = 2,
     .queries = 150,
     .keys = 200,
     .heads = 2,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .ranges = kCausal,
     .bias_heads = 1,
     .masking_bias = -1e10f},
    {.name = "bias that masks by the lowest float",
     .batch = 1,
     .queries = 150,
     .keys = 200,
     .heads = 1,
     .groups = 1,
     .dim = 256,
     .value_dim = 256,
     .bias_heads = 1,
     .masking_bias = -3.38e38f},
    {.name = "keys of -1e9",
     .batch = 1,
     .queries = 300,
     .keys = 300,
     .heads = 2,
     .groups = 1,
     .dim = 64,
     .value_dim = 64,
     .ranges = kWindow,
     .scale = 0.3f,
     .level = -1e9f},
    {.name = "keys of 1e9",
     .batch = 1,
     .queries = 200,
     .keys = 200,
     .heads = 1,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .ranges = kWindow,
     .scale = 0.5f,
     .level = 1e9f},
    {.name = "keys of the lowest float, 192 and 128",
     .batch = 1,
     .queries = 200,
     .keys = 200,
     .heads = 1,
     .groups = 1,
     .dim = 192,
     .value_dim = 128,
     .ranges = kWindow,
     .scale = 0.5f,
     .level = -3.38e38f},
    {.name = "keys of -3e38, 256 dims",
     .batch = 1,
     .queries = 150,
     .keys = 150,
     .heads = 1,
     .groups = 1,
     .dim = 256,
     .value_dim = 256,
     .ranges = kWindow,
     .scale = 0.3f,
     .level = -3e38f},
    {.name = "keys of -1e12, softcap of 2e9",
     .batch = 1,
     .queries = 150,
     .keys = 150,
     .heads = 1,
     .groups = 1,
     .dim = 64,
     .value_dim = 64,
     .ranges = kWindow,
     .softcap = 2e9f,
     .scale = 1.f,
     .level = -1e12f},
    {.name = "saturated softcap",
     .batch = 1,
     .queries = 100,
     .keys = 100,
     .heads = 1,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .ranges = kWindow,
     .softcap = 2.f,
     .scale = 20000.f},
    {.name = "saturated softcap, 192 and 128",
     .batch = 1,
     .queries = 100,
     .keys = 100,
     .heads = 1,
     .groups = 1,
     .dim = 192,
     .value_dim = 128,
     .ranges = kWindow,
     .softcap = 2.f,
     .scale = 20000.f},
    {.name = "saturated softcap, bias, 256 dims",
     .batch = 1,
     .queries = 100,
     .keys = 100,
     .heads = 1,
     .groups = 1,
     .dim = 256,
     .value_dim = 256,
     .ranges = kWindow,
     .softcap = 2.f,
     .scale = 20000.f,
     .bias_heads = 1},
    {.name = "sinks",
     .batch = 2,
     .queries = 150,
     .keys = 150,
     .heads = 4,
     .groups = 2,
     .dim = 64,
     .value_dim = 64,
     .ranges = kRandom,
     .sinks = true},
    {.name = "sinks, bias that masks by -1e9",
     .batch = 1,
     .queries = 130,
     .keys = 130,
     .heads = 4,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .bias_heads = 1,
     .masking_bias = -1e9f,
     .sinks = true},
    {"one query and key, bias", 1, 1, 1, 1, 1, 64, 64, kNoRanges, false, 0, 1, 128, DType::kBF16,
     0.f, 0.f, 0, 1},
    {"no keys", 1, 130, 0, 2, 1, 128, 128},
    {"no queries", 1, 0, 130, 2, 1, 128, 128},
    {"no queries, bias", 1, 0, 130, 2, 1, 128, 128, kNoRanges, false, 0, 1, 128, DType::kBF16, 0.f,
     0.f, 0, 2},
    {.name = "no queries, a row of biases",
     .batch = 1,
     .queries = 0,
     .keys = 130,
     .heads = 2,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .bias_heads = 2,
     .bias_rows = false},
};

// Every query sees every key, so that all outputs have a NaN, whatever their sinks are, and lse and
// the largest score too for the last KV head. For the forward pass only.
inline const AttentionCase kNanBesideSinks = {.name = "a NaN beside sinks",
                                              .batch = 1,
                                              .queries = 70,
                                              .keys = 150,
                                              .heads = 4,
                                              .groups = 2,
                                              .dim = 64,
                                              .value_dim = 64,
                                              .sinks = true,
                                              .nan = true};

}  // namespace jax_dsa
