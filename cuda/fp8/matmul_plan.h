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
  // Neighbouring tiles make pairs: of 256x128 side by side, of 128x192 one below the other.
  const int rows = p.b_rows ? 128 : 256, columns = p.b_rows ? 192 : 128;
  const int64_t along = p.b_rows ? ceil_div(p.m, int64_t{rows}) : ceil_div(p.n, int64_t{columns});
  const bool pair = along % 2 == 0 || along > 16;
  const int64_t places = std::max(processors / (pair ? 2 : 1), 1);
  const int64_t large = ceil_div(p.b_rows ? tiles(pair ? 2 * rows : rows, columns)
                                          : tiles(rows, pair ? 2 * columns : columns),
                                 places);
  // A product of 128x128 takes so many hundredths of a larger tile's.
  const int64_t small = ceil_div(tiles(128, 128), int64_t{processors}) * (p.b_rows ? 74 : 57);
  return small < 100 * large ? Plan{false, false, 128, 128, 1} : Plan{false, pair, rows, columns, 1};
}

}  // namespace jax_dsa::fp8
