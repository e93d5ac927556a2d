// What the scores and the attention share: a CTA's queries, its walk over the blocks that they
// selected, and the products of rotated queries with a block's keys.
//
// Warps. A CTA takes a query tile: a few queries of one KV head group. Each MMA warp has one
// head tile (16 query heads) of one query. The warp after the MMA warps is the producer. Its
// lane i reads the list of the nodes that query i selected, in ascending order.
//
// Walk. The producer forms the union of these lists: it visits the nodes in ascending order and
// loads the block of children of each node once, together with a bit mask of the queries that take
// it. The MMA warps of a query work on the blocks that the query takes. Kernels differ in what of a
// block they load and in what the MMA warps do.
#pragma once

#include <climits>
#include <cmath>

#include "common/error.h"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "htree/htree.h"
#include "htree/rotate.cuh"

namespace jax_dsa::htree {

inline constexpr int kTileHeads = 16;  // query heads per head tile; a warp has one head tile
inline constexpr int kRingBytes = 192 * 1024;

template <typename S, int kR, int kBytes_, int kCapacity>
struct Ring;

// A launch of a kernel: its parameter, and its bytes of shared memory.
template <typename Call>
struct Prepared {
  Call call;
  int shared_bytes;
};

// The shape of a CTA on Hopper: number of MMA warps, registers per thread of theirs, and rows of
// blocks per pipeline stage. portable_walk.cuh has that of other GPUs. A shape also decides how a
// CTA gets its blocks, through the members below.
template <int kWarps_, int kRegisters_, int kStageRows_>
struct CtaShape {
  static constexpr bool kHopper = true;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = (kWarps + 4) * 32;  // one more warpgroup, with the producer warp
  static constexpr int kRegisters = kRegisters_;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kStageRows = kStageRows_;
  static_assert(kWarps % 4 == 0 && registers_fit(1, kWarps / 4, kRegisters, kProducerRegisters));

  // The ring in the struct `Shared`, with stages of kCapacity bytes in all.
  template <int kR, int kBytes, int kCapacity, typename Shared>
  using BlockRing = Ring<CtaShape, kR, kBytes, kCapacity>;
  // The parameter of a kernel that takes the plan `P`.
  template <typename P>
  using Call = P;

  // Returns the first head of the CTA in its group.
  template <typename P>
  static __device__ __forceinline__ int first_head(const P&) {
    return 0;
  }

  // Prepares the launch of a kernel with `Shared` in shared memory, of which a CTA can have
  // `shared_bytes`, for the heads of a group from `first_head` on.
  template <typename Shared, typename P>
  static Prepared<P> prepare(const P& plan, int /*shared_bytes*/, int /*first_head*/) {
    static_assert(shared_memory_fits(1, sizeof(Shared)));
    return {plan, sizeof(Shared)};
  }

  // The warps of the two warpgroups call these first.
  static __device__ __forceinline__ void start_producer() { lower_registers<kProducerRegisters>(); }
  static __device__ __forceinline__ void start_mma() { raise_registers<kRegisters>(); }
};
// With 12 warps a CTA holds 12, 6, 4, 3, 2 or 1 queries of 1, 2, 3, 4, 6 or 12 head tiles each.
using AttendShape = CtaShape<12, 160, 96>;
// Scores need fewer registers.
using ScoresShape = CtaShape<16, 112, 64>;
// For dQ: the warps hold queries, dO and dQ in registers.
using BwdShape = CtaShape<8, 232, 64>;

// A chunk of the queries that is processed at a time, and what the kernels leave for each other
// about it. A row is a (batch entry, KV head group, query) of the chunk, in this order.
struct QueryChunk {
  int first_batch, batch;
  int64_t first_query, queries;
  int64_t rows;

  float* importance;  // [rows, width], by ordinal, log2 units
  int64_t width;
  int32_t* ends;      // [rows]: ordinal of the last candidate
  int32_t* ordinals;  // [rows, K - 1]: the most important others, ascending
  int32_t* nodes;     // [layers - 1, rows, K]: selected nodes of layers 1, 2, ..., then -1
  uint32_t* masks;  // [layers - 1, rows, K]: bit i of word o says that ordinal r o + i is selected
};

struct Plan {
  HTreeFwdParams p;
  HTreeLayers layers;
  QueryChunk chunk;
  int group_heads;   // M, query heads per KV head group
  int head_tiles;    // per query, of those that a launch processes
  int tile_queries;  // queries per CTA
  int query_tiles;   // per batch entry and KV head group

