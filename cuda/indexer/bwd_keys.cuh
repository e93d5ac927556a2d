// Lightning indexer, backward pass over selected keys, second kernel: dk. The first kernel
// (bwd_queries.cuh) has stored the ReLU mask a.
//
//   dk[s] = sum over queries t and their slots i that hold key s of sum_j h[t,j,i] wq[t,j]
//   h = bf16(g[t,i]) a[t,j,i]        wq = bf16(w[t,j] q[t,j])
//
// Why rows are shared. Adding the row of every slot to dk in global memory would take T K C float
// reductions, which alone exceed the time budget. A CTA therefore processes a query tile of 8
// neighbouring queries, whose selections overlap. A key that several of them selected becomes one
// row, which is reduced over the heads of all these queries and added to dk once.
//
// Building the rows. The keys are processed in KV partitions of 4096 keys. For every key of the
// partition a table in shared memory holds the slots, at most one per query, that selected it. The
// selected keys are counted and sorted by their query mask (which queries of the tile selected
// them), in Gray code order. Each 64 of them form a key tile, which is multiplied with the queries
// in the union of its masks. Neighbours in Gray code order differ in few queries, so few of the
// multiplications are with zeros. If a query has the same key in several slots, only one of them
// fits in the table. The partition is then processed again for the remaining slots.
//
// Warpgroups. All four run the same code, each on its own key tile. The left operand (keys by
// heads) is built in registers from the mask and g; the right operand wq comes from shared memory.
// While one warpgroup waits for loads or reductions, the others multiply.
//
// Column order. Within each 16 channels, wq is stored in a permuted order. The accumulators that a
// thread holds for two groups of eight columns are then four consecutive channels, which is what
// one vector reduction takes.
//
// Shared memory for 128 channels: wq of 8 queries, 16 KiB each; table of slots, 64 KiB; sorted
// rows, 16 KiB; bits of finished slots, 8 KiB; counts per query mask, 1 KiB.
#pragma once

#include "common/ptx.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/bwd_queries.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer_bwd {

inline constexpr int kQueryTile = 8;
inline constexpr int kMasks = 1 << kQueryTile;
inline constexpr int kKeyThreads = 512;
inline constexpr int kKeyPartition = 4096;
inline constexpr uint16_t kNoSlot = 0xffff;
static_assert(kIndexerBwdMaxSlots < kNoSlot && kIndexerBwdMaxSlots % 32 == 0);

// kC is the number of channels, padded to 64 or 128; kPartition is the number of keys
// per KV partition.
template <int kC, int kPartition>
struct alignas(1024) KeyShared {
  static_assert(kPartition % 32 == 0);
  uint8_t wq[kQueryTile][kC / 64][kBlockBytes];
  uint16_t slots[kPartition][kQueryTile];
  uint32_t order[kPartition];  // key within the partition | query mask << 16
  uint32_t done[kQueryTile][kIndexerBwdMaxSlots / 32];
  int bins[kMasks];  // number of rows per query mask, then their next place in `order`
  int rows;
  int collisions;  // slots of the partition whose entry in the table was taken by another slot
};

// A work tile: the KV partitions split, split + splits, ... of one query tile.
struct KeyWorkTile {
  int64_t token;  // index of the first query in [batch, queries]
  int batch, query_count, split;

  __device__ KeyWorkTile(const IndexerBwdParams& p, int tile_index, int splits) {
    const int query_tiles = static_cast<int>(ceil_div(p.queries, int64_t{kQueryTile}));
    const int query_tile = tile_index / splits;
    split = tile_index - query_tile * splits;
    batch = query_tile / query_tiles;
    const int64_t query = int64_t{query_tile - batch * query_tiles} * kQueryTile;
    token = batch * p.queries + query;
    query_count = static_cast<int>(min(p.queries - query, int64_t{kQueryTile}));
  }
};

__host__ __device__ inline int64_t key_work_tile_count(const IndexerBwdParams& p, int splits) {
  return p.batch * ceil_div(p.queries, int64_t{kQueryTile}) * splits;
}

__device__ __forceinline__ int gray_rank(int mask) {
  mask ^= mask >> 1;
  mask ^= mask >> 2;
  return mask ^ mask >> 4;
}

// ---- right operand -----------------------------------------------------------------------------

