// Lightning indexer, backward over selected keys, second kernel: dk. With the gates a that the
// first kernel (bwd_queries.cuh) left,
//
//     dk[s] = sum over queries t and their slots i of key s:  sum_j h[t,j,i] wq[t,j]
//     h = bf16(g[t,i]) a[t,j,i]        wq = bf16(w[t,j] q[t,j])
//
// Adding every slot's row to dk in memory would take T K C floats of reductions, and that alone all
// the time there is. So a block takes 8 neighbouring queries, whose selections overlap: a key that
// several of them selected is one row, contracted over the heads of all of them, and is added once.
//
// Rows: for a window of 4096 keys, a table in shared memory has for every key the slots, one of
// each query, that selected it. The keys in use are counted and ordered by their mask of queries,
// masks in Gray order; 64 of them make a tile, which is multiplied with the queries in the union of
// its masks: neighbours in this order differ in few queries, so that little is multiplied with
// zeros. A query with the same key in several slots gets one into the table; the others are
// remembered, and the window is gone through again for them.
//
// Four warpgroups, each a tile of its own at a time, run the same code: the left operand (keys by
// heads) is made in registers from gates and g, the right one is wq in shared memory, and while one
// waits for gates, g or reductions the others multiply.
//
// wq's channels are stored in another order within each 16: a thread's accumulators of two groups
// of eight columns are then four channels in a row, which is what a reduction takes.
//
// Shared memory: wq of 8 queries (16 KiB each at 128 channels), table (64 KiB), rows in order
// (16 KiB), which slots are done (8 KiB), counts by mask.
#pragma once

#include "common/ptx.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/bwd_queries.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer_bwd {

inline constexpr int kGroup = 8;  // queries of a block
inline constexpr int kMasks = 1 << kGroup;
inline constexpr int kKeyThreads = 512;
inline constexpr int kKeyWindow = 4096;
inline constexpr uint16_t kNoSlot = 0xffff;
static_assert(kIndexerBwdMaxSlots < kNoSlot && kIndexerBwdMaxSlots % 32 == 0);

// kC: channels, padded to 64 or 128. kWindow: keys of a window.
template <int kC, int kWindow>
struct alignas(1024) KeyShared {
  static_assert(kWindow % 32 == 0);
  uint8_t wq[kGroup][kC / 64][kBlockBytes];
  uint16_t slots[kWindow][kGroup];
  uint32_t order[kWindow];  // key within the window | mask << 16
  uint32_t done[kGroup][kIndexerBwdMaxSlots / 32];
  int bins[kMasks];  // by mask: count of rows, then their next place in `order`
  int rows;
  int lost;  // slots of the window that found their place in the table taken
};

// One block's work: the windows `part`, `part` + parts, ... of a group of queries.
struct KeyItem {
  int64_t token;  // the first query's
  int batch, members, part;

  __device__ KeyItem(const IndexerBwdParams& p, int number, int parts) {
    const int groups = static_cast<int>(ceil_div(p.queries, int64_t{kGroup}));
    const int group = number / parts;
    part = number - group * parts;
    batch = group / groups;
    const int64_t query = int64_t{group - batch * groups} * kGroup;
    token = batch * p.queries + query;
    members = static_cast<int>(min(p.queries - query, int64_t{kGroup}));
  }
};

__host__ __device__ inline int64_t key_item_count(const IndexerBwdParams& p, int parts) {
  return p.batch * ceil_div(p.queries, int64_t{kGroup}) * parts;
}

__device__ __forceinline__ int gray_rank(int mask) {
  mask ^= mask >> 1;
  mask ^= mask >> 2;
  return mask ^ mask >> 4;
}

// ---- right operand -----------------------------------------------------------------------------

// wq of the group. Channels 4 u + 2 h + {0, 1} of 16 go to columns 8 h + 2 u + {0, 1}.
template <int kC, int kWindow>
__device__ __noinline__ void load_queries(const IndexerBwdParams& p, KeyItem item) {
  auto& shared = dynamic_shared<KeyShared<kC, kWindow>>();
  constexpr int kPieces = kC / 16;                           // of a row, 32 bytes each
  constexpr int kAtOnce = kKeyThreads / (kHeads * kPieces);  // queries
  constexpr int kBatch = 4;
  const int piece = threadIdx.x % kPieces, head = threadIdx.x / kPieces % kHeads;
  const bool there = head < p.heads && piece * 16 < p.channels;
#pragma unroll 1
  for (int base = threadIdx.x / kPieces / kHeads; base < kGroup; base += kBatch * kAtOnce) {
    const int64_t row = (item.token + base) * p.heads + head;
    const char* q = static_cast<const char*>(p.q) + (row * p.channels + piece * 16) * 2;
    uint4 from[kBatch][2];
    float w[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool valid = there && base + i * kAtOnce < item.members;
      const auto* at = reinterpret_cast<const uint4*>(q + i * kAtOnce * p.heads * p.channels * 2);
      from[i][0] = valid ? __ldg(at) : uint4{};
      from[i][1] = valid ? __ldg(at + 1) : uint4{};
      w[i] = load_now(p.weights + row + i * kAtOnce * p.heads, valid, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
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
        const int chunk = 2 * piece + h;
        uint8_t* to =
            shared.wq[base + i * kAtOnce][chunk / 8] + head * 128 + ((chunk % 8) ^ (head % 8)) * 16;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(scaled[4 * h], scaled[4 * h + 1], scaled[4 * h + 2], scaled[4 * h + 3]);
      }
    }
  }
}

