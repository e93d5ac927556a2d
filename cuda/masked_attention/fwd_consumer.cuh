// The MMA warpgroups of the attention forward kernels. See fwd.cuh.
#pragma once

#include "common/store_rows.cuh"
#include "common/wgmma.cuh"
#include "masked_attention/fwd_plan.cuh"
#include "masked_attention/scores.cuh"
#include "masked_attention/softmax.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kEither = -1;

// The main loop of MMA warpgroup kWarpgroup. With kEither, all warpgroups run the same code.
// Tr::Rows says what the rows of a work tile are.
template <typename Tr, int kWarpgroup, typename Params>
__device__ void consume(const Params& p, Shared<Tr>& shared) {
  constexpr int kScores = Tr::kKeys / 2, kSteps = Tr::kKeys / 16,
                kQInRegisters = Tr::kQRegisterSteps;
  const int own = static_cast<int>(threadIdx.x / 128);
  const int warpgroup = kWarpgroup == kEither ? uniform(own) : kWarpgroup;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The thread's rows in the work tile, the second one eight rows below the first.
  const typename Tr::Rows tile_rows(p, warpgroup * 64 + warp * 16 + lane / 4);
  const ScoreUnits<Tr::kGeneral> units(p.scale);
  float cap_inverse = 0.f;
  if constexpr (Tr::kGeneral) cap_inverse = p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const uint64_t q = k_major_descriptor(smem_address(shared.q) + warpgroup * kBlockBytes);

  float o[Tr::kE / 2];
  float s[kScores];
  uint32_t probabilities[kSteps][4];
  uint32_t q_fragments[kQInRegisters > 0 ? kQInRegisters : 1][4];
  float factor[2];
  RowState rows;
  RingPlace<Tr::kStages> k_ring, v_ring;  // stages of the next QK^T and the next PV
  RingPlace<Tr::kBiasBuffers> bias_ring;
  uint32_t q_parity = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  const auto load_queries = [&] {
    const uint32_t from =
        smem_address(shared.q) + warpgroup * kBlockBytes + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kQInRegisters; ++i) {
      const int chunk = (i % 4 * 2 + lane / 16) ^ (lane % 8);
      load_matrix_x4(from + i / 4 * Tr::kQBlockBytes + chunk * 16, q_fragments[i]);
    }
  };
  // Issues QK^T of the next key tile.
  const auto start_scores = [&] {
    const int at = uniform(k_ring.index);
    mbarrier_wait(&shared.k_full[at], k_ring.parity);
    if constexpr (Tr::kUsePingPong) named_barrier_sync<256>(kPingPong + warpgroup);
    const uint64_t keys = k_major_descriptor(smem_address(shared.k[at]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      const uint64_t b = keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2;
      if constexpr (kQInRegisters == Tr::kD / 16) {
        wgmma_16<Tr::kType, kKMajor>(s, q_fragments[i], b, i > 0);
      } else {
        if (i < kQInRegisters) {
          wgmma_16<Tr::kType, kKMajor>(s, q_fragments[i < kQInRegisters ? i : 0], b, i > 0);
        } else {
          const uint64_t a = q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2;
          wgmma_16<Tr::kType, kKMajor, kKMajor>(s, a, b, i > 0);
        }
      }
    }
    wgmma_commit();
  };
  // Issues the product of the probabilities and V.
  const auto start_values = [&](bool accumulate) {
    const int at = uniform(v_ring.index);
    mbarrier_wait(&shared.v_full[at], v_ring.parity);
    mbarrier_wait(&shared.cleared[at], v_ring.parity);
    const uint64_t values = mn_major_descriptor(smem_address(shared.v[at]), Tr::kKeyBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma_16<Tr::kType, kMNMajor>(o, probabilities[i], values + i * (16 * 128 / 16),
                                    i > 0 || accumulate);
    }
    wgmma_commit();
  };
  const auto signal_next_warpgroup = [&] {
    if constexpr (!Tr::kUsePingPong) return;
    const bool last = warpgroup == Tr::kWarpgroups - 1;
    named_barrier_arrive<256>(kPingPong + (last ? 0 : warpgroup + 1));
  };
  // Processes the finished scores of a tile and frees its K buffer: bias, softcap, mask, softmax.
  // Returns whether the accumulator must be multiplied by `factor`. `last` tells whether the tile
  // is the last one of its work tile.
  const auto use_scores = [&](bool& last) {
    wgmma_pin(s);
    const int at = k_ring.index;
    const Stage& stage = shared.stage[at];
    last = stage.last;
    if constexpr (Tr::kGeneral) {
      if constexpr (Tr::kBias) {
        const int tile = bias_ring.index;
        const bool shared_row = p.bias.queries == 1;
        mbarrier_wait(&shared.bias.full[tile], bias_ring.parity);
        add_bias<Tr::kType>(s, p.scale, [&](int k, uint32_t (&x)[4]) {
          load_matrix_x4(bias_chunk(smem_address(shared.bias.tile[tile]), shared_row,
                                    warpgroup * 64 + warp * 16 + lane % 16, 2 * k + lane / 16),
                         x);
        });
        arrive(&shared.bias.free[tile]);
        bias_ring.advance();
      }
      cap_scores(s, Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
    }
    if (stage.partial) {
      mbarrier_wait(&shared.bits_built[stage.queue_slot], stage.parity);
      tile_rows.mask(s, shared.bits[stage.queue_slot]);
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.tile_released[stage.queue_slot]);
      mbarrier_arrive(&shared.k_free[at]);  // after this, `stage` may be overwritten
    }
    k_ring.advance();
    return softmax(s, units, rows, factor);
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      probabilities[i / 8][i / 2 % 4] = pack_16<Tr::kType>(s[i], s[i + 1]);
    }
  };
  const auto finish_values = [&] {
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive(&shared.v_free[v_ring.index]);
    v_ring.advance();
  };
  const auto write_results = [&](const WorkTile& work_tile, bool nonempty) {
    const RowPlace place = tile_rows.place(p, work_tile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const sink =
          p.sinks ? p.sinks + work_tile.batch * p.sinks_stride + tile_rows.head(p, work_tile, r)
                  : nullptr;
      const RowResult result = row_result(rows, units, r, nonempty, sink);
      factor[r] = result.factor;
      if (r * 8 < place.rows_left && lane % 4 == 0) {
        p.max_logit[place.first + r * place.second] = result.max_logit;
        p.log_sum[place.first + r * place.second] = result.log_sum;
      }
    }
    store_rows<Tr::kType>(o, factor, smem_address(shared.out[warpgroup * 4 + warp]),
                          static_cast<uint16_t*>(p.out) + place.first * p.value_dim,
                          place.second * (p.value_dim / 8), place.rows_left, p.value_dim);
  };

  // The warpgroups take turns from the first tile to the last. Warpgroup 0 starts.
  if (Tr::kUsePingPong && warpgroup == Tr::kWarpgroups - 1) {
    named_barrier_arrive<256>(kPingPong + 0);
  }
  for (;; q_parity ^= 1) {
    mbarrier_wait(&shared.q_full, q_parity);
    const WorkTile work_tile = shared.work_tile;
    if (work_tile.done) break;
    rows = {{-INFINITY, -INFINITY}, -INFINITY, {0.f, 0.f}, false};
    if (!work_tile.nonempty) {
      arrive(&shared.q_free);
      write_results(work_tile, false);
      continue;
    }
    load_queries();
    if constexpr (kQInRegisters == Tr::kD / 16) arrive(&shared.q_free);

    bool last;
    start_scores();
    signal_next_warpgroup();
    wgmma_wait<0>();
    use_scores(last);
    pack();
    bool accumulate = false;
    while (!last) {
      start_scores();
      start_values(accumulate);
      signal_next_warpgroup();
      wgmma_wait<1>();
      const bool rescale = use_scores(last);
      finish_values();
      if (rescale) {
#pragma unroll
        for (int i = 0; i < Tr::kE / 2; ++i) o[i] *= factor[i / 2 % 2];
      }
      pack();
      accumulate = true;
    }
    if constexpr (kQInRegisters < Tr::kD / 16) arrive(&shared.q_free);
    start_values(accumulate);
    finish_values();
    write_results(work_tile, true);
  }
  // Consume the last arrival, so that no barrier is left with a pending one.
  if (Tr::kUsePingPong && warpgroup == 0) named_barrier_sync<256>(kPingPong + 0);
}

}  // namespace jax_dsa::masked_attention
