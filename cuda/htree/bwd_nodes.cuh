// The gradients of nodes: for a block of the tree, over the queries that visit it,
//
//   dK += sum over 16 heads of dS^T Q,        dV += sum over 16 heads of P^T dO
//
// with the keys as the M dimension of all MMAs. A warp has a key tile, 16 rows of a block (all 8
// if r = 8), and its gradients in registers. It loads the records of the visits, two ahead, with
// their rotations. Warps work independently: each fetches the next work tile from an atomic
// counter when it is done, and adds its result to the tree's gradients after the segments
// before. A CTA has as many warps as shared memory has space for, at most kNodeWarps.
#pragma once

#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

inline constexpr int kNodeWarps = 8;

template <int kD, int kR>
struct alignas(128) NodesWarp {
  struct alignas(128) Buffer {
    uint8_t record[Record<kD>::kBytes];
    uint8_t rotation[RotationLoader<kD>::kBytes];
  };
  static constexpr int kTileBytes = kBwdTileRows<kR> * kD * 2;
  Buffer buffers[2];
  uint8_t keys[kTileBytes], values[kTileBytes];
  uint64_t full[2], tile_full;  // of bulk copies
};

// Starts to copy `kBytes` from global to shared memory, by all lanes of a warp.
template <int kBytes>
__device__ __forceinline__ void copy_by_warp(void* to, const uint8_t* from, uint64_t policy) {
  const int lane = threadIdx.x % 32;
  const uint32_t first = whole_sum(smem_address(to), lane * 16);
#pragma unroll
  for (int i = 0; i < kBytes; i += 512) {
    if (i + 512 <= kBytes || lane < kBytes % 512 / 16) {
      cp_async_16(first + i, from + i + lane * 16, true, policy);
    }
  }
}
template <int kD, int kR>
struct alignas(1024) NodesShared {
  NodesWarp<kD, kR> warps[kNodeWarps];
};

