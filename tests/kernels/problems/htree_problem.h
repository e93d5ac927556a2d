// Random problems of hierarchical tree attention, and what a query has to give in float64. For the
// emulator and for tests/kernels/gpu/htree_check.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "htree/htree.h"

namespace htree_problem {

using bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  int batch, tokens, queries, heads, groups, dim, compression, top_k;
  int end = 0;  // queries are at random tokens below it, and tokens from there on are NaN; 0: all
  bool none = false;  // a third of the queries stand at no token
  float scale = 0.f;  // 0: D^-1/2
  float size = 1.f;   // of the queries
  bool ties = false;  // keys of half of the blocks are 0
  int chunk = 0;      // rows that the workspace is for; 0: all
  int distant = 0;    // keys from this token on have scores of -inf in float32; 0: none
};

inline float rounded(double x) { return __bfloat162float(__float2bfloat16(static_cast<float>(x))); }

struct Problem {
  Case c;
  jax_dsa::HTreeLayers layers;
  std::vector<bf16> q, k, v;
  std::vector<int32_t> positions;
  float scale;
  double rope_base = 10000;
  bool decodes = false;  // keys are rotated to where the query stands, and rounded then
  // Pooled keys and values, rounded, by (batch entry, group): all layers in turn, [nodes, D].
  struct Tree {
    std::vector<std::vector<float>> k, v;
  };
  std::vector<Tree> trees;

  int64_t token(int b, int t) const { return int64_t{b} * c.queries + t; }
  const Tree& tree(int b, int g) const { return trees[b * c.groups + g]; }
  int candidates(int position, int layer) const {
    if (position < 0) return 0;
    int64_t n = 0, span = 1;
    for (int l = 1; l < layers.count; ++l) span *= c.compression;
    for (int l = layers.count - 1; l >= layer; --l, span /= c.compression) {
      const int parents = static_cast<int>(std::min<int64_t>(n, c.top_k));
      n = l + 1 == layers.count
              ? position / span + 1
              : c.compression * (parents - 1) + position / span % c.compression + 1;
    }
    return static_cast<int>(n);
  }
};

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c, jax_dsa::htree_layers(c.tokens, c.compression, c.top_k)};
  p.scale = c.scale ? c.scale : 1 / std::sqrt(float(c.dim));
  const int64_t row = int64_t{c.groups} * c.dim;
  p.q.resize(int64_t{c.batch} * c.queries * c.heads * c.dim);
  p.k.resize(int64_t{c.batch} * c.tokens * row);
  p.v.resize(p.k.size());
  for (auto& x : p.q) x = __float2bfloat16(c.size * normal(random));
  const int slow = c.dim / 2 - 1;  // a dimension that hardly rotates
  for (size_t i = slow; i < p.q.size() && c.distant; i += c.dim) p.q[i] = __float2bfloat16(128.f);
  for (auto* x : {&p.k, &p.v}) {
    for (auto& y : *x) y = __float2bfloat16(normal(random));
  }
  const int end = c.end ? c.end : c.tokens;
  bool zero = false;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < c.tokens; ++t) {
      const int64_t at = (b * c.tokens + t) * row;
      if (t % c.compression == 0) zero = c.ties && random() % 2;
      for (int64_t i = 0; i < row && zero; ++i) p.k[at + i] = __float2bfloat16(0.f);
      for (int g = 0; g < c.groups && c.distant; ++g) {
        p.k[at + g * c.dim + slow] = __float2bfloat16(t < c.distant ? 0.f : -3e37f);
      }
      for (int64_t i = 0; i < row && t >= end; ++i) {
        p.k[at + i] = p.v[at + i] = __float2bfloat16(NAN);
      }
    }
    for (int t = 0; t < c.queries; ++t) {
      int position = c.end || c.queries != c.tokens ? static_cast<int>(random() % end) : t;
      if (t == 0) position = end - 1;
      p.positions.push_back(c.none && random() % 3 == 0 ? -1 : position);
    }
  }
  if (c.none && !p.positions.empty()) p.positions.back() = -1;
  for (int i = 0; i < c.batch * c.groups; ++i) {
    Problem::Tree tree;
    for (int l = 0; l < p.layers.count; ++l) {
      for (auto* to : {&tree.k, &tree.v}) {
        const bool keys = to == &tree.k;
        std::vector<float> layer(p.layers.size[l] * c.dim);
        for (int64_t j = 0; j < p.layers.size[l]; ++j) {
          for (int d = 0; d < c.dim; ++d) {
            float& x = layer[j * c.dim + d];
            if (l == 0) {
              const int64_t at =
                  ((i / c.groups * int64_t{c.tokens} + j) * c.groups + i % c.groups) * c.dim + d;
              x = __bfloat162float(keys ? p.k[at] : p.v[at]);
              continue;
            }
            const int64_t first = j * c.compression;
            const int64_t count = std::min<int64_t>(c.compression, p.layers.size[l - 1] - first);
            float sum = 0;
            for (int64_t s = 0; s < count; ++s) sum += to->back()[(first + s) * c.dim + d];
            x = rounded(sum / static_cast<float>(count));
          }
        }
        to->push_back(std::move(layer));
      }
    }
    p.trees.push_back(std::move(tree));
  }
  return p;
}

