// The importance of a layer's candidates: logsumexp of their scores over the heads of the KV
// head group, in log2 units.
//
// CTA, producer and pipeline: see walk.cuh. A warp multiplies a block with all heads of its
// query, 16 at a time. If a query has several warps, they take the blocks in turn. Queries of at
// most 16 heads stay in registers. Queries of more heads are in shared memory: reading a block
// of keys from there takes as long as reading 16 heads of a query.
//
// A lane holds heads lane / 4 and lane / 4 + 8 of two columns in eight. It keeps a sum for each
// column. Three shuffles then add up the lanes that differ in heads; in each, a lane passes on
// half of its columns as long as it has two. If a plain sum leaves the safe range, it is
// computed again with running maxima. This decision depends on the column alone, so that equal
// scores give equal importances.
//
// The last candidate is not scored: it is always selected.
#pragma once

#include <cfloat>
#include <type_traits>

#include "htree/walk.cuh"

namespace jax_dsa::htree {

template <typename S, int kD, int kR>
struct alignas(1024) ScoresShared {
  using BlockRing = typename S::template BlockRing<kR, kR * kD * 2, 96 * 1024, ScoresShared>;
  BlockRing ring;
  uint8_t rotations[S::kWarps][RotationMatrices<kD>::kBytes];
  uint8_t zeros[RotationMatrices<kD>::kBytes];
  // Head tiles i * head_tiles, ... belong to query i: 16 heads each, swizzled like blocks.
  uint8_t q[S::kWarps][kTileHeads * kD * 2];
};

// Sum of 2^score.
struct PlainSum {
  float sum = 0.f;

  static __device__ PlainSum of(float a, float b) { return {exp2_approx(a) + exp2_approx(b)}; }
  __device__ PlainSum operator+(PlainSum x) const { return {sum + x.sum}; }
  __device__ PlainSum shuffled(int mask) const { return {__shfl_xor_sync(~0u, sum, mask)}; }
  __device__ PlainSum choose(bool other, PlainSum x) const { return {other ? x.sum : sum}; }
  // Returns whether no term that matters was too large or too small.
  __device__ bool in_range() const { return sum > 0x1p-60f && sum < 0x1p100f; }
  __device__ float log2() const { return log2_approx(sum); }
};
// The same for scores of any size.
struct Sum {
  float peak = -INFINITY, sum = 0.f;

  static __device__ Sum of(float a, float b) {
    const float peak = fmaxf(a, b), finite = peak == -INFINITY ? 0.f : peak;
    return {peak, exp2_approx(a - finite) + exp2_approx(b - finite)};
  }
  __device__ Sum operator+(Sum x) const {
    const float high = fmaxf(peak, x.peak), finite = high == -INFINITY ? 0.f : high;
    return {high, sum * exp2_approx(peak - finite) + x.sum * exp2_approx(x.peak - finite)};
  }
  __device__ Sum shuffled(int mask) const {
    return {__shfl_xor_sync(~0u, peak, mask), __shfl_xor_sync(~0u, sum, mask)};
  }
  __device__ Sum choose(bool other, Sum x) const {
    return {other ? x.peak : peak, other ? x.sum : sum};
  }
  __device__ float log2() const { return peak + log2_approx(sum); }
};

// Adds up the first kCount columns of the lanes that differ in the bits kLane, kLane / 2, ...,
// 4. A lane whose bit kLane is set keeps the upper half of the columns.
template <int kCount, int kLane, typename Sum, int kColumns>
__device__ __forceinline__ void reduce_columns(Sum (&x)[kColumns]) {
  if constexpr (kLane >= 4) {
    if constexpr (kCount > 1) {
      const bool upper = threadIdx.x & kLane;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const Sum passed = x[i].choose(!upper, x[i + kCount / 2]);
        x[i] = x[i].choose(upper, x[i + kCount / 2]) + passed.shuffled(kLane);
      }
      reduce_columns<kCount / 2, kLane / 2>(x);
    } else {
      x[0] = x[0] + x[0].shuffled(kLane);
      reduce_columns<1, kLane / 2>(x);
    }
  }
}

