// The importance of a layer's candidates: logsumexp over the heads of the group of their scores, in
// log2 units.
//
// Thread block, producer, ring: walk.cuh. All heads of a query meet in one warp, 16 at a time,
// their queries in shared memory; of the warps that a query has, each takes every so many-th block.
// A lane has heads lane / 4 and 8 more of two columns in eight; it keeps a maximum and a sum for
// each column, and in three exchanges lanes that differ in heads join theirs, each passing on half
// of its columns as long as it has two.
//
// The last candidate is not scored: it is selected whatever it holds.
#pragma once

#include <type_traits>

#include "htree/walk.cuh"

namespace jax_dsa::htree {

template <typename S, int kD, int kR>
struct alignas(1024) ScoresShared {
  Ring<S, kR, kR * kD * 2> ring;
  uint8_t turns[S::kWarps][Turns<kD>::kBytes];
  // Of query i the warps' parts from i * warps_per_query on: 16 heads each, swizzled like blocks.
  uint8_t q[S::kWarps][kHeads * kD * 2];
};

// 2^scores summed: peak + log2(sum).
struct Sum {
  float peak, sum;

  static __device__ Sum of(float a, float b) {
    const float peak = fmaxf(a, b), finite = peak == -INFINITY ? 0.f : peak;
    return {peak, exp2_approx(a - finite) + exp2_approx(b - finite)};
  }
  __device__ Sum operator+(Sum x) const {
    const float high = fmaxf(peak, x.peak), finite = high == -INFINITY ? 0.f : high;
    return {high, sum * exp2_approx(peak - finite) + x.sum * exp2_approx(x.peak - finite)};
  }
  __device__ Sum of_lane(int mask) const {
    return {__shfl_xor_sync(~0u, peak, mask), __shfl_xor_sync(~0u, sum, mask)};
  }
};

// Joins the first kCount columns of lanes that differ in the bits kLane, kLane / 2, ..., 4. A lane
// with kLane set keeps the upper half.
template <int kCount, int kLane, int kColumns>
__device__ __forceinline__ void join(Sum (&x)[kColumns]) {
  if constexpr (kLane >= 4) {
    if constexpr (kCount > 1) {
      const bool upper = threadIdx.x & kLane;
      const auto choose = [&](bool second, const Sum& a, const Sum& b) -> Sum {
        return {second ? b.peak : a.peak, second ? b.sum : a.sum};
      };
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const Sum passed = choose(!upper, x[i], x[i + kCount / 2]);
        x[i] = choose(upper, x[i], x[i + kCount / 2]) + passed.of_lane(kLane);
      }
      join<kCount / 2, kLane / 2>(x);
    } else {
      x[0] = x[0] + x[0].of_lane(kLane);
      join<1, kLane / 2>(x);
    }
  }
}

