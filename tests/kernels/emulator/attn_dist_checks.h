// Checks of attn_dist kernels on the emulator against float64. The Hopper kernel and the portable
// kernel share them.
#pragma once

#include <cuda_bf16.h>

#include <climits>

#include "attn_dist/attn_dist.h"
#include "emulator.h"
#include "far_rows.h"

namespace jax_dsa {

using bf16 = __nv_bfloat16;
using Launch = cudaError_t (*)(const AttnDistFwdParams&, cudaStream_t);

struct Case {
  const char* name;
  int batch, queries, keys, heads, groups, head_group, dim, slots;
  bool adversarial = false, ends = false, lengths = false;
  int sinks = 0;              // 1: [N], 2: [B, N]
  float scale = 0.f;          // 0: D^-1/2
  bool infinite = false;      // every row selects a key with an infinite element
  bool nan = false;           // every third head has NaN in its queries
  bool mostly_empty = false;  // of nine queries, three have all slots and six have none
  float huge = 0.f;  // the score of all keys of every second request, and of every third key
};

struct Problem {
  Case c;
  std::vector<bf16> q, kv;
  std::vector<int32_t> indices, ends, lengths;
  std::vector<float> lse, sinks;
  std::vector<float> log_sum;  // with huge scores
  float scale;

  int index(int64_t token, int group, int slot) const {
    return indices[(token * c.groups + group) * c.slots + slot];
  }
  bool valid(int64_t token, int group, int slot) const {
    const int key = index(token, group, slot);
    return key >= 0 && key < c.keys && (!c.ends || key < ends[token]) &&
           (!c.lengths || slot < lengths[token]);
  }
  const bf16* key(int64_t token, int group, int slot) const {
    return &kv[((token / c.queries * c.keys + index(token, group, slot)) * c.groups + group) *
               c.dim];
  }
  double score(int64_t token, int head, int slot) const {
    const bf16* row = &q[(token * c.heads + head) * c.dim];
    const bf16* column = key(token, head / (c.heads / c.groups), slot);
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) {
      sum += double(__bfloat162float(row[d])) * __bfloat162float(column[d]);
    }
    return c.huge != 0.f ? double(float(sum) * scale) : sum * scale;
  }
  double rest(int64_t token, int head) const {
    return log_sum.empty() ? 0 : log_sum[token * c.heads + head];
  }
  double gate(int64_t token, int head) const {
    if (!c.sinks) return 1;
    const double sink = sinks[(c.sinks == 2 ? token / c.queries * c.heads : 0) + head];
    return 1 / (1 + std::exp(sink - lse[token * c.heads + head] - rest(token, head)));
  }
};

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t tokens = int64_t{c.batch} * c.queries;
  p.scale = c.scale ? c.scale : 1 / std::sqrt(float(c.dim));
  p.q.resize(tokens * c.heads * c.dim);
  p.kv.resize(int64_t{c.batch} * c.keys * c.groups * c.dim + 8);
  for (auto& x : p.q) x = __float2bfloat16(normal(random));
  for (auto& x : p.kv) x = __float2bfloat16(normal(random));
  p.indices.resize(tokens * c.groups * c.slots);
  const int odd[] = {INT_MIN, -1, c.keys, INT_MAX, 0, c.keys - 1};
  for (auto& x : p.indices) {
    x = c.keys ? static_cast<int>(random() % c.keys) : 0;
    if (c.adversarial && random() % 2) x = odd[random() % 6];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    p.ends.push_back(static_cast<int>(random() % (c.keys + 20)) - 5);
    p.lengths.push_back(static_cast<int>(random() % (c.slots + 9)) - 4);
    if (c.mostly_empty) p.lengths.back() = t % 9 < 3 ? c.slots : 0;
    if (c.adversarial && t % 5 == 3) {
      for (int i = 0; i < c.groups * c.slots; ++i) {
        p.indices[t * c.groups * c.slots + i] = odd[random() % 4];
      }
    }
  }
  for (int64_t i = 0; c.infinite && i < tokens * c.groups; ++i) {
    p.indices[i * c.slots] = 0;
    for (int b = 0; b < c.batch * c.groups; ++b) {
      p.kv[(b / c.groups * c.keys * c.groups + b % c.groups) * c.dim] = __float2bfloat16(INFINITY);
    }
  }
  for (int64_t i = 2; c.nan && i < tokens * c.heads; i += 3) p.q[i * c.dim] = __float2bfloat16(NAN);
  p.sinks.resize(c.sinks == 2 ? c.batch * c.heads : c.heads);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    p.sinks[i] = i % 7 == 2 ? INFINITY : i % 7 == 4 ? -INFINITY : normal(random) * 2;
  }
  for (int64_t i = 0; i < tokens * c.heads; ++i) {
    p.lse.push_back(random() % 16 == 0 ? -INFINITY : 2 + normal(random));
  }
  if (c.huge != 0.f) {
    for (size_t i = 0; i < p.q.size(); ++i) {
      p.q[i] = __float2bfloat16(i % c.dim == size_t(c.dim) - 1 ? 1.f : 0.f);
    }
    for (int64_t row = 0; row < int64_t{c.batch} * c.keys * c.groups; ++row) {
      if (row / c.groups / c.keys % 2 == 1 || row / c.groups % 3 == 0) {
        p.kv[(row + 1) * c.dim - 1] = __float2bfloat16(c.huge);
      }
    }
    for (int64_t i = 0; i < tokens * c.heads; ++i) {
      const int64_t token = i / c.heads;
      const int head = i % c.heads, group = head / (c.heads / c.groups);
      std::vector<double> scores;
      for (int k = 0; k < c.slots; ++k) {
        if (p.valid(token, group, k)) scores.push_back(p.score(token, head, k));
      }
      double top = -INFINITY, sum = 0;
      for (double s : scores) top = std::max(top, s);
      for (double s : scores) sum += std::exp(s - top);
      p.lse[i] = top;
      p.log_sum.push_back(scores.empty() ? 0 : std::log(sum));
    }
  }
  // Keys that no slot selects become NaN.
  std::vector<bool> used(int64_t{c.batch} * c.keys * c.groups);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int g = 0; g < c.groups; ++g) {
      for (int k = 0; k < c.slots; ++k) {
        if (p.valid(t, g, k)) used[(p.key(t, g, k) - p.kv.data()) / c.dim] = true;
      }
    }
  }
  for (size_t r = 0; r < used.size(); ++r) {
    for (int i = 0; i < c.dim && !used[r]; ++i) p.kv[r * c.dim + i] = __float2bfloat16(NAN);
  }
  return p;
}

