// CONSUMER
#pragma once

#include "common/limits.h"
#include "common/wgmma.cuh"
#include "mla/plan.cuh"
#include "mla/record_tiles.cuh"
#include "mla/rows.cuh"

namespace jax_dsa::mla {

// Warpgroup kSide. `Params` has a factor of scores, and functions which say what items there are
// and what becomes of their scores and results: `first_item`, `item_step`, `item_count`,
// `lazy_margin`, `hide_scores`, `write_results`.
template <int kD, int kSide, typename Params, typename Notes>
__device__ void consume(const Params& p, Shared<kD, Notes>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 4;
  const float scale_log2 = p.scale * kLog2E;
  const int items = item_count(p);
  const uint64_t q = k_major_descriptor(smem_address(shared.q));
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.keys[kSide]));
  const uint64_t others_p =
      k_major_descriptor(smem_address(shared.keys[1 - kSide][kProbabilities]));
  // Where this lane stores its row of an 8x8 matrix of P, without the swizzled chunk.
  const uint32_t own_p =
      smem_address(shared.keys[kSide][kProbabilities]) + (warp * 16 + lane % 16) * 128;

  float o[128] = {};
  float s[32];
  uint32_t probabilities[4][4];
  float factor[2];
  uint64_t valid = 0;  // of the tile whose scores are in `s`
  Rows rows = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
  uint32_t item_parity = 0, key_parity = 0, others_parity = 0;
  int previous = -1;  // the item whose results are in `o` and `rows`
  const uint32_t places = Notes::kRecords ? RecordsInPlace::places() : 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Starts Q K^T of the next own tile; `turns` if the even tile has an odd one to let pass.
  const auto start_scores = [&](bool turns) {
    if constexpr (Notes::kRecords) named_barrier_sync<256>(kEvenUnpacked + kSide);
    if (kSide == 1) named_barrier_sync<256>(kTurn);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      // PTX asks for a proxy fence here: cp.async is of the generic proxy, wgmma of the async one.
      // It takes 2 % of the time. That wgmma sees copies whose mbarrier has completed is measured,
      // not promised; all kernels here that gather by cp.async rely on it, and others' do, too.
      mbarrier_wait(&shared.key_full[kSide][part], key_parity);
      if (part == 0) valid = shared.valid[kSide].all();
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kD / 64; ++block) {
        const bool mine = block < 8 && block / 4 == kSide;
        if (mine != (part == 0)) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint64_t offset = block * (kBlockBytes / 16) + k * 2;
          const bool first = block == kSide * 4 && k == 0;
          wgmma_bf16<kKMajor, kKMajor>(s, q + offset, own_keys + offset, !first);
        }
      }
    }
    wgmma_commit();
    if (kSide == 0 && turns) named_barrier_arrive<256>(kTurn);
    key_parity ^= 1;
  };
  const auto finish_scores = [&](bool last) {
    wgmma_wait<0>();
    wgmma_pin(s);
    if (last) arrive(&shared.q_free);
  };
  // The owner's P, to registers and to shared memory. Returns whether the accumulator must be
  // scaled by `factor`.
  const auto own_softmax = [&](bool last, auto between, auto before_store) {
    hide_scores<kSide>(p, shared, valid, s);
    const bool moved = softmax(s, scale_log2, lazy_margin(p), rows, probabilities, factor, between);
    before_store();
    // P replaces keys, which the scores of all four warps must have used.
    if constexpr (kD > 512) named_barrier_sync<128>(kEvenScored + kSide);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = (2 * k + lane / 16) ^ (lane % 8);
      store_matrix_x4(own_p + chunk * 16, probabilities[k][0], probabilities[k][1],
                      probabilities[k][2], probabilities[k][3]);
    }
    if (lane % 4 == 0) {
      shared.reference[kSide][row] = rows.reference[0];
      shared.reference[kSide][row + 8] = rows.reference[1];
    }
    if (last) shared.sum[kSide][threadIdx.x % 128] = make_float2(rows.sum[0], rows.sum[1]);
    fence_async_proxy();
    named_barrier_arrive<256>(kSide == 0 ? kEvenReady : kOddReady);
    return moved;
  };
  // Waits for the other's P and follows its references.
  const auto follow = [&](bool last) {
    named_barrier_sync<256>(kSide == 0 ? kOddReady : kEvenReady);
    const float to[2] = {shared.reference[1 - kSide][row], shared.reference[1 - kSide][row + 8]};
    if (__any_sync(~0u, to[0] != rows.reference[0] || to[1] != rows.reference[1])) {
      rows.move(to, factor);
      scale_rows(o, factor);
    }
    if (last) {
      const float2 sum = shared.sum[1 - kSide][threadIdx.x % 128];
      rows.others[0] = sum.x;
      rows.others[1] = sum.y;
    }
  };
  const auto values = [&](int parity) {
    return mn_major_descriptor(smem_address(shared.keys[parity][kSide * 4]), kBlockBytes);
  };
  // Both products come in two groups of 32 keys, whose rows can then be refilled one half after the
  // other.
  const auto multiply_own = [&](bool accumulate) {
    const uint64_t v = values(kSide);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_bf16<kMNMajor>(o, probabilities[k], v + k * (16 * 128 / 16), k > 0 || accumulate);
      if (k % 2 == 1) wgmma_commit();
    }
  };
  const auto multiply_others = [&](int half, bool accumulate) {
    const uint64_t v = values(1 - kSide);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = half * 2 + i;
      wgmma_bf16<kKMajor, kMNMajor>(o, others_p + k * 2, v + k * (16 * 128 / 16),
                                    i > 0 || accumulate);
    }
    wgmma_commit();
  };
  const auto finish_half = [&](int parity) {
    wgmma_wait<1>();
    arrive(&shared.key_free[parity][0]);
  };
  const auto finish_rest = [&](int parity) {
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive(&shared.key_free[parity][1]);
  };
  const auto nothing = [] {};

  // Results leave late, so that the next item's first scores can run beside.
  const auto write_previous = [&] {
    if (previous < 0) return;
    write_results<kSide>(p, previous, o, rows, smem_address(shared.stage[kSide * 4 + warp]));
    rows = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
    previous = -1;
  };

  for (int number = first_item(p);; number += item_step(p)) {
    int tiles = 0;
    if (number < items) {
      mbarrier_wait(&shared.q_full, item_parity);
      item_parity ^= 1;
      tiles = shared.notes.tiles;
      if (tiles <= kSide) arrive(&shared.q_free);
    }
    if (tiles <= kSide) write_previous();
    if (number >= items) break;

    if constexpr (kSide == 0) {
      for (int tile = 0; tile < tiles; tile += 2) {
        const bool odd = tile + 1 < tiles, last = tile + 2 >= tiles;
        if constexpr (Notes::kRecords) {
          // The odd tile beside the even one's scores; in a loop, for code that stays in its cache.
#pragma unroll 1
          for (int i = 0; i <= odd; ++i) {
            unpack_half<0>(shared, i, i == 0 ? key_parity : others_parity, places);
            if (i == 0) start_scores(odd);
          }
          if (odd) {
            others_parity ^= 1;
            named_barrier_arrive<256>(kOddUnpacked);
          }
        } else {
          start_scores(odd);
        }
        if (tile == 0) write_previous();
        finish_scores(last);
        if (own_softmax(last, nothing, nothing)) scale_rows(o, factor);
        multiply_own(tile > 0);
        finish_half(0);
        finish_rest(0);
        if (odd) {
          follow(tile + 3 >= tiles);
          multiply_others(0, true);
          multiply_others(1, true);
          finish_half(1);
          finish_rest(1);
        }
      }
    } else {
      for (int tile = 0; tile + 1 < tiles; tile += 2) {
        const bool last = tile + 3 >= tiles;
        if constexpr (Notes::kRecords) {
#pragma unroll 1
          for (int i = 0; i < 2; ++i) {
            unpack_half<1>(shared, i, i == 0 ? others_parity : key_parity, places);
            if (i == 0) named_barrier_arrive<256>(kEvenUnpacked);
          }
          others_parity ^= 1;
        }
        start_scores(true);
        if (tile == 0) write_previous();
        finish_scores(last);
        follow(tile + 2 >= tiles);
        // Half of the product first: more would fill the queue of wgmma and hold up the softmax.
        multiply_others(0, tile > 0);
        const bool moved =
            own_softmax(last, [&] { multiply_others(1, true); }, [&] { finish_half(0); });
        finish_rest(0);
        if (moved) scale_rows(o, factor);
        multiply_own(true);
        finish_half(1);
        finish_rest(1);
      }
      if (tiles % 2 == 1) {
        if constexpr (Notes::kRecords) {
          unpack_half<1>(shared, 0, others_parity, places);
          others_parity ^= 1;
          named_barrier_arrive<256>(kEvenUnpacked);
        }
        follow(true);
        multiply_others(0, tiles > 1);
        multiply_others(1, true);
        finish_half(0);
        finish_rest(0);
      }
    }
    previous = number;
  }
}

template <int kD, typename Notes>
__device__ void initialise(Shared<kD, Notes>& shared) {
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.q_full, 128 + 1);
    mbarrier_init(&shared.q_free, 8);
    for (int parity = 0; parity < 2; ++parity) {
      mbarrier_init(&shared.key_full[parity][0], 128 + 4);
      mbarrier_init(&shared.key_full[parity][1], 128);
      for (int half = 0; half < 2; ++half) mbarrier_init(&shared.key_free[parity][half], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
}

}  // namespace jax_dsa::mla