template <bool kHopper, int kD, int kR>
__global__ void __launch_bounds__(kNodeWarps * 32, 1)
    nodes_kernel(const __grid_constant__ BwdPlan x) {
  using R = Record<kD>;
  using Buffer = typename NodesWarp<kD, kR>::Buffer;
  constexpr int kRows = kBwdTileRows<kR>;
  const Plan& plan = x.plan;
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  auto& shared = dynamic_shared<NodesShared<kD, kR>>().warps[threadIdx.x / 32];
  if (kHopper && lane == 0) {
    for (auto& barrier : shared.full) mbarrier_init(&barrier, 1);
    mbarrier_init(&shared.tile_full, 1);
    mbarrier_init_fence();
  }
  if constexpr (kHopper) __syncthreads();

  const float scale_log2 = plan.p.scale * kLog2E;
  const uint64_t keep = l2_policy_evict_last();
  const uint32_t row_offset = swizzled<kD>(lane % 16, lane / 16);
  const uint32_t key_offset = swizzled<kD>(lane % kRows, lane / 16);
  const uint32_t transposed_offset = swizzled<kD>(matrix % 2 * 8 + lane % 8, matrix / 2);
  RingPlace<2> at;
  uint32_t tile_parity = 0;
  for (;;) {
    uint32_t tile_index = 0;
    if (lane == 0) tile_index = atomicAdd(x.tile_counter, 1u);
    tile_index = __shfl_sync(~0u, tile_index, 0);
    if (tile_index >= __ldg(x.tile_counter + 1) * kBwdTilesPerBlock<kR>) break;
    const WorkTile work_tile = x.work_tiles[tile_index / kBwdTilesPerBlock<kR>];
    const int key_tile = tile_index % kBwdTilesPerBlock<kR>;
    const int64_t bg = work_tile.list / plan.layers.blocks;
    const int64_t first =
        int64_t{x.starts[work_tile.list]} * plan.head_tiles + work_tile.segment * kSegment;
    const int count =
        min(x.counts[work_tile.list] * plan.head_tiles - work_tile.segment * kSegment, kSegment);
    const Visit* const visits = x.visits + first;
    const uint8_t* const records =
        x.records + bg * plan.chunk.queries * plan.head_tiles * R::kBytes;
    // Block of the whole tree, which has all batch entries, not only the chunk's.
    const int64_t block =
        plan.chunk.first_batch * plan.p.groups * plan.layers.blocks + work_tile.list;

    const auto load = [&](uint32_t record_and_rotation, RingPlace<2> to) {
      Buffer& buffer = shared.buffers[to.index];
      if constexpr (kHopper) {
        mbarrier_arrive_expect(&shared.full[to.index], R::kBytes + sizeof(buffer.rotation));
        bulk_load(buffer.record, records + int64_t{record_and_rotation & 0xffff} * R::kBytes,
                  R::kBytes, &shared.full[to.index], keep);
        bulk_load(buffer.rotation,
                  reinterpret_cast<const uint8_t*>(plan.p.rotations) +
                      int64_t{record_and_rotation >> 16} * sizeof(buffer.rotation),
                  sizeof(buffer.rotation), &shared.full[to.index], keep);
      } else {
        copy_by_warp<R::kBytes>(buffer.record,
                                records + int64_t{record_and_rotation & 0xffff} * R::kBytes, keep);
        copy_by_warp<sizeof(buffer.rotation)>(
            buffer.rotation,
            reinterpret_cast<const uint8_t*>(plan.p.rotations) +
                int64_t{record_and_rotation >> 16} * sizeof(buffer.rotation),
            keep);
      }
    };
    if (!kHopper || lane == 0) {
      const uint8_t* const from = static_cast<const uint8_t*>(plan.p.tree) +
                                  block * kNodeBytes<kD, kR> + key_tile * sizeof(shared.keys);
      if constexpr (kHopper) {
        mbarrier_arrive_expect(&shared.tile_full, 2 * sizeof(shared.keys));
        bulk_load(shared.keys, from, sizeof(shared.keys), &shared.tile_full, keep);
        bulk_load(shared.values, from + kNodeBytes<kD, kR> / 2, sizeof(shared.keys),
                  &shared.tile_full, keep);
      } else {
        copy_by_warp<sizeof(shared.keys)>(shared.keys, from, keep);
        copy_by_warp<sizeof(shared.keys)>(shared.values, from + kNodeBytes<kD, kR> / 2, keep);
      }
      // Without bulk copies there is a group per record; the first includes keys and values.
      load(__ldg(&visits[0].record_and_rotation), at);
      if constexpr (!kHopper) cp_async_commit();
      if (count > 1) load(__ldg(&visits[1].record_and_rotation), at + 1);
      if constexpr (!kHopper) cp_async_commit();
    }
    if constexpr (kHopper) mbarrier_wait(&shared.tile_full, tile_parity);
    tile_parity ^= 1;

    float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
    uint32_t upcoming = __ldg(&visits[0].masked);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint32_t masked = upcoming >> key_tile * kRows;
      const auto fetch = [&](const uint32_t& from, int ahead) {
        return static_cast<uint32_t>(
            load_now(reinterpret_cast<const int*>(&from), i + ahead < count, 0));
      };
      upcoming = fetch(visits[i + 1].masked, 1);
      const uint32_t next_record = fetch(visits[i + 2].record_and_rotation, 2);
      Buffer& buffer = shared.buffers[at.index];
      const uint32_t q = smem_address(buffer.record), dout = q + R::kRows;
      const uint32_t rotation = smem_address(buffer.rotation);
      const uint32_t keys = smem_address(shared.keys) + key_offset;
      const uint32_t values = smem_address(shared.values) + key_offset;
      if constexpr (kHopper) {
        mbarrier_wait(&shared.full[at.index], at.parity);
      } else {
        cp_async_wait_group<1>();
        __syncwarp();
      }

      float s[2][4] = {}, dp[2][4] = {};  // [8 heads]
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        uint32_t low[4], high[4], a[4], b[4];
        load_matrix_x4(offset_chunks(q + row_offset, j * 2), low);
        load_matrix_x4(offset_chunks(q + row_offset, (j + kD / 32) * 2), high);
        rotate<kD>(low, high, rotation, j);
        store_matrix_x4(offset_chunks(q + row_offset, j * 2), low[0], low[1], low[2], low[3]);
        store_matrix_x4(offset_chunks(q + row_offset, (j + kD / 32) * 2), high[0], high[1], high[2],
                        high[3]);
        load_matrix_x4(offset_chunks(keys, j * 2), a);
        mma_16<DType::kBF16>(s[0], a, low[0], low[2]);
        mma_16<DType::kBF16>(s[1], a, low[1], low[3]);
        load_matrix_x4(offset_chunks(keys, (j + kD / 32) * 2), a);
        mma_16<DType::kBF16>(s[0], a, high[0], high[2]);
        mma_16<DType::kBF16>(s[1], a, high[1], high[3]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          load_matrix_x4(offset_chunks(values, (j + half * kD / 32) * 2), a);
          load_matrix_x4(offset_chunks(dout + row_offset, (j + half * kD / 32) * 2), b);
          mma_16<DType::kBF16>(dp[0], a, b[0], b[2]);
          mma_16<DType::kBF16>(dp[1], a, b[1], b[3]);
        }
      }

      float factor_log2 = scale_log2;
      if (*reinterpret_cast<const int*>(buffer.record + R::kExact)) {
        factor_log2 = kLog2E;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int head = half * 8 + lane % 4 * 2;
          const float2 base = *reinterpret_cast<const float2*>(buffer.record + R::kBase + head * 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            s[half][j] = __fmul_rn(s[half][j], plan.p.scale) - (j % 2 ? base.y : base.x);
          }
        }
      }
      uint32_t p[4], ds[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = half * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(buffer.record + R::kLse + head * 4);
        const float2 delta = *reinterpret_cast<const float2*>(buffer.record + R::kDelta + head * 4);
        float y[4], z[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float own_lse = j % 2 ? lse.y : lse.x;
          const bool counts = !(masked >> (lane / 4 + j / 2 * 8) & 1) && own_lse < INFINITY;
          y[j] = counts ? exp2_approx(fmaf(s[half][j], factor_log2, -own_lse)) : 0.f;
          z[j] = counts ? y[j] * (dp[half][j] - (j % 2 ? delta.y : delta.x)) : 0.f;
        }
        p[half * 2] = pack_bf16(y[0], y[1]), p[half * 2 + 1] = pack_bf16(y[2], y[3]);
        ds[half * 2] = pack_bf16(z[0], z[1]), ds[half * 2 + 1] = pack_bf16(z[2], z[3]);
      }
      __syncwarp();  // rotated queries are in shared memory
