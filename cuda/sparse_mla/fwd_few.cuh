// Sparse MLA, forward pass, for up to 32 heads per KV head group. The operator is that of fwd.cuh.
//
// Tiling. A work tile is (query, KV head group). CTAs are persistent, two per SM. Warpgroup 0
// multiplies (mla/few_heads.cuh). Warpgroup 1 is the producer: it gathers Q and the selected keys.
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/softmax.cuh"
#include "mla/few_heads.cuh"
#include "mla/producer.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

template <typename Shared>
__device__ __forceinline__ mla::ValidKeyRows valid_key_rows(const SparseMlaFwdParams&,
                                                            const Shared& shared, int valid_stage,
                                                            int warp, int lane) {
  return mla::ValidKeyRows(shared.valid[valid_stage], warp, lane);
}
// Multiplies scores by their scale; -inf for invalid keys.
template <int kN>
__device__ __forceinline__ void mask_scores(const SparseMlaFwdParams& p,
                                            const mla::ValidKeyRows& rows, float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    s[i] = rows.valid[i / 2 % 2] ? __fmul_rn(s[i], p.scale) : -INFINITY;
  }
}

template <typename Tr, typename Notes>
__device__ void write_few_results(const SparseMlaFwdParams& p, int work_index, int tiles,
                                  const float (&o)[Tr::kValueBlocks][Tr::kN / 2],
                                  mla::HeadColumns<Tr::kN>& columns,
                                  mla::FewShared<Tr, Notes>& shared) {
  constexpr int kN = Tr::kN;
  constexpr int kThreadHeads = mla::HeadColumns<kN>::kHeadsPerThread;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const WorkTile work_tile(p, work_index);
  const int64_t first = work_tile.token * p.heads + work_tile.head;
  // Another barrier must separate two reductions. Only key tiles contain one.
  if (tiles > 0) {
    mla::reduce_over_keys<kN>(columns.sum, shared.exchange, [](float a, float b) { return a + b; });
  }
  float factor[kThreadHeads];
#pragma unroll
  for (int i = 0; i < kThreadHeads; ++i) {
    const int head = mla::HeadColumns<kN>::head(i);
    const float total = columns.sum[i];
    const bool empty = total == 0.f;
    float denominator = total;
    if (head < work_tile.heads) {
      if (p.sinks && !empty) {
        const float sink =
            p.sinks[int64_t{work_tile.batch} * p.sinks_stride + work_tile.head + head];
        denominator += sink_weight(sink, columns.running_max[i]);
      }
      if (threadIdx.x < 4) {
        p.max_logit[first + head] = max_with_nan(columns.running_max[i], total);
        p.log_sum[first + head] = log_of_sum(total);
      }
    }
    factor[i] = output_factor(total, denominator);
  }

  // Outputs are staged in the warp's own bytes of the probabilities. Lanes 0..15 read the first 8
  // of its 16 dimensions.
  const uint32_t block = smem_address(shared.probabilities);
  const uint32_t staged_to = mla::transposed_address(block);
  const int row = lane % 16, half = lane / 16;
  const uint32_t staged_from = block + row * 128 + ((warp * 2 + half) ^ (row % 8)) * 16;
  auto* out =
      static_cast<__nv_bfloat16*>(p.out) + (first + row) * kMlaValueDim + warp * 16 + half * 8;
#pragma unroll
  for (int m = 0; m < Tr::kValueBlocks; ++m) {
    uint32_t packed[kN / 4];
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const float a = factor[mla::HeadColumns<kN>::local_head(i)],
                  b = factor[mla::HeadColumns<kN>::local_head(i + 1)];
      packed[i / 2] = pack_bf16(scale_output(o[m][i], a), scale_output(o[m][i + 1], b));
    }
    mla::store_transposed<kN>(staged_to, packed);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kN; i += 16) {
      uint32_t x[4];
      load_shared_16(staged_from + i * 128, x);
      store_16(out + i * kMlaValueDim + m * 64, x, i + row < work_tile.heads);
    }
    __syncwarp();
  }
}

template <typename Tr>
__device__ void produce_few(const SparseMlaFwdParams& p, mla::FewShared<Tr>& shared) {
  constexpr int kD = Tr::kD, kN = Tr::kN, kTileBlocks = Tr::kTileBlocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int work_tiles = work_tile_count(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // the row of a tile whose index
                                                                // this lane reads
  const uint32_t ring = smem_address(shared.ring);
  Gather gather(warp, sub, chunk);
  RingPlace<Tr::kRingBlocks> at;
  uint32_t q_parity = 0, tile_count = 0;

  for (int work_index = blockIdx.x; work_index < work_tiles;
       work_index += gridDim.x, q_parity ^= 1) {
    const WorkTile work_tile(p, work_index);
    const Slots slots(p, work_tile.token, work_tile.group);
    const int tiles = count_tiles(slots, lane);
    int index = slots.index(slot);

    mla::begin_work_tile(shared, q_parity, tiles, [&] {  // rows beyond the work tile's heads become
                                                         // zeros
      const char* q = static_cast<const char*>(p.q) +
                      (work_tile.token * p.heads + work_tile.head) * (kD * 2) + chunk * 16;
#pragma unroll
      for (int i = 0; i < kN; i += 16) {
        const int row = i + warp * 4 + sub;
        const bool exists = row < work_tile.heads;
        const char* from = q + (exists ? row * (kD * 2) : 0);
        const uint32_t to = whole_sum(smem_address(shared.q), row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
        for (int block = 0; block < kTileBlocks; ++block) {
          cp_async_16(to + block * (kN * 128), from + block * 128, exists, drop);
        }
      }
    });

    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* kv = static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride +
                     work_tile.group * (kD * 2) + chunk * 16;
    for (int tile = 0; tile < tiles; ++tile, ++tile_count) {
      const uint32_t bits = gather.set_rows(kv, stride, sub, index, slots.is_valid(index));
      if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) {
        mbarrier_wait(&shared.free[at.index], at.parity ^ 1);
        if (i == 0 && lane == 0) {
          const uint32_t stage = tile_count % Tr::kValidStages;
          shared.valid[stage].set(warp, bits);
          mbarrier_arrive(&shared.valid_full[stage]);
        }
        gather.copy_block(ring + at.index * kBlockBytes, 0, Tr::column_block(i), keep);
        cp_async_arrive(&shared.full[at.index]);
        at = at + 1;
      }
    }
  }
}

template <int kD, int kN>
__global__ void __launch_bounds__(mla::kFewThreads, mla::kFewCtasPerSm)
    fwd_few_kernel(const __grid_constant__ Forward p) {
  constexpr int kConsumer = 192, kProducer = 64;
  static_assert(registers_fit(mla::kFewCtasPerSm, 1, kConsumer, kProducer));
  auto& shared = dynamic_shared<mla::FewShared<mla::FewTraits<kD, kN>>>();
  mla::initialise(shared);
  if (threadIdx.x / 128 == 0) {
    raise_registers<kConsumer>();
    mla::consume_few(p, shared);
  } else {
    lower_registers<kProducer>();
    produce_few(p, shared);
  }
}

}  // namespace jax_dsa::sparse_mla