template <typename S, int kD, int kR>
__global__ void __launch_bounds__(S::kThreads, 1)
    scores_kernel(const __grid_constant__ Pass pass, int layer) {
  constexpr int kRowBytes = kD * 2, kColumns = kR / 4;
  auto& shared = dynamic_shared<ScoresShared<S, kD, kR>>();
  const HTreeFwdParams& p = pass.p;
  const Tile tile(pass);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int parts = pass.parts, heads = pass.group_heads;

  for (int i = threadIdx.x; i < S::kWarps * kHeads * (kD / 8); i += S::kThreads) {
    const int chunk = i % (kD / 8), row = i / (kD / 8) % kHeads, part = i / (kD / 8) / kHeads;
    const int query = part / parts, head = part % parts * kHeads + row;
    const bool has = query < tile.queries && head < heads;
    const int64_t from = has ? tile.token(pass, query) * p.heads + tile.group * heads + head : 0;
    uint32_t x[4];
    load_16_now<0>(static_cast<const char*>(p.q) + from * kRowBytes + chunk * 16, has, x);
    store_shared_16(smem_address(shared.q[part]) + place<kD>(row, chunk), x);
  }
  if (threadIdx.x == 0) {
    shared.ring.init();
    mbarrier_init_fence();
  }
  __syncthreads();

  RingPlace<Ring<S, kR, kR * kD * 2>::kStages> at;
  if (warp >= S::kWarps) {
    lower_registers<S::kProducerRegisters>();
    if (warp > S::kWarps) return;
    const int64_t row = tile.row + min(lane, tile.queries - 1);
    const int64_t first = (tile.batch * p.groups + tile.group) * pass.layers.blocks;
    produce(shared.ring, at,
            static_cast<const uint8_t*>(p.tree) +
                (first + pass.layers.first[layer]) * kNodeBytes<kD, kR>,
            kNodeBytes<kD, kR>, Blocks::of<kR>(pass, tile.position(pass, lane), row, layer));
    return;
  }

  raise_registers<S::kRegisters>();
  const int query = warp / parts, part = warp % parts;
  const int position = tile.position(pass, query);
  const int n = candidates<kR>(pass, position, layer);
  const int64_t row = tile.row + min(query, tile.queries - 1);
  if (query < tile.queries && part == 0 && lane == 0) pass.chunk.ends[row] = max(n - 1, 0);
  float* const importance = pass.chunk.importance + row * pass.chunk.width;
  const float scale_log2 = p.scale * kLog2E;
  const uint32_t queries = smem_address(shared.q[query * parts < S::kWarps ? query * parts : 0]);
  Turns<kD> turns(p.rotations, shared.turns[warp]);
  const bool early = is_early<kR>(pass, position, layer);
  if (early) {  // all blocks meet the same queries: the warp rotates its part of them
    turns.load(n - 1);
    const uint32_t turn = turns.next(-1);
    const uint32_t own = smem_address(shared.q[warp]) + place<kD>(lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint32_t low[4], high[4];
      load_matrix_x4(further(own, j * 2), low);
      load_matrix_x4(further(own, (j + kD / 32) * 2), high);
      rotate<kD>(low, high, turn, j);
      store_matrix_x4(further(own, j * 2), low[0], low[1], low[2], low[3]);
      store_matrix_x4(further(own, (j + kD / 32) * 2), high[0], high[1], high[2], high[3]);
    }
  }
  named_barrier_sync<S::kWarps * 32>(1);
  turns.load(n - 1 - kR * part);
  int ordinal = 0;  // of the block that comes next
  const auto walk = [&](auto rotates) {
    constexpr bool kRotates = decltype(rotates)::value;
    consume(shared.ring, at, query, [&](uint32_t block) {
      const int first = kR * ordinal;
      if (ordinal++ % parts != part) return;
      const uint32_t turn = kRotates ? turns.next(n - 1 - first - kR * parts) : 0;
      Sum sums[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] = {-INFINITY, 0.f};
#pragma unroll 1
      for (int heads_before = 0; heads_before < heads; heads_before += kHeads) {
        const uint32_t from = queries + heads_before * kRowBytes + place<kD>(lane % 16, lane / 16);
        float s[kR / 8][4];
        multiply_keys<kD, kR, kRotates>(s, block, turn, [&](int j, uint32_t (&a)[4]) {
          load_matrix_x4(further(from, j * 2), a);
        });
        const int head = heads_before + lane / 4;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float a = head < heads ? s[i / 2][i % 2] * scale_log2 : -INFINITY;
          const float b = head + 8 < heads ? s[i / 2][i % 2 + 2] * scale_log2 : -INFINITY;
          sums[i] = sums[i] + Sum::of(a, b);
        }
      }
      join<kColumns, 16>(sums);
      // Which column that is: the bits of lane / 4 from the highest on choose halves.
      constexpr int kBits = kColumns == 8 ? 3 : kColumns == 4 ? 2 : 1;
      const int mine = lane / 4 >> (3 - kBits);
      const int at_column = mine / 2 * 8 + lane % 4 * 2 + mine % 2;
      if ((lane / 4 & ((8 >> kBits) - 1)) == 0 && first + at_column < n - 1) {
        importance[first + at_column] = sums[0].peak + log2f(sums[0].sum);
      }
    });
  };
  if (early) {
    walk(std::false_type());
  } else {
    walk(std::true_type());
  }
}

}  // namespace jax_dsa::htree
