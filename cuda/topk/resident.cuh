// Top-k of float32 rows that fit in the registers of one CTA.
//
// Every thread holds kVec quads of the row. The k-th largest value is first bracketed: a sample of
// one logit from every second quad, one logit in 8, gives values at ranks k +- 4 standard
// deviations. Then one step counts the logits above the bracket and computes a histogram of those
// in it. This repeats with a narrower bracket until at most 32 keys are left (select.cuh). If the
// bracket misses the k-th largest value, it is replaced by the whole range. Ties that must not be
// selected are overwritten in the registers, by position. A prefix sum then assigns each thread its
// places in the output, which is staged in shared memory and copied out.
//
// Shared memory: Scratch, then the indices of the output [min(k, size)]. Values, if needed, are
// read from global memory again.
#pragma once

#include "topk/fwd.cuh"

namespace jax_dsa::topk {

template <int kThreads_, int kVec_, int kCtasPerSm_>
struct ResidentTraits {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVec = kVec_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  // The number of positions that fit. Up to 3 of them may lie before the row.
  static constexpr int kSize = 4 * kThreads * kVec;
  static constexpr int kQuads = kThreads * kVec;
  static_assert(kVec % 4 == 0, "one word holds the counts of four quads");
};

using Resident = ResidentTraits<256, 8, 4>;

// The part of the row in the registers of one thread, and the steps of the selection.
template <typename T>
struct RowRegisters {
  static constexpr int kThreads = T::kThreads;
  static constexpr int kVec = T::kVec;
  using L = List<kThreads>;

  float x[kVec][4];