inline std::vector<double> expected(const Problem& x) {
  const Case& c = x.c;
  const int sums = c.heads / c.head_group;
  std::vector<double> out(int64_t{c.batch} * sums * c.queries * c.slots);
  for (int64_t t = 0; t < int64_t{c.batch} * c.queries; ++t) {
    for (int n = 0; n < c.heads; ++n) {
      const double lse = x.lse[t * c.heads + n];
      if (lse == -INFINITY) continue;
      const int64_t row = (t / c.queries * sums + n / c.head_group) * c.queries + t % c.queries;
      for (int k = 0; k < c.slots; ++k) {
        if (!x.valid(t, n / (c.heads / c.groups), k)) continue;
        out[row * c.slots + k] += x.gate(t, n) * std::exp(x.score(t, n, k) - lse - x.rest(t, n));
      }
    }
  }
  return out;
}

// The kernel's keys follow `far` others that no slot selects.
inline std::vector<float> run(const Problem& x, Launch launch, int num_sms,
                              const emulator::Options& options, int64_t far = 0) {
  const Case& c = x.c;
  const int64_t row_bytes = int64_t{c.groups} * c.dim * 2;
  const emulator::FarRows kv(x.kv.data(), c.batch, c.keys * row_bytes, far * row_bytes);
  const std::vector<int32_t> indices = emulator::far_positions(x.indices, far);
  const std::vector<int32_t> ends = emulator::far_positions(x.ends, far, 1);
  std::vector<float> out(int64_t{c.batch} * (c.heads / c.head_group) * c.queries * c.slots, NAN);
  AttnDistFwdParams p = {};
  p.q = x.q.data(), p.kv = kv.data(), p.indices = indices.data(), p.lse = x.lse.data();
  p.ends = c.ends ? ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.sinks = c.sinks ? x.sinks.data() : nullptr;
  p.log_sum = x.log_sum.empty() ? nullptr : x.log_sum.data();
  p.sinks_stride = c.sinks == 2 ? c.heads : 0;
  p.out = out.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys + far, p.heads = c.heads;
  p.groups = c.groups, p.head_group = c.head_group, p.slots = c.slots, p.dim = c.dim;
  p.scale = x.scale;
  emulator::machine.options = options, emulator::machine.num_sms = num_sms;
  emulator::require(launch(p, nullptr));
  return out;
}

inline int failures = 0;

