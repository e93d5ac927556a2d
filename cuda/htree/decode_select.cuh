// Decode's selection: from the importances of a layer's candidates to the list of selected nodes.
//
// All threads of a CTA work on one row. A sample of the importances gives a lower bound below which
// no candidate can be selected, and the width of the bins. The candidates above the bound are
// counted in 256 bins. The counts tell the boundary bin: all candidates above it are selected, and
// of those in it only some. Pairwise comparisons rank the boundary bin. There are two slow paths:
//   - If the sample was misleading, so that too few candidates pass the bound, all are counted.
//   - If too many candidates share the boundary bin, because they are equal, the least selected
//     key is found bit by bit.
// Each thread owns whole words of 32 candidates.
#pragma once

#include <cfloat>

#include "htree/decode_plan.cuh"

namespace jax_dsa::htree {

// Returns the sum over all threads of the CTA. `parity` alternates between consecutive calls.
__device__ __forceinline__ int sum_over_cta(int x, int parity, int (&warp_sums)[2][kDecodeWarps]) {
  x = __reduce_add_sync(~0u, x);
  if (threadIdx.x % 32 == 0) warp_sums[parity][threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < kDecodeWarps; ++i) x += warp_sums[parity][i];
  return x;
}

// Returns an integer whose order is that of the float with these bits.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The greatest key is selected first: the higher importance, then the lower ordinal.
__device__ __forceinline__ uint64_t rank_key(float importance, int ordinal) {
  const uint32_t key = static_cast<uint32_t>(ordered(__float_as_int(importance))) ^ 0x80000000u;
  return uint64_t{key} << 32 | ~static_cast<uint32_t>(ordinal);
}

// Bins of equal width from `base` on; values beyond either end fall into the end bins. A bin is
// represented as the float 2^23 + bin, which holds the bin in its lowest bits.
struct Bins {
  static constexpr float kFirst = 0x1p23f;
  float floor, base, factor;  // values below `floor` are not counted

  __device__ float bin_of(float y) const {
    return fminf(fmaxf(fmaf(y - base, factor, kFirst), kFirst), kFirst + (kBins - 1));
  }
};

// Calls take(four values, position of the first one in the word) for the candidates of a word.
// Threads begin with different quads to avoid bank conflicts.
template <typename Take>
__device__ __forceinline__ void for_each_quad(const float4* values, int word, Take take) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int quad = (i + threadIdx.x) % 8;
    const float4 y = values[word * 8 + quad];
    const float all[4] = {y.x, y.y, y.z, y.w};
    take(all, quad * 4);
  }
}

// Copies the importances of the `others`, all candidates but the last one, to shared memory and
// takes the samples. NaN becomes -inf, -0 becomes 0.
template <typename Selection>
__device__ __forceinline__ void load_importances(const float4* importance, int split, int others,
                                                 int quads, Selection& selection, float4* values) {
  const int thread = threadIdx.x;
  // One quad in 2^shift gives a sample.
  const int shift = quads > kSamples ? 32 - __clz((quads - 1) / kSamples) : 0;
  constexpr int kAtOnce = 8;
  for (int first = thread; first < quads; first += kAtOnce * kDecodeThreads) {
    // The CTAs of a row begin with different quads, so that they do not wait for the same slice of
    // the L2.
    const auto quad_of = [&](int i) { return first + (i + split) % kAtOnce * kDecodeThreads; };
    float4 y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = quad_of(i);
      y[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (quad * 4 < others) y[i] = __ldcg(importance + quad);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = quad_of(i);
      const auto clean = [](float z) { return fmaxf(z + 0.f, -INFINITY); };  // no NaN, no -0
      y[i] = make_float4(clean(y[i].x), clean(y[i].y), clean(y[i].z), clean(y[i].w));
      if (quad == others / 4) {  // memory past the last one of them is undefined
        const int rest = others % 4;
        y[i] = make_float4(rest > 0 ? y[i].x : -INFINITY, rest > 1 ? y[i].y : -INFINITY,
                           rest > 2 ? y[i].z : -INFINITY, -INFINITY);
      }
      if (quad < quads) values[quad] = y[i];
      const int sample = quad >> shift;
      if (quad < quads && ((quad ^ sample * 5) & ((1 << shift) - 1)) == 0)
        selection.samples[sample] = y[i].x;
    }
  }
}

