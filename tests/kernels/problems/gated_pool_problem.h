// Test problems of gated pooling with their expected results in float64, for the emulator and for
// tests/kernels/gpu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "gated_pool/gated_pool.h"
#include "problems/elements.h"

namespace gated_pool_problem {

using jax_dsa::DType;

struct Case {
  const char* name;
  int64_t batch, tokens;
  int ratio, halves, dim;
  DType dtype = DType::kBF16;
  bool packed = false;
  float size = 1.f;  // standard deviation of the gates
};

inline const Case kCases[] = {
    {"ratio 4, overlapping", 2, 43, 4, 2, 256},
    {"ratio 4, overlapping, documents", 2, 70, 4, 2, 132, DType::kBF16, true},
    {"ratio 4, overlapping, documents, f32", 1, 61, 4, 2, 64, DType::kF32, true},
    {"ratio 4, f16, large gates", 1, 32, 4, 1, 128, DType::kF16, false, 60.f},
    {"ratio 4", 2, 43, 4, 1, 132},
    {"ratio 4, documents", 2, 90, 4, 1, 256, DType::kBF16, true},
    {"ratio 4, documents, f32", 1, 61, 4, 1, 64, DType::kF32, true},
    {"ratio 3, documents", 2, 50, 3, 1, 20, DType::kF32, true},
    {"ratio 1, overlapping", 1, 9, 1, 2, 8, DType::kF32, true},
    {"ratio 128", 1, 300, 128, 1, 72},
    {"ratio 128, documents", 1, 700, 128, 1, 36, DType::kF16, true},
    {"ratio 64, overlapping", 1, 200, 64, 2, 32, DType::kF32},
    {"ratio 17, overlapping, documents, large gates", 2, 90, 17, 2, 4, DType::kF32, true, 60.f},
    // A thread group processes keys, then slots without a key, then keys again.
    {"ratio 17, overlapping, many documents", 1, 680, 17, 2, 4, DType::kF32, true},
    {"ratio 128, many documents", 2, 5120, 128, 1, 12, DType::kBF16, true},
    {"no whole block", 2, 3, 4, 2, 16},
    {"no tokens", 2, 0, 4, 2, 16},
    {"no batch", 0, 16, 4, 2, 16, DType::kBF16, true},
    {"no channels", 1, 16, 4, 2, 0},
};

struct Problem {
  Case c;
  std::vector<uint8_t> values, gates, dout;  // NaN where no key uses them
  std::vector<float> bias, scale, dsquares;
  std::vector<int32_t> starts;
  // Expected results, and for sums over keys the sums of their terms' magnitudes.
  std::vector<double> out, squares, dvalues, dgates, dbias, dbias_size, dscale, dscale_size;
};

// Makes the problem, with a scale of the keys if `scaled`.
inline Problem make(const Case& c, bool scaled, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t width = int64_t{c.halves} * c.dim, slots = c.tokens / c.ratio;
  for (int64_t i = 0; i < c.batch * c.ratio * width; ++i) p.bias.push_back(normal(random));
  struct Contribution {
    int64_t at, bias;
  };
  // The offsets of each key's contributions. Slots without a key have none.
  std::vector<std::vector<Contribution>> keys(c.batch * slots);
  std::vector<bool> used(c.batch * c.tokens * c.halves);
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t start = 0;
    while (start < c.tokens) {
      int64_t end = c.tokens;
      if (c.packed) {
        const int64_t length = random() % 4 == 0 ? 1 + random() % 3 : 1 + random() % (4 * c.ratio);
        end = std::min(c.tokens, start + length);
      }
      for (int64_t row = start; row < end; ++row) p.starts.push_back(static_cast<int32_t>(start));
      for (int64_t i = 0; start + (i + 1) * c.ratio <= end; ++i) {
        auto& key = keys[b * slots + start / c.ratio + i];
        for (int64_t block = i > 0 && c.halves == 2 ? i - 1 : i; block <= i; ++block) {
          const int64_t half = block == i ? c.halves - 1 : 0;
          for (int64_t r = 0; r < c.ratio; ++r) {
            const int64_t row = b * c.tokens + start + block * c.ratio + r;
            used[row * c.halves + half] = true;
            key.push_back(
                {(row * c.halves + half) * c.dim, ((b * c.ratio + r) * c.halves + half) * c.dim});
          }
        }
      }
      start = end;
    }
  }
  std::vector<double> values, gates, dout;
  for (int64_t i = 0; i < c.batch * c.tokens * width; ++i) {
    const bool is_used = used[i / c.dim];
    values.push_back(append(p.values, c.dtype, is_used ? normal(random) : NAN));
    gates.push_back(append(p.gates, c.dtype, is_used ? c.size * normal(random) : NAN));
  }
  for (int64_t i = 0; i < c.batch * slots * c.dim; ++i) {
    const bool is_key = !keys[i / c.dim].empty();
    dout.push_back(append(p.dout, c.dtype, is_key ? normal(random) : NAN));
  }
  if (scaled) {
    for (int64_t i = 0; i < c.batch * c.dim; ++i) p.scale.push_back(normal(random));
    for (const auto& key : keys) p.dsquares.push_back(key.empty() ? NAN : normal(random));
  }
  p.out.assign(dout.size(), 0.), p.squares.assign(p.dsquares.size(), 0.);
  p.dscale.assign(p.scale.size(), 0.), p.dscale_size = p.dscale;
  p.dvalues.assign(values.size(), 0.), p.dgates = p.dvalues;
  p.dbias.assign(p.bias.size(), 0.), p.dbias_size = p.dbias;
  for (size_t k = 0; k < keys.size(); ++k) {
    for (int64_t d = 0; d < c.dim && !keys[k].empty(); ++d) {
      double most = -INFINITY, weight = 0, value = 0;
      for (const auto& x : keys[k]) most = std::fmax(most, gates[x.at + d] + p.bias[x.bias + d]);
      for (const auto& x : keys[k]) {
        const double e = std::exp(gates[x.at + d] + p.bias[x.bias + d] - most);
        weight += e, value += e * values[x.at + d];
      }
      const double y = value / weight;
      double dy = dout[k * c.dim + d];
      p.out[k * c.dim + d] = y;
      if (scaled) {
        const size_t i = k / slots * c.dim + d;
        p.out[k * c.dim + d] *= p.scale[i];
        p.squares[k] += y * y;
        p.dscale[i] += dy * y;
        p.dscale_size[i] += std::fabs(dy * y);
        dy = dy * p.scale[i] + 2 * p.dsquares[k] * y;
      }
      for (const auto& x : keys[k]) {
        const double e = std::exp(gates[x.at + d] + p.bias[x.bias + d] - most) / weight;
        const double dgate = e * dy * (values[x.at + d] - y);
        p.dvalues[x.at + d] = e * dy;
        p.dgates[x.at + d] = dgate;
        p.dbias[x.bias + d] += dgate;
        p.dbias_size[x.bias + d] += std::fabs(dgate);
      }
    }
  }
  return p;
}