inline void check(const Case& c, Launch launch, const std::vector<emulator::Options>& schedules) {
  const Problem x = make(c, schedules[0].seed);
  const std::vector<double> want = expected(x);
  std::vector<float> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    const std::vector<float> got =
        run(x, launch, 2 + i % 2, options);  // other KV splits, same result
    if (i == 0) first = got;
    double worst = 0, top = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const bool equal = got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]));
      const double error = equal ? 0 : std::fabs(got[i] - want[i]) / (want[i] + 1e-3);
      worst = std::max(worst, std::isnan(error) ? INFINITY : error);
      if (want[i] == 0 && got[i] != 0) worst = INFINITY;
      top = std::max(top, want[i]);
    }
    const bool same = memcmp(first.data(), got.data(), got.size() * sizeof(float)) == 0;
    const bool good = worst < 1e-4 && same;
    printf("%-4s %-24s %s %s seed %llu  relative %.1e, values up to %.1e%s\n", good ? "ok" : "BAD",
           c.name, options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, worst, top, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

// Expects the same bits if keys come first that no slot selects.
inline void check_far(const Case& c, Launch launch) {
  const Problem x = make(c, 0);
  const std::vector<float> want = run(x, launch, 2, {});
  const std::vector<float> got =
      run(x, launch, 2, {}, emulator::far_rows(int64_t{c.groups} * c.dim * 2));
  const bool good = memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0;
  printf("%-4s %-24s far keys\n", good ? "ok" : "BAD", c.name);
  failures += !good;
}

inline const Case kCases[] = {
    {"one tile, one query", 1, 1, 64, 128, 1, 64, 576, 64},
    {"three queries per CTA", 1, 5, 300, 128, 1, 64, 576, 250},
    {"64 heads, odd tiles", 1, 5, 300, 64, 1, 64, 512, 150, false, true},
    {"adversarial, two sums", 2, 4, 90, 40, 1, 20, 576, 131, true, true, true, 2},
    {"192 heads of 64", 1, 2, 100, 192, 1, 64, 512, 100, false, false, true, 0, -0.03f},
    {"96 heads joined", 2, 3, 90, 96, 1, 96, 576, 201, true, false, true, 1},
    {"320 heads joined", 1, 2, 90, 320, 1, 160, 512, 100, false, true, false, 2},
    {"groups, small sums", 1, 3, 70, 36, 2, 3, 512, 77, true, false, true, 1},
    {"one head per sum", 1, 2, 70, 9, 1, 1, 512, 65, false, false, false, 1},
    {"infinite key", 1, 2, 40, 9, 1, 3, 512, 20, false, false, false, 0, 0.f, true},
    {"NaN under infinite sinks", 1, 3, 70, 9, 1, 1, 512, 65, false, false, false, 1, 0.f, false,
     true},
    {"most queries empty", 1, 48, 90, 64, 1, 64, 512, 128, false, false, true, 0, 0.f, false, false,
     true},
    {"three head tiles", 1, 20, 90, 12, 1, 1, 512, 128},
    {"no slots", 1, 3, 10, 16, 1, 16, 576, 0},
    {"huge scores", 2, 2, 90, 40, 1, 20, 576, 131, true, false, true, 2, 0.9f, false, false, false,
     -1e9f},
    {"huge scores joined", 2, 2, 90, 96, 1, 96, 512, 131, true, false, true, 0, 0.9f, false, false,
     false, -3e38f},
    {"no keys", 1, 9, 0, 128, 1, 64, 576, 70},
};

// The dims of grouped-query attention.
inline const Case kSmallDims[] = {
    {"D 128, 4 groups of 16", 1, 3, 300, 64, 4, 16, 128, 250},
    {"D 256, 2 groups of 12", 2, 2, 90, 24, 2, 12, 256, 200, true, true, true, 1},
    {"D 192, one head each", 1, 4, 70, 3, 3, 1, 192, 131, true, true, false, 2},
    {"D 64, 4 groups of 7", 1, 5, 300, 28, 4, 7, 64, 513, true, false, true},
    {"D 128, 2 groups of 40", 1, 3, 90, 80, 2, 40, 128, 99, true, true, false, 1},
    {"D 64, sums of 8", 2, 2, 90, 64, 1, 8, 64, 70, true},
    {"D 192, 160 heads joined", 1, 2, 90, 160, 1, 160, 192, 130, false, false, true, 2},
    {"D 256, 96 heads", 1, 2, 90, 96, 1, 24, 256, 70, false, true, true},
    {"D 128, huge scores", 2, 2, 90, 32, 2, 16, 128, 140, true, false, true, 2, 0.9f, false, false,
     false, -1e9f},
    {"D 128, most queries empty", 1, 20, 90, 16, 1, 16, 128, 260, false, false, true, 0, 0.f, false,
     false, true},
    {"D 64, no slots", 1, 3, 10, 16, 1, 16, 64, 0},
    {"D 64, no keys", 1, 3, 0, 16, 2, 8, 64, 130},
};

}  // namespace jax_dsa
