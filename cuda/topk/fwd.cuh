// Top-k of f32 rows in one read of the logits, exact for every input.
//
// A row's range is streamed in index order, a tile of kThreads x kVec x 4 logits at a time, from
// registers into a list in shared memory of (value, index). Only what exceeds a threshold is
// appended, at places given by a prefix sum, so the list stays in index order. When a tile does not
// fit, the list is cut to its exact k largest (select.cuh) and the threshold rises to the smallest
// of them: a later logit that only equals it loses the tie. The list holds k and a tile at least,
// so it never overflows: it is a cache, and all-equal rows, plateaus or ascending rows only make it
// be cut more often, at most once a tile. At the end the list is cut once more and copied out.
//
// The threshold starts as a guess, so that a typical row appends little more than k and is cut
// once: 2048 logits, in quads spread evenly over the range, are ranked, and the guess is what about
// k + 4 standard deviations should exceed or equal. Too low a guess costs time only; if fewer than
// k passed it, the row is streamed again with none.
//
// Throughput: a row a block, five blocks an SM, so that one row's cut hides behind another's loads.
// Wide: the same with more threads, for long rows and for few. Latency: a row's range is split over
// the blocks of a cluster. Each takes the same sample of the whole row, streams its part and cuts
// its own list; then the first block appends the others' lists to its own and cuts once more.
//
// Shared memory: Scratch (4.5 KB of bins and sums), then the list, 8 bytes an entry.
// Rows need no alignment: quads of 16 bytes are counted from the aligned address at or below the
// row's start, and a quad that reaches past the range is read element by element.
#pragma once

#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/types.h"
#include "topk/select.cuh"
#include "topk/topk.h"

namespace jax_dsa::topk {

constexpr int kSample = 2048;  // logits of a row that are ranked for the guess
constexpr float kGuessDeviations = 4.f;

template <int kThreads_, int kVec_, int kBlocksPerSm_, bool kCluster_>
struct Traits {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVec = kVec_;  // quads of a tile that a thread holds
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kCluster = kCluster_;     // a row is a cluster's, not a block's
  static constexpr int kQuads = kThreads * kVec;  // of a tile
  static constexpr int kTile = 4 * kQuads;
  static constexpr int kFirst = 8192;  // logits that the L2 is asked for while the guess is made
  static_assert(kVec <= 4, "a byte a quad in one word");
  static_assert(kTile >= kSample);
  static constexpr int shared_bytes(int capacity) {
    return sizeof(Scratch<kThreads>) + capacity * kEntryBytes;
  }
};

using Throughput = Traits<256, 2, 5, false>;
using Wide = Traits<512, 4, kTopkLongRowsAtOnce, false>;
using Latency = Traits<512, 4, 2, true>;

// A run of a row's candidates. Positions are counted from the aligned address `base`.
struct Run {
  const float* base;
  int shift;        // position of the row's element 0, 0..3
  int first, last;  // positions, half open
};

// -inf outside the run.
__device__ __forceinline__ float4 load_quad(const Run& run, int quad) {
  const int at = 4 * quad;
  if (at >= run.first && at + 4 <= run.last) return load_aligned(run.base + at);
  float x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool inside = at + j >= run.first && at + j < run.last;
    x[j] = inside ? __ldg(run.base + at + j) : -INFINITY;
  }
  return {x[0], x[1], x[2], x[3]};
}

// Warps hold consecutive runs of 32 x kVec quads of a tile.
template <typename T>
__device__ __forceinline__ int quad_of(int tile, int v) {
  return tile + threadIdx.x / 32 * (32 * T::kVec) + 32 * v + threadIdx.x % 32;
}

template <typename T>
__device__ __forceinline__ void load_tile(const Run& run, int tile, float4 (&x)[T::kVec]) {
  const int quad = quad_of<T>(tile, 0);
  if (4 * tile >= run.first && 4 * (tile + T::kQuads) <= run.last) {
    const float* from = run.base + 4 * static_cast<int64_t>(quad);
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) x[v] = load_aligned(from + 4 * 32 * v);
  } else {
#pragma unroll
    for (int v = 0; v < T::kVec; ++v) x[v] = load_quad(run, quad + 32 * v);
  }
}

