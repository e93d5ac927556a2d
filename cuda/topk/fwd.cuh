// Top-k of float32 rows in one read of the logits, exact for every input.
//
// The list. A row's range is streamed in index order, one tile of kThreads x kVec x 4 logits at a
// time, from registers into a list of (value, index) entries in shared memory. Only logits above a
// threshold are appended, at places given by a prefix sum, so the list stays in index order. When a
// tile does not fit, the list is cut to its exact k largest entries (select.cuh), and the threshold
// rises to the smallest of these. A later logit that equals the threshold loses the tie. The list
// has room for k entries and one tile, so it never overflows. Rows of equal values, plateaus or
// ascending values only cause more cuts, at most one per tile. At the end the list is cut once more
// and copied out.
//
// The first threshold is estimated from a sample, so that a typical row appends little more than k
// entries and is cut once. The sample consists of 2048 logits in quads (4 consecutive logits),
// spread evenly over the range. The threshold is a value that about k + 4 standard deviations of
// the logits should reach. If it is too low, only time is lost. If fewer than k logits pass it, the
// row is streamed again without a threshold.
//
// Variants.
//   Throughput  one CTA per row, five CTAs per SM, so that the cuts of one row overlap the loads of
//               another
//   Wide        the same with more threads, for long rows and for few rows
//   Latency     one cluster per row. Every CTA takes the same sample of the whole row, streams its
//               split of the range and cuts its own list. CTA 0 then appends the lists of the
//               others to its own and cuts once more. split.cuh does the same without clusters.
//
// Shared memory: Scratch (4.5 KB of bins and sums), then the list, 8 bytes per entry.
//
// Rows need no alignment. Quads of 16 bytes are counted from the aligned address at or below the
// start of the row, and a quad that extends beyond the range is read element by element.
#pragma once

#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/types.h"
#include "topk/select.cuh"
#include "topk/topk.h"

namespace jax_dsa::topk {

constexpr int kSample = 2048;  // logits per row from which the first threshold is estimated
constexpr float kGuessDeviations = 4.f;

template <int kThreads_, int kVec_, int kCtasPerSm_, bool kCluster_>
struct Traits {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVec = kVec_;  // quads per thread and tile
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kCluster = kCluster_;     // whether a cluster processes a row
  static constexpr int kQuads = kThreads * kVec;  // quads per tile
  static constexpr int kTile = 4 * kQuads;
  // The number of logits that are prefetched into L2 while the sample is evaluated.
  static constexpr int kPrefetchLogits = 8192;
  static_assert(kVec <= 4, "one byte per quad in a 32-bit word");
  static_assert(kTile >= kSample);
  static constexpr int shared_bytes(int capacity) {
    return sizeof(Scratch<kThreads>) + capacity * kEntryBytes;
  }
};

using Throughput = Traits<256, 2, 5, false>;
using Wide = Traits<512, 4, kTopkWideCtasPerSm, false>;
using Latency = Traits<512, 4, 2, true>;

// A range of candidates of a row. Positions are counted from the aligned address `base`.
struct RowRange {
  const float* base;
  int shift;        // position of element 0 of the row, 0..3
  int first, last;  // positions, half open

  __device__ __forceinline__ int size() const { return last - first; }
};

// Returns the range of a row. `wanted` receives the number of candidates to select from it.
__device__ __forceinline__ RowRange range_of(const TopkParams& p, int64_t row, int* wanted) {
  const int size = static_cast<int>(p.size);
  const int start = p.starts ? min(max(p.starts[row], 0), size) : 0;
  const int end = p.ends ? max(min(p.ends[row], size), start) : size;
  *wanted = static_cast<int>(min(p.k, static_cast<int64_t>(end - start)));
  const float* logits = p.logits + row * p.size;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(logits) / sizeof(float) % 4);
  return {logits - shift, shift, start + shift, end + shift};
}

// Returns split `rank` of a range of which `ranks` CTAs process one split each.
__device__ __forceinline__ RowRange split_of(const RowRange& range, int rank, int ranks) {
  const int quad = range.first / 4;
  const int64_t quads = ceil_div(range.last, 4) - quad;
  RowRange split = range;
  split.first = max(range.first, 4 * (quad + static_cast<int>(quads * rank / ranks)));
  split.last = min(range.last, 4 * (quad + static_cast<int>(quads * (rank + 1) / ranks)));
  return split;
}

