// What the scores and the attention share: a thread block's queries, its walk over the blocks that
// they selected, and the products of rotated queries with a block's keys.
//
// The queries are of one group of heads. The warp behind those that multiply is the producer: its
// lane i has the list of query i's nodes, ascending, and all lanes together pass over the union of
// the lists. The block of children of each node is copied once, with a word of who takes it.
// Kernels differ in what of a block they copy and in what their warps do with the ones they take.
#pragma once

#include <climits>
#include <cmath>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "htree/htree.h"
#include "htree/rotate.cuh"

namespace jax_dsa::htree {

inline constexpr int kTileHeads = 16;  // of a warp
inline constexpr int kRingBytes = 192 * 1024;

// How a thread block is made up: warps that multiply, their registers, rows of a stage's blocks.
template <int kWarps_, int kRegisters_, int kStageRows_>
struct CtaShape {
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = (kWarps + 4) * 32;  // of the last four warps one is the producer
  static constexpr int kRegisters = kRegisters_;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kStageRows = kStageRows_;
  static_assert(kWarps % 4 == 0 && registers_fit(1, kWarps / 4, kRegisters, kProducerRegisters));
};
// Its twelve warps are one, two, three, four or six a query.
using AttendShape = CtaShape<12, 160, 96>;
// Scores need fewer registers.
using ScoresShape = CtaShape<16, 112, 64>;

// Some of the queries, and what the passes leave each other about them. A row is a (batch entry,
// group, query) of these, in that order.
struct QueryChunk {
  int first_batch, batch;
  int64_t first_query, queries;
  int64_t rows;

  float* importance;  // [rows, width], by ordinal
  int64_t width;
  int32_t* ends;      // [rows], ordinal of the last candidate
  int32_t* ordinals;  // [rows, K - 1], of the most important others
  int32_t* nodes;     // [layers - 1, rows, K]: what is selected in layers 1, 2, ...; then -1
  uint32_t* masks;    // [layers - 1, rows, K]: bit i of word o: ordinal r o + i is selected
};

struct Plan {
  HTreeFwdParams p;
  HTreeLayers layers;
  QueryChunk chunk;
  int group_heads;   // M
  int head_tiles;    // warps of a query
  int tile_queries;  // queries of a thread block
  int query_tiles;   // of the queries of a batch entry and group

  // For thread blocks of shape S.
  template <typename S>
  Plan shaped() const {
    Plan plan = *this;
    plan.tile_queries = S::kWarps / head_tiles;
    plan.query_tiles = static_cast<int>(ceil_div(chunk.queries, int64_t{plan.tile_queries}));
    return plan;
  }
  int64_t ctas() const { return int64_t{query_tiles} * chunk.batch * p.groups; }
};

// How many candidates the query at a token has in a layer.
template <int kR>
__device__ __forceinline__ int candidates(const Plan& plan, int position, int layer) {
  if (position < 0) return 0;
  constexpr int kBits = kR == 8 ? 3 : kR == 16 ? 4 : 5;
  int at = plan.layers.count - 1;
  int n = (position >> (kBits * at)) + 1;
  while (at-- > layer) {
    n = kR * (min(n, static_cast<int>(plan.p.top_k)) - 1) + (position >> (kBits * at)) % kR + 1;
  }
  return n;
}

// Whether these are the layer's first nodes, whatever the query selects above: it then meets the
// early blocks, so that its result does not depend on how many tokens follow.
template <int kR>
__device__ __forceinline__ bool sees_prefix(const Plan& plan, int position, int layer) {
  constexpr int kBits = kR == 8 ? 3 : kR == 16 ? 4 : 5;
  return position >> (kBits * layer) < kR * static_cast<int>(plan.p.top_k);
}

// The queries of this thread block. Computed where it is constructed: nothing of it needs to be
// held over a walk.
struct QueryTile {
  int batch, group, first;  // first: query of the chunk
  int queries;
  int64_t row;  // of the first query