// ---- rows --------------------------------------------------------------------------------------

// Calls visit(slot, key within the window, whether the slot is open) for all slots of the group, 64
// threads a query and 32 slots in a row a warp.
template <int kC, int kWindow, typename Visit>
__device__ void visit_slots(const IndexerBwdParams& p, const KeyItem& item, int window, bool again,
                            KeyShared<kC, kWindow>& shared, Visit visit) {
  constexpr int kBatch = 16, kStep = kKeyThreads / kGroup;
  const int member = threadIdx.x / kStep, own = threadIdx.x % kStep;
  const int32_t* indices = p.indices + (item.token + member) * p.slots;
  const int end = member < item.members ? p.slots : 0;
  const int size = static_cast<int>(min(p.keys - window, int64_t{kWindow}));
  for (int base = own; base - own < end; base += kBatch * kStep) {
    int index[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      index[i] = load_now(indices + base + i * kStep, base + i * kStep < end, -1);
    }
    asm volatile("" ::: "memory");  // or each load would be moved to its use
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = base + i * kStep;
      bool open = index[i] >= window && index[i] - window < size;
      if (again && open) open = !(shared.done[member][slot / 32] >> slot % 32 & 1);
      visit(member, slot, index[i] - window, open);
    }
  }
}

// The queries of a row of the table.
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

// Fills `slots`, `order`, `rows` and `lost`. `again`: slots that are done do not count.
template <int kC, int kWindow>
__device__ __noinline__ void find_rows(const IndexerBwdParams& p, KeyItem item, int window,
                                       bool again) {
  auto& shared = dynamic_shared<KeyShared<kC, kWindow>>();
  const int lane = threadIdx.x % 32;
  auto* table = reinterpret_cast<uint4*>(shared.slots);
  for (int i = threadIdx.x; i < kWindow; i += kKeyThreads) {
    table[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int i = threadIdx.x; i < kMasks; i += kKeyThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.lost = 0;
  __syncthreads();
  int lost = 0;
  visit_slots(p, item, window, again, shared, [&](int member, int slot, int key, bool open) {
    if (open) {
      store_any(shared.slots[key][member], static_cast<uint16_t>(slot));
      ++lost;
    }
  });
  __syncthreads();

#pragma unroll 2
  for (int row = threadIdx.x; row < kWindow; row += kKeyThreads) {
    const int mask = mask_of(table[row]);
    if (mask != 0) atomicAdd(&shared.bins[gray_rank(mask)], 1);
    lost -= __popc(mask);
  }
  lost = __reduce_add_sync(~0u, lost);
  if (lane == 0 && lost != 0) atomicAdd(&shared.lost, lost);
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
  for (int row = threadIdx.x; row < kWindow; row += kKeyThreads) {
    const int mask = mask_of(table[row]);
    // One addition for all rows of the warp with this mask: there may be few masks.
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

// Slots that are in the table are done.
template <int kC, int kWindow>
__device__ __noinline__ void mark_done(const IndexerBwdParams& p, KeyItem item, int window,
                                       bool again) {
  auto& shared = dynamic_shared<KeyShared<kC, kWindow>>();
  visit_slots(p, item, window, again, shared, [&](int member, int slot, int key, bool open) {
    const unsigned bits = __ballot_sync(~0u, open && shared.slots[key][member] == slot);
    __syncwarp();  // all have read `done`, which a vote does not promise
    if (threadIdx.x % 32 == 0 && bits != 0) shared.done[member][slot / 32] |= bits;
  });
}

// ---- products ----------------------------------------------------------------------------------

// What one query has for a thread's two rows.
struct Gated {
  uint64_t gates[2];
  float g[2];
};

// The left operand: rows lane / 4 + {0, 8} of a warp's 16, all heads.
__device__ __forceinline__ void expand(const Gated& x, uint32_t (&h)[4][4]) {
  const int shift = threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t g = pack_bf16(x.g[row], x.g[row]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t bits = static_cast<uint32_t>(x.gates[row] >> (32 * pair)) >> shift;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t top = bits << (7 - r);
        h[2 * pair][2 * r + row] = spread_top_bits<0>(top) & g;
        h[2 * pair + 1][2 * r + row] = spread_top_bits<1>(top) & g;
      }
    }
  }
}

// Rows [first, first + 64) of the order, by a warpgroup.
template <int kC, int kWindow>
__device__ void add_tile(const IndexerBwdParams& p, const KeyItem& item, int window, int first,
                         KeyShared<kC, kWindow>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int64_t padded = ceil_div(p.slots, kTile) * kTile;
  const auto entry = [&](int i) { return first + i < shared.rows ? shared.order[first + i] : 0; };
  uint32_t masks = __reduce_or_sync(~0u, (entry(lane) | entry(lane + 32)) >> 16);
  const uint32_t own[2] = {entry(warp * 16 + lane / 4), entry(warp * 16 + lane / 4 + 8)};

  const auto load = [&](int member) {
    Gated x;
    const int64_t token = item.token + member;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      x.gates[row] = 0;
      x.g[row] = 0.f;
      if (own[row] >> (16 + member) & 1) {
        const int slot = shared.slots[own[row] & 0xffff][member];
        x.gates[row] = __ldg(p.gates + token * padded + slot);
        x.g[row] = __ldg(p.grad + token * p.slots + slot);
      }
    }
    return x;
  };

  float d[kC / 2] = {};
  uint32_t h[4][4];
  int member = __ffs(masks) - 1;
  for (Gated now = load(member);;) {
    masks &= masks - 1;
    const int next = __ffs(masks) - 1;
    Gated ahead;
    if (next >= 0) ahead = load(next);
    wgmma_wait<0>();  // for the registers of h
    expand(now, h);
    const uint64_t wq = mn_major_descriptor(smem_address(shared.wq[member]), kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_bf16<kMNMajor>(d, h[i], wq + i * (2048 / 16), true);
    wgmma_commit();
    if (next < 0) break;
    member = next;
    now = ahead;
  }
  wgmma_wait<0>();
  wgmma_pin(d);

#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int64_t key = item.batch * p.keys + window + (own[row] & 0xffff);
    float* to = p.dk + key * p.channels + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      const int at = 8 * i + 2 * row;
      red_add(to + 16 * i, d[at], d[at + 1], d[at + 4], d[at + 5],
              own[row] != 0 && 16 * i < p.channels);
    }
  }
}

