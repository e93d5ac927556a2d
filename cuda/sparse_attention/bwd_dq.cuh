// dQ of sparse attention.
//
//   P  = exp(scale * S - max_logit - log_sum)      S = Q K^T
//   dS = P * (dP - delta)                          dP = dO V^T     dQ = scale * dS K
//
// with delta = rowsum(O * dO) - dlse.
//
// Tiling. Work tiles and steps are those of the forward pass (fwd.cuh): a few neighbouring queries
// of one KV head walk over the union of their lists, so that dQ is the sum of one work tile and
// stays in registers. A step has 64 keys, or 32 with 256 dims.
//
// Warpgroups.
//   0, 1  MMA: 64 rows each. The products for S and dP of a step are issued behind that for dQ of
//         the step before, and P is computed beside dP. The warpgroups never wait for each other.
//         A warpgroup skips steps none of whose keys its queries see.
//   2     producer, as in the forward pass
//
// Keys that no query of a work tile sees may hold anything. Their rows of K are set to zero, and dS
// is 0 where P is.
//
// Shared memory for D = E = 128: Q, dO 64 KiB; K, V 4 stages x 32 KiB.
#pragma once

#include "common/store_rows.cuh"
#include "common/wgmma.cuh"
#include "masked_attention/fwd_plan.cuh"
#include "sparse_attention/bwd_rows.cuh"
#include "sparse_attention/producer.cuh"

namespace jax_dsa::sparse_attention {

using DqCall = TileCall<SparseAttentionBwdParams>;

template <int kQueued, int kKeys, int kBlocks>
struct DqExtra {
  int32_t rows[kQueued][kKeys];  // see KeyRows
  uint32_t seen_by[kQueued];     // the MMA warpgroups, one bit each, whose queries see any key
  alignas(1024) uint8_t dout[kBlocks][kTileRows * 128];
};

template <DType kType_, int kD_, int kE_>
struct DqTraits : masked_attention::MmaWarpgroups<2> {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kWide = kD > 192 || kE > 128;
  static constexpr int kKeys = kWide ? 32 : 64;  // keys per step
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64;
  static constexpr int kQBlockBytes = kTileRows * 128, kKeyBlockBytes = kKeys * 128;
  static constexpr int kStages = kWide ? 2 : kD > 128 ? 3 : kD > 64 ? 4 : 6;
  static constexpr int kQueued = ceil_div(kStages + 2, 2) * 2;  // see masked_attention::FwdTraits
  using Extra = DqExtra<kQueued, kKeys, kEBlocks>;
  static constexpr bool kBias = false;
  static constexpr int kBiasBuffers = 0;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));
};

// Loads the rows of dout with those of q.
template <typename Tr>
struct DqLoader : BlockLoader<Tr, DqCall> {
  using Base = BlockLoader<Tr, DqCall>;
  const CUtensorMap& dout_map;

  __device__ DqLoader(const Base& base, const CUtensorMap& dout_map)
      : Base(base), dout_map(dout_map) {}
  __device__ uint32_t query_bytes() const {
    return (Tr::kDBlocks + Tr::kEBlocks) * this->block_bytes();
  }
  __device__ void load_queries(const WorkTile& x) const {
    Base::load_queries(x);
    this->load_query_rows(this->shared.extra.dout, dout_map, this->shared.q_full, x);
  }
  // Writes zeros to these rows of the keys.
  __device__ void clear_rows(int at, uint32_t parity, const uint32_t* rows) const {
    mbarrier_wait(&this->shared.k_full[at], parity);
    masked_attention::clear_rows<Tr::kKeys, 32>(this->shared.k[at], rows, threadIdx.x % 32);
  }
};