// Computes wq of the query tile. Channels 4 u + 2 h + {0, 1} of each 16 go to columns
// 8 h + 2 u + {0, 1}.
template <int kC, int kPartition>
__device__ __noinline__ void load_queries(const IndexerBwdParams& p, KeyWorkTile work) {
  auto& shared = dynamic_shared<KeyShared<kC, kPartition>>();
  constexpr int kSlices = kC / 16;                                // slices of 32 bytes per row
  constexpr int kStepQueries = kKeyThreads / (kHeads * kSlices);  // queries per step
  constexpr int kUnroll = 4;
  const int slice = threadIdx.x % kSlices, head = threadIdx.x / kSlices % kHeads;
  const bool in_bounds = head < p.heads && slice * 16 < p.channels;
#pragma unroll 1
  for (int base = threadIdx.x / kSlices / kHeads; base < kQueryTile;
       base += kUnroll * kStepQueries) {
    const int64_t row = (work.token + base) * p.heads + head;
    const char* q = static_cast<const char*>(p.q) + (row * p.channels + slice * 16) * 2;
    uint4 from[kUnroll][2];
    float w[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool valid = in_bounds && base + i * kStepQueries < work.query_count;
      const auto* at =
          reinterpret_cast<const uint4*>(q + i * kStepQueries * p.heads * p.channels * 2);
      from[i][0] = valid ? __ldg(at) : uint4{};
      from[i][1] = valid ? __ldg(at + 1) : uint4{};
      w[i] = load_now(p.weights + row + i * kStepQueries * p.heads, valid, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t pair[8] = {from[i][0].x, from[i][0].y, from[i][0].z, from[i][0].w,
                                from[i][1].x, from[i][1].y, from[i][1].z, from[i][1].w};
      uint32_t scaled[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const float2 x = unpack_bf16(pair[u]);
        scaled[u % 2 * 4 + u / 2] = pack_bf16(w[i] * x.x, w[i] * x.y);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int chunk = 2 * slice + h;
        uint8_t* to = shared.wq[base + i * kStepQueries][chunk / 8] + head * 128 +
                      ((chunk % 8) ^ (head % 8)) * 16;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(scaled[4 * h], scaled[4 * h + 1], scaled[4 * h + 2], scaled[4 * h + 3]);
      }
    }
  }
}

// ---- rows --------------------------------------------------------------------------------------

// Calls visit(query, slot, key within the partition, open) for all slots of the query tile. `open`
// says whether the slot holds a key of the partition and is still to be processed. Each query has
// 64 threads, and each warp visits 32 consecutive slots at a time.
template <int kC, int kPartition, typename Visit>
__device__ void visit_slots(const IndexerBwdParams& p, const KeyWorkTile& work, int first_key,
                            bool again, KeyShared<kC, kPartition>& shared, Visit visit) {
  constexpr int kUnroll = 16, kStep = kKeyThreads / kQueryTile;
  const int query = threadIdx.x / kStep, own = threadIdx.x % kStep;
  const int32_t* indices = p.indices + (work.token + query) * p.slots;
  const int end = query < work.query_count ? p.slots : 0;
  const int size = static_cast<int>(min(p.keys - first_key, int64_t{kPartition}));
  for (int base = own; base - own < end; base += kUnroll * kStep) {
    int index[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      index[i] = load_now(indices + base + i * kStep, base + i * kStep < end, -1);
    }
    asm volatile("" ::: "memory");  // keeps the compiler from moving each load down to its use
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int slot = base + i * kStep;
      bool open = index[i] >= first_key && index[i] - first_key < size;
      if (again && open) open = !(shared.done[query][slot / 32] >> slot % 32 & 1);
      visit(query, slot, index[i] - first_key, open);
    }
  }
}

// Returns the query mask of one row of the table.
__device__ __forceinline__ int mask_of(const uint4& slots) {
  const uint32_t pair[4] = {slots.x, slots.y, slots.z, slots.w};
  int mask = 0;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if ((pair[u] & 0xffff) != kNoSlot) mask |= 1 << (2 * u);
    if (pair[u] >> 16 != kNoSlot) mask |= 2 << (2 * u);
  }
  return mask;
}