// x, rotated; by cos and sin of two bf16 each, if `by_parts`.
inline std::vector<double> rotated(const Problem& p, const float* x, double ordinal, bool round,
                                   bool by_parts = false) {
  const int half = p.c.dim / 2;
  std::vector<double> y(p.c.dim);
  for (int i = 0; i < half; ++i) {
    const double angle = ordinal * std::pow(p.rope_base, -double(i) / half);
    double c = std::cos(angle), s = std::sin(angle);
    if (by_parts) {
      for (double* z : {&c, &s}) *z = rounded(*z) + rounded(*z - rounded(*z));
    }
    y[i] = x[i] * c - x[i + half] * s;
    y[i + half] = x[i + half] * c + x[i] * s;
    if (round) y[i] = rounded(y[i]), y[i + half] = rounded(y[i + half]);
  }
  return y;
}

// Queries of a group's heads, rotated.
inline std::vector<std::vector<double>> queries(const Problem& p, int b, int t, int g,
                                                double ordinal, bool round) {
  const Case& c = p.c;
  const int heads = c.heads / c.groups;
  std::vector<std::vector<double>> q;
  for (int h = g * heads; h < (g + 1) * heads; ++h) {
    std::vector<float> row(c.dim);
    for (int d = 0; d < c.dim; ++d) {
      row[d] = __bfloat162float(p.q[(p.token(b, t) * c.heads + h) * c.dim + d]);
    }
    q.push_back(rotated(p, row.data(), ordinal, round, round && !p.decodes));
  }
  return q;
}
inline std::vector<double> scores(const Problem& p, const std::vector<std::vector<double>>& q,
                                  const std::vector<double>& key) {
  std::vector<double> s;
  for (const auto& row : q) {
    double sum = 0;
    for (int d = 0; d < p.c.dim; ++d) sum += row[d] * key[d];
    s.push_back(sum * p.scale);
  }
  return s;
}

// Whether layer 1's selection is just what these importances call for, ties and all.
inline bool selects_exactly(const Problem& p, int b, int t, const float* importance,
                            const int16_t* selected) {
  const int n = p.candidates(p.positions[p.token(b, t)], 1);
  std::vector<int> order(std::max(n - 1, 0));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int i, int j) { return importance[i] > importance[j]; });
  order.resize(std::min<size_t>(order.size(), p.c.top_k - 1));
  if (n > 0) order.push_back(n - 1);
  std::sort(order.begin(), order.end());
  order.resize(p.c.top_k, -1);
  return std::equal(order.begin(), order.end(), selected);
}

