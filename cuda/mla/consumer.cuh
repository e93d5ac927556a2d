// The MMA warpgroups of attention over the keys of MLA, for 64 heads (rows) at a time. The forward
// and decode kernels of sparse MLA and the wide kernel of mqa_decode use them.
//
// Warpgroups.
//   0 (left)   scores and softmax of the even key tiles; columns 0..255 of the output
//   1 (right)  scores and softmax of the odd key tiles; columns 256..511 of the output
//   2          producer: copies Q and the keys; each kernel brings its own
// Warpgroups 0 and 1 both multiply the probabilities P of every tile with their half of its values.
// They read their own P from registers and the peer's P from shared memory. While one of them is in
// its softmax, the tensor cores have the other's products to work on.
//
// Running maximum. P of a tile is relative to a lazily rescaled running maximum of its row. The
// maximum is raised only when a score exceeds it by more than log(2^8), so the accumulators are
// rarely rescaled and P stays in [0, 256]. The maxima of the tiles form one chain (even, odd, even,
// ...). Both warpgroups add the tiles in this order, so each accumulator only ever follows that
// chain.
//
// Shared memory, in blocks of 64 rows by 64 columns of bf16 (8 KiB, 128-byte swizzle; see
// common/tile.cuh):
//   q        D/64 blocks
//   keys     2 tiles of 9 blocks. P of a tile replaces its ninth block once the scores have used
//   it. staging  1 KiB per warp, through which outputs leave in 64-byte chunks
// Running maxima, row sums, validity bits and mbarriers take another 3 KiB or so.
//
// A key tile is filled and freed in halves. It is freed by rows, 0..31 before 32..63, in the order
// in which the products with V read them. The scores wait for columns: the owner's half of the
// value columns first, then the other half with the ninth block.
#pragma once

#include <type_traits>

#include "common/limits.h"
#include "common/wgmma.cuh"
#include "mla/page_record_tiles.cuh"
#include "mla/plan.cuh"
#include "mla/rows.cuh"

