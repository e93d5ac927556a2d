// The teacher of the warm-up loss for the multi-head form, with instructions of sm_80.
// teacher_heads.cuh has the two kernels' work tiles.
//
// Tiling. A CTA multiplies 128 queries with 128 keys of a head. Its eight warps have 32 queries and
// 64 keys each. Both tiles come in blocks of 64 columns, through one ring of three slots, so one
// kernel serves every number of dims on every GPU. The first kernel iterates over the key tiles of
// a head, the second over the heads of a key tile.
#pragma once

#include "common/mma_tile.cuh"
#include "losses/powers.cuh"
#include "losses/ranges.cuh"
#include "losses/teacher_heads_plan.cuh"

namespace jax_dsa::teacher_heads {

inline constexpr int kPortableThreads = 256, kPortableSlots = 3;
inline constexpr int kPortableKeys = 128;  // keys of a tile

struct alignas(128) PortableShared {
  uint8_t q[kPortableSlots][kQueries * 128], keys[kPortableSlots][kPortableKeys * 128];
  teacher::Powers powers[kQueries];  // of the second half of the keys
};

template <Pass kPass>
__global__ void __launch_bounds__(kPortableThreads, 1)
    portable_teacher_heads_kernel(const __grid_constant__ TeacherParams p) {
  constexpr bool kSums = kPass == Pass::kSums;
  auto& shared = dynamic_shared<PortableShared>();
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), column = lane % 4 * 2;
  WorkTiles<kPass, kPortableKeys> work_tile;
  if (!work_tile.next(p)) return;
  const int warp_row = warp % 4 * 32, warp_key = warp / 4 * 64;
  const int own_query = work_tile.query + warp_row + lane / 4;  // and those 8, 16 and 24 after it
  const int64_t first_token = work_tile.batch * p.queries + work_tile.query;
  const int group_heads = p.heads / p.groups, blocks = p.dim / 64;
  const int64_t q_stride = int64_t{p.heads} * p.dim, kv_stride = int64_t{p.groups} * p.dim;

  // ---- copies. An item is a head in the second kernel, else a key tile.
  const int first = kSums ? 0 : work_tile.tiles.first,
            last = kSums ? p.heads : work_tile.tiles.last;
  int item = first, block = 0, free_slot = 0;
  const auto load = [&] {
    if (item < last) {
      const int head = kSums ? item : work_tile.head;
      const int64_t key = int64_t{kSums ? work_tile.tiles.first : item} * kPortableKeys;
      load_tile<kQueries, 1, kPortableThreads>(
          smem_address(shared.q[free_slot]),
          static_cast<const uint16_t*>(p.q) + first_token * q_stride + head * p.dim + block * 64,
          q_stride, 64, [&](int row) { return work_tile.query + row < p.queries; });
      load_tile<kPortableKeys, 1, kPortableThreads>(
          smem_address(shared.keys[free_slot]),
          static_cast<const uint16_t*>(p.kv) + (work_tile.batch * p.keys + key) * kv_stride +
              head / group_heads * p.dim + block * 64,
          kv_stride, 64, [&](int row) { return key + row < p.keys; });
      free_slot = free_slot + 1 == kPortableSlots ? 0 : free_slot + 1;
      if (++block == blocks) block = 0, ++item;
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kPortableSlots - 1; ++i) load();

  int slot = 0;
  float s[2][32];
  const auto multiply = [&] {
    clear_fragments(s);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      cp_async_wait_group<kPortableSlots - 2>();
      __syncthreads();
      load();
      multiply_tiles<DType::kBF16, 4>(
          s, Operand<Side::kA, false, kQueries>(smem_address(shared.q[slot]), warp_row, 0),
          Operand<Side::kB, false, kPortableKeys>(smem_address(shared.keys[slot]), warp_key, 0));
      slot = slot + 1 == kPortableSlots ? 0 : slot + 1;
    }
  };
  // The range of one of the thread's four queries.
  const auto seen = [&](int i) { return range_of(p, work_tile.batch, own_query + i * 8); };

  if constexpr (!kSums) {
    teacher::Powers rows[2][2];
    const Range ranges[2][2] = {{seen(0), seen(1)}, {seen(2), seen(3)}};
#pragma unroll 1
    for (int tile = first; tile < last; ++tile) {
      multiply();
      const int key = tile * kPortableKeys + warp_key;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const auto covers = [&](Range x) { return x.low <= key && key + 64 <= x.high; };
        const bool whole = __all_sync(~0u, covers(ranges[m][0]) && covers(ranges[m][1]));
        teacher::add_scores(s[m], p.scale, key + column, whole, rows[m],
                            [&](int r, int k) { return ranges[m][r].has(k); });
      }
    }
    // Combine the lanes of a row, then the two warps that have its keys.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      teacher::Powers& row = rows[i / 2][i % 2];
      row.combine(1);
      row.combine(2);
      if (warp_key > 0 && lane % 4 == 0) shared.powers[warp_row + lane / 4 + i * 8] = row;
    }
    __syncthreads();
    if (warp_key > 0 || lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      teacher::Powers& row = rows[i / 2][i % 2];
      const int at = warp_row + lane / 4 + i * 8;
      row.combine(shared.powers[at]);
      if (work_tile.query + at < p.queries) {
        p.pairs[(first_token + at) * p.heads + work_tile.head] = row.pair();
      }
    }
  } else {
    float sum[2][32];
    clear_fragments(sum);
#pragma unroll 1
    for (int head = 0; head < p.heads; ++head) {
      float2 pair[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pair[i / 2][i % 2] = make_float2(0.f, -INFINITY);
        if (own_query + i * 8 < p.queries) {
          const int64_t token = first_token + warp_row + lane / 4 + i * 8;
          pair[i / 2][i % 2] = p.pairs[token * p.heads + head];
        }
      }
      multiply();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float2(&own)[2] = pair[m];
        float offset[2] = {fmaf(own[0].x, -kLog2E, own[0].y), fmaf(own[1].x, -kLog2E, own[1].y)};
        float factor_log2 = p.scale * kLog2E;
        if (__any_sync(~0u, fmaxf(fabsf(own[0].x), fabsf(own[1].x)) * kLog2E > kExactBaseLimit)) {
          teacher::subtract_largest(s[m], p.scale, make_float2(own[0].x, own[1].x));
          factor_log2 = kLog2E;
          offset[0] = own[0].y, offset[1] = own[1].y;
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sum[m][i] += exp2_approx(fmaf(s[m][i], factor_log2, offset[i / 2 % 2]));
        }
      }
    }
    const int key = work_tile.tiles.first * kPortableKeys + warp_key + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Range range = seen(i);
      float* const to = p.out + (first_token + warp_row + lane / 4 + i * 8) * p.keys;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int own = key + j / 2 * 8 + j % 2;
        if (range.has(own)) to[own] = sum[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2];
      }
    }
  }
}

}  // namespace jax_dsa::teacher_heads