// The main loop of MMA warpgroup `warpgroup`, 0 or 1. Both run the same code, because twice as much
// would not fit in the instruction cache.
template <typename Tr>
__device__ void consume_dq(const DqCall& p, const float* delta,
                           masked_attention::Shared<Tr>& shared, int warpgroup) {
  constexpr int kScores = Tr::kKeys / 2, kSteps = Tr::kKeys / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const HeadRows rows(p, warpgroup * 64 + warp * 16 + lane / 4);
  const uint64_t q = k_major_descriptor(smem_address(shared.q) + warpgroup * kBlockBytes);
  const uint64_t dout =
      k_major_descriptor(smem_address(shared.extra.dout) + warpgroup * kBlockBytes);
  const float scale_log2 = p.scale * kLog2E;

  float dq[Tr::kD / 2], s[kScores], dp[kScores];
  RingPlace<Tr::kStages> ring;
  masked_attention::Stage stage;  // of the step whose scores are in flight

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Returns whether this warpgroup's queries see any key of the next step.
  const auto sees_next = [&] {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.k_full[at], ring.parity);
    stage = shared.stage[at];
    mbarrier_wait(&shared.bits_built[stage.queue_slot], stage.parity);
    return static_cast<bool>(uniform(shared.extra.seen_by[stage.queue_slot]) >> warpgroup & 1);
  };
  // Releases the steps before the next one that the warpgroup sees, while it has no product in
  // flight. Returns whether there is one.
  const auto skip_steps = [&] {
    while (!sees_next()) {
      const int at = uniform(ring.index);
      // All of the stage must be loaded before it can be free again.
      mbarrier_wait(&shared.v_full[at], ring.parity);
      mbarrier_wait(&shared.cleared[at], ring.parity);
      arrive(&shared.tile_released[stage.queue_slot]);
      arrive(&shared.k_free[at]);
      arrive(&shared.v_free[at]);
      ring.advance();
      if (stage.last) return false;
    }
    return true;
  };
  // Issues the products for S and dP of this step.
  const auto start = [&] {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.cleared[at], ring.parity);
    const uint64_t keys = k_major_descriptor(smem_address(shared.k[at]));
    const uint64_t values = k_major_descriptor(smem_address(shared.v[at]));
    wgmma_forget(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(s, q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2,
                                            keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
                                            i > 0);
    }
    wgmma_commit();
    mbarrier_wait(&shared.v_full[at], ring.parity);
    wgmma_forget(dp);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kE / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(dp, dout + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2,
                                            values + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
                                            i > 0);
    }
    wgmma_commit();
  };

  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    mbarrier_wait(&shared.q_full, q_parity);
    const WorkTile work_tile = shared.work_tile;
    if (work_tile.done) break;
    const RowPlace place = rows.place(p, work_tile);
    float lse[2], row_delta[2];
    HugeRow huge_rows[2];
    bool huge = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = place.first + r * place.second;
      const bool exists = r * 8 < place.rows_left;
      const RowLse row(exists ? __ldg(p.max_logit + at) : -INFINITY,
                       exists ? __ldg(p.log_sum + at) : 0.f);
      row_delta[r] = exists ? __ldg(delta + at) : 0.f;
      lse[r] = row.log2, huge_rows[r] = row.huge;
      huge = huge || row.is_huge;
    }
    huge = __any_sync(~0u, huge);
    // Each iteration processes steps that follow each other. If none are skipped, there is one.
    bool last = !work_tile.nonempty, accumulate = false;
    while (!last && skip_steps()) {
      start();
      int previous = 0;
      for (bool first = true;; first = false) {
        const int at = uniform(ring.index);
        wgmma_wait<1>();  // S of this step, and dQ of the step before
        wgmma_pin(s);
        if (!first) arrive(&shared.k_free[previous]);
        rows.mask(s, shared.bits[stage.queue_slot]);
        arrive(&shared.tile_released[stage.queue_slot]);
        float to_log2 = scale_log2;
        if (__builtin_expect(huge, 0)) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) {
            const HugeRow& row = huge_rows[i / 2 % 2];
            s[i] = __fmul_rn(s[i], p.scale) - row.max_logit - row.log_sum;
          }
          to_log2 = kLog2E;
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          s[i] = exp2_approx(fmaf(s[i], to_log2, -lse[i / 2 % 2]));
        }
        // This phase has completed already. The wait ends the basic block; otherwise ptxas would
        // move the wait for dP above the exponentials.
        mbarrier_wait(&shared.v_full[at], ring.parity);
        wgmma_wait<0>();
        wgmma_pin(dp);
        arrive(&shared.v_free[at]);
        uint32_t ds[kSteps][4];
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
          const float base = row_delta[i / 2 % 2];
          const float2 x = masked_attention::score_gradients(
              {s[i], s[i + 1]}, {dp[i] - base, dp[i + 1] - base}, true);
          ds[i / 8][i / 2 % 4] = pack_16<Tr::kType>(x.x, x.y);
        }
        wgmma_pin(ds);
        const uint64_t keys = mn_major_descriptor(smem_address(shared.k[at]), Tr::kKeyBlockBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          wgmma_16<Tr::kType, kMNMajor>(dq, ds[k], keys + k * (16 * 128 / 16), k > 0 || accumulate);
        }
        wgmma_commit();
        accumulate = true;
        previous = at, last = stage.last;
        ring.advance();
        if (last || !sees_next()) break;
        start();
      }
      wgmma_wait<0>();
      wgmma_pin(dq);
      arrive(&shared.k_free[previous]);
    }
    const float factor[2] = {accumulate ? p.scale : kUndefined, accumulate ? p.scale : kUndefined};
    arrive(&shared.q_free);
    store_rows<Tr::kType>(dq, factor, smem_address(shared.out[warpgroup * 4 + warp]),
                          static_cast<uint16_t*>(p.dq) + place.first * p.dim,
                          place.second * (p.dim / 8), place.rows_left, p.dim);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    dq_kernel(const __grid_constant__ DqCall p,
              const __grid_constant__ masked_attention::TileScheduler scheduler,
              const __grid_constant__ TileLists lists, const float* delta, unsigned* tile_counter,
              const __grid_constant__ CUtensorMap q_map,
              const __grid_constant__ CUtensorMap dout_map,
              const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map) {
  auto& shared = dynamic_shared<masked_attention::Shared<Tr>>();
  // Rows of the tile beyond its queries are never loaded.
  clear_shared(shared.q);
  clear_shared(shared.extra.dout);
  if (threadIdx.x == 0) {
    init_barriers<Tr>(p, shared);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    consume_dq<Tr>(p, delta, shared, warpgroup);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    produce_steps<Tr>(p, scheduler, lists, tile_counter, shared,
                      DqLoader<Tr>({p, q_map, k_map, v_map, shared}, dout_map));
  }
}

}  // namespace jax_dsa::sparse_attention
