// The KV splits of a CTA's work range (plan.cuh).
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "mqa_decode/plan.cuh"

namespace jax_dsa::mqa_decode {

// What consumers must know about a KV split.
struct KvSplit {
  int batch, group, row;  // `row` is the first of its row tile
  int partial_index;      // index of its partial results; -1 if its results are final
  bool has_tiles;
};
// Returns which rows a CTA multiplies if work tiles are divided by static splits.
__device__ inline KvSplit static_split(const Decode& p, int tile_rows) {
  const int work_tile = p.cta_group() / p.by_static_splits;
  const int batch = work_tile / p.per_request, tile = work_tile - batch * p.per_request;
  const int group = tile / p.row_passes, pass = tile - group * p.row_passes;
  return {
      .batch = batch, .group = group, .row = (pass * p.cta_group_size + p.cta_rank()) * tile_rows};
}
// Partial outputs are lines of 128 floats. If kWide, a line has the accumulator layout: lines are
// ordered by column half, warp and column group (8 columns), and a lane has two floats of a row and
// two of the row 8 below. Otherwise rows follow one another, and a lane has four neighboring floats
// of one row. The constructor computes where a lane's four floats of a line belong.
template <bool kWide>
struct PartialLine {
  static constexpr int kColumns = kWide ? 8 : 128;  // from one line to the next line of the same
                                                    // rows
  int row, column;

  __device__ PartialLine(int line, int value_dim) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWide) {
      row = line / 32 % 4 * 16 + lane / 4;
      column = line / 128 * 256 + line % 32 * 8 + lane % 4 * 2;
    } else {
      row = quotient(line * 128 + lane * 4, value_dim);
      column = line * 128 + lane * 4 - row * value_dim;
    }
  }
};
// Splits that are kept. Results of a split are written after the keys of the next splits have
// arrived.
inline constexpr int kSplitsKept = 4;

// Iterates over the KV splits of a CTA's work range. Used by a whole warp.
struct SplitIterator {
  const Decode& p;
  const WorkRange& range;
  int tile_rows;
  int index = -1;   // of the split
  int batch, tile;  // the split's request, and the work tile's number within the request
  VisibleKeys visible;
  KvSplit split;
  int first_key, tiles;  // the split's first key and number of key tiles

  __device__ SplitIterator(const Decode& p, const WorkRange& range, int tile_rows)
      : p(p),
        range(range),
        tile_rows(tile_rows),
        batch(range.batch),
        tile(range.tile),
        visible(range.visible) {}

  __device__ bool next() {
    if (++index >= range.splits()) return false;
    if (index > 0 && ++tile == p.per_request) {
      tile = 0;
      visible = visible_keys_by_warp(p, ++batch);
    }
    const int group = tile / p.row_passes;
    const int row = ((tile - group * p.row_passes) * p.cta_group_size + p.cta_rank()) * tile_rows;
    const int from = index == 0 ? range.from : 0;
    const int to = index + 1 == range.splits() ? range.to : INT_MAX;
    const int first = min(from, visible.tiles());
    first_key = visible.first_key() + first * kTile;
    tiles = row < p.rows ? max(min(to, visible.tiles()) - first, 0) : 0;
    const bool final = from == 0 && to == INT_MAX;
    split = {batch, group, row, final ? -1 : static_cast<int>(blockIdx.x) * 2 + (from == 0),
             tiles > 0};
    return true;
  }
};

// Launches the kernel that combines the splits of work tiles of `tile_rows` rows (combine.cuh). It
// may start under programmatic dependent launch.
cudaError_t launch_combine(const Decode& p, int tile_rows, bool wide, cudaStream_t stream);

}  // namespace jax_dsa::mqa_decode