// Loads a quad, with -inf for elements outside the range.
__device__ __forceinline__ float4 load_quad(const RowRange& range, int quad) {
  const int at = 4 * quad;
  if (at >= range.first && at + 4 <= range.last) return load_aligned(range.base + at);
  float x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool inside = at + j >= range.first && at + j < range.last;
    x[j] = inside ? __ldg(range.base + at + j) : -INFINITY;
  }
  return {x[0], x[1], x[2], x[3]};
}

// Returns the index of the v-th quad of this thread. Each warp has 32 x kVec consecutive quads of a
// tile.
template <typename T>
__device__ __forceinline__ int quad_of(int tile, int v) {
  return tile + threadIdx.x / 32 * (32 * T::kVec) + 32 * v + threadIdx.x % 32;
}

template <typename T>
__device__ __forceinline__ void load_tile(const RowRange& range, int tile, float4 (&x)[T::kVec]) {
  const int quad = quad_of<T>(tile, 0);
  if (4 * tile >= range.first && 4 * (tile + T::kQuads) <= range.last) {
    const float* from = range.base + 4 * static_cast<int64_t>(quad);
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) x[v] = load_aligned(from + 4 * 32 * v);
  } else {
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) x[v] = load_quad(range, quad + 32 * v);
  }
}

// Estimates a key that slightly more than `wanted` candidates of the range exceed. Returns the
// lowest key if the sample is too small to tell.
template <typename T>
__device__ __forceinline__ int guess(const RowRange& range, int wanted) {
  using L = List<T::kThreads>;
  constexpr int kQuads = kSample / 4;
  const float mean = __fdividef(static_cast<float>(kSample) * wanted, range.last - range.first);
  const float target = mean + kGuessDeviations * (mean * rsqrtf(mean)) + kGuessDeviations;
  if (target >= kSample) return kLowestKey;
  const int low_quad = ceil_div(range.first, 4);
  const int quads = range.last / 4 - low_quad;
  float4* sample = reinterpret_cast<float4*>(L::entries());
  float4 x[kQuads / T::kThreads];
#pragma unroll
  for (int v = 0; v < kQuads / T::kThreads; ++v) {
    const int64_t i = v * T::kThreads + threadIdx.x;
    x[v] = load_aligned(range.base + 4 * (low_quad + i * quads / kQuads));
  }
  int low = INT_MAX, high = INT_MIN;
#pragma unroll
  for (int v = 0; v < kQuads / T::kThreads; ++v) {
    float* const xs[] = {&x[v].x, &x[v].y, &x[v].z, &x[v].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (isnan(*xs[j])) *xs[j] = -INFINITY;
      low = min(low, key_of(*xs[j]));
      high = max(high, key_of(*xs[j]));
    }
    sample[v * T::kThreads + threadIdx.x] = x[v];
  }
  const int rank = static_cast<int>(target);
  const Cut cut =
      L::find_cut(smem_address(sample), sizeof(float), kSample, rank, rank / 16, low, high);
  return max(cut.ties > 0 ? cut.key - 1 : cut.key, kLowestKey);
}

// Prefetches `count` logits (a multiple of 4) from position `at` on into L2, as far as they lie in
// the range.
__device__ __forceinline__ void prefetch(const RowRange& range, int at, int count) {
  const int from = max(at, ceil_div(range.first, 4) * 4);
  const int size = (min(at + count, range.last) - from) / 4 * 4;
  if (size > 0) {
    prefetch_block_l2(range.base + from, size * static_cast<int>(sizeof(float)));
  }
}

