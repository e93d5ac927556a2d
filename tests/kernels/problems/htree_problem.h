// Random problems of hierarchical tree attention, for the emulator (tests/kernels/emulator) and
// the GPU (tests/kernels/gpu). Trees, rotations and scores are computed in float64.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
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
  int end = 0;  // queries are at random tokens below it, later tokens are NaN; 0: none are NaN
  bool none = false;       // a third of the queries have no token
  float scale = 0.f;       // 0: D^-1/2
  float size = 1.f;        // scale of the queries' elements
  bool ties = false;       // the keys of half of the blocks are 0
  int chunk = 0;           // rows that the workspace is made for; 0: all
  int distant = 0;         // scores from this token on are -inf in float32; 0: none
  float cotangents = 1.f;  // scale of the cotangents
  float huge = 0.f;  // the scores of all tokens, in every second batch entry of every third token
};

inline float rounded(double x) { return __bfloat162float(__float2bfloat16(static_cast<float>(x))); }

// Returns the absolute error; infinite if just one is NaN.
inline double error(double got, double expected) {
  if (got == expected) return 0;
  const double x = std::fabs(got - expected);
  return std::isnan(x) ? INFINITY : x;
}

struct Problem {
  Case c;
  jax_dsa::HTreeLayers layers;
  std::vector<bf16> q, k, v;
  std::vector<int32_t> positions;
  float scale;
  double rope_base = 10000;
  bool decodes = false;  // keys are rotated to the query's position before they are rounded
  // Pooled keys and values, rounded to bfloat16, by (batch entry, KV head group): for each
  // layer [nodes, D].
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
  if (c.huge != 0.f) p.rope_base = 1e30;  // so that it does not rotate at all
  for (size_t i = 0; c.huge != 0.f && i < p.q.size(); ++i) {
    p.q[i] = __float2bfloat16(i % c.dim == size_t(slow) ? 1.f : 0.f);
  }
  for (int64_t i = 0; c.huge != 0.f && i < int64_t(p.k.size()); i += c.dim) {
    const int64_t token = i / row;
    if (token / c.tokens % 2 == 0 || token % 3 == 0) p.k[i + slow] = __float2bfloat16(c.huge);
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

// Returns x rotated by `ordinal` positions, rounded to bfloat16 if `round`. If `split_tables`,
// cos and sin are split into two bfloat16 each, as in rotate.cuh.
inline std::vector<double> rotated(const Problem& p, const float* x, double ordinal, bool round,
                                   bool split_tables = false) {
  const int half = p.c.dim / 2;
  std::vector<double> y(p.c.dim);
  for (int i = 0; i < half; ++i) {
    const double angle = ordinal * std::pow(p.rope_base, -double(i) / half);
    double c = std::cos(angle), s = std::sin(angle);
    if (split_tables) {
      for (double* z : {&c, &s}) *z = rounded(*z) + rounded(*z - rounded(*z));
    }
    y[i] = x[i] * c - x[i + half] * s;
    y[i + half] = x[i + half] * c + x[i] * s;
    if (round) y[i] = rounded(y[i]), y[i + half] = rounded(y[i + half]);
  }
  return y;
}

// Returns the rotated queries of a KV head group.
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
// Returns the scores of a key for each of the queries.
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

// Returns all keys or all values as an HTreeCache stores them, [B, nodes, G, D], with NaN in the
// padding.
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

// Cases for decode: few queries over a cache.
inline const Case kDecodeCases[] = {
    {"tokens alone", 1, 40, 2, 4, 1, 64, 8, 16},
    {"one token", 2, 1, 1, 2, 1, 64, 16, 4},
    {"two layers", 2, 200, 2, 16, 1, 128, 16, 4, 190},
    {"three layers", 1, 1100, 3, 6, 2, 64, 8, 8, 1090, true},
    {"capacity left", 1, 4000, 2, 16, 1, 64, 8, 8, 300},
    {"many selected", 1, 3000, 1, 4, 1, 64, 16, 100, 2990},
    {"many candidates", 1, 25000, 1, 2, 1, 64, 16, 100, 24990},
    {"five layers, K 1", 1, 4200, 4, 3, 1, 64, 8, 1, 4190},
    {"blocks of 32, 40 heads", 1, 2400, 1, 40, 1, 128, 32, 8, 2390},
    {"128 heads", 1, 300, 1, 128, 1, 64, 8, 8, 290},
    {"ties, sharp", 1, 700, 3, 4, 1, 64, 8, 12, 690, false, 0.f, 6, true},
    {"all equal", 1, 18000, 2, 2, 1, 64, 16, 80, 18000, false, 0.f, 0},
    {"few within reach", 1, 1100, 2, 5, 1, 64, 8, 4, 1090, false, 0.f, 1, false, 0, 64},
    {"huge scores", 2, 120, 2, 5, 1, 64, 8, 16, 0, false, 1.f, 1, false, 0, 0, 1.f, -1e9f},
    {"no queries", 1, 30, 0, 4, 1, 64, 8, 4},
};

// Cases for the forward pass, and for the backward pass if they have gradients.
inline const Case kSmallCases[] = {
    {"tokens alone", 1, 40, 40, 16, 1, 128, 16, 4},
    {"one token", 1, 1, 1, 16, 1, 128, 16, 4},
    {"two layers", 1, 100, 14, 16, 1, 128, 16, 3, 91},
    {"three layers", 1, 1100, 13, 16, 1, 128, 16, 4, 1090},
    {"prefix of three layers", 1, 1100, 9, 16, 1, 128, 16, 4, 60},
    {"past the prefix", 1, 1100, 13, 16, 1, 128, 16, 4, 1000},
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
    {"huge scores", 2, 120, 13, 20, 1, 64, 8, 16, 0, false, 1.f, 1, false, 0, 0, 1.f, -1e9f},
    {"huge scores, 128 dims", 2, 60, 7, 16, 1, 128, 16, 4, 0, false, 1.f, 1, false, 0, 0, 1.f,
     -3e38f},
    {"no queries", 1, 30, 0, 16, 1, 128, 16, 4},
};

}  // namespace htree_problem
