// Puts the slots of two neighbouring queries in an order in which those of common keys come first,
// a key at the same place of both, so that the backward kernel can add both queries' gradients of
// such a key up before it reduces them into memory. Neighbouring queries select much the same keys.
//
// A block has the two rows of a step. It sorts what is not sorted, which top-k's output is. Each
// thread then walks through a run of each list beside the other list, in which it finds its place
// by bisection: entries match one to one, a key that is repeated as often as both have it. Only
// whole tiles of matches are put first; the others stay in order, and slots that do not count come
// last, as -1.
#pragma once

#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kOrderThreads = 256;
inline constexpr int kNoKey = INT_MAX;  // no index that counts
static_assert(kOrderSlots <= 32 * kOrderThreads);

// The slots of a row, up to a power of two, have room in shared memory.
inline int order_room(int slots) {
  int room = kOrderThreads;
  while (room < slots) room *= 2;
  return room;
}

// A list of so many entries of keys in shared memory, skewed so that threads that walk through a
// run each are at different banks.
struct KeyList {
  int32_t* data;
  int room;

  __host__ __device__ static int words(int room) { return room + room / 32; }
  __device__ int32_t& operator[](unsigned i) const { return data[i + i / 32]; }
  // How many of the sorted entries are less than `entry`.
  __device__ int rank(int32_t entry) const {
    int below = 0;
    for (int step = room; step > 0; step /= 2) {
      if (below + step <= room && (*this)[below + step - 1] < entry) below += step;
    }
    return below;
  }
  // Bitonic, by the block; runs shorter than `first` are sorted, up and down in turns.
  __device__ void sort(int first) const {
    for (int run = first; run <= room; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int i = thread_index(); i < room / 2; i += kOrderThreads) {
          const int low = 2 * i - (i & (apart - 1)), high = low + apart;
          const int32_t x = (*this)[low], y = (*this)[high];
          if ((x > y) == ((low & run) == 0)) (*this)[low] = y, (*this)[high] = x;
        }
        __syncthreads();
      }
    }
  }
};

inline int order_shared_bytes(int room) {
  return (3 * KeyList::words(room) + kOrderThreads / 32) * 4;
}

// The sum over the block, and over the threads before this one. `warps` has room for one a warp.
__device__ inline int2 block_sum(int x, int* warps) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int sum = inclusive_scan(x);
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int all = 0, before = sum - x;
  for (int i = 0; i < kOrderThreads / 32; ++i) {
    if (i < warp) before += warps[i];
    all += warps[i];
  }
  __syncthreads();
  return {all, before};
}

__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const __grid_constant__ SparseMlaBwdParams p, const __grid_constant__ BwdWork work,
                 int room) {
  auto* const shared = &dynamic_shared<int32_t>();
  const KeyList lists[2] = {{shared, room}, {shared + KeyList::words(room), room}};
  const KeyList ordered = {shared + 2 * KeyList::words(room), room};
  int* const warps = shared + 3 * KeyList::words(room);
  const int step = static_cast<int>(blockIdx.x);
  const int thread = thread_index();
  const HeadTile rows[2] = {{p, work, step, 0}, {p, work, step, 1}};
  const int bits = p.member_bits;  // below each key
  const int32_t no_key = kNoKey >> bits;

#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const Slots slots = rows[side].slots(p);
#pragma unroll 8
    for (int i = thread; i < room; i += kOrderThreads) {
      const int index = slots.index(i);
      lists[side][i] = slots.is_valid(index) && rows[side].heads > 0 ? index : kNoKey;
    }
  }
  __syncthreads();
  const int run = room / kOrderThreads, begin = thread * run;  // this thread's part of each list
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const KeyList list = lists[side];
    int wrong = 0;
    for (int i = max(begin, 1); i < begin + run; ++i) {
      wrong += list[i - 1] >> bits > list[i] >> bits;
    }
    if (block_sum(wrong, warps).x > 0) list.sort(2);
  }

  const bool together = rows[0].batch(p) == rows[1].batch(p);
  uint32_t matches[2] = {};  // bit i: this thread's i-th entry has one
  int2 counts[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const KeyList own = lists[side], other = lists[1 - side];
    int at = room;
    if (const int32_t key = own[begin] >> bits; together && key != no_key) {
      at = other.rank(key << bits);
      if (begin > 0 && own[begin - 1] >> bits == key) {  // behind the matches in the threads before
        at = min(at + begin - own.rank(key << bits), other.rank((key + 1) << bits));
      }
    }
    for (int i = 0; i < run; ++i) {
      const int32_t key = own[begin + i] >> bits;
      while (at < room && other[at] >> bits < key) ++at;
      if (at < room && key != no_key && other[at] >> bits == key) {
        matches[side] |= 1u << i;
        ++at;
      }
    }
    counts[side] = block_sum(__popc(matches[side]), warps);
  }
  const int first = counts[0].x / kTile * kTile;  // so many matches come first
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    int rank = counts[side].y;  // among the matches
    for (int i = 0; i < run; ++i) {
      const bool match = matches[side] >> i & 1;
      const int place = match && rank < first ? rank : first + begin + i - min(rank, first);
      rank += match;
      ordered[place] = lists[side][begin + i];
    }
    __syncthreads();
    int32_t* const to = p.order + int64_t{rows[side].row} * p.slots;
    for (int i = thread; i < p.slots && rows[side].heads > 0; i += kOrderThreads) {
      const int32_t entry = ordered[i];
      to[i] = entry == kNoKey ? -1 : entry;
    }
    __syncthreads();
  }
  if (thread == 0) common_tiles(p, work)[step] = first / kTile;
}

}  // namespace jax_dsa::sparse_mla
