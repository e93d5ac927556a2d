// Problems of the indexer's warm-up loss, and what must come of them in float64; also used by
// benchmarks/micro.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "losses/losses.h"

namespace dense_loss_problem {

using bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  int batch, queries, keys;
  int heads, groups, dim;     // of the attention
  int index_heads, channels;  // of the indexer
  bool causal = true;         // else random ranges, some of them empty or beyond the keys
  bool relu = true, scaled = false;
  float scale = 0.f;  // 0: D^-1/2
};

inline const Case kCases[] = {
    {"128 heads", 1, 5, 150, 128, 1, 576, 64, 128},
    {"96 heads, ranges", 2, 4, 200, 96, 1, 576, 64, 128, false, true, true},
    {"two queries an item", 2, 7, 130, 40, 1, 512, 32, 64, false},
    {"four queries an item", 1, 11, 90, 20, 1, 512, 17, 32, true, false, true},
    {"eight queries an item", 1, 19, 140, 9, 1, 576, 1, 128, false, false},
    {"192 heads", 1, 3, 100, 192, 1, 512, 64, 128, false},
    {"two groups", 1, 6, 140, 40, 2, 512, 48, 64, true, true, true, -0.03f},
    {"three groups of 16", 1, 9, 70, 48, 3, 576, 8, 32, false},
    {"many queries", 1, 150, 150, 16, 1, 512, 64, 128},
    {"many keys", 1, 3, 700, 128, 1, 512, 16, 64, false},
    {"one key", 2, 1, 1, 128, 1, 576, 64, 128},
    {"no keys", 1, 3, 0, 128, 1, 576, 64, 128},
    {"no queries", 1, 0, 70, 128, 1, 576, 64, 128},
};

struct Problem {
  Case c;
  std::vector<bf16> q, kv, index_q, index_k;
  std::vector<float> weights, k_scale;  // k_scale is empty unless the case is scaled
  std::vector<int32_t> starts, ends;
  float scale;

  int64_t tokens() const { return int64_t{c.batch} * c.queries; }
  int low(int64_t token) const { return std::max(starts[token], 0); }
  int high(int64_t token) const { return std::min(ends[token], c.keys); }
};

inline float value(bf16 x) { return __bfloat162float(x); }

inline double dot(const bf16* a, const bf16* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double(value(a[i])) * value(b[i]);
  return sum;
}

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  p.scale = c.scale != 0.f ? c.scale : 1 / std::sqrt(float(c.dim));
  const int64_t tokens = p.tokens(), rows = int64_t{c.batch} * c.keys;
  const auto fill = [&](std::vector<bf16>& x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x.push_back(__float2bfloat16(normal(random)));
  };
  fill(p.q, tokens * c.heads * c.dim);
  fill(p.kv, rows * c.groups * c.dim);
  fill(p.index_q, tokens * c.index_heads * c.channels);
  fill(p.index_k, rows * c.channels);
  for (int64_t i = 0; i < tokens * c.index_heads; ++i) {
    p.weights.push_back(0.1f * normal(random));
  }
  for (int64_t i = 0; c.scaled && i < rows; ++i) p.k_scale.push_back(std::exp(normal(random) / 2));
  for (int64_t t = 0; t < tokens; ++t) {
    if (c.causal) {
      p.starts.push_back(0);
      p.ends.push_back(static_cast<int>(t % c.queries) + std::max(c.keys - c.queries, 0) + 1);
    } else {
      const int keys = c.keys;
      p.starts.push_back(t % 5 == 4 ? INT_MIN : static_cast<int>(random() % (keys + 9)) - 5);
      p.ends.push_back(t % 5 == 4 ? INT_MAX
                       : t % 5 == 3
                           ? p.starts.back() - 2
                           : p.starts.back() + 1 + static_cast<int>(random() % (keys + 1)));
    }
  }
  // NaN in every key that no query sees, in every scale of one.
  std::vector<bool> seen(rows);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int s = p.low(t); s < p.high(t); ++s) seen[t / c.queries * c.keys + s] = true;
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (seen[r]) continue;
    for (int i = 0; i < c.groups * c.dim; ++i) p.kv[r * c.groups * c.dim + i] = bf16(NAN);
    for (int i = 0; i < c.channels; ++i) p.index_k[r * c.channels + i] = bf16(NAN);
    if (c.scaled) p.k_scale[r] = NAN;
  }
  return p;
}

