// A list of (value, index) entries in shared memory, cut down in place to its k largest values.
//
// The key of a float is an int with the same order, in which -0 equals +0: the bits of the
// magnitude, negated for negative values. The k-th largest key is found by histograms of 1024 bins.
// Each histogram covers the range that the one before left over. The first covers the list's own
// minimum to maximum, so no distribution puts all keys into a few bins. Once at most 32 keys are
// left, they are ranked directly.
//
// The list stays in ascending index order: kept entries move to places given by a prefix sum. Ties
// therefore go to the lower index, and nothing depends on the order in which threads run. Atomics
// only count.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "common/ptx.cuh"
#include "topk/instructions.cuh"

namespace jax_dsa::topk {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBinBits = 10;
constexpr int kBins = 1 << kBinBits;
constexpr int kFew = 32;                 // the number of keys that a warp can rank directly
constexpr int kLowestKey = -0x7f800000;  // the key of -inf
constexpr int kEntryBytes = 8;           // a float and its index

__device__ __forceinline__ int key_of(float x) {
  const int bits = __float_as_int(x);
  return bits < 0 ? -(bits & INT_MAX) : bits;
}
__device__ __forceinline__ float value_of(int key) {
  return __int_as_float(key < 0 ? INT_MIN | -key : key);
}

// A cut keeps the keys above `key` and the first `ties` of those that equal it.
struct Cut {
  int key;
  int ties;
};

// Shared memory beside the list. The list follows it.
template <int kThreads>
struct alignas(16) Scratch {
  static constexpr int kWarps = kThreads / 32;
  int append_sums[2][kWarps];  // double buffered, so that one barrier per step is enough
  int bins[kBins];             // zero between uses
  int no_bin[4];               // takes the increments of values that belong to no bin
  int few[kFew];
  int few_count;  // zero between uses
  int counts[2];  // length of this CTA's list after each attempt, read by the cluster
  int2 bounds[kWarps];
  float kept[kWarps];  // see List::keep
  int scan_sums[kWarps];
  int4 found[2];
};

template <int kThreads>
struct List {
  static constexpr int kWarps = kThreads / 32;
  using Scratch = topk::Scratch<kThreads>;

  static __device__ __forceinline__ Scratch& scratch() { return dynamic_shared<Scratch>(); }
  static __device__ __forceinline__ float2* entries() {
    return reinterpret_cast<float2*>(&scratch() + 1);
  }

