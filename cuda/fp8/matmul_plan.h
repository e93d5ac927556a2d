// Chooses the kernel of the FP8 matmul and its tile sizes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8/matmul.h"

namespace jax_dsa::fp8 {

struct Plan {
  bool few_rows;      // whether to use the kernel of matmul_few.cuh
  bool cta_pair;      // many rows: whether a cluster has two CTAs
  int rows, columns;  // of a work tile
  int k_splits;       // few rows: CTAs that share the K of a work tile
  int ctas_per_sm;
};

inline Plan plan(const Fp8MatmulParams& p, int num_sms) {
  const auto tiles = [&](int64_t rows, int64_t columns) {
    return p.batch * ceil_div(p.m, rows) * ceil_div(p.n, columns);
  };
  if (p.m <= 128 || 2 * tiles(128, 128) <= num_sms) {
    const int rows = p.m <= 16 ? 16 : p.m <= 32 ? 32 : p.m <= 64 ? 64 : 128;
    const int columns = rows <= 32 ? 64 : 128;
    // At most one CTA per SM, or two of 128 rows, and at least four K blocks per CTA.
    const int64_t max_ctas = rows == 128 ? 2 * num_sms : num_sms;
    int k_splits = 1;
    while (k_splits < 8 && 2 * tiles(rows, columns) * k_splits <= max_ctas &&
           ceil_div(p.k, int64_t{128}) >= 8 * k_splits) {
      k_splits *= 2;
    }
    // Two CTAs per SM have more stages each. Three are better if two would leave a small second
    // wave.
    const int ctas_per_sm = rows <= 32 && tiles(rows, columns) > 2 * num_sms ? 3 : 2;
    return {true, false, rows, columns, k_splits, ctas_per_sm};
  }
  // Choose the tile size with the least estimated time: the number of waves times the time of one
  // work tile, in hundredths of that of 256 rows (measured).
  // With an odd number of columns of tiles, pairs leave one CTA of the last pair idle.
  const bool cta_pair = ceil_div(p.n, int64_t{128}) % 2 == 0 || p.n > 16 * 128;
  Plan best = {};
  int64_t least = INT64_MAX;
  const auto consider = [&](int rows, bool cta_pair, int tile_time) {
    const int64_t clusters = std::max(num_sms / (cta_pair ? 2 : 1), 1);
    const int64_t time = tile_time * ceil_div(tiles(rows, cta_pair ? 256 : 128), clusters);
    if (time < least) least = time, best = {false, cta_pair, rows, 128, 1, 1};
  };
  consider(256, cta_pair, 100);
  consider(192, cta_pair, 75);
  consider(128, false, 57);
  return best;
}

}  // namespace jax_dsa::fp8
