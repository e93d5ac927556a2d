// Reorders the slots of two neighbouring queries so that their common keys come first, each at the
// same position for both. The backward kernel can then add the gradients of such a key over both
// queries before it reduces them into memory. Neighbouring queries select mostly the same keys.
//
// A CTA processes the two rows of a step. It sorts lists that are not sorted; the output of top-k
// is. Each thread then walks through a run of each list and, in parallel, through the other list,
// whose starting position it finds by bisection. Entries match one to one: a repeated key matches
// as often as both lists contain it. Only whole key tiles of matches are moved to the front. The
// other slots keep their order, and invalid slots come last, as -1.
#pragma once

#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kOrderThreads = 256;
inline constexpr int kNoKey = INT_MAX;  // greater than every valid index
static_assert(kOrderSlots <= 32 * kOrderThreads);

// Returns the number of slots of a row in shared memory, padded to a power of two.
inline int padded_slots(int slots) {
  int capacity = kOrderThreads;
  while (capacity < slots) capacity *= 2;
  return capacity;
}

// A list of `capacity` keys in shared memory. It is skewed so that threads which walk through one
// run each access different banks.
struct KeyList {
  int32_t* data;
  int capacity;

  __host__ __device__ static int words(int capacity) { return capacity + capacity / 32; }
  __device__ int32_t& operator[](unsigned i) const { return data[i + i / 32]; }
  // Returns how many entries of the sorted list are less than `entry`.
  __device__ int rank(int32_t entry) const {
    int below = 0;
    for (int step = capacity; step > 0; step /= 2) {
      if (below + step <= capacity && (*this)[below + step - 1] < entry) below += step;
    }
    return below;
  }
  // Sorts the list by a bitonic sort of the CTA. Runs shorter than `first` must be sorted already,
  // alternately in ascending and descending order.
  __device__ void sort(int first) const {
    for (int run = first; run <= capacity; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int i = thread_index(); i < capacity / 2; i += kOrderThreads) {
          const int low = 2 * i - (i & (apart - 1)), high = low + apart;
          const int32_t x = (*this)[low], y = (*this)[high];
          if ((x > y) == ((low & run) == 0)) (*this)[low] = y, (*this)[high] = x;
        }
        __syncthreads();
      }
    }
  }
};

inline int order_shared_bytes(int capacity) {
  return (3 * KeyList::words(capacity) + kOrderThreads / 32) * 4;
}

// Returns the sum of x over the CTA, and the sum over the threads before this one. `warp_sums`
// needs one entry per warp.
__device__ inline int2 cta_sum(int x, int* warp_sums) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int sum = inclusive_scan(x);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int all = 0, before = sum - x;
  for (int i = 0; i < kOrderThreads / 32; ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  __syncthreads();
  return {all, before};
}

__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const __grid_constant__ SparseMlaBwdParams p, const __grid_constant__ BwdWork work,
                 int capacity) {
  auto* const shared = &dynamic_shared<int32_t>();
  const KeyList lists[2] = {{shared, capacity}, {shared + KeyList::words(capacity), capacity}};
  const KeyList ordered = {shared + 2 * KeyList::words(capacity), capacity};
  int* const warp_sums = shared + 3 * KeyList::words(capacity);
  const int step = static_cast<int>(blockIdx.x);
  const int thread = thread_index();
  const HeadTile rows[2] = {{p, work, step, 0}, {p, work, step, 1}};
  const int bits = p.head_mask_bits;  // mask bits below each key
  const int32_t no_key = kNoKey >> bits;

#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const Slots slots = rows[side].slots(p);
#pragma unroll 8
    for (int i = thread; i < capacity; i += kOrderThreads) {
      const int index = slots.index(i);
      lists[side][i] = slots.is_valid(index) && rows[side].heads > 0 ? index : kNoKey;
    }
  }
  __syncthreads();
  const int run = capacity / kOrderThreads, begin = thread * run;  // each thread's run of a list
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const KeyList list = lists[side];
    int wrong = 0;
    for (int i = max(begin, 1); i < begin + run; ++i) {
      wrong += list[i - 1] >> bits > list[i] >> bits;
    }
    if (cta_sum(wrong, warp_sums).x > 0) list.sort(2);
  }

  const bool together = rows[0].batch(p) == rows[1].batch(p);
  uint32_t matches[2] = {};  // bit i: this thread's i-th entry has a match
  int2 counts[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const KeyList own = lists[side], other = lists[1 - side];
    int at = capacity;
    if (const int32_t key = own[begin] >> bits; together && key != no_key) {
      at = other.rank(key << bits);
      // Continue after the matches of previous threads.
      if (begin > 0 && own[begin - 1] >> bits == key) {
        at = min(at + begin - own.rank(key << bits), other.rank((key + 1) << bits));
      }
    }
    for (int i = 0; i < run; ++i) {
      const int32_t key = own[begin + i] >> bits;
      while (at < capacity && other[at] >> bits < key) ++at;
      if (at < capacity && key != no_key && other[at] >> bits == key) {
        matches[side] |= 1u << i;
        ++at;
      }
    }
    counts[side] = cta_sum(__popc(matches[side]), warp_sums);
  }
  const int first = counts[0].x / kTile * kTile;  // the matches that come first
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