namespace jax_dsa::mla {

// Runs MMA warpgroup kSide over the CTA's work tiles. `Work` has a member `scale`. The following
// functions, found in the namespace of `Work`, say which work tiles there are and what becomes of
// scores and results:
//   work_tile_count(work), first_work_tile(work), work_tile_step(work)
//   lazy_margin(work)    by how much a score may exceed the running maximum
//   mask_scores<kSide>(work, shared, valid, s)
//   write_results<kSide>(work, work_index, o, rows, staging)
template <int kD, int kSide, typename Work, typename Notes>
__device__ void consume(const Work& work, Shared<kD, Notes>& shared) {
  using Records = std::conditional_t<kD == 576, RecordsInPlace, PageRecordsInPlace>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 4;
  const int work_tiles = work_tile_count(work);
  const uint64_t q = k_major_descriptor(smem_address(shared.q));
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.keys[kSide]));
  const uint64_t peer_p =
      k_major_descriptor(smem_address(shared.keys[1 - kSide][kProbabilityBlock]));
  // The address at which this lane stores its row of an 8x8 matrix of P, without the swizzled
  // chunk.
  const uint32_t own_p =
      smem_address(shared.keys[kSide][kProbabilityBlock]) + (warp * 16 + lane % 16) * 128;

  float o[128] = {};
  float s[32];
  uint32_t probabilities[4][4];
  float factor[2];
  uint64_t valid = 0;  // valid keys of the tile whose scores are in `s`
  Rows rows = {{-INFINITY, -INFINITY}, {kNoSum, kNoSum}, {kNoSum, kNoSum}};
  uint32_t q_parity = 0, key_parity = 0, peer_parity = 0;
  int previous = -1;  // the work tile whose results are in `o` and `rows`
  const uint32_t offsets = Notes::kRecords ? Records::unpack_offsets() : 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Starts Q K^T of the next own tile. `ping_pong` is true if an odd tile follows the even one and
  // may start its scores after it.
  const auto start_scores = [&](bool ping_pong) {
    if constexpr (Notes::kRecords) named_barrier_sync<256>(kEvenUnpacked + kSide);
    if (kSide == 1) named_barrier_sync<256>(kPingPong);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // PTX asks for a proxy fence here, because cp.async belongs to the generic proxy and wgmma to
      // the async proxy. The fence would take 2 % of the time. That wgmma sees copies whose
      // mbarrier phase has completed is measured, not promised. All kernels here that gather with
      // cp.async rely on it, as do kernels of other projects.
      mbarrier_wait(&shared.key_full[kSide][half], key_parity);
      if (half == 0) valid = shared.valid[kSide].all();
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kD / 64; ++block) {
        const bool own_half = block < 8 && block / 4 == kSide;
        if (own_half != (half == 0)) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint64_t offset = block * (kBlockBytes / 16) + k * 2;
          const bool first = block == kSide * 4 && k == 0;
          wgmma_bf16<kKMajor, kKMajor>(s, q + offset, own_keys + offset, !first);
        }
      }
    }
    wgmma_commit();
    if (kSide == 0 && ping_pong) named_barrier_arrive<256>(kPingPong);
    key_parity ^= 1;
  };
  const auto finish_scores = [&](bool last) {
    wgmma_wait<0>();
    wgmma_pin(s);
    if (last) arrive(&shared.q_free);
  };
  // Computes the owner's P and puts it into registers and shared memory. Returns whether the
  // accumulator must be scaled by `factor`.
  const auto own_softmax = [&](bool last, auto between, auto before_store) {
    mask_scores<kSide>(work, shared, valid, s);
    const bool raised =
        softmax(s, work.scale, lazy_margin(work), rows, probabilities, factor, between);
    before_store();
    // P replaces keys that the scores of all four warps must have used.
    if constexpr (kD > 512) named_barrier_sync<128>(kEvenScored + kSide);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = (2 * k + lane / 16) ^ (lane % 8);
      store_matrix_x4(own_p + chunk * 16, probabilities[k][0], probabilities[k][1],
                      probabilities[k][2], probabilities[k][3]);
    }
    if (lane % 4 == 0) {
      shared.running_max[kSide][row] = rows.running_max[0];
      shared.running_max[kSide][row + 8] = rows.running_max[1];
    }
    if (last) shared.sum[kSide][threadIdx.x % 128] = make_float2(rows.sum[0], rows.sum[1]);
    fence_async_proxy();
    named_barrier_arrive<256>(kSide == 0 ? kEvenReady : kOddReady);
    return raised;
  };
  // Waits for the peer's P and adopts its running maxima.
  const auto follow = [&](bool last) {
    named_barrier_sync<256>(kSide == 0 ? kOddReady : kEvenReady);
    const float next[2] = {shared.running_max[1 - kSide][row],
                           shared.running_max[1 - kSide][row + 8]};
    if (__any_sync(~0u, next[0] != rows.running_max[0] || next[1] != rows.running_max[1])) {
      rows.raise(next, factor);
      scale_rows(o, factor);
    }
    if (last) {
      const float2 sum = shared.sum[1 - kSide][threadIdx.x % 128];
      rows.peer_sum[0] = sum.x;
      rows.peer_sum[1] = sum.y;
    }
  };
  const auto values = [&](int parity) {
    return mn_major_descriptor(smem_address(shared.keys[parity][kSide * 4]), kBlockBytes);
  };
  // Both products are issued in two groups of 32 keys, so that the rows of the first group can be
  // refilled while the second is multiplied.
  const auto multiply_own = [&](bool accumulate) {
    const uint64_t v = values(kSide);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_bf16<kMNMajor>(o, probabilities[k], v + k * (16 * 128 / 16), k > 0 || accumulate);
      if (k % 2 == 1) wgmma_commit();
    }
  };
  const auto multiply_peer = [&](int half, bool accumulate) {
    const uint64_t v = values(1 - kSide);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = half * 2 + i;
      wgmma_bf16<kKMajor, kMNMajor>(o, peer_p + k * 2, v + k * (16 * 128 / 16),
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

  // Results are written late, so that the next work tile's first scores can run meanwhile.
  const auto write_previous = [&] {
    if (previous < 0) return;
    write_results<kSide>(work, previous, o, rows, smem_address(shared.staging[kSide * 4 + warp]));
    rows = {{-INFINITY, -INFINITY}, {kNoSum, kNoSum}, {kNoSum, kNoSum}};
    previous = -1;
  };

  for (int work_index = first_work_tile(work);; work_index += work_tile_step(work)) {
    int tiles = 0;
    if (work_index < work_tiles) {
      mbarrier_wait(&shared.q_full, q_parity);
      q_parity ^= 1;
      tiles = shared.notes.tiles;
      if (tiles <= kSide) arrive(&shared.q_free);
    }
    if (tiles <= kSide) write_previous();
    if (work_index >= work_tiles) break;

    if constexpr (kSide == 0) {
      for (int tile = 0; tile < tiles; tile += 2) {
        const bool odd = tile + 1 < tiles, last = tile + 2 >= tiles;
        if constexpr (Notes::kRecords) {
          // Unpack the odd tile while the even one's scores run. A loop keeps the code small enough
          // for the instruction cache.
#pragma unroll 1
          for (int i = 0; i <= odd; ++i) {
            unpack_half<Records, 0>(shared, i, i == 0 ? key_parity : peer_parity, offsets);
            if (i == 0) start_scores(odd);
          }
          if (odd) {
            peer_parity ^= 1;
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
          multiply_peer(0, true);
          multiply_peer(1, true);
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
            unpack_half<Records, 1>(shared, i, i == 0 ? peer_parity : key_parity, offsets);
            if (i == 0) named_barrier_arrive<256>(kEvenUnpacked);
          }
          peer_parity ^= 1;
        }
        start_scores(true);
        if (tile == 0) write_previous();
        finish_scores(last);
        follow(tile + 2 >= tiles);
        // Issue only half of the product first. More would fill the wgmma queue and delay the
        // softmax.
        multiply_peer(0, tile > 0);
        const bool raised =
            own_softmax(last, [&] { multiply_peer(1, true); }, [&] { finish_half(0); });
        finish_rest(0);
        if (raised) scale_rows(o, factor);
        multiply_own(true);
        finish_half(1);
        finish_rest(1);
      }
      if (tiles % 2 == 1) {
        if constexpr (Notes::kRecords) {
          unpack_half<Records, 1>(shared, 0, peer_parity, offsets);
          peer_parity ^= 1;
          named_barrier_arrive<256>(kEvenUnpacked);
        }
        follow(true);
        multiply_peer(0, tiles > 1);
        multiply_peer(1, true);
        finish_half(0);
        finish_rest(0);
      }
    }
    previous = work_index;
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
