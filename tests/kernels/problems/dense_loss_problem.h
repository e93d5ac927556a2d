// Test problems of the indexer's warm-up loss with their expected results in float64, for the
// emulator and for tests/kernels/gpu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "losses/losses.h"

namespace dense_loss_problem {

using bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  int batch, queries, keys;
  int heads, groups, dim;     // attention
  int index_heads, channels;  // indexer
  bool causal = true;         // false: random ranges, some of them empty or beyond the keys
  bool relu = true, scaled = false;
  float scale = 0.f;  // 0: D^-1/2
  float huge = 0.f;   // the score of every third key, and of all keys of every second batch entry
};

inline const Case kCases[] = {
    {"128 heads", 1, 5, 150, 128, 1, 576, 64, 128},
    {"96 heads, ranges", 2, 4, 200, 96, 1, 576, 64, 128, false, true, true},
    {"two queries per work tile", 2, 7, 130, 40, 1, 512, 32, 64, false},
    {"four queries per work tile", 1, 11, 90, 20, 1, 512, 17, 32, true, false, true},
    {"eight queries per work tile", 1, 19, 140, 9, 1, 576, 1, 128, false, false},
    {"192 heads", 1, 3, 100, 192, 1, 512, 64, 128, false},
    {"two groups", 1, 6, 140, 40, 2, 512, 48, 64, true, true, true, -0.03f},
    {"three groups of 16", 1, 9, 70, 48, 3, 576, 8, 32, false},
    {"many queries", 1, 150, 150, 16, 1, 512, 64, 128},
    {"many keys", 1, 3, 700, 128, 1, 512, 16, 64, false},
    {"multi-head, 192 dims", 2, 140, 150, 3, 3, 192, 16, 64},
    {"multi-head, ranges", 1, 70, 200, 4, 4, 128, 8, 32, false},
    {"multi-head, groups", 1, 9, 70, 6, 2, 64, 8, 32, false, true, true, -0.2f},
    {"multi-head, 256 dims", 1, 130, 64, 2, 1, 256, 8, 32},
    {"huge scores", 2, 4, 150, 96, 1, 576, 64, 128, false, true, false, 0.7f, -1e9f},
    {"multi-head, huge scores", 2, 30, 100, 4, 2, 128, 8, 32, true, true, false, -0.9f, 3e38f},
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
      p.starts.push_back(t % 5 == 4 ? -9 : static_cast<int>(random() % (keys + 9)) - 5);
      p.ends.push_back(t % 5 == 4 ? keys + 9
                       : t % 5 == 3
                           ? p.starts.back() - 2
                           : p.starts.back() + 1 + static_cast<int>(random() % (keys + 1)));
    }
  }
  for (size_t i = 0; c.huge != 0.f && i < p.q.size(); ++i) {
    p.q[i] = __float2bfloat16(i % c.dim == size_t(c.dim) - 1 ? 1.f : 0.f);
  }
  for (int64_t r = 0; c.huge != 0.f && r < rows * c.groups; ++r) {
    if (r / c.groups % 3 == 0 || r / c.groups / c.keys % 2 == 1) {
      p.kv[(r + 1) * c.dim - 1] = __float2bfloat16(c.huge);
    }
  }
  // Keys that no query sees are NaN, and so are their scales.
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

// Returns the teacher [batch, queries, keys], 0 where the query does not see the key.
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
        if (c.huge != 0.f) s[k] = float(s[k]);
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

// Returns the gradients of sum_ts grad[t, s] * I[t, s] over the keys s that query t sees.
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

// Returns the logits [batch, queries, keys], -inf where the query does not see the key.
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

// Returns the largest error, relative to the largest expected value (or 1e-3). NaN counts as
// infinite.
inline double difference(const std::vector<float>& got, const std::vector<double>& want) {
  double worst = 0, top = 1e-3;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::fabs(got[i] - want[i]);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    top = std::max(top, std::fabs(want[i]));
  }
  return worst / top;
}

// The loss summed over the rows that count, and its gradients.
struct Loss {
  std::vector<double> kl;  // [batch]
  std::vector<int> rows;   // [batch]
  Gradients gradients;
};