// Fills `slots`, `order`, `rows` and `collisions`. With `again`, finished slots are left out.
template <int kC, int kPartition>
__device__ __noinline__ void find_rows(const IndexerBwdParams& p, KeyWorkTile work, int first_key,
                                       bool again) {
  auto& shared = dynamic_shared<KeyShared<kC, kPartition>>();
  const int lane = threadIdx.x % 32;
  auto* table = reinterpret_cast<uint4*>(shared.slots);
  for (int i = threadIdx.x; i < kPartition; i += kKeyThreads) {
    table[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int i = threadIdx.x; i < kMasks; i += kKeyThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.collisions = 0;
  __syncthreads();
  int collisions = 0;
  visit_slots(p, work, first_key, again, shared, [&](int query, int slot, int key, bool open) {
    if (open) {
      store_any(shared.slots[key][query], static_cast<uint16_t>(slot));
      ++collisions;
    }
  });
  __syncthreads();

#pragma unroll 2
  for (int row = threadIdx.x; row < kPartition; row += kKeyThreads) {
    const int mask = mask_of(table[row]);
    if (mask != 0) atomicAdd(&shared.bins[gray_rank(mask)], 1);
    collisions -= __popc(mask);
  }
  collisions = __reduce_add_sync(~0u, collisions);
  if (lane == 0 && collisions != 0) atomicAdd(&shared.collisions, collisions);
  __syncthreads();

  if (threadIdx.x < 32) {
    constexpr int kOwn = kMasks / 32;
    int count[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      count[i] = shared.bins[lane * kOwn + i];
      sum += count[i];
    }
    int before = inclusive_scan(sum);
    if (lane == 31) shared.rows = before;
    before -= sum;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      shared.bins[lane * kOwn + i] = before;
      before += count[i];
    }
  }
  __syncthreads();
#pragma unroll 2
  for (int row = threadIdx.x; row < kPartition; row += kKeyThreads) {
    const int mask = mask_of(table[row]);
    // There may be few different masks, so one lane adds for all rows of the warp that share one.
    const unsigned alike = __match_any_sync(~0u, mask);
    const int first = __ffs(alike) - 1;
    int place = 0;
    if (lane == first && mask != 0) {
      place = atomicAdd(&shared.bins[gray_rank(mask)], __popc(alike));
    }
    place = __shfl_sync(~0u, place, first) + __popc(alike & ((1u << lane) - 1));
    if (mask != 0) shared.order[place] = row | mask << 16;
  }
  __syncthreads();
}

// Marks the slots that are in the table as finished.
template <int kC, int kPartition>
__device__ __noinline__ void mark_done(const IndexerBwdParams& p, KeyWorkTile work, int first_key,
                                       bool again) {
  auto& shared = dynamic_shared<KeyShared<kC, kPartition>>();
  visit_slots(p, work, first_key, again, shared, [&](int query, int slot, int key, bool open) {
    const unsigned bits = __ballot_sync(~0u, open && shared.slots[key][query] == slot);
    __syncwarp();  // All lanes have now read `done`. A vote alone does not order memory accesses.
    if (threadIdx.x % 32 == 0 && bits != 0) shared.done[query][slot / 32] |= bits;
  });
}

// ---- products ----------------------------------------------------------------------------------

// The mask and the gradient of one query at the two rows of a thread.
struct MaskedGradients {
  uint64_t relu_mask[2];
  float g[2];
};

// Builds the left operand h for rows lane / 4 + {0, 8} of the warp's 16 rows and all heads.
__device__ __forceinline__ void expand_mask(const MaskedGradients& x, uint32_t (&h)[4][4]) {
  const int shift = threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t g = pack_bf16(x.g[row], x.g[row]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t bits = static_cast<uint32_t>(x.relu_mask[row] >> (32 * pair)) >> shift;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t top = bits << (7 - r);
        h[2 * pair][2 * r + row] = spread_top_bits<0>(top) & g;
        h[2 * pair + 1][2 * r + row] = spread_top_bits<1>(top) & g;
      }
    }
  }
}