// Runs both passes of mean pooling and compares their results bit for bit: a pool's values are
// added in order. `Memory` is as below.
template <typename Memory>
bool run_mean(const Case& c, uint64_t seed, Memory& memory) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const int64_t slots = c.tokens / c.ratio;
  std::vector<int32_t> starts;
  std::vector<int64_t> key_of;  // of each token; -1 if it is in no pool
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t start = 0; start < c.tokens;) {
      const int64_t length = c.packed ? 1 + random() % (3 * c.ratio) : c.tokens;
      const int64_t end = std::min(start + length, c.tokens);
      for (int64_t row = start; row < end; ++row) {
        const int64_t block = (row - start) / c.ratio;
        const bool whole = start + (block + 1) * c.ratio <= end;
        starts.push_back(static_cast<int32_t>(start));
        key_of.push_back(whole ? b * slots + start / c.ratio + block : -1);
      }
      start = end;
    }
  }
  std::vector<uint8_t> values, dkeys, keys, dvalues;  // NaN where they do not count
  std::vector<double> dkey;
  std::vector<float> sums(c.batch * slots * c.dim);
  std::vector<bool> is_key(c.batch * slots);
  const auto factor = static_cast<float>(1. / c.ratio);
  for (int64_t t = 0; t < c.batch * c.tokens; ++t) {
    const int64_t key = key_of[t];
    for (int d = 0; d < c.dim; ++d) {
      const float x = append(values, c.dtype, key < 0 ? NAN : normal(random));
      if (key < 0) continue;
      float& sum = sums[key * c.dim + d];
      sum = is_key[key] ? sum + x : x;
    }
    if (key >= 0) is_key[key] = true;
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    const bool is = is_key[i / c.dim];
    dkey.push_back(append(dkeys, c.dtype, is ? normal(random) : NAN));
    append(keys, c.dtype, is ? sums[i] * factor : 0.f);
  }
  for (int64_t i = 0; i < c.batch * c.tokens * c.dim; ++i) {
    const int64_t key = key_of[i / c.dim];
    const double dy = key < 0 ? 0 : dkey[key * c.dim + i % c.dim];
    append(dvalues, c.dtype, static_cast<float>(dy) * factor);
  }
  jax_dsa::MeanPoolParams p = {};
  p.batch = c.batch, p.tokens = c.tokens, p.ratio = c.ratio, p.dim = c.dim, p.dtype = c.dtype;
  p.factor = factor;
  p.starts = c.packed ? memory.put(starts) : nullptr;
  auto* const to_keys = memory.template room<uint8_t>(keys.size());
  auto* const to_dvalues = memory.template room<uint8_t>(dvalues.size());
  p.from = memory.put(values), p.to = to_keys;
  memory.require(jax_dsa::launch_mean_pool_fwd(p, nullptr));
  p.from = memory.put(dkeys), p.to = to_dvalues;
  memory.require(jax_dsa::launch_mean_pool_bwd(p, nullptr));
  const bool same = memory.get(static_cast<const uint8_t*>(to_keys), keys.size()) == keys &&
                    memory.get(static_cast<const uint8_t*>(to_dvalues), dvalues.size()) == dvalues;
  printf("%-4s %-48s mean\n", same ? "ok" : "BAD", c.name);
  return same;
}