  static __device__ __forceinline__ void init() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) scratch().bins[i] = 0;
    if (threadIdx.x == 0) scratch().few_count = 0;
  }

  static __device__ __forceinline__ uint32_t base() { return opaque(smem_address(&scratch())); }

  // Stores a number that is the same in all lanes of a warp, for `reload` to read. The compiler
  // must then repeat the comparisons with the reloaded number. Keeping dozens of their results in
  // registers over a barrier would cost more than comparing twice.
  static __device__ __forceinline__ void keep(uint32_t base, float x) {
    store_value(kept_address(base), x);
  }
  static __device__ __forceinline__ float reload(uint32_t base) {
    return reload_value(kept_address(base));
  }
  static __device__ __forceinline__ uint32_t kept_address(uint32_t base) {
    return base + static_cast<uint32_t>(offsetof(Scratch, kept)) + threadIdx.x / 32 * 4;
  }

  // Each warp passes one number. Returns the sums over the warps before this one and over all
  // warps. The function contains one barrier. Consecutive calls must alternate `parity`.
  static __device__ __forceinline__ int2 sum_warps(uint32_t base, int own, int parity) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t sums = base + parity * (kWarps * 4);  // append_sums is the first member.
    store_by_first(lane, sums + warp * 4, own);
    __syncthreads();
    const int x = load_int(sums + lane % kWarps * 4);  // 32 / kWarps lanes read each sum.
    return {static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? x : 0)),
            static_cast<int>(__reduce_add_sync(kAllLanes, x)) / (32 / kWarps)};
  }

  // Returns the cut that leaves the `wanted` largest of `count` values, or up to `slack` more. The
  // values lie `stride` bytes apart, beginning at `from`, and must be more than `wanted`. `low` and
  // `high` are the smallest and the largest key that this thread has seen; each key must have been
  // seen by some thread. The caller need not synchronise: a barrier precedes the first read.
  static __device__ __forceinline__ Cut find_cut(uint32_t from, int stride, int count, int wanted,
                                                 int slack, int low, int high) {
    Scratch& s = scratch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    if (lane == 0) s.bounds[warp] = {low, high};
    __syncthreads();
    const int2 bounds = s.bounds[lane % kWarps];
    low = __reduce_min_sync(kAllLanes, bounds.x);
    high = __reduce_max_sync(kAllLanes, bounds.y);

    const uint32_t bins = smem_address(s.bins);
    const uint32_t first = from + threadIdx.x * stride, end = from + count * stride;
    const uint32_t step = kThreads * stride;
#pragma unroll 1
    for (;;) {
      const unsigned range = static_cast<unsigned>(high) - static_cast<unsigned>(low);
      const int shift = max(0, 32 - __clz(range) - kBinBits);
      const auto note = [&](float x) {
        const unsigned distance = static_cast<unsigned>(key_of(x)) - static_cast<unsigned>(low);
        increment_within(bins, distance, range, shift);
      };
      uint32_t at = first;
      for (; at + 3 * step < end; at += 4 * step) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = load_value(at + j * step);
#pragma unroll
        for (int j = 0; j < 4; ++j) note(x[j]);
      }
#pragma unroll 1
      for (; at < end; at += step) note(load_value(at));
      __syncthreads();
      const int4 found = find_bin(wanted);
      const int left = found.z;
      wanted -= found.y;
      low = static_cast<int>(low + (static_cast<unsigned>(found.x) << shift));
      high = min(high, low + ((1 << shift) - 1));
      if (left - wanted <= slack) return {low - 1, 0};
      if (shift == 0) return {low, wanted};
      if (left <= kFew) break;
    }

    // At most kFew keys are left. Collect and rank them.
    const unsigned range = static_cast<unsigned>(high) - static_cast<unsigned>(low);