// [batch, queries, keys], 0 where nothing is seen.
inline std::vector<double> teacher(const Problem& p) {
  const Case& c = p.c;
  std::vector<double> out(p.tokens() * c.keys), s(c.keys);
  for (int64_t t = 0; t < p.tokens(); ++t) {
    for (int n = 0; n < c.heads; ++n) {
      double largest = -INFINITY, sum = 0;
      for (int k = p.low(t); k < p.high(t); ++k) {
        const int64_t key = t / c.queries * c.keys + k;
        s[k] = p.scale * dot(&p.q[(t * c.heads + n) * c.dim],
                             &p.kv[(key * c.groups + n / (c.heads / c.groups)) * c.dim], c.dim);
        largest = std::max(largest, s[k]);
      }
      for (int k = p.low(t); k < p.high(t); ++k) sum += std::exp(s[k] - largest);
      for (int k = p.low(t); k < p.high(t); ++k) {
        out[t * c.keys + k] += std::exp(s[k] - largest) / sum;
      }
    }
  }
  return out;
}

struct Gradients {
  std::vector<double> q, k, weights, k_scale;
};

// Of sum_ts grad[t, s] * I[t, s] over the keys seen.
inline Gradients index_gradients(const Problem& p, const std::vector<double>& grad) {
  const Case& c = p.c;
  Gradients g;
  g.q.resize(p.index_q.size()), g.k.resize(p.index_k.size());
  g.weights.resize(p.weights.size()), g.k_scale.resize(p.k_scale.size());
  for (int64_t t = 0; t < p.tokens(); ++t) {
    for (int s = p.low(t); s < p.high(t); ++s) {
      const int64_t key = t / c.queries * c.keys + s;
      const double own = grad[t * c.keys + s], scale = c.scaled ? p.k_scale[key] : 1.;
      const bf16* k = &p.index_k[key * c.channels];
      for (int j = 0; j < c.index_heads; ++j) {
        const int64_t head = t * c.index_heads + j;
        const bf16* q = &p.index_q[head * c.channels];
        const double x = dot(q, k, c.channels), w = p.weights[head];
        if (c.relu && !(x > 0)) continue;
        g.weights[head] += own * scale * x;
        if (c.scaled) g.k_scale[key] += own * w * x;
        for (int i = 0; i < c.channels; ++i) {
          g.q[head * c.channels + i] += own * scale * w * value(k[i]);
          g.k[key * c.channels + i] += own * scale * w * value(q[i]);
        }
      }
    }
  }
  return g;
}

// [batch, queries, keys], -inf where nothing is seen.
inline std::vector<double> index_logits(const Problem& p) {
  const Case& c = p.c;
  std::vector<double> out(p.tokens() * c.keys, -INFINITY);
  for (int64_t t = 0; t < p.tokens(); ++t) {
    for (int s = p.low(t); s < p.high(t); ++s) {
      const int64_t key = t / c.queries * c.keys + s;
      double sum = 0;
      for (int j = 0; j < c.index_heads; ++j) {
        const int64_t head = t * c.index_heads + j;
        const double x =
            dot(&p.index_q[head * c.channels], &p.index_k[key * c.channels], c.channels);
        sum += p.weights[head] * (c.relu ? std::max(x, 0.) : x);
      }
      out[t * c.keys + s] = sum * (c.scaled ? p.k_scale[key] : 1.f);
    }
  }
  return out;
}

// The largest difference, relative to the largest value wanted (or 1e-3); infinite for NaN.
inline double difference(const std::vector<float>& got, const std::vector<double>& want) {
  double worst = 0, top = 1e-3;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::fabs(got[i] - want[i]);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    top = std::max(top, std::fabs(want[i]));
  }
  return worst / top;
}

}  // namespace dense_loss_problem
