// Gradients of hierarchical tree attention in float64, and their errors.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "problems/htree_problem.h"

namespace htree_problem {

// Cotangents of outputs and lse. Some heads have none. Nor has any head of query 1, whose
// queries are NaN and which sees all NaN that there are.
struct Cotangents {
  std::vector<bf16> dout;
  std::vector<float> dlse;
};
inline Cotangents cotangents(Problem& p, uint64_t seed) {
  std::mt19937_64 random(seed + 1);
  std::normal_distribution<float> normal;
  Cotangents y;
  const int64_t heads = p.q.size() / p.c.dim;
  if (p.c.queries > 2) p.positions[1] = p.c.tokens - 1;
  for (int64_t i = 0; i < heads; ++i) {
    const bool poisoned = p.c.queries > 2 && i / p.c.heads == 1;
    const bool none = poisoned || random() % 8 == 0;
    for (int d = 0; d < p.c.dim; ++d) {
      y.dout.push_back(__float2bfloat16(none ? 0.f : p.c.cotangents * normal(random)));
      if (poisoned) p.q[i * p.c.dim + d] = __float2bfloat16(NAN);
    }
    y.dlse.push_back(none ? 0.f : p.c.cotangents * normal(random));
  }
  return y;
}

// Gradients in float64: of all queries and tokens; and those of the nodes by (batch entry, KV
// head group) and layer, before they are distributed to the tokens.
struct Gradients {
  std::vector<double> dq, dk, dv;
  std::vector<std::vector<std::vector<double>>> keys, values;
};
// Adds the gradients of one query and KV head group.
inline void add_gradients(const Problem& p, const Cotangents& x, int b, int t, int g,
                          const int16_t* selected, Gradients& y) {
  const Case& c = p.c;
  const int heads = c.heads / c.groups, position = p.positions[p.token(b, t)];
  const int64_t first = p.token(b, t) * c.heads + g * heads;
  bool live = false;
  for (int64_t i = first * c.dim; i < (first + heads) * c.dim; ++i) {
    live |= __bfloat162float(x.dout[i]) != 0;
  }
  if (position < 0 || !live) return;
  struct Candidate {  // that is not selected
    int layer, ordinal, n;
    int64_t node;
    std::vector<double> key;
  };
  std::vector<Candidate> all;
  std::vector<int64_t> parents;
  for (int l = p.layers.count - 1; l >= 0; --l) {
    const int n = p.candidates(position, l);
    const int16_t* row = selected + (l - 1) * c.top_k;
    std::vector<int64_t> below;
    int next = 0;
    for (int i = 0; i < n; ++i) {
      const int64_t node = l + 1 == p.layers.count
                               ? i
                               : parents[i / c.compression] * c.compression + i % c.compression;
      if (l > 0 && next < c.top_k && row[next] == i) {
        below.push_back(node), ++next;
        continue;
      }
      const float* key = &p.tree(b, g).k[l][node * c.dim];
      all.push_back({l, i, n, node, rotated(p, key, i, false)});
    }
    parents = below;
  }
  std::vector<std::vector<std::vector<double>>> q(p.layers.count);
  for (int l = 0; l < p.layers.count; ++l) {
    q[l] = queries(p, b, t, g, p.candidates(position, l) - 1, false);
  }
  auto& keys = y.keys[b * c.groups + g];
  auto& values = y.values[b * c.groups + g];
  for (int h = 0; h < heads; ++h) {
    const bf16* dout = &x.dout[(first + h) * c.dim];
    std::vector<double> s, dp;
    double peak = -INFINITY, total = 0, mean = 0;
    for (const Candidate& z : all) {
      const float* value = &p.tree(b, g).v[z.layer][z.node * c.dim];
      double score = 0, own = 0;
      for (int d = 0; d < c.dim; ++d) {
        score += q[z.layer][h][d] * z.key[d];
        own += double(__bfloat162float(dout[d])) * value[d];
      }
      s.push_back(score * p.scale), dp.push_back(own);
      peak = std::max(peak, s.back());
    }
    for (double& z : s) total += z = std::exp(z - peak);
    for (size_t i = 0; i < s.size(); ++i) mean += (s[i] /= total) * dp[i];
    std::vector<std::vector<double>> rotated_dq(p.layers.count, std::vector<double>(c.dim));
    for (size_t i = 0; i < all.size(); ++i) {
      const Candidate& z = all[i];
      const double ds = s[i] * (dp[i] - mean + x.dlse[first + h]) * p.scale;
      std::vector<float> dk(c.dim);
      for (int d = 0; d < c.dim; ++d) {
        rotated_dq[z.layer][d] += ds * z.key[d];
        dk[d] = ds * q[z.layer][h][d];
        values[z.layer][z.node * c.dim + d] += s[i] * __bfloat162float(dout[d]);
      }
      const auto back = rotated(p, dk.data(), -z.ordinal, false);
      for (int d = 0; d < c.dim; ++d) keys[z.layer][z.node * c.dim + d] += back[d];
    }
    for (int l = 0; l < p.layers.count; ++l) {
      const std::vector<float> dq(rotated_dq[l].begin(), rotated_dq[l].end());
      const auto back = rotated(p, dq.data(), 1 - p.candidates(position, l), false);
      for (int d = 0; d < c.dim; ++d) y.dq[(first + h) * c.dim + d] += back[d];
    }
  }
}
// Returns all gradients; `selected` is [B, T, G, layers - 1, K].
inline Gradients gradients(const Problem& p, const Cotangents& x, const int16_t* selected) {
  const Case& c = p.c;
  Gradients y;
  y.dq.resize(p.q.size()), y.dk.resize(p.k.size()), y.dv.resize(p.v.size());
  for (int i = 0; i < c.batch * c.groups; ++i) {
    std::vector<std::vector<double>> layers;
    for (int l = 0; l < p.layers.count; ++l) {
      layers.push_back(std::vector<double>(p.layers.size[l] * c.dim));
    }
    y.keys.push_back(layers), y.values.push_back(layers);
  }
  for (int b = 0; b < c.batch; ++b) {
    for (int t = 0; t < c.queries; ++t) {
      for (int g = 0; g < c.groups; ++g) {
        const int64_t row = p.token(b, t) * c.groups + g;
        add_gradients(p, x, b, t, g, selected + row * (p.layers.count - 1) * c.top_k, y);
      }
    }
  }
  for (int i = 0; i < c.batch * c.groups; ++i) {
    for (auto* nodes : {&y.keys[i], &y.values[i]}) {
      for (int l = p.layers.count - 2; l >= 0; --l) {
        for (int64_t j = 0; j < p.layers.size[l]; ++j) {
          const int64_t parent = j / c.compression;
          const int64_t count =
              std::min<int64_t>(c.compression, p.layers.size[l] - parent * c.compression);
          for (int d = 0; d < c.dim; ++d) {
            (*nodes)[l][j * c.dim + d] += (*nodes)[l + 1][parent * c.dim + d] / count;
          }
        }
      }
      auto& to = nodes == &y.keys[i] ? y.dk : y.dv;
      for (int64_t j = 0; j < c.tokens; ++j) {
        for (int d = 0; d < c.dim; ++d) {
          to[((i / c.groups * int64_t{c.tokens} + j) * c.groups + i % c.groups) * c.dim + d] =
              (*nodes)[0][j * c.dim + d];
        }
      }
    }
  }
  return y;
}
// The error's norm relative to that of the gradients, and the largest error relative to the
// largest gradient.
struct GradientError {
  double norm, most;
  // Rounding errors of scores grow with the scale of the queries.
  bool good(double size) const { return norm < 0.004 + 0.003 * size && most < 0.01 * (1 + size); }
};
inline GradientError gradient_error(const bf16* got, const std::vector<double>& expected) {
  double sum = 0, all = 0, most = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double off = error(__bfloat162float(got[i]), expected[i]);
    sum += off * off, all += expected[i] * expected[i];
    most = std::max(most, off), largest = std::max(largest, std::fabs(expected[i]));
  }
  if (most == 0) return {0, 0};
  return {std::sqrt(sum / all), most / largest};
}

// Returns whether the case has gradients to check. Those of a softmax that is all but one-hot
// are differences of rounding errors.
inline bool has_gradients(const Case& c) {
  return c.heads / c.groups <= jax_dsa::kHTreeMaxBwdGroupHeads && c.size < 10;
}
inline const Case kBwdCases[] = {
    {"lists in segments", 1, 360, 360, 3, 1, 64, 8, 4},
    {"segments of head tiles", 1, 140, 140, 34, 1, 64, 32, 2},
    // Without the scale, sums for dK would overflow.
    {"large cotangents", 1, 140, 140, 34, 1, 64, 32, 2, 0, false, 0.f, 1.f, false, 0, 0, 8e36f},
};

}  // namespace htree_problem
