// Test problems of block masks and their exact solutions, for the emulator and the GPU.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <random>
#include <vector>

#include "block_mask/block_mask.h"

namespace block_mask_problem {

using jax_dsa::AttentionMask;
using jax_dsa::BlockMaskParams;
using jax_dsa::ceil_div;

enum Ranges { kNoRanges, kCausal, kRandom, kShared };

struct Case {
  const char* name;
  int batch, heads, queries, keys, block_q, block_k;
  // No mask array if mask_queries is 0.
  int mask_queries, mask_batch = 1, mask_heads = 1;
  Ranges ranges = kNoRanges;
  bool segments = false;
  // No other block mask ("map") if map_heads is 0.
  int map_heads = 0, map_batch = 1, map_block_q = 128, map_block_k = 128;
  int offset = 0;     // bytes between an aligned address and the mask
  int first_row = 0;  // row of the first query in the map
};

inline const Case kCases[] = {
    {"one key", 1, 1, 1, 1, 1, 8, 1},
    {"whole tiles", 1, 1, 128, 512, 128, 128, 128},
    {"whole tiles, unaligned", 1, 1, 70, 256, 64, 64, 70, 1, 1, kNoRanges, false, 0, 1, 0, 0, 3},
    {"of each head", 2, 3, 150, 640, 64, 128, 150, 2, 3},
    {"shared by heads and batch", 2, 3, 40, 336, 16, 48, 40},
    {"shared by groups", 2, 4, 33, 160, 16, 32, 33, 2, 2},
    {"odd keys", 1, 2, 62, 213, 16, 16, 62, 1, 2},
    {"odd tiles", 1, 1, 62, 400, 5, 24, 62},
    {"tiles of 8 keys", 1, 2, 20, 333, 3, 8, 20, 1, 2},
    {"wide tiles", 1, 1, 20, 1600, 8, 1040, 20},
    {"wide tiles, unaligned", 2, 1, 20, 777, 8, 520, 20, 2},
    {"tall tiles", 1, 1, 700, 48, 520, 16, 700},
    {"tiles larger than the mask", 1, 1, 13, 30, 128, 128, 13},
    {"one row for all queries", 2, 2, 130, 384, 64, 128, 1, 2, 1},
    {"one row for all queries, odd keys", 2, 2, 13, 301, 4, 40, 1, 2, 2, kRandom},
    {"padding, alone", 3, 1, 1, 272, 1, 128, 1, 3},
    {"causal, no mask", 1, 1, 300, 300, 64, 64, 0, 1, 1, kCausal},
    {"causal and a mask", 1, 2, 300, 304, 64, 64, 300, 1, 2, kCausal},
    {"random ranges and a mask", 2, 1, 213, 213, 32, 32, 213, 2, 1, kRandom},
    {"shared ranges", 2, 2, 100, 192, 32, 64, 100, 1, 2, kShared},
    {"segments", 2, 1, 100, 213, 32, 32, 0, 1, 1, kNoRanges, true},
    {"segments, ranges and a mask", 2, 2, 150, 160, 32, 32, 150, 1, 2, kRandom, true},
    {"a map", 2, 2, 150, 272, 32, 128, 150, 2, 1, kNoRanges, false, 2, 1},
    {"a map, shifted, of odd tiles", 1, 4, 50, 333, 128, 128, 50, 1, 2, kNoRanges, false, 4, 1, 24,
     40, 0, 35},
    {"a map and one row", 2, 1, 140, 256, 128, 128, 1, 2, 1, kNoRanges, false, 1, 2, 64, 64},
    {"everything", 2, 2, 90, 256, 64, 64, 90, 1, 2, kRandom, true, 1, 2, 16, 32},
    {"no queries", 1, 1, 0, 64, 16, 16, 0},
    {"no keys", 1, 1, 20, 0, 16, 16, 20},
    {"no batch", 0, 1, 20, 30, 16, 16, 20},
};

// Returns a case with random sizes and options.
inline Case random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto one_of = [&](auto... x) {
    const int choices[] = {x...};
    return choices[random() % sizeof...(x)];
  };
  Case c = {"random"};
  c.batch = one_of(1, 2), c.heads = one_of(1, 2, 4);
  c.queries = 1 + random() % 150;
  c.keys = 1 + random() % 500;
  if (random() % 2) c.keys = (c.keys + 15) / 16 * 16;
  c.block_q = 1 + random() % one_of(8, 40, 128);
  c.block_k = 8 * (1 + random() % one_of(2, 10, 80));
  if (random() % 2) c.block_k = (c.block_k + 15) / 16 * 16;
  c.mask_queries = one_of(0, 1, c.queries, c.queries);
  c.mask_batch = one_of(1, c.batch), c.mask_heads = one_of(1, c.heads);
  c.ranges = static_cast<Ranges>(random() % 4);
  c.segments = random() % 4 == 0;
  c.map_heads = one_of(0, 0, 1, c.heads), c.map_batch = one_of(1, c.batch);
  c.map_block_q = 1 + random() % 60, c.map_block_k = 8 * (1 + random() % 20);
  c.offset = one_of(0, 0, 5);
  c.first_row = random() % 50;
  return c;
}

