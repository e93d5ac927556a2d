// A problem of masked attention, and its solution in float64.
#pragma once

#include <cuda_bf16.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "masked_attention/masked_attention.h"

namespace jax_dsa {

enum Ranges { kNoRanges, kCausal, kWindow, kRandom, kShared };

struct AttentionCase {
  const char* name;
  int batch, queries, keys, heads, groups, dim, value_dim;
  Ranges ranges = kNoRanges;
  bool segments = false;
  int map_heads = 0, map_batch = 1;  // no map if 0
  int block_q = 128;
  DType dtype = DType::kBF16;
  float softcap = 0.f;
  float scale = 0.f;  // 0: dim^-1/2
  int first_row = 0;  // of the map, of the first query
};

inline uint16_t to_16(DType dtype, float x) {
  uint16_t bits;
  if (dtype == DType::kF16) {
    const _Float16 y = static_cast<_Float16>(x);
    memcpy(&bits, &y, 2);
  } else {
    const __nv_bfloat16 y = __float2bfloat16(x);
    memcpy(&bits, &y, 2);
  }
  return bits;
}
inline float from_16(DType dtype, uint16_t bits) {
  if (dtype == DType::kF16) {
    _Float16 y;
    memcpy(&y, &bits, 2);
    return static_cast<float>(y);
  }
  __nv_bfloat16 y;
  memcpy(&y, &bits, 2);
  return __bfloat162float(y);
}

struct AttentionProblem {
  AttentionCase c;
  float scale;
  std::vector<uint16_t> q, k, v;
  std::vector<int32_t> starts, ends, q_segments, kv_segments, rows, tiles;
  std::vector<uint8_t> bits;
  int64_t slots = 0;
  int tile_rows = 0, tile_columns = 0;
  static constexpr int kBlockK = 128;

  float at(const std::vector<uint16_t>& x, int64_t i) const { return from_16(c.dtype, x[i]); }

  bool in_map(int b, int n, int t, int s) const {
    const int64_t which = (c.map_batch == 1 ? 0 : b) * c.map_heads + n / (c.heads / c.map_heads);
    const int row = rows[t];
    const int kind = tiles[(which * tile_rows + row / c.block_q) * tile_columns + s / kBlockK];
    if (kind < 0) return kind == -1;
    const int64_t line = (which * slots + kind) * c.block_q + row % c.block_q;
    return bits[line * (kBlockK / 8) + s % kBlockK / 8] >> (s % 8) & 1;
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
  double score(int b, int n, int t, int s) const {
    const int64_t row = ((int64_t{b} * c.queries + t) * c.heads + n) * c.dim;
    const int64_t key = ((int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups)) * c.dim;
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) sum += double(at(q, row + d)) * at(k, key + d);
    sum *= scale;
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
    const int lines = c.first_row + c.queries;
    p.tile_rows = (lines + c.block_q - 1) / c.block_q, p.tile_columns = (c.keys + 127) / 128;
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
  // NaN in every key and value that no query of its head sees, and in queries that see no key.
  const int per_group = c.heads / c.groups;
  for (int b = 0; b < c.batch; ++b) {
    for (int g = 0; g < c.groups; ++g) {
      for (int s = 0; s < c.keys; ++s) {
        bool seen = false;
        for (int n = g * per_group; n < (g + 1) * per_group && !seen; ++n) {
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

}  // namespace jax_dsa