inline Loss loss(const Problem& p) {
  const Case& c = p.c;
  const std::vector<double> target = teacher(p), logits = index_logits(p);
  std::vector<double> grad(target.size());
  Loss out;
  out.kl.resize(c.batch), out.rows.resize(c.batch);
  for (int64_t t = 0; t < p.tokens(); ++t) {
    if (p.low(t) >= p.high(t)) continue;
    double largest = -INFINITY, sum = 0;
    for (int s = p.low(t); s < p.high(t); ++s) {
      largest = std::max(largest, logits[t * c.keys + s]);
    }
    for (int s = p.low(t); s < p.high(t); ++s) sum += std::exp(logits[t * c.keys + s] - largest);
    for (int s = p.low(t); s < p.high(t); ++s) {
      const double log_q = logits[t * c.keys + s] - largest - std::log(sum);
      const double own = target[t * c.keys + s] / c.heads;
      if (own > 0) out.kl[t / c.queries] += own * (std::log(own) - log_q);
      grad[t * c.keys + s] = std::exp(log_q) - own;
    }
    out.rows[t / c.queries] += 1;
  }
  out.gradients = index_gradients(p, grad);
  return out;
}

// The kernels' results. They are NaN or -7 before the kernels run.
struct Results {
  std::vector<float> kl, q, k, weights, k_scale;
  std::vector<int32_t> rows;

  explicit Results(const Problem& p)
      : kl(p.c.batch, NAN),
        q(p.index_q.size(), NAN),
        k(p.index_k.size(), NAN),
        weights(p.weights.size(), NAN),
        k_scale(p.k_scale.size(), NAN),
        rows(p.c.batch, -7) {}

  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
      });
    };
    return same(kl, other.kl) && same(q, other.q) && same(k, other.k) &&
           same(weights, other.weights) && same(k_scale, other.k_scale) && rows == other.rows;
  }
};

// Returns the parameters of the loss with pointers to host memory, without a workspace.
inline jax_dsa::DenseLossParams params(const Problem& x, Results& to) {
  const Case& c = x.c;
  jax_dsa::DenseLossParams p = {};
  p.index.q = x.index_q.data(), p.index.k = x.index_k.data();
  p.index.weights = x.weights.data(), p.index.k_scale = c.scaled ? x.k_scale.data() : nullptr;
  p.index.starts = x.starts.data(), p.index.ends = x.ends.data();
  p.index.dq = to.q.data(), p.index.dk = to.k.data(), p.index.dweights = to.weights.data();
  p.index.dk_scale = c.scaled ? to.k_scale.data() : nullptr;
  p.index.batch = c.batch, p.index.queries = c.queries, p.index.keys = c.keys;
  p.index.heads = c.index_heads, p.index.channels = c.channels, p.index.relu = c.relu;
  p.teacher.q = x.q.data(), p.teacher.kv = x.kv.data();
  p.teacher.heads = c.heads, p.teacher.groups = c.groups, p.teacher.dim = c.dim;
  p.teacher.scale = x.scale;
  p.kl = to.kl.data(), p.rows = to.rows.data();
  return p;
}

// Prints the errors of the results, and returns whether they are within the tolerance.
inline bool report(const char* name, const Problem& p, const Loss& want, const Results& got) {
  const double kl = difference(got.kl, want.kl), q = difference(got.q, want.gradients.q);
  const double k = difference(got.k, want.gradients.k);
  const double weights = difference(got.weights, want.gradients.weights);
  const double k_scale = difference(got.k_scale, want.gradients.k_scale);
  bool rows = true;
  for (int b = 0; b < p.c.batch; ++b) rows = rows && got.rows[b] == want.rows[b];
  // bf16 has 8 significant bits: the factors of each product have a relative error of up to 2^-9.
  const bool good = kl < 1e-5 && q < 4e-3 && k < 4e-3 && weights < 1e-4 && k_scale < 4e-3 && rows;
  printf("%-4s %-24s KL %.1e dq %.1e dk %.1e dw %.1e dk_scale %.1e%s\n", good ? "ok" : "BAD", name,
         kl, q, k, weights, k_scale, rows ? "" : "  ROWS DIFFER");
  fflush(stdout);
  return good;
}

}  // namespace dense_loss_problem