// Appends the logits that exceed the key `above` to the list, which is cut to `wanted` entries
// whenever it is full. Returns the length of the list.
template <typename T>
__device__ __forceinline__ int stream(const RowRange& range, int above, int wanted, int capacity) {
  using L = List<T::kThreads>;
  constexpr int kVec = T::kVec;
  const uint32_t base = L::base(), list = base + sizeof(typename L::Scratch);
  const int end = ceil_div(range.last, 4);
  int tile = range.first / 4;
  int count = 0, parity = 0;
  float cut = value_of(above);
#pragma unroll 1
  // The loop runs once, and once more after every cut. No tile stays in registers during a cut.
  while (tile < end) {
    float4 next[kVec];
    load_tile<T>(range, tile, next);
    const float* from = range.base + 4 * static_cast<int64_t>(quad_of<T>(tile, 0));
    int index = 4 * quad_of<T>(tile, 0) - range.shift;
    if constexpr (kVec > 2) L::keep(base, cut);
#pragma unroll 1
    do {
      float4 x[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) x[v] = next[v];
      from += T::kTile;
      const int following = tile + T::kQuads;
      if (4 * (following + T::kQuads) <= range.last) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) next[v] = load_aligned(from + 4 * 32 * v);
      } else if (following < end) {
        load_tile<T>(range, following, next);
      }

      unsigned counts = 0;  // one byte per quad
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        count_above(cut, counts, x[v].x, 1u << (8 * v));
        count_above(cut, counts, x[v].y, 1u << (8 * v));
        count_above(cut, counts, x[v].z, 1u << (8 * v));
        count_above(cut, counts, x[v].w, 1u << (8 * v));
      }
      // The 32 lanes of a quad row hold 128 logits, so the sums fit in one byte.
      const unsigned inclusive = inclusive_scan(counts);
      const unsigned totals = __shfl_sync(kAllLanes, inclusive, 31);
      const int2 warps = L::sum_warps(base, __dp4a(totals, 0x01010101u, 0u), parity);
      parity ^= 1;
      if (count + warps.y > capacity) break;
      const unsigned before = inclusive - counts;
      uint32_t row = list + (count + warps.x) * kEntryBytes;
      if constexpr (kVec > 2) cut = L::reload(base);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        uint32_t to = row + __byte_perm(before, 0, 0x4440 + v) * kEntryBytes;
        append_above(cut, to, x[v].x, index + 128 * v);
        append_above(cut, to, x[v].y, index + 128 * v + 1);
        append_above(cut, to, x[v].z, index + 128 * v + 2);
        append_above(cut, to, x[v].w, index + 128 * v + 3);
        row += __byte_perm(totals, 0, 0x4440 + v) * kEntryBytes;
      }
      count += warps.y;
      index += T::kTile;
      tile = following;
    } while (tile < end);
    if (tile < end) {
      cut = value_of(L::cut_to(count, wanted));
      count = wanted;
    }
  }
  return count;
}

// Appends the lists of splits kFirst to ranks - 1 to this CTA's list, which already holds those
// before kFirst, and returns its length. `list_of(r)` is the list of split r. Lane r passes in
// `counts` its length, and `all` is the sum of the lengths.
template <typename T, int kFirst, typename ListOf>
__device__ __forceinline__ int gather(const ListOf& list_of, int ranks, int all, int counts,
                                      int wanted, int capacity) {
  using L = List<T::kThreads>;
  float2* entries = L::entries();
  int count = kFirst > 0 ? __shfl_sync(kAllLanes, counts, 0) : 0;
  static_assert(kFirst == 0 || kFirst == 1);
  if (all <= capacity) {  // Everything fits. Warps copy the lists in parallel.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lists = max(ranks - kFirst, 1);
    const int starts = inclusive_scan(counts) - counts;
    constexpr int kWarps = T::kThreads / 32;
    for (int r = kFirst + warp % lists; r < ranks; r += kWarps) {
      const int start = __shfl_sync(kAllLanes, starts, r),
                peer_count = __shfl_sync(kAllLanes, counts, r);
      const float2* peer_entries = list_of(r);
      const int helpers = max(kWarps - 1 - (r - kFirst), 0) / lists + 1;
#pragma unroll 4
      for (int i = warp / lists * 32 + lane; i < peer_count; i += helpers * 32) {
        entries[start + i] = peer_entries[i];
      }
    }
    return all;
  }
  for (int r = kFirst; r < ranks; ++r) {
    const float2* peer_entries = list_of(r);
    const int peer_count = __shfl_sync(kAllLanes, counts, r);
    for (int done = 0; done < peer_count;) {
      if (count == capacity) {
        L::cut_to(count, wanted);
        count = wanted;
      }
      const int copied = min(peer_count - done, capacity - count);
      for (int i = threadIdx.x; i < copied; i += T::kThreads) {
        entries[count + i] = peer_entries[done + i];
      }
      done += copied;
      count += copied;
    }
  }
  return count;
}