// The column that a lane holds after reduce_columns: the bits of lane / 4, from the highest on,
// have chosen the halves.
template <int kR>
struct Column {
  int column;
  bool first;  // whether this is the first of the lanes that hold the column

  __device__ explicit Column(int lane) {
    constexpr int kBits = kR == 32 ? 3 : kR == 16 ? 2 : 1;
    const int half = lane / 4 >> (3 - kBits);
    column = half / 2 * 8 + lane % 4 * 2 + half % 2;
    first = (lane / 4 & ((8 >> kBits) - 1)) == 0;
  }
};

template <typename S, int kD, int kR>
__global__ void __launch_bounds__(S::kThreads, 1)
    scores_kernel(const __grid_constant__ typename S::template Call<Plan> plan, int layer) {
  constexpr int kRowBytes = kD * 2, kColumns = kR / 4;
  auto& shared = dynamic_shared<ScoresShared<S, kD, kR>>();
  const HTreeFwdParams& p = plan.p;
  const QueryTile tile(plan);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_tiles = plan.head_tiles, heads = plan.group_heads;

  for (int i = threadIdx.x; i < S::kWarps * kTileHeads * (kD / 8); i += S::kThreads) {
    const int chunk = i % (kD / 8), row = i / (kD / 8) % kTileHeads,
              head_tile = i / (kD / 8) / kTileHeads;
    const int query = head_tile / head_tiles, head = head_tile % head_tiles * kTileHeads + row;
    const bool has = query < tile.queries && head < heads;
    const int64_t from = has ? tile.token(plan, query) * p.heads + tile.group * heads + head : 0;
    uint32_t x[4];
    load_16_now<0>(static_cast<const char*>(p.q) + from * kRowBytes + chunk * 16, has, x);
    store_shared_16(smem_address(shared.q[head_tile]) + swizzled<kD>(row, chunk), x);
  }
  if (threadIdx.x == 0) shared.ring.init();
  clear_zeros(shared.zeros);
  __syncthreads();

  auto at = shared.ring.begin(plan);
  if (warp >= S::kWarps) {
    S::start_producer();
    if (warp > S::kWarps) return;
    const int64_t row = tile.row + min(lane, tile.queries - 1);
    const int64_t first = (tile.batch * p.groups + tile.group) * plan.layers.blocks;
    produce(shared.ring, at,
            static_cast<const uint8_t*>(p.tree) +
                (first + plan.layers.first[layer]) * kNodeBytes<kD, kR>,
            kNodeBytes<kD, kR>, BlockList::of<kR>(plan, tile.position(plan, lane), row, layer));
    return;
  }

  S::start_mma();
  const int query = warp / head_tiles, head_tile = warp % head_tiles;
  const int position = tile.position(plan, query);
  const int n = candidates<kR>(plan, position, layer);
  const int64_t row = tile.row + min(query, tile.queries - 1);
  if (query < tile.queries && head_tile == 0 && lane == 0) plan.chunk.ends[row] = max(n - 1, 0);
  float* const importance = plan.chunk.importance + row * plan.chunk.width;
  const float scale_log2 = p.scale * kLog2E;
  const uint32_t queries =
      smem_address(shared.q[query * head_tiles < S::kWarps ? query * head_tiles : 0]);
  RotationMatrices<kD> rotations(p.rotations, shared.rotations[warp], shared.zeros);
  const bool prefix = sees_prefix<kR>(plan, position, layer);
  // The queries of the warp's head tile: arranged in pairs for the rotations to come, or
  // rotated already where all blocks need the same rotation. If this is the query's only head
  // tile, it stays in registers.
  const bool held = head_tiles == 1;
  if (prefix) rotations.load(n - 1);
  const uint32_t prefix_rotation = prefix ? rotations.next(-1) : 0;
  const uint32_t own = smem_address(shared.q[warp]) + swizzled<kD>(lane % 16, lane / 16);
  uint32_t q[kD / 16][4];
#pragma unroll
  for (int j = 0; j < kD / 32; ++j) {
    uint32_t (&low)[4] = q[j], (&high)[4] = q[j + kD / 32];
    load_matrix_x4(offset_chunks(own, j * 2), low);
    load_matrix_x4(offset_chunks(own, (j + kD / 32) * 2), high);
    pair_up(low, high);
    if (prefix) rotate_pairs(low, high, prefix_rotation, j);
    if (held) continue;
    store_matrix_x4(offset_chunks(own, j * 2), low[0], low[1], low[2], low[3]);
    store_matrix_x4(offset_chunks(own, (j + kD / 32) * 2), high[0], high[1], high[2], high[3]);
  }
  if (!held) named_barrier_sync<S::kWarps * 32>(1);
  rotations.load(n - 1 - kR * head_tile);
  int ordinal = 0;  // of the next block, in units of blocks
  const auto walk = [&](auto rotates, auto holds) {
    constexpr bool kRotates = decltype(rotates)::value, kHeld = decltype(holds)::value;
    consume(shared.ring, at, query, [&](uint32_t block) {
      const int at_ordinal = ordinal++, first = kR * at_ordinal;
      if (!kHeld && at_ordinal % head_tiles != head_tile) return;
      const uint32_t rotation = kRotates ? rotations.next(n - 1 - first - kR * head_tiles) : 0;
      // Returns the sum of one of this lane's columns over all heads.
      const auto sum = [&](auto none) {
        decltype(none) sums[kColumns];
#pragma unroll 1
        for (int heads_before = 0; heads_before < (kHeld ? 1 : heads); heads_before += kTileHeads) {
          const uint32_t from =
              queries + heads_before * kRowBytes + swizzled<kD>(lane % 16, lane / 16);
          float s[kR / 8][4];
          multiply_keys<kD, kR>(s, block, [&](int j, uint32_t (&low)[4], uint32_t (&high)[4]) {
            if constexpr (kHeld) {
#pragma unroll
              for (int i = 0; i < 4; ++i) low[i] = q[j][i], high[i] = q[j + kD / 32][i];
            } else {
              load_matrix_x4(offset_chunks(from, j * 2), low);
              load_matrix_x4(offset_chunks(from, (j + kD / 32) * 2), high);
            }
            if constexpr (kRotates) rotate_pairs(low, high, rotation, j);
          });
          const int head = heads_before + lane / 4;
          const float absent[2] = {head < heads ? 0.f : -INFINITY,
                                   head + 8 < heads ? 0.f : -INFINITY};
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            sums[i] = sums[i] + decltype(none)::of(s[i / 2][i % 2] * scale_log2 + absent[0],
                                                   s[i / 2][i % 2 + 2] * scale_log2 + absent[1]);
          }
        }
        reduce_columns<kColumns, 16>(sums);
        return sums[0];
      };
      const Column<kR> mine(lane);
      const bool has = mine.first && first + mine.column < n - 1;
      const PlainSum plain = sum(PlainSum());
      float result = plain.log2();
      if (__any_sync(~0u, has && !plain.in_range())) {
        const Sum any = sum(Sum());
        // Top-k skips NaN and -inf, and would then select fewer nodes than n calls for.
        result = plain.in_range() ? result : fmaxf(any.log2(), -FLT_MAX);
      }
      if (has) importance[first + mine.column] = result;
    });
  };
  const auto walk_as = [&](auto holds) {
    if (prefix) {
      walk(std::false_type(), holds);
    } else {
      walk(std::true_type(), holds);
    }
  };
  if (held) {
    walk_as(std::true_type());
  } else {
    walk_as(std::false_type());
  }
}

}  // namespace jax_dsa::htree
