// Lightning indexer, backward pass over selected keys, first kernel: dq, dweights and the ReLU
// mask. For one query whose slots i hold keys s_i, with gradients g_i of the logits and head
// weights w_j:
//
//   x[j,i] = q_j . k[s_i]        a[j,i] = [x[j,i] > 0]        h[j,i] = bf16(g_i ks_i) a[j,i]
//   dw_j = sum_i g_i ks_i a[j,i] x[j,i]        dq_j = w_j sum_i h[j,i] k[s_i]
//
// ks is k_scale, or 1 without it; a is 1 without ReLU; g is 0 for a slot without a valid index. The
// kernel stores the ReLU mask a, 64 bits per slot, from which the second kernel (bwd_keys.cuh)
// computes dk without the scores.
//
// Operand layout. Heads (padded to 64) are the M dimension of both MMAs. Q then stays in registers
// as the left operand of the first MMA, and the accumulator fragments of x, masked and packed, are
// the left operand of the second. Each gathered key tile is read twice from shared memory, once as
// a K-major and once as an MN-major operand.
//
// Warpgroups.
//   0, 1  MMA: one query each
//   2     producer: two warps gather keys for each MMA warpgroup
// An MMA warpgroup copies a tile's scores to other registers and starts the scores of the next tile
// before it processes them.
//
// Layout of the ReLU mask. A thread computes the bits of 16 keys and 2 heads. Three exchanges
// between lanes turn them into 2 keys and 16 heads, and shared memory joins the 16 bits of each of
// the four warps to the 64 bits of a slot. The 16 bits of warp w belong to heads 16 w to 16 w + 15.
// In them, bit (l / 2) * 2 + r of byte l % 2 belongs to head 8 r + l, so the bits that lane l / 2
// of a quad needs for its operand in the second kernel are adjacent.
//
// Shared memory for each MMA warpgroup: a ring of 5 tiles of 64 keys (16 KiB each at 128 channels,
// in blocks of 64 columns, 128-byte swizzle) with their g; Q; the mask of two tiles.
#pragma once

#include <cuda_bf16.h>

#include "common/gather.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer_bwd {

inline constexpr int kHeads = 64;  // including padding
inline constexpr int kStages = 5;
inline constexpr int kQueryThreads = 384;

// Named barrier kMaskStored + w belongs to MMA warpgroup w.
enum NamedBarrier { kMaskStored = 1 };

// kC is the number of channels, padded to 64 or 128.
template <int kC>
struct alignas(1024) QueryShared {
  uint8_t keys[2][kStages][kC / 64][kBlockBytes];
  uint8_t q[2][kC / 64][kBlockBytes];
  float g[2][kStages][kTile];
  uint16_t relu_mask[2][2][kTile][4];
  int tiles[2];  // number of key tiles of the query in `q`
  uint64_t q_full[2], q_free[2];
  uint64_t key_full[2][kStages], key_free[2][kStages];
};

// ---- gathering ---------------------------------------------------------------------------------

