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
  int blocks;         // on a SM
};

inline Plan plan(const Fp8MatmulParams& p, int num_sms) {
  const auto tiles = [&](int64_t rows, int64_t columns) {
    return p.batch * ceil_div(p.m, rows) * ceil_div(p.n, columns);
  };
  if (p.m <= 128 || 2 * tiles(128, 128) <= num_sms) {
    const int rows = p.m <= 16 ? 16 : p.m <= 32 ? 32 : p.m <= 64 ? 64 : 128;
    const int columns = rows <= 32 ? 64 : 128;
    // A block for each SM, or two of 128 rows; four blocks of K or more in each.
    const int64_t most = rows == 128 ? 2 * num_sms : num_sms;
    int parts = 1;
    while (parts < 8 && 2 * tiles(rows, columns) * parts <= most &&
           ceil_div(p.k, int64_t{128}) >= 8 * parts) {
      parts *= 2;
    }
    // Two, with more bytes on their way each, unless a second round would be a small one.
    const int blocks = rows <= 32 && tiles(rows, columns) > 2 * num_sms ? 3 : 2;
    return {true, false, rows, columns, parts, blocks};
  }
  // The tiles that take the least time: rounds of all SMs, each of so many hundredths.
  const bool pair = ceil_div(p.n, int64_t{128}) % 2 == 0 || p.n > 16 * 128;  // side by side
  Plan best = {};
  int64_t least = INT64_MAX;
  const auto consider = [&](int rows, bool pair, int each) {
    const int64_t places = std::max(num_sms / (pair ? 2 : 1), 1);
    const int64_t time = each * ceil_div(tiles(rows, pair ? 256 : 128), places);
    if (time < least) least = time, best = {false, pair, rows, 128, 1, 1};
  };
  if (!p.b_rows) consider(256, pair, 100);
  consider(192, pair, 75);
  consider(128, false, p.b_rows ? 59 : 57);
  return best;
}

}  // namespace jax_dsa::fp8
