// Checks of the backward pass of the indexer's logits at all keys on the emulator, against float64.
#pragma once

#include <functional>

#include "emulator.h"
#include "losses/index_grads.cu"
#include "problems/dense_loss_problem.h"

using namespace dense_loss_problem;
using jax_dsa::IndexGradsParams;

inline const std::initializer_list<const char*> kSmallCases = {
    "96 heads, ranges", "two queries per work tile", "two groups"};

inline int failures = 0;

// Runs the kernels. With `cut`, the queries of a single batch entry are divided among two launches.
inline Results run(const Problem& x, const std::vector<float>& grad, bool cut) {
  const Case& c = x.c;
  Results r(x);
  const int64_t segments = c.queries / jax_dsa::kIndexGradsSegment + 1;
  const int64_t blocks = c.keys / jax_dsa::kIndexGradsKeys + 1;
  std::vector<float> partial_dk(segments * x.index_k.size(), NAN);
  std::vector<uint8_t> partial_used(segments * c.batch * blocks, 7);
  const int half = c.queries / 2;
  for (int launch = 0; launch < (cut ? 2 : 1); ++launch) {
    const int64_t token = launch * half;
    IndexGradsParams p = {};
    p.q = x.index_q.data() + token * c.index_heads * c.channels, p.k = x.index_k.data();
    p.weights = x.weights.data() + token * c.index_heads;
    p.k_scale = c.scaled ? x.k_scale.data() : nullptr;
    p.starts = x.starts.data() + token, p.ends = x.ends.data() + token;
    p.grad = grad.data() + token * c.keys;
    p.dq = r.q.data() + token * c.index_heads * c.channels, p.dk = r.k.data();
    p.dweights = r.weights.data() + token * c.index_heads;
    p.dk_scale = c.scaled ? r.k_scale.data() : nullptr;
    p.partial_dk = partial_dk.data(), p.partial_used = reinterpret_cast<bool*>(partial_used.data());
    p.batch = c.batch, p.keys = c.keys, p.heads = c.index_heads, p.channels = c.channels;
    p.queries = !cut ? c.queries : launch == 0 ? half : c.queries - half;
    p.relu = c.relu, p.first = launch == 0, p.last = !cut || launch == 1;
    emulator::require(launch_index_grads(p, nullptr));
  }
  return r;
}

// Compares the results of all schedules with the expected ones and with each other.
inline void check(const Case& c, const std::vector<emulator::Options>& schedules) {
  const Problem x = make(c, schedules[0].seed);
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  std::vector<double> wanted_grad;
  std::vector<float> grad;
  for (int64_t i = 0; i < x.tokens() * c.keys; ++i) {
    const int key = i % c.keys;
    const int64_t token = i / c.keys;
    const bool seen = key >= x.low(token) && key < x.high(token);
    grad.push_back(seen ? normal(random) : NAN);
    wanted_grad.push_back(grad.back());
  }
  const Gradients want = index_gradients(x, wanted_grad);
  Results first(x);
  for (size_t i = 0; i < schedules.size(); ++i) {
    emulator::machine.options = schedules[i], emulator::machine.num_sms = 2 + i % 2;
    const Results got = run(x, grad, false);
    if (i == 0) first = got;
    // bf16 has 8 bits: each number that is multiplied is off by up to 2^-9 of itself.
    const double q = difference(got.q, want.q), k = difference(got.k, want.k);
    const double weights = difference(got.weights, want.weights);
    const double k_scale = difference(got.k_scale, want.k_scale);
    const bool good = q < 4e-3 && k < 4e-3 && weights < 1e-5 && k_scale < 4e-3 && got == first;
    printf("%-4s %-24s dq %.1e dk %.1e dw %.1e dk_scale %.1e%s\n", good ? "ok" : "BAD", c.name, q,
           k, weights, k_scale, got == first ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
  if (c.batch == 1) {
    const Results got = run(x, grad, true);
    const bool good = difference(got.q, want.q) < 4e-3 && difference(got.k, want.k) < 4e-3 &&
                      difference(got.k_scale, want.k_scale) < 4e-3;
    printf("%-4s %-24s in two launches\n", good ? "ok" : "BAD", c.name);
    failures += !good;
  }
}