// All nodes of the tree as a cache has them: keys, or values, [B, nodes, G, D]; NaN where there are
// none.
inline std::vector<bf16> cache(const Problem& p, bool keys) {
  const Case& c = p.c;
  const int64_t nodes = jax_dsa::htree_cache_nodes(c.tokens, c.compression, c.top_k);
  std::vector<bf16> all(c.batch * nodes * c.groups * c.dim, __float2bfloat16(NAN));
  for (int bg = 0; bg < c.batch * c.groups; ++bg) {
    int64_t first = 0;
    for (int l = 0; l < p.layers.count; ++l) {
      const auto& from = keys ? p.trees[bg].k[l] : p.trees[bg].v[l];
      for (int64_t i = 0; i < p.layers.size[l] * c.dim; ++i) {
        const int64_t row = (bg / c.groups * nodes + first + i / c.dim) * c.groups + bg % c.groups;
        all[row * c.dim + i % c.dim] = __float2bfloat16(from[i]);
      }
      first += (p.layers.size[l] + c.compression - 1) / c.compression * c.compression;
    }
  }
  return all;
}

struct Findings {
  double exact = 0, close = 0;  // outputs' errors against float64; with the kernel's roundings
  double lse = 0;
  double gap = 0;  // by which a candidate that was left exceeds one that was selected
  double importance = 0;
  bool partition = true, complete = true;

  // `size` is that of the queries: scores' roundings grow with it. On a GPU that of a rotated query
  // may fall the other way, since tensor cores add up otherwise than floats do.
  bool good(double size, bool tensor_cores = false) const {
    return partition && complete && gap < 2e-3 && close < 0.012 &&
           exact < 0.08 * std::max(1., size / 6) &&
           lse < 2e-3 * (tensor_cores ? std::max(1., size) : 1.) && importance < 2e-3;
  }
  void operator+=(const Findings& x) {
    for (auto part : {&Findings::exact, &Findings::close, &Findings::lse, &Findings::gap,
                      &Findings::importance}) {
      this->*part = std::max(this->*part, x.*part);
    }
    partition &= x.partition, complete &= x.complete;
  }
};
inline double error(double got, double want) {
  if (got == want) return 0;
  const double x = std::fabs(got - want);
  return std::isnan(x) ? INFINITY : x;
}