#pragma unroll 4
    for (uint32_t at = first; at < end; at += step) {
      const int key = key_of(load_value(at));
      const unsigned distance = static_cast<unsigned>(key) - static_cast<unsigned>(low);
      if (distance <= range) s.few[atomicAdd(&s.few_count, 1)] = key;
    }
    return rank_few(s.found[0].z, wanted);
  }

  // Returns the cut that leaves the `wanted` largest of the `left` keys in `few`.
  static __device__ __forceinline__ Cut rank_few(int left, int wanted) {
    Scratch& s = scratch();
    const int lane = threadIdx.x % 32;
    __syncthreads();  // `few` is complete.
    const int key = lane < left ? s.few[lane] : INT_MIN;
    int greater = 0, equal = 0;
#pragma unroll 4
    for (int i = 0; i < left; ++i) {
      const int other = s.few[i];
      greater += other > key;
      equal += other == key;
    }
    const bool is_cut = lane < left && greater < wanted && wanted <= greater + equal;
    const int chosen = __ffs(__ballot_sync(kAllLanes, is_cut)) - 1;
    const int cut = __shfl_sync(kAllLanes, key, chosen);
    const int ties = wanted - __shfl_sync(kAllLanes, greater, chosen);
    __syncthreads();  // All threads have read `few`.
    if (threadIdx.x == 0) s.few_count = 0;
    // If all ties are kept, return a cut without ties, which is cheaper to apply.
    if (ties == __shfl_sync(kAllLanes, equal, chosen)) return {cut - 1, 0};
    return {cut, ties};
  }

  // Finds the bin that holds the `wanted`-th largest key and clears all bins. Returns the index of
  // the bin, the number of keys in higher bins, and the number of keys in it, or zeros if there are
  // fewer than `wanted` keys. With other > 0, found[1] receives the same for the `other`-th largest
  // key.
  static __device__ __forceinline__ int4 find_bin(int wanted, int other = 0) {
    constexpr int kEach = kBins / kThreads;  // 2, 4 or 8
    Scratch& s = scratch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = kBins - (threadIdx.x + 1) * kEach;  // Thread 0 has the highest bins.
    int2* own = reinterpret_cast<int2*>(&s.bins[first]);
    int bin[kEach];
    int sum = 0;
#pragma unroll
    for (int v = 0; v < kEach / 2; ++v) {
      const int2 x = own[v];
      bin[2 * v] = x.x, bin[2 * v + 1] = x.y;
      sum += x.x + x.y;
    }
#pragma unroll
    for (int v = 0; v < kEach / 2; ++v) own[v] = {};
    const int inclusive = inclusive_scan(sum);
    if (lane == 31) s.scan_sums[warp] = inclusive;
    __syncthreads();
    const int before = lane < warp ? s.scan_sums[lane] : 0;
    const int above = __reduce_add_sync(kAllLanes, before) + inclusive - sum;
    const auto note = [&](int rank, int4& found) {
      if (threadIdx.x == kThreads - 1 && rank > above + sum) found = {};
      if (above < rank && rank <= above + sum) {
        int a = above;
#pragma unroll
        for (int j = kEach - 1; j >= 0; --j) {
          if (a < rank && rank <= a + bin[j]) found = {first + j, a, bin[j], 0};
          a += bin[j];
        }
      }
    };
    note(wanted, s.found[0]);
    if (other > 0) note(other, s.found[1]);
    __syncthreads();
    return s.found[0];
  }

  // Applies a cut to the list in place. Every round reads entries, passes a barrier, and writes at
  // or before the places that it read.
  template <bool kTies>
  static __device__ __forceinline__ void compress(uint32_t base, int count, Cut cut) {
    const uint32_t list = base + sizeof(Scratch);
    const float cut_value = value_of(cut.key);
    // Entries of the earlier rounds: those kept (with ties, those above the cut), and those that
    // tie.
    int kept = 0;
    [[maybe_unused]] int tied = 0;
    int parity = 0;
#pragma unroll 1
    for (int round = 0; round < count; round += 4 * kThreads, parity ^= 1) {
      const int i = round + 4 * threadIdx.x;
      const uint32_t from = list + i * kEntryBytes;
      int4 a = {}, b = {};
      if (i < count) a = load_entries(from), b = load_entries(from + 2 * kEntryBytes);
      const int none = __float_as_int(-INFINITY);  // -inf is never above a cut.
      const int bits[4] = {i < count ? a.x : none, i + 1 < count ? a.z : none,
                           i + 2 < count ? b.x : none, i + 3 < count ? b.z : none};
      const int index[4] = {a.y, a.w, b.y, b.w};
      unsigned sums = 0;  // number above in the low 16 bits, number tied in the high 16 bits
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        count_above(cut_value, sums, __int_as_float(bits[j]), 1);
        if constexpr (kTies) sums += (__int_as_float(bits[j]) == cut_value) << 16;
      }
      const int inclusive = inclusive_scan(sums);
      const int2 warps = sum_warps(base, __shfl_sync(kAllLanes, inclusive, 31), parity);
      const int before = warps.x + inclusive - sums;
      if constexpr (kTies) {
        int above = kept + (before & 0xffff), ties = tied + (before >> 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = __int_as_float(bits[j]);
          const bool is_tied = x == cut_value, is_above = x > cut_value;
          uint32_t to = list + (above + min(ties, cut.ties)) * kEntryBytes;
          append_if(is_above || (is_tied && ties < cut.ties), to, x, index[j]);
          above += is_above;
          ties += is_tied;
        }
        kept += warps.y & 0xffff;
        tied += warps.y >> 16;
      } else {
        uint32_t to = list + (kept + before) * kEntryBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) append_above(cut_value, to, __int_as_float(bits[j]), index[j]);
        kept += warps.y;
      }
    }
  }

  // Cuts the list of `count` entries to its `wanted` largest. Returns the key that later entries
  // must exceed.
  static __device__ __noinline__ int cut_to(int count, int wanted) {
    const uint32_t base = List::base(), list = base + sizeof(Scratch);
    __syncthreads();  // The list is complete.
    int low = INT_MAX, high = INT_MIN;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int key = key_of(load_value(list + i * kEntryBytes));
      low = min(low, key);
      high = max(high, key);
    }
    const Cut cut = find_cut(list, kEntryBytes, count, wanted, 0, low, high);
    if (cut.ties == 0) {
      compress<false>(base, count, cut);
    } else {
      compress<true>(base, count, cut);
    }
    __syncthreads();
    return cut.key;
  }
};

}  // namespace jax_dsa::topk