template <int kC, int kWindow>
__global__ void __launch_bounds__(kKeyThreads, 1)
    keys_kernel(const __grid_constant__ IndexerBwdParams p, int parts) {
  auto& shared = dynamic_shared<KeyShared<kC, kWindow>>();
  const int items = static_cast<int>(key_item_count(p, parts));
  const int64_t padded = ceil_div(p.slots, kTile) * kTile;
  const int windows = static_cast<int>(ceil_div(p.keys, int64_t{kWindow}));
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const KeyItem item(p, number, parts);
    if (threadIdx.x == 0) {
      prefetch_l2(p.gates + item.token * padded, item.members * padded * 8);
      if (p.slots % 4 == 0) {
        prefetch_l2(p.grad + item.token * p.slots, item.members * p.slots * 4);
      }
    }
    load_queries<kC, kWindow>(p, item);
    for (int i = threadIdx.x; i < kGroup * kIndexerBwdMaxSlots / 32; i += kKeyThreads) {
      (&shared.done[0][0])[i] = 0;
    }
    fence_async_proxy();  // wgmma reads wq
    for (int w = item.part; w < windows; w += parts) {
      const int window = w * kWindow;
      if (threadIdx.x == 0 && w + parts >= windows && number + gridDim.x < items) {
        const KeyItem next(p, number + gridDim.x, parts);
        const int row = p.heads * p.channels * 2;
        prefetch_l2(static_cast<const char*>(p.q) + next.token * row, next.members * row);
      }
      for (bool again = false;; again = true) {
        find_rows<kC, kWindow>(p, item, window, again);
        for (int first = threadIdx.x / 128 * 64; first < shared.rows; first += kKeyThreads / 2) {
          add_tile(p, item, window, first, shared);
        }
        const bool more = shared.lost != 0;
        if (more) mark_done<kC, kWindow>(p, item, window, again);
        __syncthreads();
        if (!more) break;
      }
    }
  }
}

// From dk = f, that is without k_scale: dk = k_scale f, dk_scale = k . f. A warp a key.
static __global__ void __launch_bounds__(256)
    scale_kernel(const __grid_constant__ IndexerBwdParams p) {
  const int64_t key = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (key >= p.batch * p.keys) return;
  const auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.f; };
  const float scale = finite(p.k_scale[key]);
  const auto* k = static_cast<const __nv_bfloat16*>(p.k) + key * p.channels;
  float* f = p.dk + key * p.channels;
  float sum = 0.f;
  for (int c = lane; c < p.channels; c += 32) {
    sum = fmaf(finite(__bfloat162float(k[c])), f[c], sum);
    f[c] *= scale;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) p.dk_scale[key] = sum;
}

}  // namespace jax_dsa::indexer_bwd
