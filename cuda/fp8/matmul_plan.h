// Which kernel multiplies, with which tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8/matmul.h"

namespace jax_dsa::fp8 {

struct Plan {
  bool few;   // rows; else:
  bool pair;  // of blocks in a cluster
  int rows;   // of a tile
  int parts;  // of K, of few rows
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
    return {true, false, rows, parts};
  }
  // A pair has an even number of tiles' columns.
  const int64_t columns = ceil_div(p.n, int64_t{128});
  const bool pair = columns % 2 == 0 || columns > 16;
  const int64_t places = std::max(processors / (pair ? 2 : 1), 1);
  const auto rounds = [&](int rows) {
    return ceil_div(tiles(rows, pair ? 256 : 128), places) * rows;
  };
  // Products of tiles of 128 rows take a twentieth longer.
  return {false, pair, 20 * rounds(256) <= 21 * rounds(128) ? 256 : 128, 1};
}

}  // namespace jax_dsa::fp8