  __device__ explicit QueryTile(const Plan& plan) {
    const uint32_t block = gridDim.x - 1 - opaque(blockIdx.x);  // late queries see most: first
    const uint32_t groups = static_cast<uint32_t>(plan.p.groups);
    const uint32_t bg = block / plan.query_tiles;
    first = static_cast<int>(block % plan.query_tiles) * plan.tile_queries;
    queries = static_cast<int>(min(plan.chunk.queries - first, int64_t{plan.tile_queries}));
    batch = plan.chunk.first_batch + static_cast<int>(bg / groups);
    group = static_cast<int>(bg % groups);
    row = bg * plan.chunk.queries + first;
  }
  // Of [B, T].
  __device__ int64_t token(const Plan& plan, int query) const {
    return int64_t{batch} * plan.p.queries + plan.chunk.first_query + first + query;
  }
  __device__ int position(const Plan& plan, int query) const {
    return query < queries ? __ldg(plan.p.positions + token(plan, query)) : -1;
  }
};

template <int kD, int kR>
inline constexpr int kNodeBytes = kR * kD * 2 * 2;  // of a block in memory

// `kBytes` of each block are copied.
template <typename S, int kR, int kBytes_, int kCapacity = kRingBytes>
struct alignas(1024) Ring {
  static constexpr int kBytes = kBytes_;
  static constexpr int kBlocks = S::kStageRows / kR;  // of a stage
  static constexpr int kStages = kCapacity / (kBlocks * kBytes);
  uint8_t blocks[kStages][kBlocks][kBytes];
  static constexpr int kLookahead = 32;
  // Of each query bit i: it takes block i; bit kBlocks: the layer ends.
  uint32_t takes[kStages][32];
  int lookahead[kLookahead][32];  // of the producer's lanes: the blocks that come next
  uint64_t full[kStages], free[kStages];

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&free[i], S::kWarps);
    }
  }
};

// A query's blocks of a layer: `count` of them, those of the nodes in `list`; the early ones if
// that is null.
struct BlockList {
  const int32_t* list;
  int count;
  int prefix_blocks;  // how many blocks lie before those that nodes have

  template <int kR>
  static __device__ BlockList of(const Plan& plan, int position, int64_t row, int layer) {
    BlockList x = {nullptr, ceil_div(candidates<kR>(plan, position, layer), kR),
                   static_cast<int>(plan.layers.prefix_blocks[layer])};
    if (!sees_prefix<kR>(plan, position, layer)) {
      x.list = plan.chunk.nodes + (layer * plan.chunk.rows + row) * plan.p.top_k;
    }
    return x;
  }
  // The i-th one's number; INT_MAX if there is none.
  __device__ int operator[](int i) const {
    if (list == nullptr) return i < count ? i : INT_MAX;
    const int node = load_now(list + i, i < count, -1);
    return node < 0 ? INT_MAX : prefix_blocks + node;
  }
};

// One layer, by the producer: lane i has query i's blocks. `tree` is the layer's first one.
//
// The walk is a chain of waits, for the least number and for the next one of who has it. So numbers
// (less those of the early blocks) come through shared memory, with those of two stages always on
// their way, and a lane reads ahead what it may need for the next block.
template <typename Ring>
__device__ void produce(Ring& ring, RingPlace<Ring::kStages>& at, const uint8_t* tree,
                        int64_t node_bytes, const BlockList& blocks_of) {
  constexpr int kBlocks = Ring::kBlocks, kLookahead = Ring::kLookahead;
  static_assert(kLookahead > 2 * kBlocks);
  const int lane = threadIdx.x % 32;
  const uint64_t keep = l2_policy_evict_last();
  tree += blocks_of.prefix_blocks * node_bytes;
  const auto count = static_cast<uint32_t>(blocks_of.count);
  const uint32_t listed = blocks_of.list == nullptr ? 0 : count;
  uint32_t next = 0, requested = 0;  // what is to be read and asked for
  const auto request = [&] {
#pragma unroll 1
    for (; requested < next + kLookahead; ++requested) {
      int& to = ring.lookahead[requested % kLookahead][lane];
      if (requested < listed) {
        cp_async_4(smem_address(&to), blocks_of.list + requested, true);
      } else {
        to = requested < count ? static_cast<int>(requested) - blocks_of.prefix_blocks : INT_MAX;
      }
    }
  };
  const auto read = [&] { return ring.lookahead[next % kLookahead][lane]; };
  request();
  cp_async_wait();
  int node = read();
  ++next;
  int upcoming = read(), first = __reduce_min_sync(~0u, node);
  do {
    cp_async_wait();  // for what was asked for a stage ago
    request();
    int least[kBlocks], blocks = 0;
    uint32_t takes = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      least[i] = first;
      blocks += first != INT_MAX;
      const bool own = node == first;
      takes |= own ? 1u << i : 0;
      node = own ? upcoming : node;
      next += own;
      upcoming = read();
      first = __reduce_min_sync(~0u, node);
    }
    takes = (takes & ((1u << blocks) - 1)) | (first == INT_MAX ? 1u << kBlocks : 0);
    mbarrier_wait(&ring.free[at.index], at.parity ^ 1);
    ring.takes[at.index][lane] = takes;
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive_expect(&ring.full[at.index], blocks * Ring::kBytes);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i < blocks) {
          bulk_load(ring.blocks[at.index][i], tree + least[i] * node_bytes, Ring::kBytes,
                    &ring.full[at.index], keep);
        }
      }
    }
    at.advance();
  } while (first != INT_MAX);
}