struct Problem {
  Case c;
  std::vector<uint8_t> mask, map_bits;
  std::vector<int32_t> starts, ends, q_segments, kv_segments, rows, map_tiles;
  int64_t map_slots = 0;
  int map_rows = 0, map_columns = 0;
  // The expected results.
  int64_t tile_rows, tile_columns;
  int64_t slots = 1;                    // slots of `bits`
  std::vector<uint8_t> occupied, full;  // [batch, heads, tile_rows, tile_columns]
  std::vector<int32_t> tiles, all_tiles;
  std::vector<uint8_t> bits, all_bits;  // results of pack, and of compress
  std::vector<uint8_t>
      first_bits;  // result of pack into a single slot; the other tiles are dropped

  bool in_map(int b, int h, int t, int s) const {
    const int64_t map_index =
        (c.map_batch == 1 ? 0 : b) * c.map_heads + h / (c.heads / c.map_heads);
    const int row = rows[t], i = row / c.map_block_q, j = s / c.map_block_k;
    const int kind = map_tiles[(map_index * map_rows + i) * map_columns + j];
    if (kind < 0 || kind >= map_slots) return kind == -1;
    const int64_t line = (map_index * map_slots + kind) * c.map_block_q + row % c.map_block_q;
    return map_bits[line * (c.map_block_k / 8) + s % c.map_block_k / 8] >> (s % 8) & 1;
  }
  bool visible(int b, int h, int t, int s) const {
    if (c.ranges != kNoRanges) {
      const int64_t at = (c.ranges == kShared ? 0 : b) * int64_t{c.queries} + t;
      if (s < starts[at] || s >= ends[at]) return false;
    }
    if (c.segments &&
        q_segments[b * int64_t{c.queries} + t] != kv_segments[b * int64_t{c.keys} + s]) {
      return false;
    }
    if (c.map_heads > 0 && !in_map(b, h, t, s)) return false;
    if (c.mask_queries == 0) return true;
    const int64_t mask_index =
        (c.mask_batch == 1 ? 0 : b) * c.mask_heads + h / (c.heads / c.mask_heads);
    const int64_t row = mask_index * c.mask_queries + (c.mask_queries == 1 ? 0 : t);
    return mask[c.offset + row * c.keys + s];
  }
};

// Returns the parameters of a launch. `copy` copies an array to where the kernel reads it.
template <typename Copy>
BlockMaskParams params(const Problem& x, Copy copy) {
  const Case& c = x.c;
  BlockMaskParams p = {};
  if (c.mask_queries > 0) p.mask = copy(x.mask) + c.offset;
  p.mask_batch = c.mask_batch, p.mask_heads = c.mask_heads, p.mask_queries = c.mask_queries;
  AttentionMask& m = p.others;
  if (c.ranges != kNoRanges) {
    m.starts = copy(x.starts), m.ends = copy(x.ends);
    m.range_stride = c.ranges == kShared ? 0 : c.queries;
  }
  if (c.segments) m.q_segments = copy(x.q_segments), m.kv_segments = copy(x.kv_segments);
  if (c.map_heads > 0) {
    m.map_rows = copy(x.rows), m.tiles = copy(x.map_tiles), m.bits = copy(x.map_bits);
    m.slots = x.map_slots, m.map_batch = c.map_batch, m.map_heads = c.map_heads;
    m.tile_rows = x.map_rows, m.tile_columns = x.map_columns;
    m.block_q = c.map_block_q, m.block_k = c.map_block_k;
  }
  p.batch = c.batch, p.heads = c.heads, p.queries = c.queries, p.keys = c.keys;
  p.block_q = c.block_q, p.block_k = c.block_k;
  return p;
}

