// Lightning indexer, backward pass over selected keys, with instructions of sm_80. bwd_queries.cuh
// and bwd_keys.cuh have the mathematics.
//
// Tiling. A CTA computes all gradients of one query. It has four warps and loops over tiles of 32
// of the selected keys:
//   1. Each warp holds q of 16 heads in registers and computes x, the scores of its heads.
//   2. The masked gradients h of dq stay in registers, as the left operand of dq += h k. Those of
//      dk, which lack k_scale, go to shared memory.
//   3. Behind a barrier, each warp multiplies h^T w q for 16 keys and half of the channels, and
//      adds the result to dk in global memory.
// A tile has two barriers. Two or more CTAs share an SM, so that one multiplies while another
// waits.
//
// dk is summed by reductions, whose order varies. The sums of dq and dweights have a fixed order.
//
// Shared memory for 128 channels: q 16 KiB, keys 2 x 8 KiB, h of two tiles 8 KiB. This is the same
// on every GPU.
#pragma once

#include "common/gather.cuh"
#include "common/mma_tile.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer_bwd {

inline constexpr int kPortableThreads = 128;
inline constexpr int kPortableKeys = 32;  // keys of a tile

// kC is the number of channels, padded to 64 or 128.
template <int kC>
struct alignas(128) PortableShared {
  uint8_t q[kC / 64][kIndexerMaxHeads * 128];  // then w q, rounded to bf16
  uint8_t keys[2][kC / 64][kPortableKeys * 128];
  uint8_t h[kIndexerMaxHeads * 128];  // [heads, keys] of two tiles side by side
  float g[2][kPortableKeys], k_scale[2][kPortableKeys];
  int32_t index[2][kPortableKeys];  // -1: not valid
};

// Multiplies this warp's 16 rows of q by the weights of their heads. The warp has read them before.
template <int kC>
__device__ __forceinline__ void scale_queries(const IndexerBwdParams& p, int64_t token, int warp,
                                              PortableShared<kC>& shared) {
  const int lane = threadIdx.x % 32, head = warp * 16 + lane / 2;
  const float w = load_now(p.weights + token * p.heads + head, head < p.heads, 0.f);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kC / 16; ++i) {
    const int chunk = lane % 2 + i * 2;
    const uint32_t at = smem_address(shared.q[chunk / 8]) + head * 128 + (chunk ^ head) % 8 * 16;
    uint32_t x[4];
    load_shared_16(at, x);
#pragma unroll
    for (uint32_t& pair : x) {
      const float2 y = unpack_bf16(pair);
      pair = pack_bf16(w * y.x, w * y.y);
    }
    store_shared_16(at, x);
  }
}