// Multiplies rows [first, first + 64) of `order` and adds the results to dk. One warpgroup calls
// it.
template <int kC, int kPartition>
__device__ void add_tile(const IndexerBwdParams& p, const KeyWorkTile& work, int first_key,
                         int first, KeyShared<kC, kPartition>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int64_t padded_slots = ceil_div(p.slots, kTile) * kTile;
  const auto entry = [&](int i) { return first + i < shared.rows ? shared.order[first + i] : 0; };
  uint32_t masks = __reduce_or_sync(~0u, (entry(lane) | entry(lane + 32)) >> 16);
  const uint32_t own[2] = {entry(warp * 16 + lane / 4), entry(warp * 16 + lane / 4 + 8)};

  const auto load = [&](int query) {
    MaskedGradients x;
    const int64_t token = work.token + query;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      x.relu_mask[row] = 0;
      x.g[row] = 0.f;
      if (own[row] >> (16 + query) & 1) {
        const int slot = shared.slots[own[row] & 0xffff][query];
        x.relu_mask[row] = __ldg(p.relu_mask + token * padded_slots + slot);
        x.g[row] = __ldg(p.grad + token * p.slots + slot);
      }
    }
    return x;
  };

  float d[kC / 2] = {};
  uint32_t h[4][4];
  int query = __ffs(masks) - 1;
  for (MaskedGradients now = load(query);;) {
    masks &= masks - 1;
    const int next = __ffs(masks) - 1;
    MaskedGradients ahead;
    if (next >= 0) ahead = load(next);
    wgmma_wait<0>();  // The previous product must finish before the registers of h are overwritten.
    expand_mask(now, h);
    const uint64_t wq = mn_major_descriptor(smem_address(shared.wq[query]), kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_bf16<kMNMajor>(d, h[i], wq + i * (2048 / 16), true);
    wgmma_commit();
    if (next < 0) break;
    query = next;
    now = ahead;
  }
  wgmma_wait<0>();
  wgmma_pin(d);

#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int64_t key = work.batch * p.keys + first_key + (own[row] & 0xffff);
    float* to = p.dk + key * p.channels + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      const int at = 8 * i + 2 * row;
      red_add(to + 16 * i, d[at], d[at + 1], d[at + 4], d[at + 5],
              own[row] != 0 && 16 * i < p.channels);
    }
  }
}

template <int kC, int kPartition>
__global__ void __launch_bounds__(kKeyThreads, 1)
    keys_kernel(const __grid_constant__ IndexerBwdParams p, int splits) {
  auto& shared = dynamic_shared<KeyShared<kC, kPartition>>();
  const int work_tiles = static_cast<int>(key_work_tile_count(p, splits));
  const int64_t padded_slots = ceil_div(p.slots, kTile) * kTile;
  const int partitions = static_cast<int>(ceil_div(p.keys, int64_t{kPartition}));
  for (int tile_index = blockIdx.x; tile_index < work_tiles; tile_index += gridDim.x) {
    const KeyWorkTile work(p, tile_index, splits);
    if (threadIdx.x == 0) {
      prefetch_l2(p.relu_mask + work.token * padded_slots, work.query_count * padded_slots * 8);
      if (p.slots % 4 == 0) {
        prefetch_l2(p.grad + work.token * p.slots, work.query_count * p.slots * 4);
      }
    }
    load_queries<kC, kPartition>(p, work);
    for (int i = threadIdx.x; i < kQueryTile * kIndexerBwdMaxSlots / 32; i += kKeyThreads) {
      (&shared.done[0][0])[i] = 0;
    }
    fence_async_proxy();  // makes wq visible to wgmma
    for (int partition = work.split; partition < partitions; partition += splits) {
      const int first_key = partition * kPartition;
      if (threadIdx.x == 0 && partition + splits >= partitions &&
          tile_index + gridDim.x < work_tiles) {
        const KeyWorkTile next(p, tile_index + gridDim.x, splits);
        const int row = p.heads * p.channels * 2;
        prefetch_l2(static_cast<const char*>(p.q) + next.token * row, next.query_count * row);
      }
      for (bool again = false;; again = true) {
        find_rows<kC, kPartition>(p, work, first_key, again);
        for (int first = threadIdx.x / 128 * 64; first < shared.rows; first += kKeyThreads / 2) {
          add_tile(p, work, first_key, first, shared);
        }
        const bool more = shared.collisions != 0;
        if (more) mark_done<kC, kPartition>(p, work, first_key, again);
        __syncthreads();
        if (!more) break;
      }
    }
  }
}

}  // namespace jax_dsa::indexer_bwd