  // Returns the plan for CTAs of shape S.
  template <typename S>
  Plan shaped() const {
    Plan plan = *this;
    plan.tile_queries = S::kWarps / head_tiles;
    plan.query_tiles = static_cast<int>(ceil_div(chunk.queries, int64_t{plan.tile_queries}));
    return plan;
  }
  int64_t ctas() const { return int64_t{query_tiles} * chunk.batch * p.groups; }
  // Calls run(plan, first head) for as many head tiles at a time as a CTA of shape S has warps for.
  template <typename S, typename Run>
  cudaError_t for_head_tiles(Run run) const {
    const int parts = ceil_div(head_tiles, S::kWarps);
    Plan part = *this;
    part.head_tiles = ceil_div(head_tiles, parts);
    for (int i = 0; i < parts; ++i) {
      DSA_RETURN_IF_CUDA_ERROR(run(part, i * part.head_tiles * kTileHeads));
    }
    return cudaSuccess;
  }
};

// Returns how many candidates the query at `position` has in a layer.
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

// Returns whether the query's candidates are the layer's first nodes whatever it selects above.
// It then reads the prefix blocks, so that its result does not depend on how many tokens follow.
template <int kR>
__device__ __forceinline__ bool sees_prefix(const Plan& plan, int position, int layer) {
  constexpr int kBits = kR == 8 ? 3 : kR == 16 ? 4 : 5;
  return position >> (kBits * layer) < kR * static_cast<int>(plan.p.top_k);
}

// The CTA's query tile. It is recomputed where it is needed, so that no register holds it during
// the walk.
struct QueryTile {
  int batch, group, first;  // first: within the chunk
  int queries;
  int64_t row;  // of the tile's first query

  __device__ explicit QueryTile(const Plan& plan) {
    const uint32_t block =
        gridDim.x - 1 - opaque(blockIdx.x);  // the last queries have the most work: start with them
    const uint32_t groups = static_cast<uint32_t>(plan.p.groups);
    const uint32_t bg = block / plan.query_tiles;
    first = static_cast<int>(block % plan.query_tiles) * plan.tile_queries;
    queries = static_cast<int>(min(plan.chunk.queries - first, int64_t{plan.tile_queries}));
    batch = plan.chunk.first_batch + static_cast<int>(bg / groups);
    group = static_cast<int>(bg % groups);
    row = bg * plan.chunk.queries + first;
  }
  // Returns the query's index in [B, T].
  __device__ int64_t token(const Plan& plan, int query) const {
    return int64_t{batch} * plan.p.queries + plan.chunk.first_query + first + query;
  }
  __device__ int position(const Plan& plan, int query) const {
    return query < queries ? __ldg(plan.p.positions + token(plan, query)) : -1;
  }
};

template <int kD, int kR>
inline constexpr int kNodeBytes = kR * kD * 2 * 2;  // bytes of a block in memory: keys and values

// The ring of pipeline stages that the producer fills with bulk copies. `kBytes_` is how much of
// each block it loads.
template <typename S, int kR, int kBytes_, int kCapacity>
struct alignas(1024) Ring {
  static constexpr int kBytes = kBytes_;
  static constexpr int kBlocks = S::kStageRows / kR;  // per stage
  static constexpr int kStages = kCapacity / (kBlocks * kBytes);
  using Place = RingPlace<kStages>;
  static constexpr bool kBulk = true;
  uint8_t blocks[kStages][kBlocks][kBytes];
  static constexpr int kLookahead = 32;
  // One mask per query: bit i says that the query takes block i of the stage, bit kBlocks that
  // this is the layer's last stage.
  uint32_t takes[kStages][32];
  int lookahead[kLookahead][32];  // each producer lane's next blocks
  uint64_t full[kStages], free[kStages];

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&free[i], S::kWarps);
    }
    mbarrier_init_fence();
  }
  template <typename Call>
  static __device__ __forceinline__ Place begin(const Call&) {
    return {};
  }
  __device__ __forceinline__ const uint8_t* block(int stage, int i) const {
    return blocks[stage][i];
  }

  // Waits for the block numbers that were requested one stage ago.
  static __device__ __forceinline__ void await_requests() { cp_async_wait(); }
  static __device__ __forceinline__ void end_requests() {}
};

// A query's blocks of a layer: the children of the `count` nodes in `list`, or the first `count`
// prefix blocks if `list` is null.
struct BlockList {
  const int32_t* list;
  int count;
  int prefix_blocks;  // of the layer; the block of node i's children is prefix_blocks + i

