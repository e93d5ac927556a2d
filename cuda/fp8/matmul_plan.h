// Which kernel multiplies, with which tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8/matmul.h"

namespace jax_dsa::fp8 {

struct Plan {
  bool few;           // rows; else:
  bool pair;          // of blocks in a cluster
  int rows, columns;  // of a tile
  int parts;          // of K, of few rows
};

inline Plan plan(const Fp8MatmulParams& p, int processors) {
  const auto tiles = [&](int64_t rows, int64_t columns) {
    return p.batch * ceil_div(p.m, rows) * ceil_div(p.n, columns);
  };
  if (p.m <= 128 || 2 * tiles(128, 128) <= processors) {
    // A block for each multiprocessor, or two of 128 rows; four blocks of K or more in each.
    const int rows = p.m <= 64 ? 64 : 128;
    int parts = 1;
    while (parts < 8 && 128 * tiles(rows, 128) * parts <= processors * rows &&
           ceil_div(p.k, int64_t{128}) >= 8 * parts) {
      parts *= 2;
    }
    return {true, false, rows, 128, parts};
  }
  // A pair has neighbouring tiles: of 128x192 and 128x128 one below the other, else side by side.
  struct Tile {
    int rows, columns;
    int clocks;  // of a multiprocessor, for 128 of K
  };
  constexpr Tile kTiles[] = {{128, 192, 816}, {256, 128, 1270}, {128, 128, 650}};
  Plan best = {};
  int64_t least = INT64_MAX;
  for (const auto& [rows, columns, clocks] : kTiles) {
    const bool below = columns >= rows;
    const int64_t along = below ? ceil_div(p.m, int64_t{rows}) : ceil_div(p.n, int64_t{columns});
    const bool pair = along % 2 == 0 || along > 16;
    const int64_t places = std::max(processors / (pair ? 2 : 1), 1);
    const int64_t all =
        tiles(below && pair ? 2 * rows : rows, !below && pair ? 2 * columns : columns);
    const int64_t time = ceil_div(all, places) * clocks;
    if (time < least) least = time, best = {false, pair, rows, columns, 1};
  }
  return best;
}

}  // namespace jax_dsa::fp8
