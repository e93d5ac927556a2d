// Checks of the indexer's backward kernels on the emulator against a float64 reference that makes
// the kernels' two roundings: g and w q are rounded to bf16 before they are multiplied.
#pragma once

#include <cuda_bf16.h>

#include <climits>
#include <cmath>
#include <random>
#include <vector>

#include "emulator.h"
#include "indexer/indexer.h"

using bf16 = __nv_bfloat16;
using namespace jax_dsa;

enum Mode { kDistinct, kArbitrary, kSameKeys };

struct Case {
  const char* name;
  int batch, queries, keys, heads, channels, slots;
  Mode mode = kDistinct;
  bool scale = false, relu = true;
};

struct Problem {
  Case c;
  std::vector<bf16> q, k;
  std::vector<int32_t> indices;
  std::vector<float> weights, grad, k_scale;

  bool is_valid(int64_t slot) const { return indices[slot] >= 0 && indices[slot] < c.keys; }
};

inline double rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t tokens = int64_t{c.batch} * c.queries;
  p.q.resize(tokens * c.heads * c.channels + 8);
  p.k.resize(int64_t{c.batch} * c.keys * c.channels + 8);
  for (auto& x : p.q) x = __float2bfloat16(normal(random));
  for (auto& x : p.k) x = __float2bfloat16(normal(random));
  // These scores are exactly 0, where the ReLU mask is 0.
  for (int i = 0; i < c.channels; ++i) p.q[(tokens - 1) * c.heads * c.channels + i] = bf16(0.f);
  p.weights.resize(tokens * c.heads);
  p.grad.resize(tokens * c.slots);
  p.k_scale.resize(int64_t{c.batch} * c.keys);
  for (auto& x : p.weights) x = normal(random);
  for (auto& x : p.grad) x = normal(random);
  for (auto& x : p.k_scale) x = normal(random);
  const int boundary[] = {INT_MIN, -1, c.keys, INT_MAX, 0, c.keys - 1};
  std::vector<int32_t> all(c.keys);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < c.keys; ++i) all[i] = i;
    if (c.mode != kSameKeys || t % c.queries == 0) std::shuffle(all.begin(), all.end(), random);
    const int wanted = c.mode == kDistinct ? c.slots - static_cast<int>(random() % 9) : c.slots;
    const int count = std::max(0, std::min(wanted, c.keys));
    std::sort(all.begin(), all.begin() + count);
    for (int i = 0; i < c.slots; ++i) {
      int x = c.mode == kSameKeys && t % c.queries > 0 ? p.indices[p.indices.size() - c.slots]
              : i < count                              ? all[i]
                                                       : -1;
      if (c.mode == kArbitrary) {
        x = random() % 3 && c.keys ? static_cast<int>(random() % c.keys) : boundary[random() % 6];
        if (t % 5 == 3) x = boundary[random() % 4];
      }
      p.indices.push_back(x);
    }
  }
  // Put NaN where nothing may be read: keys that no slot selects, gradients of invalid slots.
  std::vector<bool> used(int64_t{c.batch} * c.keys);
  for (int64_t i = 0; i < tokens * c.slots; ++i) {
    if (p.is_valid(i)) {
      used[i / c.slots / c.queries * c.keys + p.indices[i]] = true;
    } else {
      p.grad[i] = NAN;
    }
  }
  for (size_t r = 0; r < used.size(); ++r) {
    if (!used[r]) p.k_scale[r] = NAN;
    for (int i = 0; i < c.channels && !used[r]; ++i) {
      p.k[r * c.channels + i] = __float2bfloat16(NAN);
    }
  }
  return p;
}

struct Gradients {
  std::vector<double> dq, dw, dk, dk_scale;
};