  template <int kR>
  static __device__ BlockList of(const Plan& plan, int position, int64_t row, int layer) {
    BlockList x = {nullptr, ceil_div(candidates<kR>(plan, position, layer), kR),
                   static_cast<int>(plan.layers.prefix_blocks[layer])};
    if (!sees_prefix<kR>(plan, position, layer)) {
      x.list = plan.chunk.nodes + (layer * plan.chunk.rows + row) * plan.p.top_k;
    }
    return x;
  }
  // Returns the number of the i-th block within the layer, or INT_MAX past the last one.
  __device__ int operator[](int i) const {
    if (list == nullptr) return i < count ? i : INT_MAX;
    const int node = load_now(list + i, i < count, -1);
    return node < 0 ? INT_MAX : prefix_blocks + node;
  }
};

// The producer's walk over one layer. Lane i passes the blocks of query i; `tree` is the layer's
// first block.
//
// The walk is a chain of dependent steps: find the least block number of all lanes, then advance
// the lanes that have it. To keep memory latency out of the chain, block numbers come through
// shared memory, where those for two stages or more are always requested ahead, and a lane reads
// the number that it may need next before it knows whether it does. Numbers are relative to the
// first block that is not a prefix block.
template <typename Ring>
__device__ void produce(Ring& ring, typename Ring::Place& at, const uint8_t* tree,
                        int64_t node_bytes, const BlockList& blocks_of) {
  constexpr int kBlocks = Ring::kBlocks, kLookahead = Ring::kLookahead;
  static_assert(kLookahead > 2 * kBlocks);
  const int lane = threadIdx.x % 32;
  const uint64_t keep = l2_policy_evict_last();
  tree += blocks_of.prefix_blocks * node_bytes;
  const auto count = static_cast<uint32_t>(blocks_of.count);
  const uint32_t listed = blocks_of.list == nullptr ? 0 : count;
  uint32_t next = 0, requested = 0;  // next entry to read, next entry to request
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
    Ring::await_requests();
    request();
    Ring::end_requests();
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
    if constexpr (Ring::kBulk) {
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
    } else {
      ring.fill(at.index, tree, node_bytes, least, blocks, keep);
    }
    at.advance();
  } while (first != INT_MAX);
}

// The producer warp's walk over all layers, from the top one down to the tokens.
template <int kD, int kR, typename Ring>
__device__ __forceinline__ void produce_all_layers(const Plan& plan, Ring& ring,
                                                   typename Ring::Place& at) {
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

// An MMA warp's walk over one layer. Calls take(address of the block in shared memory) for each
// block that `query` takes, in order.
template <typename Ring, typename Take>
__device__ __forceinline__ void consume(Ring& ring, typename Ring::Place& at, int query,
                                        Take take) {
  constexpr uint32_t kLast = 1u << Ring::kBlocks;
  uint32_t takes;  // bit i: block i of the stage is still to be taken
  do {
    mbarrier_wait(&ring.full[at.index], at.parity);
    takes = ring.takes[at.index][query];
#pragma unroll 1
    while (takes & (kLast - 1)) {
      const int block = __ffs(takes) - 1;
      takes &= takes - 1;
      take(smem_address(ring.block(at.index, block)));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.free[at.index]);
    at.advance();
  } while (!(takes & kLast));
}

// Returns the byte offset of 16-byte chunk c of a row in a block, or in a head tile of queries,
// which is swizzled in the same way.
template <int kD>
__device__ __forceinline__ uint32_t swizzled(int row, int c) {
  return row * (kD * 2) + c / 8 * 128 + ((c % 8) ^ (row % 8)) * 16;
}
// Returns the address `chunks` chunks further on. Only bits of c that are 0 may change.
__device__ __forceinline__ uint32_t offset_chunks(uint32_t from, int chunks) {
  return (from ^ chunks % 8 * 16) + chunks / 8 * 128;
}

// s [16 heads, r keys] = Q K^T for a block's keys. load(j, low, high) returns query fragments j
// and j + D / 32, which are dimensions 16 j to 16 j + 15 of either half of D.
template <int kD, int kR, typename Load>
__device__ __forceinline__ void multiply_keys(float (&s)[kR / 8][4], uint32_t block, Load load) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int i = 0; i < kR / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
  for (int j = 0; j < kD / 32; ++j) {
    uint32_t low[4], high[4], b[4];
    load(j, low, high);
    if constexpr (kR == 8) {  // b: keys of both fragments
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