// Copies the list to the outputs of the row and fills their rest with -1 and -inf.
template <int kThreads>
__device__ __forceinline__ void write_out(const TopkParams& p, int64_t row, int count) {
  const float2* entries = List<kThreads>::entries();
  int32_t* indices = p.indices + row * p.k;
  for (int i = threadIdx.x; i < count; i += kThreads) indices[i] = __float_as_int(entries[i].y);
  for (int64_t i = count + threadIdx.x; i < p.k; i += kThreads) indices[i] = -1;
  if (p.values) {
    float* values = p.values + row * p.k;
    for (int i = threadIdx.x; i < count; i += kThreads) values[i] = entries[i].x;
    for (int64_t i = count + threadIdx.x; i < p.k; i += kThreads) values[i] = -INFINITY;
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    topk_kernel(const __grid_constant__ TopkParams p, int capacity) {
  using L = List<T::kThreads>;
  int rank = 0, ranks = 1;
  if constexpr (T::kCluster) rank = cluster_rank(), ranks = cluster_size();

  // Causal rows grow with their index. Start with the longest.
  const int64_t row = p.rows - 1 - blockIdx.x / ranks;
  int wanted;
  const RowRange whole = range_of(p, row, &wanted);
  const RowRange split = T::kCluster ? split_of(whole, rank, ranks) : whole;

  int count = 0;  // length of this CTA's list
  if (wanted > 0) {
    if (prefetches_block_l2()) prefetch(split, split.first / 4 * 4, T::kPrefetchLogits);
    L::init();
    int above = whole.size() > capacity ? guess<T>(whole, wanted) : kLowestKey;
    for (int attempt = 0;; ++attempt) {
      count = stream<T>(split, above, wanted, capacity);
      int all = count;
      if (count > wanted) {
        L::cut_to(count, wanted);
        count = wanted;
      }
      [[maybe_unused]] int counts = 0;  // Lane r holds the length of the list of CTA r.
      if constexpr (T::kCluster) {
        if (threadIdx.x == 0) L::scratch().counts[attempt] = count;
        cluster_sync();
        const int lane = threadIdx.x % 32;
        if (lane < ranks) counts = *cluster_peer(&L::scratch().counts[attempt], lane);
        all = __reduce_add_sync(kAllLanes, counts);
      }
      if (all >= wanted || above == kLowestKey) {
        if constexpr (T::kCluster) {
          if (rank == 0) {
            const auto list_of = [](int r) { return cluster_peer(L::entries(), r); };
            count = gather<T, 1>(list_of, ranks, all, counts, wanted, capacity);
          }
        }
        break;
      }
      above = kLowestKey;
      // All threads have now read the sums of the last tile. The first tile of the next attempt may
      // overwrite them.
      __syncthreads();
    }
    if constexpr (T::kCluster) {
      cluster_sync();  // CTA 0 has read the lists of the others.
      if (rank > 0) return;
      if (count > wanted) {
        L::cut_to(count, wanted);
        count = wanted;
      }
    }
  } else if (rank > 0) {
    return;
  }
  __syncthreads();  // The list is complete.

  write_out<T::kThreads>(p, row, count);
}

// Launches the kernel with `ranks` CTAs per row (1 unless T::kCluster).
template <typename T>
cudaError_t launch(const TopkParams& p, int capacity, int ranks, cudaStream_t stream) {
  const int bytes = T::shared_bytes(capacity);
  if constexpr (T::kCluster) {
    return launch_clusters(topk_kernel<T>, p.rows, ranks, T::kThreads, bytes, stream, p, capacity);
  } else {
    return launch_blocks(topk_kernel<T>, p.rows, T::kThreads, bytes, stream, p, capacity);
  }
}

}  // namespace jax_dsa::topk