template <int kC>
__device__ void gather(const IndexerBwdParams& p, QueryShared<kC>& shared) {
  const int lane = threadIdx.x % 32, side = threadIdx.x / 64 % 2, half = threadIdx.x / 32 % 2;
  const int chunk = lane % 8, sub = lane / 8;  // Eight lanes copy one row.
  const bool in_bounds = kC == 128 || chunk * 8 < p.channels;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int64_t tokens = p.batch * p.queries;
  const uint32_t row_bytes = kC == 128 ? 256 : p.channels * 2;
  const int keys = static_cast<int>(p.keys);
  // The byte offset of this lane's chunk of row half * 32 + i * 4 + sub in a block, for even and
  // odd i.
  const uint32_t first = (half * 32 + sub) * 128;
  const uint32_t offset[2] = {first + (chunk ^ sub) * 16, first + 512 + (chunk ^ (sub + 4)) * 16};
  const auto copy_row = [&](uint32_t to, int i, const char* from, bool valid, uint64_t policy) {
#pragma unroll
    for (int block = 0; block < kC / 64; ++block) {
      cp_async_16(to + block * kBlockBytes + i / 2 * 1024 + offset[i % 2], from + block * 128,
                  valid && in_bounds, policy);
    }
  };
  RingPlace<kStages> stage;
  uint32_t q_parity = 1;

  for (int64_t token = blockIdx.x * 2 + side; token < tokens; token += gridDim.x * 2) {
    const Slots slots(p.indices + token * p.slots, p.slots, keys);
    const float* grad = p.grad + token * p.slots;
    const int64_t batch = token / p.queries;
    const int tiles = count_tiles(slots, lane);
    int slot = half * 32 + lane;
    int index = slots.index(slot);
    float g = load_now(grad + slot, slot < p.slots, 0.f);

    mbarrier_wait(&shared.q_free[side], q_parity);
    q_parity ^= 1;
    if (half == 0 && lane == 0) {
      shared.tiles[side] = tiles;
      mbarrier_arrive(&shared.q_full[side]);
    }
    const char* q = static_cast<const char*>(p.q) + token * p.heads * row_bytes + chunk * 16;
    const uint32_t q_to = smem_address(shared.q[side]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = half * 32 + i * 4 + sub;
      const bool valid = row < p.heads && tiles > 0;
      copy_row(q_to, i, q + (valid ? row * row_bytes : 0), valid, drop);
    }
    cp_async_arrive(&shared.q_full[side]);

    const char* k = static_cast<const char*>(p.k) + batch * p.keys * row_bytes + chunk * 16;
    // Without this the compiler adds the batch to every key before it multiplies by the row size.
    asm("" : "+l"(k));
    for (int tile = 0; tile < tiles; ++tile) {
      const bool valid = slots.is_valid(index);
      const int key = valid ? index : 0;
      const uint32_t bits = __ballot_sync(~0u, valid) >> sub;
      float scaled_g = valid ? g : 0.f;
      if (p.k_scale != nullptr && valid) scaled_g *= __ldg(p.k_scale + batch * p.keys + index);
      slot += kTile;
      index = slots.index(slot);
      g = load_now(grad + slot, slot < p.slots, 0.f);

      mbarrier_wait(&shared.key_free[side][stage.index], stage.parity ^ 1);
      shared.g[side][stage.index][half * 32 + lane] = scaled_g;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.key_full[side][stage.index]);
      const uint32_t to = smem_address(shared.keys[side][stage.index]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row_key = __shfl_sync(~0u, key, i * 4 + sub);
        copy_row(to, i, k + uint64_t{row_bytes} * static_cast<uint32_t>(row_key),
                 bits >> (i * 4) & 1, keep);
      }
      cp_async_arrive(&shared.key_full[side][stage.index]);
      stage.advance();
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// Transposes mask bits between the lanes of a warp. Before the call, bit 8 * (i % 2) +
// 2 * (i / 2 % 2) + 4 * (i / 4) + r + 16 * e of a lane's word belongs to head 8 r + lane / 4 and
// key 8 i + 2 * (lane % 4) + e. Afterwards, with l in place of i, the bit belongs to head 8 r + l
// and key 8 * (lane / 4) + 2 * (lane % 4) + e.
__device__ __forceinline__ uint32_t exchange_mask(uint32_t word) {
  const int lane = threadIdx.x % 32;
  constexpr int kShift[] = {8, 2, 4};
  constexpr uint32_t kLow[] = {0x00ff00ff, 0x33333333, 0x0f0f0f0f};
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    const uint32_t other = __shfl_xor_sync(~0u, word, 4 << b);
    word = lane >> (2 + b) & 1 ? (word & ~kLow[b]) | (other & ~kLow[b]) >> kShift[b]
                               : (word & kLow[b]) | (other & kLow[b]) << kShift[b];
  }
  return word;
}

// The main loop of MMA warpgroup kSide.
template <int kC, int kSide>
__device__ void multiply(const IndexerBwdParams& p, QueryShared<kC>& shared) {
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32, warp = thread / 32, column = lane % 4 * 2;
  const int head = warp * 16 + lane / 4;  // The thread holds this head and head + 8.
  const int64_t tokens = p.batch * p.queries;
  const int64_t padded_slots = ceil_div(p.slots, kTile) * kTile;
  const uint32_t all = p.relu ? 0 : ~0u;  // Without ReLU every mask bit is set.
  const float floor = p.relu ? 0.f : -INFINITY;
  const uint64_t by_channel = k_major_descriptor(smem_address(shared.keys[kSide]));
  const uint64_t by_key = mn_major_descriptor(smem_address(shared.keys[kSide]), kBlockBytes);
  constexpr int kStageStep = kC / 64 * kBlockBytes / 16;  // in descriptor units of 16 bytes
  const int q_row = warp * 16 + lane % 16;
  const uint32_t q_from = smem_address(shared.q[kSide]) + q_row * 128;

  uint32_t q[kC / 16][4], h[4][4];
  float dq[kC / 2], scores[32], dw[2];
  RingPlace<kStages> ahead, stage;  // stages of the next scores and of the current tile
  uint32_t q_parity = 0;
  int buffer = 0;  // which of the two mask buffers the current tile writes

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  const auto start_scores = [&] {
    mbarrier_wait(&shared.key_full[kSide][ahead.index], ahead.parity);
    const uint64_t k = by_channel + ahead.index * kStageStep;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      wgmma_bf16<kKMajor>(scores, q[i], k + i / 4 * (kBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
    ahead.advance();
  };
  const auto free_previous_tile = [&] {
    arrive(&shared.key_free[kSide][stage.index == 0 ? kStages - 1 : stage.index - 1]);
  };
  const auto write_relu_mask = [&](int64_t token, int tile) {
    named_barrier_sync<128>(kMaskStored + kSide);
    if (tile < 0) return;
    const auto* from = reinterpret_cast<const uint32_t*>(shared.relu_mask[kSide][buffer ^ 1]);
    reinterpret_cast<uint32_t*>(p.relu_mask + token * padded_slots + tile * kTile)[thread] =
        from[thread];
  };
  // Computes h, dw and the mask of the current tile.
  const auto apply_mask = [&](const float (&x)[32]) {
    const float* g = shared.g[kSide][stage.index] + column;
    uint32_t word = all;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 gi = *reinterpret_cast<const float2*>(g + 8 * i);
      const uint32_t rounded = pack_bf16(gi.x, gi.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = fmaxf(x[4 * i + 2 * r], floor), b = fmaxf(x[4 * i + 2 * r + 1], floor);
        dw[r] = fmaf(gi.y, b, fmaf(gi.x, a, dw[r]));
        const uint32_t on = positive_bf16(pack_bf16(a, b));
        h[i / 2][i % 2 * 2 + r] = rounded & (on | all);
        word |= on & 0x00010001u << (8 * (i % 2) + 2 * (i / 2 % 2) + 4 * (i / 4) + r);
      }
    }
    word = exchange_mask(word);
    const int slot = lane / 4 * 8 + column;
    shared.relu_mask[kSide][buffer][slot][warp] = static_cast<uint16_t>(word);
    shared.relu_mask[kSide][buffer][slot + 1][warp] = static_cast<uint16_t>(word >> 16);
    buffer ^= 1;
  };
  const auto start_product = [&](bool accumulate) {
    const uint64_t k = by_key + stage.index * kStageStep;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      wgmma_bf16<kMNMajor>(dq, h[i], k + i * (2048 / 16), i > 0 || accumulate);
    wgmma_commit();
    stage.advance();
  };

  for (int64_t token = blockIdx.x * 2 + kSide; token < tokens; token += gridDim.x * 2) {
    float w[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool in_bounds = head + 8 * r < p.heads;
      w[r] = load_now(p.weights + token * p.heads + head + 8 * r, in_bounds, 0.f);
      dw[r] = 0.f;
    }
    mbarrier_wait(&shared.q_full[kSide], q_parity);
    q_parity ^= 1;
    const int tiles = shared.tiles[kSide];
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      const int chunk = 2 * i + lane / 16;
      load_matrix_x4(q_from + chunk / 8 * kBlockBytes + ((chunk % 8) ^ (lane % 8)) * 16, q[i]);
    }
    arrive(&shared.q_free[kSide]);

    if (tiles > 0) {
      start_scores();
      wgmma_wait<0>();
      wgmma_pin(scores);
      for (int tile = 0; tile + 1 < tiles; ++tile) {
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = scores[i];
        start_scores();
        wgmma_wait<1>();  // The product of the previous tile has finished.
        if (tile > 0) free_previous_tile();
        write_relu_mask(token, tile - 1);
        apply_mask(x);
        start_product(tile > 0);
        wgmma_wait<1>();
        wgmma_pin(scores);
      }
      wgmma_wait<0>();
      if (tiles > 1) free_previous_tile();
      write_relu_mask(token, tiles - 2);
      apply_mask(scores);
      start_product(tiles > 1);
      wgmma_wait<0>();
      wgmma_pin(dq);
      free_previous_tile();
      write_relu_mask(token, tiles - 1);
    }

    auto* out = static_cast<__nv_bfloat16*>(p.dq) + (token * p.heads + head) * p.channels + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dw[r] += __shfl_xor_sync(~0u, dw[r], 1);
      dw[r] += __shfl_xor_sync(~0u, dw[r], 2);
      if (head + 8 * r >= p.heads) continue;
      if (lane % 4 == 0) p.dweights[token * p.heads + head + 8 * r] = dw[r];
      const float scale = tiles > 0 ? w[r] : 0.f;
#pragma unroll
      for (int i = 0; i < kC / 8; ++i) {
        const float a = dq[4 * i + 2 * r] * scale, b = dq[4 * i + 2 * r + 1] * scale;
        if (i * 8 < p.channels) {
          *reinterpret_cast<uint32_t*>(out + 8 * r * p.channels + 8 * i) =
              tiles > 0 ? pack_bf16(a, b) : 0;
        }
      }
    }
  }
}

template <int kC>
__global__ void __launch_bounds__(kQueryThreads, 1)
    queries_kernel(const __grid_constant__ IndexerBwdParams p) {
  constexpr int kConsumer = 208, kProducer = 88;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<QueryShared<kC>>();
  if (threadIdx.x == 0) {
    for (int side = 0; side < 2; ++side) {
      mbarrier_init(&shared.q_full[side], 64 + 1);
      mbarrier_init(&shared.q_free[side], 4);
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&shared.key_full[side][i], 64 + 2);
        mbarrier_init(&shared.key_free[side][i], 4);
      }
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    multiply<kC, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<kConsumer>();
    multiply<kC, 1>(p, shared);
  } else {
    lower_registers<kProducer>();
    gather<kC>(p, shared);
  }
}

}  // namespace jax_dsa::indexer_bwd