// One query and group. `selected` is [layers - 1, K]; the outputs of its heads lie one behind the
// other. Selections are taken as they are, if they are ones that may be made.
inline Findings check(const Problem& p, int b, int t, int g, const int16_t* selected,
                      const bf16* out, const float* lse, const float* importance) {
  const Case& c = p.c;
  const int heads = c.heads / c.groups, position = p.positions[p.token(b, t)];
  Findings found;
  std::vector<std::vector<double>> score[2];  // [counted][head]
  std::vector<const float*> values;
  std::vector<int64_t> parents;
  int64_t span = 1, covered = 0;
  for (int l = 1; l < p.layers.count; ++l) span *= c.compression;
  for (int l = p.layers.count - 1; l >= 0; --l, span /= c.compression) {
    const int n = p.candidates(position, l);
    std::vector<int64_t> nodes(n);
    for (int i = 0; i < n; ++i) {
      nodes[i] = l + 1 == p.layers.count
                     ? i
                     : parents[i / c.compression] * c.compression + i % c.compression;
    }
    std::vector<bool> is_selected(n);
    parents.clear();
    if (l > 0) {
      const int16_t* row = selected + (l - 1) * c.top_k;
      const int count = std::min(n, c.top_k);
      for (int i = 0; i < c.top_k; ++i) {
        const bool good =
            i < count ? row[i] < n && row[i] >= 0 && (i == 0 || row[i] > row[i - 1]) : row[i] == -1;
        found.complete &= good;
        if (!good) return found;
        if (i < count) is_selected[row[i]] = true, parents.push_back(nodes[row[i]]);
      }
      if (n > 0) found.complete &= bool(is_selected[n - 1]);
    }
    double least = INFINITY, most = -INFINITY;  // importance of those selected; of the others
    const auto exact_queries = queries(p, b, t, g, n - 1, false);
    std::vector<std::vector<double>> close_queries;  // of a block
    for (int i = 0; i < n; ++i) {
      const bool early = position / span < c.compression * c.top_k;
      if (i % c.compression == 0) {
        close_queries = queries(p, b, t, g, p.decodes ? 0 : n - 1 - (early ? 0 : i), true);
      }
      if (l > 0 && i == n - 1) continue;
      const float* key = &p.tree(b, g).k[l][nodes[i] * c.dim];
      const auto exact = scores(p, exact_queries, rotated(p, key, i, false));
      const int places = p.decodes ? i - (n - 1) : early ? i : i % c.compression;
      const auto close = scores(p, close_queries, rotated(p, key, places, true));
      if (l > 0) {
        const double peak = *std::max_element(close.begin(), close.end());
        double sum = 0;
        for (double x : close) sum += std::exp(x - peak);
        const double want = std::max(peak + std::log(sum), -double{FLT_MAX} * std::log(2.));
        (is_selected[i] ? least : most) =
            is_selected[i] ? std::min(least, want) : std::max(most, want);
        if (l == 1 && importance) {
          found.importance = std::max(found.importance, error(importance[i] * std::log(2.), want));
        }
      }
      if (is_selected[i]) continue;
      score[0].push_back(exact), score[1].push_back(close);
      values.push_back(&p.tree(b, g).v[l][nodes[i] * c.dim]);
      covered += l == 0 ? 1 : span;
    }
    found.gap = std::max(found.gap, most - least);
  }
  found.partition = covered == position + 1;

  for (int h = 0; h < heads; ++h) {
    for (int kind = 0; kind < 2; ++kind) {
      double peak = -INFINITY, total = 0;
      for (const auto& s : score[kind]) peak = std::max(peak, s[h]);
      std::vector<double> want(c.dim);
      for (size_t i = 0; i < values.size(); ++i) {
        const double x = std::exp(score[kind][i][h] - peak);
        total += x;
        for (int d = 0; d < c.dim; ++d) want[d] += x * values[i][d];
      }
      double& worst = kind == 0 ? found.exact : found.close;
      for (int d = 0; d < c.dim; ++d) {
        const double x = values.empty() ? 0 : want[d] / total;
        const double off = error(__bfloat162float(out[h * c.dim + d]), x);
        worst = std::max(worst, off / std::max(1., std::fabs(x)));
      }
      if (kind == 1) {
        const double x = values.empty() ? -INFINITY : peak + std::log(total);
        found.lse = std::max(found.lse, error(lse[h], x));
      }
    }
  }
  return found;
}

// Cotangents of outputs and lse; some heads have none, nor has any head of query 1, whose queries
// are NaN, and which sees all NaN that there is.
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
      y.dout.push_back(__float2bfloat16(none ? 0.f : normal(random)));
      if (poisoned) p.q[i * p.c.dim + d] = __float2bfloat16(NAN);
    }
    y.dlse.push_back(none ? 0.f : normal(random));
  }
  return y;
}

// In float64, of all queries; of nodes by (batch entry, group) and layer, before they are spread.
struct Gradients {
  std::vector<double> dq, dk, dv;
  std::vector<std::vector<std::vector<double>>> keys, values;
};
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
  struct Counted {
    int layer, ordinal, n;
    int64_t node;
    std::vector<double> key;
  };
  std::vector<Counted> all;
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
    for (const Counted& z : all) {
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
      const Counted& z = all[i];
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
// All gradients; `selected` is [B, T, G, layers - 1, K].
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
// The error's share of the whole; and of the largest, the largest.
struct GradientError {
  double norm, most;
  // Scores' roundings grow with the queries.
  bool good(double size) const { return norm < 0.004 + 0.003 * size && most < 0.01 * (1 + size); }
};
inline GradientError gradient_error(const bf16* got, const std::vector<double>& want) {
  double sum = 0, all = 0, most = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double off = error(__bfloat162float(got[i]), want[i]);
    sum += off * off, all += want[i] * want[i];
    most = std::max(most, off), largest = std::max(largest, std::fabs(want[i]));
  }
  if (most == 0) return {0, 0};
  return {std::sqrt(sum / all), most / largest};
}