#pragma unroll
      for (int j = 0; j < kD / 16; ++j) {
        uint32_t b[4];
        load_matrix_x4_transposed(offset_chunks(dout + transposed_offset, j * 2), b);
        mma_16<DType::kBF16>(dv[2 * j], p, b[0], b[1]);
        mma_16<DType::kBF16>(dv[2 * j + 1], p, b[2], b[3]);
        load_matrix_x4_transposed(offset_chunks(q + transposed_offset, j * 2), b);
        mma_16<DType::kBF16>(dk[2 * j], ds, b[0], b[1]);
        mma_16<DType::kBF16>(dk[2 * j + 1], ds, b[2], b[3]);
      }
      if constexpr (kHopper) fence_async_proxy();
      __syncwarp();
      if ((!kHopper || lane == 0) && i + 2 < count) load(next_record, at);
      if constexpr (!kHopper) cp_async_commit();
      at.advance();
    }

    uint32_t* const done = x.done + work_tile.list * int64_t{kBwdTilesPerBlock<kR>} + key_tile;
    if (lane == 0 && work_tile.segment > 0) counter_wait<kHopper>(done, work_tile.segment);
    __syncwarp();
    float* const to =
        x.gradients + (block * 2 * kR + key_tile * kRows + lane / 4) * kD + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
      for (int half = 0; half < kRows / 8; ++half) {
        const auto add = [&](float* place, float a, float b) {
          auto* const pair = reinterpret_cast<float2*>(place);
          const float2 old = __ldcg(pair);
          __stcg(pair, make_float2(old.x + a, old.y + b));
        };
        float* const at_row = to + half * 8 * kD + j * 8;
        add(at_row, dk[j][2 * half], dk[j][2 * half + 1]);
        add(at_row + kR * kD, dv[j][2 * half], dv[j][2 * half + 1]);
      }
    }
    __syncwarp();
    if (lane == 0) counter_add<kHopper>(done);
  }
}

}  // namespace jax_dsa::htree
