// What the portable kernels share that walk over the union of the lists of a tile of queries.
//
// A CTA takes a work tile, or a part of one: kRows of its 128 rows. For each step, it builds one
// bit per query and key in shared memory. Keys and values that no query of the tile sees may hold
// anything; their copies write zeros.
#pragma once

#include "common/mma_tile.cuh"
#include "masked_attention/softmax.cuh"
#include "sparse_attention/lists.cuh"
#include "sparse_attention/steps.cuh"

namespace jax_dsa::sparse_attention {

// kD, kE: maximum dims. kRowTiles: tiles of 16 rows per warp. kKeys: keys of a step.
template <DType kType_, int kD_, int kE_, int kRowTiles_, int kKeys_>
struct PortableTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_, kRowTiles = kRowTiles_, kKeys = kKeys_;
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64, kWords = kKeys / 32;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowTiles * 16, kRows = kWarps * kWarpRows;
  static constexpr int kParts = kTileRows / kRows;  // CTAs of a work tile
};

// What a CTA knows of its work tile.
template <int kKeys>
struct StepTile {
  Steps<kKeys> steps;
  WorkTile tile;
  int heads;            // per KV head
  int first_row, rows;  // of the CTA, within the work tile
};

// What a walk keeps in shared memory, to save registers: the work tile, and the bits of three
// steps: the one that is multiplied, the one whose copies are issued, and the next.
template <typename Tr>
struct StepBits {
  StepTile<Tr::kKeys> tile;
  static constexpr int kBuffers = 3, kRounds = kMaxTileQueries / 32;
  uint32_t bits[kBuffers][kMaxTileQueries][Tr::kWords];
  uint32_t seen[kBuffers][kRounds][Tr::kWords];  // the union over each 32 queries
  uint8_t query_of_row[Tr::kRows];
};

// The walk of a CTA over the steps of its tile. All threads call the functions.
template <typename Tr, typename Params>
class StepWalk {
  static constexpr int kKeys = Tr::kKeys, kWords = Tr::kWords;

 public:
  __device__ StepWalk(const Params& p, const masked_attention::TileScheduler& scheduler,
                      const TileLists& lists, StepBits<Tr>& shared)
      : p(p), lists(lists), shared(shared), at(shared.tile) {
    const int heads = p.heads / p.groups, first_row = blockIdx.x % Tr::kParts * Tr::kRows;
    const int thread = thread_index();
    if (thread == 0) {
      StepTile<kKeys> x = {Steps<kKeys>(p.lists.block_size),
                           scheduler.work_tile(blockIdx.x / Tr::kParts), heads, first_row, 0};
      x.steps.start(lists, p.groups, x.tile);
      const int queries = static_cast<int>(min(p.queries - x.tile.query, int64_t{p.tile_queries}));
      x.rows = max(min(queries * heads - first_row, Tr::kRows), 0);
      shared.tile = x;
    }
    if (thread < Tr::kRows) {
      shared.query_of_row[thread] = min((first_row + thread) / heads, p.tile_queries - 1);
    }
    __syncthreads();
    found[0] = find(0), found[1] = find(1);
  }

  __device__ int rows() const { return at.rows; }
  __device__ int batch() const { return at.tile.batch; }
  __device__ int step_count() const { return at.rows > 0 ? ceil_div(at.steps.keys(), kKeys) : 0; }

  // The index of a row of the CTA in [batch, queries, heads]. Row r exists if r < rows.
  __device__ int64_t row_index(int row) const {
    const int query = (at.first_row + row) / at.heads;
    return (at.tile.batch * p.queries + at.tile.query + query) * p.heads + at.tile.head * at.heads +
           at.first_row + row - query * at.heads;
  }

  // Builds the bits of a step. A barrier must separate this from their use, and from the use of
  // those of three steps before.
  __device__ __forceinline__ void build_bits(int step) const {
    const int lane = thread_index() % 32, buffer = step % StepBits<Tr>::kBuffers;
    const int boxes = max(1, 32 >> at.steps.box_shift), width = 32 / boxes;
    const int rounds = ceil_div(p.tile_queries, 32);
#pragma unroll 1
    for (int task = thread_index() / 32; task < rounds * kWords; task += Tr::kWarps) {
      const int r = task / kWords, w = task % kWords;
      const int key = step * kKeys + 32 * w + lane * width, entry = key >> at.steps.block_shift;
      const bool exists = lane < boxes && entry < at.steps.entries;
      const int row = exists ? row_of(key) : 0;
      const uint32_t sees = exists ? __ldg(at.steps.queries + int64_t{entry} * lists.words + r) : 0;
      const int64_t query = at.tile.query + 32 * r + lane;
      const int end = 32 * r + lane < p.tile_queries && query < p.queries
                          ? key_end(p.lists, at.tile.batch * p.queries + query, p.keys)
                          : 0;
      const uint32_t bits = word_bits(sees, row, end, boxes, width);
      shared.bits[buffer][32 * r + lane][w] = bits;
      const uint32_t seen = __reduce_or_sync(~0u, bits);
      if (lane == 0) shared.seen[buffer][r][w] = seen;
    }
  }