// A key that `wanted` of the run's candidates, and a margin, should exceed; or the lowest if a
// sample cannot tell.
template <typename T>
__device__ __forceinline__ int guess(const Run& run, int wanted) {
  using L = List<T::kThreads>;
  constexpr int kQuads = kSample / 4;
  const float mean = __fdividef(static_cast<float>(kSample) * wanted, run.last - run.first);
  const float target = mean + kGuessDeviations * (mean * rsqrtf(mean)) + kGuessDeviations;
  if (target >= kSample) return kLowestKey;
  const int low_quad = ceil_div(run.first, 4);
  const int quads = run.last / 4 - low_quad;
  float4* sample = reinterpret_cast<float4*>(L::entries());
  float4 x[kQuads / T::kThreads];
#pragma unroll
  for (int v = 0; v < kQuads / T::kThreads; ++v) {
    const int64_t i = v * T::kThreads + threadIdx.x;
    x[v] = load_aligned(run.base + 4 * (low_quad + i * quads / kQuads));
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

// Asks the L2 for the `count` logits (a multiple of 4) from position `at`, as far as they lie in
// the run: one instruction of one thread, which no register waits for.
__device__ __forceinline__ void prefetch(const Run& run, int at, int count) {
  const int from = max(at, ceil_div(run.first, 4) * 4);
  const int size = (min(at + count, run.last) - from) / 4 * 4;
  if (size > 0) {
    prefetch_l2(run.base + from, size * static_cast<int>(sizeof(float)));
  }
}

// Lists what exceeds the key `above`, cut to `wanted` whenever there is no room; returns the list's
// length.
template <typename T>
__device__ __forceinline__ int stream(const Run& run, int above, int wanted, int capacity) {
  using L = List<T::kThreads>;
  constexpr int kVec = T::kVec;
  const uint32_t base = L::base(), list = base + sizeof(typename L::Scratch);
  const int end = ceil_div(run.last, 4);
  int tile = run.first / 4;
  int count = 0, parity = 0;
  float cut = value_of(above);
#pragma unroll 1
  while (tile < end) {  // once, and once more after every cut: no tile is held in registers over it
    float4 next[kVec];
    load_tile<T>(run, tile, next);
    const float* from = run.base + 4 * static_cast<int64_t>(quad_of<T>(tile, 0));
    int index = 4 * quad_of<T>(tile, 0) - run.shift;
    if constexpr (kVec > 2) L::keep(base, cut);
#pragma unroll 1
    do {
      float4 x[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) x[v] = next[v];
      from += T::kTile;
      const int following = tile + T::kQuads;
      if (4 * (following + T::kQuads) <= run.last) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) next[v] = load_aligned(from + 4 * 32 * v);
      } else if (following < end) {
        load_tile<T>(run, following, next);
      }

      unsigned counts = 0;  // a byte a quad
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        count_above(cut, counts, x[v].x, 1u << (8 * v));
        count_above(cut, counts, x[v].y, 1u << (8 * v));
        count_above(cut, counts, x[v].z, 1u << (8 * v));
        count_above(cut, counts, x[v].w, 1u << (8 * v));
      }
      const unsigned inclusive = inclusive_scan(counts);  // a warp's quads hold 128 logits
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

// Appends the lists of the cluster's other blocks to this one's, the first; returns its length.
// `counts`: lane r holds the length of block r's.
template <typename T>
__device__ __forceinline__ int gather(int all, int counts, int wanted, int capacity) {
  using L = List<T::kThreads>;
  float2* entries = L::entries();
  int count = __shfl_sync(kAllLanes, counts, 0);
  if (all <= capacity) {  // every warp takes another list
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int ranks = cluster_size();
    const int starts = inclusive_scan(counts) - counts;
    constexpr int kWarps = T::kThreads / 32;
    for (int r = 1 + warp % max(ranks - 1, 1); r < ranks; r += kWarps) {
      const int start = __shfl_sync(kAllLanes, starts, r),
                theirs = __shfl_sync(kAllLanes, counts, r);
      const float2* their_entries = cluster_peer(entries, r);
      const int helpers = (kWarps - 1 - (r - 1)) / (ranks - 1) + 1;
#pragma unroll 4
      for (int i = warp / (ranks - 1) * 32 + lane; i < theirs; i += helpers * 32) {
        entries[start + i] = their_entries[i];
      }
    }
    return all;
  }
  for (int r = 1; r < cluster_size(); ++r) {
    const float2* their_entries = cluster_peer(entries, r);
    const int theirs = __shfl_sync(kAllLanes, counts, r);
    for (int done = 0; done < theirs;) {
      if (count == capacity) {
        L::cut_to(count, wanted);
        count = wanted;
      }
      const int some = min(theirs - done, capacity - count);
      for (int i = threadIdx.x; i < some; i += T::kThreads) {
        entries[count + i] = their_entries[done + i];
      }
      done += some;
      count += some;
    }
  }
  return count;
}

// Copies the list to the row's output, and fills up what is left of it.
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
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    topk_kernel(const __grid_constant__ TopkParams p, int capacity) {
  using L = List<T::kThreads>;
  const int rank = T::kCluster ? cluster_rank() : 0;
  const int ranks = T::kCluster ? cluster_size() : 1;

  // Causal rows grow with their number: the longest go first.
  const int64_t row = p.rows - 1 - blockIdx.x / ranks;
  const int size = static_cast<int>(p.size);
  const int start = p.starts ? min(max(p.starts[row], 0), size) : 0;
  const int end = p.ends ? max(min(p.ends[row], size), start) : size;
  const int wanted = static_cast<int>(min(p.k, static_cast<int64_t>(end - start)));

  const float* logits = p.logits + row * p.size;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(logits) / sizeof(float) % 4);
  const Run whole = {logits - shift, shift, start + shift, end + shift};
  Run part = whole;
  if constexpr (T::kCluster) {
    const int quad = whole.first / 4;
    const int64_t quads = ceil_div(whole.last, 4) - quad;
    part.first = max(whole.first, 4 * (quad + static_cast<int>(quads * rank / ranks)));
    part.last = min(whole.last, 4 * (quad + static_cast<int>(quads * (rank + 1) / ranks)));
  }

  int count = 0;  // of this block's list
  if (wanted > 0) {
    if (threadIdx.x == 0) prefetch(part, part.first / 4 * 4, T::kFirst);
    L::init();
    int above = end - start > capacity ? guess<T>(whole, wanted) : kLowestKey;
    for (int attempt = 0;; ++attempt) {
      count = stream<T>(part, above, wanted, capacity);
      int all = count;
      if (count > wanted) {
        L::cut_to(count, wanted);
        count = wanted;
      }
      [[maybe_unused]] int counts = 0;  // lane r: of block r
      if constexpr (T::kCluster) {
        if (threadIdx.x == 0) L::scratch().counts[attempt] = count;
        cluster_sync();
        const int lane = threadIdx.x % 32;
        if (lane < ranks) counts = *cluster_peer(&L::scratch().counts[attempt], lane);
        all = __reduce_add_sync(kAllLanes, counts);
      }
      if (all >= wanted || above == kLowestKey) {
        if constexpr (T::kCluster) {
          if (rank == 0) count = gather<T>(all, counts, wanted, capacity);
        }
        break;
      }
      above = kLowestKey;
      __syncthreads();  // all have read the last tile's sums, where the first one's may go
    }
    if constexpr (T::kCluster) {
      cluster_sync();  // the first block has read the others' lists
      if (rank > 0) return;
      if (count > wanted) {
        L::cut_to(count, wanted);
        count = wanted;
      }
    }
  } else if (rank > 0) {
    return;
  }
  __syncthreads();  // the list is written

  write_out<T::kThreads>(p, row, count);
}

// Launches with `ranks` blocks a row (1 unless T::kCluster).
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