inline Gradients reference(const Problem& p) {
  const Case& c = p.c;
  const int64_t tokens = int64_t{c.batch} * c.queries;
  Gradients out = {std::vector<double>(tokens * c.heads * c.channels),
                   std::vector<double>(tokens * c.heads),
                   std::vector<double>(int64_t{c.batch} * c.keys * c.channels),
                   std::vector<double>(int64_t{c.batch} * c.keys)};
  for (int64_t slot = 0; slot < tokens * c.slots; ++slot) {
    if (!p.is_valid(slot)) continue;
    const int64_t token = slot / c.slots, key = token / c.queries * c.keys + p.indices[slot];
    const bf16* k = &p.k[key * c.channels];
    const float scale = c.scale ? p.k_scale[key] : 1.f;
    for (int j = 0; j < c.heads; ++j) {
      const int64_t row = token * c.heads + j;
      const bf16* q = &p.q[row * c.channels];
      double x = 0;
      for (int i = 0; i < c.channels; ++i) x += double(__bfloat162float(q[i])) * double(k[i]);
      if (c.relu && !(x > 0)) continue;
      out.dw[row] += double(p.grad[slot] * scale) * x;
      for (int i = 0; i < c.channels; ++i) {
        out.dq[row * c.channels + i] +=
            p.weights[row] * rounded(p.grad[slot] * scale) * double(k[i]);
        out.dk[key * c.channels + i] +=
            rounded(p.grad[slot]) * rounded(p.weights[row] * __bfloat162float(q[i]));
      }
    }
  }
  for (size_t key = 0; c.scale && key < out.dk_scale.size(); ++key) {
    for (int i = 0; i < c.channels; ++i) {
      const double k = double(p.k[key * c.channels + i]);
      if (std::isfinite(k)) out.dk_scale[key] += out.dk[key * c.channels + i] * k;
      out.dk[key * c.channels + i] *= std::isfinite(p.k_scale[key]) ? p.k_scale[key] : 0;
    }
  }
  return out;
}

struct Error {
  double worst = 0, top = 0;
  template <typename T>
  void add(const std::vector<T>& got, const std::vector<double>& expected, double relative) {
    for (double x : expected) top = std::max(top, std::fabs(x));
    for (size_t i = 0; i < expected.size(); ++i) {
      const double e = std::fabs(double(got[i]) - expected[i]) - relative * std::fabs(expected[i]);
      worst = std::max(worst, std::isnan(e) ? INFINITY : e);
    }
  }
  bool good() const { return worst <= 2e-5 * top + 1e-6; }
};

inline int failures = 0;

inline const Case kCases[] = {
    {"one tile", 1, 1, 64, 64, 128, 64},
    {"ring of tiles", 1, 6, 450, 64, 128, 400},
    {"query tiles", 2, 11, 300, 40, 128, 90},
    {"same keys", 1, 8, 200, 64, 128, 70, kSameKeys},
    {"arbitrary slots", 1, 9, 60, 33, 64, 50, kArbitrary, true},
    {"no relu", 1, 9, 150, 17, 32, 80, kDistinct, true, false},
    {"no slots", 1, 3, 10, 16, 64, 0},
};

using Launch = cudaError_t (*)(const IndexerBwdParams&, cudaStream_t);

// Compares the gradients with the expected ones.
inline void check(const Case& c, const emulator::Options& options, Launch launch) {
  const Problem x = make(c, options.seed);
  const int64_t tokens = int64_t{c.batch} * c.queries, keys = int64_t{c.batch} * c.keys;
  std::vector<bf16> dq(tokens * c.heads * c.channels, __float2bfloat16(NAN));
  std::vector<float> dk(keys * c.channels), dw(tokens * c.heads, NAN), dk_scale(keys, NAN);
  std::vector<uint64_t> relu_mask(indexer_bwd_relu_mask_words(tokens, c.slots) + 2, ~uint64_t{0});
  IndexerBwdParams p = {};
  p.q = x.q.data(), p.k = x.k.data(), p.weights = x.weights.data();
  p.k_scale = c.scale ? x.k_scale.data() : nullptr;
  p.indices = x.indices.data(), p.grad = x.grad.data();
  p.dq = dq.data(), p.dk = dk.data(), p.dweights = dw.data();
  p.dk_scale = c.scale ? dk_scale.data() : nullptr;
  p.relu_mask = relu_mask.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.slots = c.slots;
  p.heads = c.heads, p.channels = c.channels, p.relu = c.relu;
  emulator::machine.options = options;
  emulator::require(launch(p, nullptr));
  const Gradients expected = reference(x);
  Error dq_error, dw_error, dk_error, dk_scale_error;
  dq_error.add(dq, expected.dq, 1. / 256);
  dw_error.add(dw, expected.dw, 0);
  dk_error.add(dk, expected.dk, 0);
  if (c.scale) dk_scale_error.add(dk_scale, expected.dk_scale, 0);
  bool good = true;
  for (const Error* e : {&dq_error, &dw_error, &dk_error, &dk_scale_error}) good &= e->good();
  printf("%-4s %-22s %s %s seed %llu ", good ? "ok" : "BAD", c.name,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed);
  for (const Error* e : {&dq_error, &dw_error, &dk_error, &dk_scale_error}) {
    printf(" %.1e of %.1e", e->worst, e->top);
  }
  printf("\n");
  fflush(stdout);
  failures += !good;
}