  // Sets the scores of this thread that its rows do not see to -inf. `row` is its first row.
  template <int kScores>
  __device__ __forceinline__ void mask(float (&s)[kScores], int step, int row) const {
    const auto& bits = shared.bits[step % StepBits<Tr>::kBuffers];
    mask_rows(s, bits[shared.query_of_row[row]], bits[shared.query_of_row[row + 8]]);
  }

  // Issues the copies of the keys or values of a step: x is p.k or p.v. The step is the current one
  // (kNext = 0) or the next one.
  template <int kNext, int kBlocks>
  __device__ __forceinline__ void load(uint32_t to, const void* x, int dim, int step) const {
    const int rounds = ceil_div(p.tile_queries, 32);
    uint32_t seen[kWords] = {};
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        seen[w] |= shared.seen[step % StepBits<Tr>::kBuffers][r][w];
      }
    }
    const int64_t stride = int64_t{p.groups} * dim;
    const auto* const first =
        static_cast<const uint16_t*>(x) + (at.tile.batch * p.keys * p.groups + at.tile.head) * dim;
    gather_tile<kKeys, kBlocks, Tr::kThreads>(to, dim, [&](int row) {
      // The lookups are those of `find`.
      const int from = __shfl_sync(~0u, found[kNext], row / kRowStep * 4 + thread_index() % 32 / 8);
      uint32_t word = seen[0];
#pragma unroll
      for (int w = 1; w < kWords; ++w) word = row / 32 == w ? seen[w] : word;
      return word >> row % 32 & 1 ? first + from * stride : nullptr;
    });
  }

  // Makes the next step the current one, after which `step` is the next one.
  __device__ __forceinline__ void advance(int step) { found[0] = found[1], found[1] = find(step); }

 private:
  static constexpr int kRowStep = Tr::kThreads / 8;

  // The row of k of a key of the union.
  __device__ int row_of(int key) const {
    return __ldg(at.steps.rows + (key >> at.steps.block_shift)) +
           (key & ((1 << at.steps.block_shift) - 1));
  }
  // Each lane looks up one row of a step for its warp. Rows that do not exist are not seen.
  __device__ int find(int step) const {
    const int lane = thread_index() % 32;
    const int key = step * kKeys + lane / 4 % (kKeys / kRowStep) * kRowStep +
                    thread_index() / 32 * 4 + lane % 4;
    return key >> at.steps.block_shift < at.steps.entries ? row_of(key) : 0;
  }

  const Params& p;
  const TileLists& lists;
  StepBits<Tr>& shared;
  const StepTile<kKeys>& at;
  int found[2];  // what this lane has looked up for the current step and the next one
};

// Issues the copies of the rows of a CTA from x [batch, queries, heads, dim].
template <typename Tr, int kBlocks, typename Walk>
__device__ __forceinline__ void load_rows(const Walk& walk, uint32_t to, const void* x, int dim) {
  gather_tile<Tr::kRows, kBlocks, Tr::kThreads>(to, dim, [&](int row) {
    return row < walk.rows() ? static_cast<const uint16_t*>(x) + walk.row_index(row) * dim
                             : nullptr;
  });
}

// Stores a warp's rows of the tile at `from` to x [batch, queries, heads, dim].
template <typename Tr, int kBlocks, typename Walk>
__device__ __forceinline__ void store_rows(const Walk& walk, uint32_t from, int warp_row, void* x,
                                           int dim) {
  scatter_tile<Tr::kRows, Tr::kWarpRows, kBlocks>(from + warp_row * 128, dim, [&](int row) {
    return warp_row + row < walk.rows()
               ? static_cast<uint16_t*>(x) + walk.row_index(warp_row + row) * dim
               : nullptr;
  });
}

}  // namespace jax_dsa::sparse_attention