  // Counts the keys within [low, high] in the bins. Returns how many keys of the thread lie above.
  __device__ __forceinline__ unsigned fill_bins(int low, int high, int shift) const {
    const uint32_t bins = smem_address(L::scratch().bins);
    const unsigned range = static_cast<unsigned>(high) - static_cast<unsigned>(low);
    const float top = value_of(high);
    unsigned above = 0;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        count_above(top, above, x[v][j], 1);
        const unsigned distance =
            static_cast<unsigned>(key_of(x[v][j])) - static_cast<unsigned>(low);
        increment_within(bins, distance, range, shift);
      }
    }
    return above;
  }

  static __device__ __forceinline__ int shift_for(int low, int high) {
    return max(0, 32 - __clz(static_cast<unsigned>(high) - static_cast<unsigned>(low)) - kBinBits);
  }

  // Estimates a bracket [low, high] of the `wanted`-th largest key from a sample of one position
  // in 8.
  __device__ __forceinline__ void guess(int wanted, int& low, int& high) const {
    const float mean = wanted / 8.f;
    const float margin = kGuessDeviations * (mean * rsqrtf(mean)) + kGuessDeviations;
    const uint32_t bins = smem_address(L::scratch().bins);
    const int shift = shift_for(low, high);
    const unsigned range = static_cast<unsigned>(high) - static_cast<unsigned>(low);
#pragma unroll
    for (int v = 0; v < kVec; v += 2) {
      const unsigned distance = static_cast<unsigned>(key_of(x[v][0])) - static_cast<unsigned>(low);
      increment_within(bins, distance, range, shift);
    }
    __syncthreads();
    const int upper = max(static_cast<int>(mean - margin), 0);
    const int4 lowest = L::find_bin(static_cast<int>(mean + margin) + 1, max(upper, 1));
    const int4 highest = L::scratch().found[1];
    const auto edge = [&](int bin) {
      return static_cast<int>(static_cast<unsigned>(low) + (static_cast<unsigned>(bin) << shift));
    };
    if (upper > 0 && highest.z > 0) high = min(high, edge(highest.x) + ((1 << shift) - 1));
    if (lowest.z > 0) low = edge(lowest.x);
  }

  // Finds the cut in [low, high] with one histogram that is linear in the value, which takes half
  // as many instructions per logit. Returns false if the bracket missed or 1023 bins are too
  // coarse.
  __device__ __forceinline__ bool find_linear(int wanted, int low, int high, Cut& cut) const {
    // From 2^23 on, floats are integers, and their lowest bits hold the integer.
    constexpr float kMagic = 8388608.f;
    typename L::Scratch& s = L::scratch();
    const float bottom = value_of(low), top = value_of(high);
    const float width = __fsub_rn(top, bottom);
    if (!(width > 1e-30f && width < INFINITY)) return false;
    float scale = __fdividef(kBins - 2, width);
    // Increases with x. Within the bracket the result is 0 to 1023 above the bits of kMagic.
    const auto linear_bin = [&](float x) {
      return __float_as_int(__fmaf_rn(__fsub_rn(x, bottom), scale, kMagic));
    };
    const uint32_t bins = smem_address(s.bins) - 4u * __float_as_uint(kMagic);
    unsigned own = 0;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Logits outside the bracket increment no_bin. A predicated increment would become a
        // branch.
        const bool is_above = x[v][j] > top, is_within = x[v][j] >= bottom && !is_above;
        count_above(top, own, x[v][j], 1);
        const int bin = is_within ? linear_bin(x[v][j]) : __float_as_int(kMagic) + kBins;
        increment(bins + 4 * bin);
      }
    }
    L::keep(L::base(), scale);
    const int above = L::sum_warps(L::base(), __reduce_add_sync(kAllLanes, own), 1).y;
    const int4 found = L::find_bin(wanted - above);
    // The lowest bin also counts values up to a quarter of a bin below the bracket.
    if (above >= wanted || found.z == 0 || found.z > kFew || found.x == 0) return false;
    const int bin = __float_as_int(kMagic) + found.x;
    scale = L::reload(L::base());
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      bool here[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) here[j] = linear_bin(x[v][j]) == bin && x[v][j] <= top;
      if (here[0] || here[1] || here[2] || here[3]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (here[j]) s.few[atomicAdd(&s.few_count, 1)] = key_of(x[v][j]);
        }
      }
    }
    cut = L::rank_few(found.z, wanted - above - found.y);
    return true;
  }

  // Returns the cut that leaves the `wanted` largest values, or all that can be selected if there
  // are fewer.
  __device__ __forceinline__ Cut find_cut(int wanted) const {
    constexpr int kBottom = kLowestKey + 1, kTop = 0x7f800000;
    typename L::Scratch& s = L::scratch();
    int low = kBottom, high = kTop;
    guess(wanted, low, high);
    Cut cut;
    if (find_linear(wanted, low, high, cut)) return cut;
    int parity = 0;
#pragma unroll 1
    for (;; parity ^= 1) {
      const int shift = shift_for(low, high);
      const unsigned own = fill_bins(low, high, shift);
      const int above = L::sum_warps(L::base(), __reduce_add_sync(kAllLanes, own), parity).y;
      const int4 found = L::find_bin(wanted - above);
      if (above >= wanted || found.z == 0) {  // The bracket missed.
        if (low == kBottom && high == kTop) return {kLowestKey, 0};
        low = kBottom, high = kTop;
        continue;
      }
      const int left = found.z, rank = wanted - above - found.y;
      low =
          static_cast<int>(static_cast<unsigned>(low) + (static_cast<unsigned>(found.x) << shift));
      high = min(high, low + ((1 << shift) - 1));
      if (left == rank) return {low - 1, 0};
      if (shift == 0) return {low, rank};
      if (left > kFew) continue;
      const float bottom = value_of(low), top = value_of(high);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (x[v][j] >= bottom && x[v][j] <= top) {
            s.few[atomicAdd(&s.few_count, 1)] = key_of(x[v][j]);
          }
        }
      }
      return L::rank_few(left, rank);
    }
  }

  // Places of the thread's elements in the output. For each of the thread's quads, one byte holds
  // the total over the 32 lanes and one byte the sum over the lanes before this one. `warps` holds
  // the sums over the warps before this one and over all warps.
  struct Places {
    unsigned totals[kVec / 4], before[kVec / 4];
    int2 warps;
  };
  template <typename Count>
  static __device__ __forceinline__ Places find_places(const Count& count, int parity) {
    Places places;
    int all = 0;
#pragma unroll
    for (int w = 0; w < kVec / 4; ++w) {
      unsigned counts = 0;
#pragma unroll
      for (int v = 0; v < 4; ++v) count(4 * w + v, counts, 1u << (8 * v));
      const unsigned inclusive = inclusive_scan(counts);
      places.totals[w] = __shfl_sync(kAllLanes, inclusive, 31);
      places.before[w] = inclusive - counts;
      all = __dp4a(places.totals[w], 0x01010101u, static_cast<unsigned>(all));
    }
    places.warps = L::sum_warps(L::base(), all, parity);
    return places;
  }

  // Overwrites the values that equal the cut with -inf, except for the first `ties`. Returns the
  // key above which values are then selected.
  __device__ __forceinline__ int drop_ties(Cut cut) {
    const float tied = value_of(cut.key);
    const Places places = find_places(
        [&](int v, unsigned& sum, unsigned step) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum += x[v][j] == tied ? step : 0;
        },
        0);
    int base = places.warps.x;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      int seen = base + __byte_perm(places.before[v / 4], 0, 0x4440 + v % 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_tied = x[v][j] == tied;
        if (is_tied && seen >= cut.ties) x[v][j] = -INFINITY;
        seen += is_tied;
      }
      base += __byte_perm(places.totals[v / 4], 0, 0x4440 + v % 4);
    }
    return cut.key - 1;
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    resident_kernel(const __grid_constant__ TopkParams p) {
  using L = List<T::kThreads>;
  const int64_t row = p.rows - 1 - blockIdx.x;
  int wanted;
  const RowRange range = range_of(p, row, &wanted);
  int count = 0;
  if (wanted > 0) {
    const int quad = quad_of<T>(0, 0);
    RowRegisters<T> registers;
    float4 x[T::kVec];
    load_tile<T>(range, 0, x);
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) {
      registers.x[v][0] = x[v].x, registers.x[v][1] = x[v].y, registers.x[v][2] = x[v].z,
      registers.x[v][3] = x[v].w;
    }
    L::init();
    __syncthreads();
    int above = kLowestKey;
    if (wanted < range.size()) {
      const Cut cut = registers.find_cut(wanted);
      above = cut.ties > 0 ? registers.drop_ties(cut) : cut.key;
    }
    float cut = value_of(above);
    L::keep(L::base(), cut);
    const auto places = RowRegisters<T>::find_places(
        [&](int v, unsigned& sum, unsigned step) {
#pragma unroll
          for (int j = 0; j < 4; ++j) count_above(cut, sum, registers.x[v][j], step);
        },
        1);
    count = places.warps.y;
    cut = L::reload(L::base());
    const uint32_t list = L::base() + sizeof(typename L::Scratch);
    const int at = 4 * quad - range.shift;
    uint32_t to_row = list + places.warps.x * 4;
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) {
      uint32_t to = to_row + __byte_perm(places.before[v / 4], 0, 0x4440 + v % 4) * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) append_index_above(cut, to, registers.x[v][j], at + 128 * v + j);
      to_row += __byte_perm(places.totals[v / 4], 0, 0x4440 + v % 4) * 4;
    }
  }
  __syncthreads();  // The list is complete.

  const int* list = reinterpret_cast<const int*>(L::entries());
  int32_t* indices = p.indices + row * p.k;
  if (count == p.k && p.k % 4 == 0 && reinterpret_cast<uintptr_t>(indices) % 16 == 0) {
    for (int i = threadIdx.x; i < count / 4; i += T::kThreads) {
      reinterpret_cast<int4*>(indices)[i] = reinterpret_cast<const int4*>(list)[i];
    }
  } else {
    for (int i = threadIdx.x; i < count; i += T::kThreads) indices[i] = list[i];
    for (int64_t i = count + threadIdx.x; i < p.k; i += T::kThreads) indices[i] = -1;
  }
  if (p.values) {
    float* values = p.values + row * p.k;
    for (int i = threadIdx.x; i < count; i += T::kThreads)
      values[i] = p.logits[row * p.size + list[i]];
    for (int64_t i = count + threadIdx.x; i < p.k; i += T::kThreads) values[i] = -INFINITY;
  }
}

// Returns whether every row fits, whatever its alignment.
template <typename T>
bool fits(const TopkParams& p) {
  const bool aligned = p.size % 4 == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
  return p.size + (aligned ? 0 : 3) <= T::kSize;
}

template <typename T>
cudaError_t launch_resident(const TopkParams& p, cudaStream_t stream) {
  const size_t bytes =
      sizeof(Scratch<T::kThreads>) + static_cast<size_t>(p.k < p.size ? p.k : p.size) * sizeof(int);
  return launch_blocks(resident_kernel<T>, p.rows, T::kThreads, static_cast<int>(bytes), stream, p);
}

}  // namespace jax_dsa::topk
