// The work tiles of the FP8 matmul, and the order in which persistent CTAs compute them.
#pragma once

#include "common/cluster.cuh"
#include "fp8/matmul.h"

namespace jax_dsa::fp8 {

inline constexpr int kBlockK = 128;       // elements of K in a stage; a row of codes has 128 bytes
inline constexpr int kBColumns = 128;     // rows of b, columns of the product, that share a scale
inline constexpr int kTileGroupRows = 8;  // rows of tiles that the scheduler walks column by column

// A tile of the product, and the K blocks that this CTA adds up for it.
struct WorkTile {
  int batch;
  int row, column;     // of the first element of the tile
  int k_begin, k_end;  // range of K blocks
};

// The numbers of work tiles. The tiles of a cluster, which are side by side, count as one.
template <typename Tr>
struct Tiles {
  int rows, columns;  // of one batch entry
  int all;
  __host__ __device__ explicit Tiles(const Fp8MatmulParams& p)
      : rows(static_cast<int>(ceil_div(p.m, int64_t{Tr::kRows}))),
        columns(static_cast<int>(ceil_div(p.n, int64_t{Tr::kClusterSize * Tr::kColumns}))),
        all(static_cast<int>(p.batch) * rows * columns) {}
};

// The static tile scheduler: cluster c takes tile indices c, c + clusters, and so on. Tile indices
// go down kTileGroupRows rows before they go to the next column. So the work tiles that are
// computed at the same time cover few rows and few columns, and their operands stay in the L2
// cache.
template <typename Tr>
struct TileScheduler {
  Tiles<Tr> tiles;
  int tile_index;
  WorkTile work_tile;

  __device__ explicit TileScheduler(const Fp8MatmulParams& p)
      : tiles(p),
        tile_index(static_cast<int>(blockIdx.x) / Tr::kClusterSize),
        work_tile{0, 0, 0, 0, static_cast<int>(ceil_div(p.k, int64_t{kBlockK}))} {}

  __device__ bool next() {
    if (tile_index >= tiles.all) return false;
    const int tiles_per_batch = tiles.rows * tiles.columns;
    const int batch = tile_index / tiles_per_batch, tile = tile_index - batch * tiles_per_batch;
    const int group = tile / (kTileGroupRows * tiles.columns) * kTileGroupRows;
    const int within = tile - group * tiles.columns, high = min(kTileGroupRows, tiles.rows - group);
    const int column = within / high, row = group + within - column * high;
    int rank = 0;
    if constexpr (Tr::kClusterSize > 1) rank = cluster_rank();
    work_tile.batch = batch;
    work_tile.row = row * Tr::kRows;
    work_tile.column = (column * Tr::kClusterSize + rank) * Tr::kColumns;
    tile_index += static_cast<int>(gridDim.x) / Tr::kClusterSize;
    return true;
  }
};

}  // namespace jax_dsa::fp8