// Ranks the samples and writes three of them to `selection`: the highest, the lowest, and a `low`
// that is below the cut unless the sample is misleading. Returns whether there are samples below
// `low`, so that it excludes anything.
template <typename Selection>
__device__ __forceinline__ bool rank_samples(Selection& selection, int wanted, int others) {
  const int thread = threadIdx.x;
  // Four threads rank one sample.
  static_assert(kSamples * 4 == kDecodeThreads);
  const int sample = thread / 4;
  const float sampled = selection.samples[sample];
  int rank = 0, valid = 0;
#pragma unroll
  for (int i = 0; i < kSamples / 4; ++i) {
    const int at = i * 4 + thread % 4;
    const float y = selection.samples[at];
    rank += y > sampled || (y == sampled && at < sample);
    valid += y > -INFINITY;
  }
#pragma unroll
  for (int i = 1; i < 4; i *= 2) {
    rank += __shfl_xor_sync(~0u, rank, i);
    valid += __shfl_xor_sync(~0u, valid, i);
  }
  // The expected number of selected samples, plus four standard deviations.
  const float expected = static_cast<float>(valid) * wanted / max(others, 1);
  const int least = static_cast<int>(fminf(expected + 4.f * sqrtf(expected) + 2.f, kSamples));
  if (thread % 4 == 0 && rank == 0) selection.high = sampled;
  if (thread % 4 == 0 && rank == max(valid - 1, 0)) selection.lowest = sampled;
  if (thread % 4 == 0 && rank == max(min(least, valid - 1), 0)) selection.low = sampled;
  return least < valid;
}

// Bin `bin` is the boundary; `above` candidates lie in higher bins.
struct Cut {
  Bins bins;
  int bin, above;
};

// Counts the candidates by bins until `wanted` of them are reached. `filters` says whether to leave
// out those below `selection.low` at first. The bins must be 0.
template <typename Selection>
__device__ __forceinline__ Cut find_cut(Selection& selection, const float4* values, int words,
                                        int wanted, bool filters) {
  const int thread = threadIdx.x, lane = thread % 32;
  Cut cut;
  Bins& bins = cut.bins;
  for (float low = selection.low;; low = selection.lowest) {
    bins.floor = filters ? low : -FLT_MAX;
    bins.base = fmaxf(low, -FLT_MAX);
    // Three times the range of the samples: now and then no sample is above the cut.
    const float width = 3.f * (selection.high - bins.base);
    bins.factor = width > 0.f ? kBins / width : 0.f;
    for (int word = thread; word < words; word += kDecodeThreads) {
      for_each_quad(values, word, [&](const float (&y)[4], int) {
#pragma unroll
        for (float z : y) {
          const float bin = bins.bin_of(z);
          count_if(&selection.bins[__float_as_int(bin) - __float_as_int(Bins::kFirst)],
                   z >= bins.floor);
        }
      });
    }
    __syncthreads();
    // Each warp scans the bins by itself. A lane has eight bins, the first lane the highest ones.
    constexpr int kEach = kBins / 32;
    int counts[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      counts[i] = selection.bins[kBins - 1 - (lane * kEach + i)];
      sum += counts[i];
    }
    const int through = inclusive_scan(sum), total = __shfl_sync(~0u, through, 31);
    cut.bin = kBins - 1 - lane * kEach, cut.above = through - sum;
    const uint32_t reach = __ballot_sync(~0u, through >= wanted);
    bool open = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      open = open && cut.above + counts[i] < wanted;
      if (open) cut.above += counts[i], --cut.bin;
    }
    const int holder = reach ? __ffs(reach) - 1 : 0;
    cut.bin = __shfl_sync(~0u, cut.bin, holder), cut.above = __shfl_sync(~0u, cut.above, holder);
    if (!reach || wanted == 0) cut.bin = wanted == 0 ? kBins : -1, cut.above = wanted;
    if (total >= wanted || !filters) break;
    filters = false;  // the sample was misleading: count all candidates
    __syncthreads();
    for (int i = thread; i < kBins; i += kDecodeThreads) selection.bins[i] = 0;
    __syncthreads();
  }
  return cut;
}

// Sets the bits of candidates above the boundary bin, and collects the keys of those in it. `mine`
// to `end` are the thread's words.
template <typename Shared, typename Selection>
__device__ __forceinline__ void collect_boundary(Shared& shared, Selection& selection,
                                                 const float4* values, const Cut& cut, int mine,
                                                 int end) {
  const float* const scalars = reinterpret_cast<const float*>(values);
  const float from = Bins::kFirst + static_cast<float>(cut.bin), to = from + 1.f;
  for (int word = mine; word < end; ++word) {
    uint32_t more = 0, equal = 0;  // above the boundary bin; in it or above
    for_each_quad(values, word, [&](const float (&y)[4], int first) {
      uint32_t its_more = 0, its_equal = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float at = cut.bins.bin_of(y[i]);
        const bool is = y[i] >= cut.bins.floor && at >= from;
        its_equal |= uint32_t{is} << i, its_more |= uint32_t{is && at >= to} << i;
      }
      more |= its_more << first, equal |= its_equal << first;
    });
    shared.bits[word] = more, equal &= ~more;
    selection.boundary_bits[word] = static_cast<int>(equal);
    for (; equal; equal &= equal - 1) {
      const int i = word * 32 + __ffs(equal) - 1, at = atomicAdd(&selection.boundary_count, 1);
      if (at < kMaxBoundary) selection.boundary[at] = rank_key(scalars[i], i);
    }
  }
}