// The producer warp's walk over all layers, from the top one down to the tokens.
template <int kD, int kR, typename Ring>
__device__ __forceinline__ void produce_all_layers(const Plan& plan, Ring& ring,
                                                   RingPlace<Ring::kStages>& at) {
  const HTreeFwdParams& p = plan.p;
  const int lane = threadIdx.x % 32;
  const QueryTile tile(plan);
  const int position = tile.position(plan, lane);
  const int64_t row = tile.row + min(lane, tile.queries - 1);
  const int64_t first = (tile.batch * p.groups + tile.group) * plan.layers.blocks;
  for (int layer = plan.layers.count - 1; layer >= 0; --layer) {
    produce(ring, at,
            static_cast<const uint8_t*>(p.tree) +
                (first + plan.layers.first[layer]) * kNodeBytes<kD, kR>,
            kNodeBytes<kD, kR>, BlockList::of<kR>(plan, position, row, layer));
  }
}

// One layer, by a warp that multiplies: take(block) for each block that `query` takes, in order.
template <typename Ring, typename Take>
__device__ __forceinline__ void consume(Ring& ring, RingPlace<Ring::kStages>& at, int query,
                                        Take take) {
  constexpr uint32_t kLast = 1u << Ring::kBlocks;
  uint32_t takes;  // bit i: block i of the stage, until it is taken
  do {
    mbarrier_wait(&ring.full[at.index], at.parity);
    takes = ring.takes[at.index][query];
#pragma unroll 1
    while (takes & (kLast - 1)) {
      const int block = __ffs(takes) - 1;
      takes &= takes - 1;
      take(smem_address(ring.blocks[at.index][block]));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.free[at.index]);
    at.advance();
  } while (!(takes & kLast));
}

// Where 16-byte chunk c of a row lies in a block (or in queries, which are swizzled likewise).
template <int kD>
__device__ __forceinline__ uint32_t swizzled(int row, int c) {
  return row * (kD * 2) + c / 8 * 128 + ((c % 8) ^ (row % 8)) * 16;
}
// The place that is `chunks` further on, if that changes only bits of c that are 0.
__device__ __forceinline__ uint32_t offset_chunks(uint32_t from, int chunks) {
  return (from ^ chunks % 8 * 16) + chunks / 8 * 128;
}

// s [16 heads, r keys] = queries times the block's keys. load(j, low, high) gives fragments j and
// j + D / 32 of the queries, dimensions 16 j to 16 j + 15 and the same of the other half.
template <int kD, int kR, typename Load>
__device__ __forceinline__ void multiply_keys(float (&s)[kR / 8][4], uint32_t block, Load load) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int i = 0; i < kR / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
  for (int j = 0; j < kD / 32; ++j) {
    uint32_t low[4], high[4], b[4];
    load(j, low, high);
    if constexpr (kR == 8) {  // of both fragments
      const uint32_t keys = block + swizzled<kD>(row, matrix / 2 * (kD / 16) + matrix % 2);
      load_matrix_x4(offset_chunks(keys, j * 2), b);
      mma_16<DType::kBF16>(s[0], low, b[0], b[1]);
      mma_16<DType::kBF16>(s[0], high, b[2], b[3]);
    } else {
#pragma unroll
      for (int i = 0; i < kR / 16; ++i) {
        const uint32_t keys = block + swizzled<kD>(i * 16 + matrix / 2 * 8 + row, matrix % 2);
        load_matrix_x4(offset_chunks(keys, j * 2), b);
        mma_16<DType::kBF16>(s[2 * i], low, b[0], b[1]);
        mma_16<DType::kBF16>(s[2 * i + 1], low, b[2], b[3]);
        load_matrix_x4(offset_chunks(keys, (j + kD / 32) * 2), b);
        mma_16<DType::kBF16>(s[2 * i], high, b[0], b[1]);
        mma_16<DType::kBF16>(s[2 * i + 1], high, b[2], b[3]);
      }
    }
  }
}

}  // namespace jax_dsa::htree