template <int kC>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_bwd_kernel(const __grid_constant__ IndexerBwdParams p) {
  constexpr int kHeads = kIndexerMaxHeads, kKeys = kPortableKeys;
  constexpr int kStep = kPortableThreads / 8, kCopies = kKeys / kStep;  // rows that a thread copies
  auto& shared = dynamic_shared<PortableShared<kC>>();
  // What depends on the thread is recomputed where it is used, which saves registers.
  const auto lane = [] { return thread_index() & 31; };
  const auto column = [&] { return lane() % 4 * 2; };
  const int warp = uniform(threadIdx.x / 32);
  const int64_t token = blockIdx.x, batch = token / p.queries;
  const Slots slots(p.indices + token * p.slots, p.slots, static_cast<int>(p.keys));
  const int tiles = count_tiles(slots, lane()) * (kTile / kKeys);

  // ---- copies
  const auto slot_of = [&](int tile, int i) {
    return tile * kKeys + i * kStep + thread_index() / 8;
  };
  int index[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) index[i] = slots.index(slot_of(0, i));
  const auto load = [&](int tile) {
    if (tile < tiles) {
      const int buffer = tile % 2, chunk = thread_index() % 8;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = i * kStep + thread_index() / 8;
        const bool valid = slots.is_valid(index[i]);
        const int64_t key = batch * p.keys + (valid ? index[i] : 0);
        const uint32_t to =
            whole_sum(smem_address(shared.keys[buffer]), row * 128 + (chunk ^ row) % 8 * 16);
#pragma unroll
        for (int b = 0; b < kC / 64; ++b) {
          cp_async_16(to + b * (kKeys * 128),
                      static_cast<const uint16_t*>(p.k) + key * p.channels + b * 64 + chunk * 8,
                      valid && b * 64 + chunk * 8 < p.channels, l2_policy_evict_last());
        }
        if (chunk == 0) {
          cp_async_4(smem_address(&shared.g[buffer][row]),
                     p.grad + token * p.slots + (valid ? slot_of(tile, i) : 0), valid);
          if (p.k_scale != nullptr) {
            cp_async_4(smem_address(&shared.k_scale[buffer][row]), p.k_scale + key, valid);
          }
          shared.index[buffer][row] = valid ? index[i] : -1;
        }
        index[i] = slots.index(slot_of(tile + 1, i));
      }
    }
    cp_async_commit();
  };

  // ---- q
  uint32_t q[1][kC / 16][4];
  if (tiles > 0) {
    load_tile<kHeads, kC / 64, kPortableThreads>(
        smem_address(shared.q), static_cast<const uint16_t*>(p.q) + token * p.heads * p.channels,
        p.channels, p.channels, [&](int head) { return head < p.heads; });
    cp_async_commit();
    load(0);
    cp_async_wait_group<1>();
    __syncthreads();
    const Operand<Side::kA, false, kHeads> rows(smem_address(shared.q), warp * 16, 0);
#pragma unroll
    for (int k = 0; k < kC / 16; ++k) rows.load(0, k, q[0][k]);
    scale_queries<kC>(p, token, warp, shared);
  }

  const uint32_t no_relu = p.relu ? 0 : ~0u;  // without relu, all bits of the mask are set
  const float floor = p.relu ? 0.f : -INFINITY;
  float dq[1][kC / 2], dw[2] = {};
  clear_fragments(dq);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % 2;
    const uint32_t keys = smem_address(shared.keys[buffer]);
    cp_async_wait_group<0>();
    __syncthreads();
    load(tile + 1);
    float x[1][kKeys / 2];
    clear_fragments(x);
    multiply_tiles<DType::kBF16, kC / 16>(x, RegisterOperand<1, kC / 16>{q},
                                          Operand<Side::kB, false, kKeys>(keys, 0, 0));

    // ---- h, and dw
    uint32_t h[1][kKeys / 16][4];
    const uint32_t row = smem_address(shared.h) + (warp * 16 + lane() / 4) * 128 + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const int key = 8 * i + column(), chunk = (buffer * (kKeys / 8) + i) ^ lane() / 4;
      const float2 g = *reinterpret_cast<const float2*>(&shared.g[buffer][key]);
      float2 scaled = g;
      if (p.k_scale != nullptr) {
        const float2 s = *reinterpret_cast<const float2*>(&shared.k_scale[buffer][key]);
        scaled.x *= s.x, scaled.y *= s.y;
      }
      const uint32_t rounded = pack_bf16(g.x, g.y), rounded_scaled = pack_bf16(scaled.x, scaled.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = fmaxf(x[0][4 * i + 2 * r], floor);
        const float b = fmaxf(x[0][4 * i + 2 * r + 1], floor);
        dw[r] = fmaf(scaled.y, b, fmaf(scaled.x, a, dw[r]));
        const uint32_t relu_mask = positive_bf16(pack_bf16(a, b)) | no_relu;
        h[0][i / 2][i % 2 * 2 + r] = rounded_scaled & relu_mask;
        store_shared_4(row + chunk * 16 + r * (8 * 128), rounded & relu_mask);
      }
    }
    multiply_tiles<DType::kBF16, kKeys / 16>(dq, RegisterOperand<1, kKeys / 16>{h},
                                             Operand<Side::kB, true, kKeys>(keys, 0, 0));
    __syncthreads();

    // ---- dk of 16 keys and half of the channels, a quarter at a time
    const int first_key = warp % 2 * 16;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int channel = warp / 2 * (kC / 2) + i * (kC / 4);
      float dk[1][kC / 8];
      clear_fragments(dk);
      multiply_tiles<DType::kBF16, kHeads / 16>(
          dk,
          Operand<Side::kA, true, kHeads, 16>(smem_address(shared.h), 0,
                                              buffer * kKeys + first_key),
          Operand<Side::kB, true, kHeads, kC / 4>(smem_address(shared.q), 0, channel));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = shared.index[buffer][first_key + lane() / 4 + r * 8];
        float* const to = p.dk + (batch * p.keys + max(key, 0)) * p.channels + channel + column();
#pragma unroll
        for (int n = 0; n < kC / 32; ++n) {
          red_add(to + n * 8, dk[0][4 * n + 2 * r], dk[0][4 * n + 2 * r + 1],
                  key >= 0 && channel + n * 8 < p.channels);
        }
      }
    }
  }

  // ---- dq and dweights
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    dw[r] += __shfl_xor_sync(~0u, dw[r], 1);
    dw[r] += __shfl_xor_sync(~0u, dw[r], 2);
    const int head = warp * 16 + lane() / 4 + r * 8;
    if (head >= p.heads) continue;
    const int64_t at = token * p.heads + head;
    if (lane() % 4 == 0) p.dweights[at] = dw[r];
    const float w = tiles > 0 ? p.weights[at] : 0.f;
    auto* const to = static_cast<__nv_bfloat16*>(p.dq) + at * p.channels + column();
#pragma unroll
    for (int i = 0; i < kC / 8; ++i) {
      const float a = dq[0][4 * i + 2 * r] * w, b = dq[0][4 * i + 2 * r + 1] * w;
      if (i * 8 < p.channels) *reinterpret_cast<uint32_t*>(to + 8 * i) = pack_bf16(a, b);
    }
  }
}

}  // namespace jax_dsa::indexer_bwd