// Sets the bits of the `left` greatest keys of the `count` in the boundary bin.
template <typename Shared, typename Selection>
__device__ __forceinline__ void rank_boundary(Shared& shared, const Selection& selection,
                                              const float* importance, int count, int left,
                                              int mine, int end) {
  for (int word = mine; word < end; ++word) {
    for (uint32_t equal = selection.boundary_bits[word]; equal; equal &= equal - 1) {
      const int bit = __ffs(equal) - 1, i = word * 32 + bit;
      const uint64_t key = rank_key(importance[i], i);
      int before = 0;
#pragma unroll 8
      for (int j = 0; j < count; ++j) before += selection.boundary[j] > key;
      if (before < left) shared.bits[word] |= 1u << bit;
    }
  }
}

// Finds the least selected key by bisection over all candidates, and sets the bits from it on.
template <typename Shared, typename Selection>
__device__ __forceinline__ void bisect_keys(Shared& shared, Selection& selection,
                                            const float* importance, int wanted, int mine,
                                            int end) {
  const int thread = threadIdx.x;
  uint64_t least_key = 0;
  const auto bits_from = [&](int word, uint64_t key) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int bit = (i + thread) % 32, at = word * 32 + bit;
      const bool is = importance[at] > -INFINITY && rank_key(importance[at], at) >= key;
      bits |= uint32_t{is} << bit;
    }
    return bits;
  };
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t trial = least_key | uint64_t{1} << bit;
    int count = 0;
    for (int word = mine; word < end; ++word) count += __popc(bits_from(word, trial));
    if (sum_over_cta(count, bit % 2, selection.warp_sums) >= wanted) least_key = trial;
  }
  __syncthreads();
  for (int word = mine; word < end; ++word) {
    shared.bits[word] = wanted > 0 ? bits_from(word, least_key) : 0;
  }
}

// Selects the nodes of a layer with n candidates into `shared.bits` and `shared.list`. All threads
// call it, and must synchronize before they read the results.
template <int kR, typename Shared>
__device__ void select(const DecodePlan& x, const DecodeRow& row, int layer, int n,
                       Shared& shared) {
  const HTreeFwdParams& p = x.plan.p;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int k = static_cast<int>(p.top_k), wanted = k - 1;
  const int words = ceil_div(n, 32);
  const int others = max(n - 1, 0), quads = words * 8;
  auto& selection = shared.selection(x.plan.head_tiles);
  float4* const values = shared.values(x.plan.head_tiles);
  const float* const scalars = reinterpret_cast<const float*>(values);
  const bool top = layer + 1 == x.plan.layers.count;

  load_importances(reinterpret_cast<const float4*>(row.importance(x, layer)), row.split, others,
                   quads, selection, values);
  if (!top) {
    const int32_t* const parents = x.lists + row.list(x, layer + 1);
    for (int i = thread; i < k; i += kDecodeThreads) selection.parents[i] = parents[i];
  }
  __syncthreads();
  const bool filters = rank_samples(selection, wanted, others);
  __syncthreads();
  const Cut cut = find_cut(selection, values, words, wanted, filters);

  const int each = ceil_div(words, kDecodeThreads), mine = thread * each;
  const int end = min(mine + each, words);
  collect_boundary(shared, selection, values, cut, mine, end);
  __syncthreads();
  const int boundary = selection.boundary_count, left = wanted - cut.above;
  if (boundary <= kMaxBoundary) {
    rank_boundary(shared, selection, scalars, boundary, left, mine, end);
  } else {
    bisect_keys(shared, selection, scalars, wanted, mine, end);
  }

  // Add the last candidate and turn the bits into the list of nodes. The row's first CTA also
  // writes bits, list and ordinals to global memory.
  const bool keeps = row.split == 0;
  int count = 0;
  for (int word = mine; word < end; ++word) {
    if (word == (n - 1) / 32) shared.bits[word] |= 1u << (n - 1) % 32;
    if (keeps) x.bits[row.bits(x, layer) + word] = shared.bits[word];
    count += __popc(shared.bits[word]);
  }
  const int scanned = inclusive_scan(count);
  if (lane == 31) selection.warp_sums[0][warp] = scanned;
  __syncthreads();
  int place = scanned - count, all = 0;  // place: of the thread's first node in the list
#pragma unroll
  for (int i = 0; i < kDecodeWarps; ++i) {
    place += i < warp ? selection.warp_sums[0][i] : 0;
    all += selection.warp_sums[0][i];
  }
  int32_t* const list = x.lists + row.list(x, layer);
  int16_t* const selected =
      p.selected + ((row.token * p.groups + row.group) * (x.plan.layers.count - 1) + layer - 1) * k;
  const auto put = [&](int at, int node, int ordinal) {
    shared.list[at] = node;
    if (keeps) list[at] = node, selected[at] = static_cast<int16_t>(ordinal);
  };
  for (int word = mine; word < end; ++word) {
    for (uint32_t rest = shared.bits[word]; rest; rest &= rest - 1, ++place) {
      const int ordinal = word * 32 + __ffs(rest) - 1;
      put(place, top ? ordinal : selection.parents[ordinal / kR] * kR + ordinal % kR, ordinal);
    }
  }
  for (int i = all + thread; i < k; i += kDecodeThreads) put(i, -1, -1);
}

}  // namespace jax_dsa::htree
