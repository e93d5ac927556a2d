// Puts the slots of two neighbouring queries in an order in which those of common keys come first,
// a key at the same place of both, so that the backward kernel can add both queries' gradients of
// such a key up before it reduces them into memory. Neighbouring queries select much the same keys.
//
// A block has the two rows of a step. It sorts what is not sorted, which top-k's output is; two
// sorted lists have a key in common, with its repetitions, where bisection finds its n-th
// occurrence in both. Only whole tiles of common keys are put first; the others stay in order, and
// slots that do not count come last, as -1.
#pragma once

#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kOrderThreads = 256;
inline constexpr int kNoKey = INT_MAX;  // no index that counts

// The slots of a row, up to a power of two, have room in shared memory.
inline int order_room(int slots) {
  int room = kOrderThreads;
  while (room < slots) room *= 2;
  return room;
}
inline int order_shared_bytes(int room) { return (2 * room + kOrderThreads / 32) * 4; }

// The sum over the block, and over the threads before this one. `warps` has room for one a warp.
__device__ inline int2 block_count(bool x, int* warps) {
  const int thread = thread_index();
  const unsigned bits = __ballot_sync(~0u, x);
  if (thread % 32 == 0) warps[thread / 32] = __popc(bits);
  __syncthreads();
  int all = 0, before = __popc(bits & ((1u << thread % 32) - 1));
  for (int i = 0; i < kOrderThreads / 32; ++i) {
    if (i < thread / 32) before += warps[i];
    all += warps[i];
  }
  __syncthreads();
  return {all, before};
}

// How many of the sorted `keys` are less than `key`.
__device__ inline int rank_of(int32_t key, const int32_t* keys, int room) {
  int below = 0;
  for (int step = room; step > 0; step /= 2) {
    if (below + step <= room && keys[below + step - 1] < key) below += step;
  }
  return below;
}

__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const __grid_constant__ SparseMlaBwdParams p, int room) {
  auto* const keys = &dynamic_shared<int32_t>();  // [2][room]
  int* const warps = keys + 2 * room;
  const BwdWork work(p);
  const int64_t step = blockIdx.x;
  const int thread = thread_index();
  const HeadTile rows[2] = {{p, work, step, 0}, {p, work, step, 1}};

  for (int side = 0; side < 2; ++side) {
    int32_t* const own = keys + side * room;
    const Slots slots = rows[side].slots(p);
    for (int i = thread; i < room; i += kOrderThreads) {
      const int index = slots.index(i);
      own[i] = slots.counts(index) && rows[side].heads > 0 ? index : kNoKey;
    }
    __syncthreads();
    bool wrong = false;
    for (int i = thread; i + 1 < room; i += kOrderThreads) wrong |= own[i] > own[i + 1];
    if (block_count(wrong, warps).x == 0) continue;
    for (int run = 2; run <= room; run *= 2) {  // bitonic
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int i = thread; i < room / 2; i += kOrderThreads) {
          const int low = 2 * i - i % apart, high = low + apart;
          const int32_t x = own[low], y = own[high];
          if ((x > y) == ((low & run) == 0)) own[low] = y, own[high] = x;
        }
        __syncthreads();
      }
    }
  }

  // Whether an entry's key is in the other row as often.
  const bool together = rows[0].batch(p) == rows[1].batch(p);
  const auto matched = [&](int side, int i) {
    const int32_t *const own = keys + side * room, *const other = keys + (1 - side) * room;
    if (!together || own[i] == kNoKey) return false;
    const int at = rank_of(own[i], other, room) + i - rank_of(own[i], own, room);
    return at < room && other[at] == own[i];
  };
  int common = 0;
  for (int base = 0; base < room; base += kOrderThreads) {
    common += block_count(matched(0, base + thread), warps).x;
  }
  const int first = common / kTile * kTile;  // of them come first
  for (int side = 0; side < 2; ++side) {
    int32_t* const to = p.order + int64_t{rows[side].row} * p.slots;
    int before = 0;  // matched entries
    for (int base = 0; base < room; base += kOrderThreads) {
      const int i = base + thread;
      const bool match = matched(side, i);
      const int2 count = block_count(match, warps);
      const int rank = before + count.y;
      before += count.x;
      const int place = match && rank < first ? rank : first + i - min(rank, first);
      const int32_t key = keys[side * room + i];
      if (place < p.slots && rows[side].heads > 0) to[place] = key == kNoKey ? -1 : key;
    }
  }
  if (thread == 0) common_tiles(p, work)[step] = first / kTile;
}

}  // namespace jax_dsa::sparse_mla