// Gradients of a softmax that is all but one-hot are differences of roundings.
inline bool has_gradients(const Case& c) {
  return c.heads / c.groups <= jax_dsa::kHTreeMaxBwdGroupHeads && c.size < 10;
}
inline const Case kBwdCases[] = {
    {"lists in segments", 1, 360, 360, 3, 1, 64, 8, 4},
    {"segments of parts", 1, 140, 140, 34, 1, 64, 32, 2},
};
// Few queries, over a cache.
inline const Case kDecodeCases[] = {
    {"tokens alone", 1, 40, 2, 4, 1, 64, 8, 16},
    {"one token", 2, 1, 1, 2, 1, 64, 16, 4},
    {"two layers", 2, 200, 2, 16, 1, 128, 16, 4, 190},
    {"three layers", 1, 1100, 3, 6, 2, 64, 8, 8, 1090, true},
    {"room for more", 1, 4000, 2, 16, 1, 64, 8, 8, 300},
    {"many selected", 1, 3000, 1, 4, 1, 64, 16, 100, 2990},
    {"many candidates", 1, 25000, 1, 2, 1, 64, 16, 100, 24990},
    {"five layers, K 1", 1, 4200, 4, 3, 1, 64, 8, 1, 4190},
    {"blocks of 32, 40 heads", 1, 2400, 1, 40, 1, 128, 32, 8, 2390},
    {"128 heads", 1, 300, 1, 128, 1, 64, 8, 8, 290},
    {"ties, sharp", 1, 700, 3, 4, 1, 64, 8, 12, 690, false, 0.f, 6, true},
    {"all equal", 1, 18000, 2, 2, 1, 64, 16, 80, 18000, false, 0.f, 0},
    {"few within reach", 1, 1100, 2, 5, 1, 64, 8, 4, 1090, false, 0.f, 1, false, 0, 64},
    {"no queries", 1, 30, 0, 4, 1, 64, 8, 4},
};

inline const Case kSmallCases[] = {
    {"tokens alone", 1, 40, 40, 16, 1, 128, 16, 4},
    {"one token", 1, 1, 1, 16, 1, 128, 16, 4},
    {"two layers", 1, 100, 14, 16, 1, 128, 16, 3, 91},
    {"three layers", 1, 1100, 13, 16, 1, 128, 16, 4, 1090},
    {"early in three layers", 1, 1100, 9, 16, 1, 128, 16, 4, 60},
    {"not as early", 1, 1100, 13, 16, 1, 128, 16, 4, 1000},
    {"all queries, groups", 2, 70, 70, 6, 2, 64, 8, 4},
    {"four layers, K 2", 1, 1300, 9, 5, 1, 64, 8, 2, 1243},
    {"five layers, K 1", 1, 4200, 5, 16, 1, 64, 8, 1, 4181},
    {"blocks of 32", 1, 2400, 7, 3, 1, 128, 32, 2, 2400},
    {"blocks of 8, 20 heads", 2, 300, 7, 40, 2, 128, 8, 4, 290, true},
    {"40 heads in chunks", 1, 500, 11, 80, 2, 64, 16, 4, 480, true, -0.2f, 1, false, 6},
    {"192 heads", 1, 200, 3, 192, 1, 64, 16, 3, 200},
    {"ties, sharp", 1, 700, 13, 16, 1, 128, 16, 5, 650, false, 0.f, 6, true},
    {"very sharp", 1, 700, 7, 16, 1, 128, 16, 5, 650, false, 0.f, 30},
    {"few within reach", 1, 1100, 7, 5, 1, 64, 8, 4, 1090, false, 0.f, 1, false, 0, 64},
    {"no queries", 1, 30, 0, 16, 1, 128, 16, 4},
};

}  // namespace htree_problem