inline void solve(Problem& x) {
  const Case& c = x.c;
  x.tile_rows = ceil_div(c.queries, c.block_q), x.tile_columns = ceil_div(c.keys, c.block_k);
  const int64_t tiles = x.tile_rows * x.tile_columns, maps = int64_t{c.batch} * c.heads;
  const int64_t tile_bytes = int64_t{c.block_q} * c.block_k / 8;
  x.occupied.resize(maps * tiles), x.full = x.occupied;
  x.tiles.resize(maps * tiles), x.all_tiles = x.tiles;
  x.all_bits.resize(maps * tiles * tile_bytes);
  for (int64_t m = 0; m < maps; ++m) {
    int next = 0;
    for (int64_t i = 0; i < tiles; ++i) {
      bool any_visible = false, all_visible = true;
      uint8_t* const bits = x.all_bits.data() + (m * tiles + i) * tile_bytes;
      for (int r = 0; r < c.block_q; ++r) {
        for (int k = 0; k < c.block_k; ++k) {
          const int64_t t = i / x.tile_columns * c.block_q + r;
          const int64_t s = i % x.tile_columns * c.block_k + k;
          if (t >= c.queries || s >= c.keys) continue;
          const bool seen = x.visible(m / c.heads, m % c.heads, t, s);
          any_visible = any_visible || seen, all_visible = all_visible && seen;
          bits[r * (c.block_k / 8) + k / 8] |= seen << k % 8;
        }
      }
      x.occupied[m * tiles + i] = any_visible, x.full[m * tiles + i] = all_visible;
      x.tiles[m * tiles + i] = !any_visible ? -2 : all_visible ? -1 : next++;
      x.all_tiles[m * tiles + i] = !any_visible ? -2 : all_visible ? -1 : i;
    }
    if (next > 0)
      x.slots = std::max<int64_t>(x.slots, next + 1);  // includes a slot that no tile has
  }
  x.bits.resize(maps * x.slots * tile_bytes);
  for (int64_t i = 0; i < maps * tiles; ++i) {
    if (x.tiles[i] < 0) continue;
    std::copy_n(x.all_bits.data() + i * tile_bytes, tile_bytes,
                x.bits.data() + (i / tiles * x.slots + x.tiles[i]) * tile_bytes);
  }
  for (int64_t m = 0; m < maps; ++m) {
    const auto first = x.bits.begin() + m * x.slots * tile_bytes;
    x.first_bits.insert(x.first_bits.end(), first, first + tile_bytes);
  }
}

// Makes a problem with random bits and with empty and full patches, so that tiles of all kinds
// occur.
inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  Problem x = {c};
  const int64_t lines = int64_t{c.mask_batch} * c.mask_heads * c.mask_queries;
  x.mask.resize(c.offset, 0xff);  // bytes before the mask, which are not 0 or 1
  for (int64_t line = 0; line < lines; ++line) {
    for (int s = 0; s < c.keys; ++s) {
      const int kind = (s / std::max(c.block_k, 8) + line / c.block_q) % 5;
      const int odd = random() % (c.mask_queries == 1 ? 2 : 600) == 0;
      x.mask.push_back(kind == 0   ? 0
                       : kind == 1 ? 1
                       : kind == 2 ? odd
                       : kind == 3 ? !odd
                                   : random() % 2);
    }
  }
  for (int b = 0; b < c.batch; ++b) {
    for (int t = 0; t < c.queries; ++t) {
      int start = INT_MIN, end = t + 1;
      if (c.ranges == kRandom) {
        start = static_cast<int>(random() % (c.keys + 40)) - 30;
        end = random() % 9 == 0 ? INT_MIN : start + static_cast<int>(random() % (c.keys + 1));
        if (random() % 9 == 0) start = INT_MAX, end = INT_MAX;
        if (random() % 9 == 0) start = INT_MIN, end = INT_MAX;
      }
      x.starts.push_back(start), x.ends.push_back(end);
      x.q_segments.push_back(t / 60 - (t % 50 == 7 ? 100 : 0));
    }
    for (int s = 0; s < c.keys; ++s) x.kv_segments.push_back(s % 40 == 39 ? 77 : s / 60);
  }
  if (c.map_heads > 0) {
    for (int t = 0; t < c.queries; ++t) x.rows.push_back(c.first_row + t);
    x.map_rows = ceil_div(c.first_row + c.queries, c.map_block_q);
    x.map_columns = ceil_div(c.keys, c.map_block_k);
    x.map_slots = int64_t{x.map_rows} * x.map_columns;
    const int64_t maps = int64_t{c.map_batch} * c.map_heads;
    x.map_tiles.resize(maps * x.map_slots);
    x.map_bits.resize(maps * x.map_slots * c.map_block_q * c.map_block_k / 8);
    for (int64_t m = 0; m < maps; ++m) {
      int next = 0;
      for (int64_t i = 0; i < x.map_slots; ++i) {
        const int kind = static_cast<int>(random() % 8);  // one tile in eight has an invalid slot
        x.map_tiles[m * x.map_slots + i] = kind < 2    ? -2
                                           : kind < 4  ? -1
                                           : kind == 4 ? INT_MAX
                                                       : next++;
      }
    }
    for (auto& bits : x.map_bits) bits = static_cast<uint8_t>(random());
  }
  solve(x);
  return x;
}

}  // namespace block_mask_problem