// Runs both passes and compares their results. `Memory` provides `put`, `room` (returns poisoned
// memory), `get` and `require`.
template <typename Memory>
bool run(const Case& c, bool scaled, uint64_t seed, Memory& memory) {
  const Problem x = make(c, scaled, seed);
  jax_dsa::GatedPoolFwdParams fwd = {};
  jax_dsa::GatedPoolBwdParams bwd = {};
  jax_dsa::GatedPoolParams& p = fwd.in;
  p.values = memory.put(x.values), p.gates = memory.put(x.gates), p.bias = memory.put(x.bias);
  p.starts = c.packed ? memory.put(x.starts) : nullptr;
  p.batch = c.batch, p.tokens = c.tokens, p.ratio = c.ratio, p.halves = c.halves, p.dim = c.dim;
  p.dtype = c.dtype;
  p.scale = scaled ? memory.put(x.scale) : nullptr;
  const int64_t tiles = jax_dsa::gated_pool_tiles(c.ratio, c.halves, c.dim);
  fwd.squares = scaled ? memory.template room<float>(tiles * x.squares.size()) : nullptr;
  bwd.dsquares = scaled ? memory.put(x.dsquares) : nullptr;
  fwd.out = memory.template room<uint8_t>(x.dout.size());
  bwd.in = p;
  bwd.dout = memory.put(x.dout);
  bwd.dvalues = memory.template room<uint8_t>(x.values.size());
  bwd.dgates = memory.template room<uint8_t>(x.gates.size());
  const int64_t max_splits =
      jax_dsa::gated_pool_bwd_splits(c.batch, c.tokens, c.ratio, c.halves, c.dim);
  bwd.splits = std::min<int64_t>(max_splits, 3);  // so that a thread group processes several keys
  bwd.sums = memory.template room<float>(bwd.splits * (x.bias.size() + x.scale.size()));
  memory.require(jax_dsa::launch_gated_pool_fwd(fwd, nullptr));
  memory.require(jax_dsa::launch_gated_pool_bwd(bwd, nullptr));

  const double rounding = c.dtype == DType::kF32 ? 0 : c.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  double worst = 0;  // relative to the tolerance
  const auto compare = [&](double got, double want, double size) {
    const double error =
        std::fabs(got - want) / (rounding * std::fabs(want) + 4e-6 * (1 + c.size / 10) * size);
    worst = std::fmax(worst, std::isnan(error) ? INFINITY : error);
  };
  const auto compare_all = [&](const void* from, const std::vector<double>& want) {
    const auto got = memory.get(static_cast<const uint8_t*>(from), want.size() * bytes_of(c.dtype));
    for (size_t i = 0; i < want.size(); ++i) {
      compare(element(got, c.dtype, i), want[i], 1 + std::fabs(want[i]));
    }
  };
  compare_all(fwd.out, x.out);
  compare_all(bwd.dvalues, x.dvalues);
  compare_all(bwd.dgates, x.dgates);
  const int64_t slots = c.tokens / c.ratio;
  const auto squares = memory.get(fwd.squares, tiles * x.squares.size());
  for (size_t i = 0; i < x.squares.size(); ++i) {
    double sum = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      sum += squares[(i / slots * tiles + tile) * slots + i % slots];
    }
    compare(sum, x.squares[i], 1 + x.squares[i]);
  }
  const size_t bias_size = c.ratio * c.halves * c.dim, all = bias_size + (scaled ? c.dim : 0);
  const auto sums = memory.get(bwd.sums, bwd.splits * c.batch * all);
  for (size_t i = 0; i < c.batch * all; ++i) {
    double sum = 0;
    for (int64_t split = 0; split < bwd.splits; ++split) {
      sum += sums[(i / all * bwd.splits + split) * all + i % all];
    }
    const size_t within_entry = i % all;
    const bool is_bias = within_entry < bias_size;
    const size_t at =
        is_bias ? i / all * bias_size + within_entry : i / all * c.dim + within_entry - bias_size;
    compare(sum, (is_bias ? x.dbias : x.dscale)[at],
            1 + (is_bias ? x.dbias_size : x.dscale_size)[at]);
  }
  printf("%-4s %-48s%s error / tolerance %.2f\n", worst < 1 ? "ok" : "BAD", c.name,
         scaled ? " scaled" : "       ", worst);
  return worst < 1;
}

}  // namespace gated_pool_problem
