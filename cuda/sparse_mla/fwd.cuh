// Sparse MLA, forward pass.
//
//   s_i = scale * q . kv[idx_i]      m = max s_i      l = sum_i exp(s_i - m)
//   out = sum_i exp(s_i - m) kv[idx_i, :512] / (l + exp(sink - m))
//
// The results for the backward pass are m, or a number up to log(2^8) below it, and log(l) with
// that number in place of m.
//
// Tiling. A work tile is (query, KV head group, 64 heads). CTAs are persistent and process work
// tiles one after the other, so that a work tile's first keys are copied while the previous results
// are written. The selected keys come in tiles of 64, of which an even and an odd one are in
// flight.
//
// Warpgroups.
//   0, 1  MMA, see mla/consumer.cuh
//   2     producer: gathers Q and the keys with cp.async (fwd_producer.cuh)
#pragma once

#include "common/limits.h"
#include "common/softmax.cuh"
#include "mla/consumer.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

// Writes one warpgroup's half of a work tile's results: its columns of the output. The left
// warpgroup also writes max_logit and log_sum.
template <int kSide>
__device__ __forceinline__ void write_results(const SparseMlaFwdParams& p, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t staging) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const WorkTile work_tile(p, work_index);
  const int64_t head = work_tile.token * p.heads + work_tile.head + row;
  const int rows_left = work_tile.heads - row;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    const bool empty = total == 0.f;
    float denominator = total;
    if (r * 8 < rows_left) {
      if (p.sinks) {
        const float sink =
            p.sinks[int64_t{work_tile.batch} * p.sinks_stride + work_tile.head + row + r * 8];
        if (!empty) denominator += sink_weight(sink, rows.running_max[r]);
      }
      if (kSide == 0 && lane % 4 == 0) {
        p.max_logit[head + r * 8] = max_with_nan(rows.running_max[r], total);
        p.log_sum[head + r * 8] = log_of_sum(total);
      }
    }
    factor[r] = output_factor(total, denominator);
  }
  auto* out = static_cast<__nv_bfloat16*>(p.out) + head * kMlaValueDim + kSide * 256;
  mla::store_rows<kMlaValueDim>(o, factor, staging, out, rows_left);
}

// Sets the scores of invalid keys of warpgroup kSide's tile to -inf.
template <int kSide, typename Shared>
__device__ __forceinline__ void mask_scores(const SparseMlaFwdParams&, const Shared&,
                                            uint64_t valid, float (&s)[32]) {
  mla::mask_columns(s, valid);
}

template <int kD>
__global__ void __launch_bounds__(mla::kThreads, 1) fwd_kernel(const __grid_constant__ Forward p) {
  constexpr int kConsumer = 216, kProducer = 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<mla::Shared<kD>>();
  mla::initialise(shared);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    mla::consume<kD, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<kConsumer>();
    mla::consume<kD, 1>(p, shared);
  } else {
    lower_registers<kProducer>();
    produce<kD>(p, shared);
  }
}

}  // namespace jax_dsa::sparse_mla
