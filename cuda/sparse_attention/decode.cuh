// Sparse attention over caches, forward pass.
//
//   s_i = scale * k_scale_i * q . k_i      m = max_i s_i      l = sum_i exp(s_i - m)
//   out = sum_i exp(s_i - m) * v_scale_i * v_i / (l + exp(sink - m))
//
// over the keys i that the query sees in its blocks, as often as a block is listed. Only FP8 caches
// have the factors k_scale and v_scale.
//
// Tiling. A work tile is (query, KV head, 16 or 32 query heads). Its list of blocks is a sequence
// of keys, which are processed in tiles of 64. A cluster of 1 to 16 CTAs divides these tiles. Each
// CTA leaves a partial result in its own shared memory, and all CTAs combine some of the rows. A
// launch is thus one kernel without a workspace. Two CTAs share an SM.
//
// Warpgroups.
//   0  MMA: mla/few_heads.cuh, with keys as the M dimension
//   1  producer: resolves blocks and pages, and copies keys and values row by row (decode_rows.cuh)
//
// Shared memory for D = 128 and 16 heads (bytes): Q 4 Ki, P 2 Ki, ring of keys and values 96 Ki.
// For FP8 caches: ring 64 Ki, codes 34 Ki. The partial result (8 Ki) replaces the ring at the end.
#pragma once

#include "common/cluster.cuh"
#include "common/combine_splits.cuh"
#include "sparse_attention/decode_rows.cuh"

namespace jax_dsa::sparse_attention {

// The work source of the MMA warpgroup, see mla/few_heads.cuh. A CTA has one work tile.
template <typename Shared>
struct DecodeWork {
  float scale;
};
template <typename Shared>
__device__ int first_work_tile(const DecodeWork<Shared>&) {
  return 0;
}
template <typename Shared>
__device__ int work_tile_step(const DecodeWork<Shared>&) {
  return 1;
}
template <typename Shared>
__device__ int work_tile_count(const DecodeWork<Shared>&) {
  return 1;
}
template <typename Shared>
__device__ float lazy_margin(const DecodeWork<Shared>&) {
  return 0.f;  // max_logit is the largest score
}

// The thread's two keys of a tile.
struct DecodeKeyRows : mla::ValidKeyRows {
  float score_factor[2];
};
struct ScaledKeyRows : DecodeKeyRows {
  float value_factor[2];  // multiplies the probabilities
};

template <typename Shared, typename Base>
__device__ __forceinline__ auto valid_key_rows(const DecodeWork<Shared>& w, const Base& shared,
                                               int stage, int warp, int lane) {
  const mla::ValidKeyRows valid(shared.valid[stage], warp, lane);
  if constexpr (Shared::kFp8) {
    const auto& factors = shared.notes.factors[stage];
    const int row = warp * 16 + lane / 4;
    return ScaledKeyRows{{valid, {w.scale * factors.keys[row], w.scale * factors.keys[row + 8]}},
                         {factors.values[row], factors.values[row + 8]}};
  } else {
    return DecodeKeyRows{valid, {w.scale, w.scale}};
  }
}

template <typename Shared, int kN>
__device__ __forceinline__ void mask_scores(const DecodeWork<Shared>&, const DecodeKeyRows& rows,
                                            float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const int r = i / 2 % 2;
    s[i] = rows.valid[r] ? __fmul_rn(s[i], rows.score_factor[r]) : -INFINITY;
  }
}

// Returns where a row of the CTA's partial output begins. The padding of four floats puts the
// elements that a warp stores at a time into different banks.
template <typename Tr, typename Shared>
__device__ __forceinline__ float* partial_row(Shared& shared, int row) {
  static_assert(Tr::kN * (Tr::kE + 4) * sizeof(float) <= sizeof(shared.ring));
  return reinterpret_cast<float*>(shared.ring) + row * (Tr::kE + 4);
}

// Stores the partial result, relative to its own maximum, in shared memory.
template <typename Shared, typename Tr, typename Notes>
__device__ __forceinline__ void write_few_results(const DecodeWork<Shared>&, int, int tiles,
                                                  const float (&o)[Tr::kValueBlocks][Tr::kN / 2],
                                                  mla::HeadColumns<Tr::kN>& columns,
                                                  mla::FewShared<Tr, Notes>& shared) {
  using HeadColumns = mla::HeadColumns<Tr::kN>;
  // A barrier must separate two reductions. Every key tile has one.
  if (tiles > 0) {
    mla::reduce_over_keys<Tr::kN>(columns.sum, shared.exchange,
                                  [](float a, float b) { return a + b; });
  }
  const int dim = thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
#pragma unroll
  for (int c = 0; c < HeadColumns::kHeadsPerThread; ++c) {
    const int row = HeadColumns::head(c);
    float* const to = partial_row<Tr>(shared, row) + dim;
#pragma unroll
    for (int m = 0; m < Tr::kValueBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < Tr::kN / 2; ++i) {
        if (HeadColumns::local_head(i) == c) to[m * 64 + i / 2 % 2 * 8] = o[m][i];
      }
    }
    if (threadIdx.x < 4)
      shared.notes.rows[row] = make_float2(columns.running_max[c], columns.sum[c]);
  }
}

// Combines the partial results of the cluster's CTAs in ascending order, for every `splits`-th row.
// The MMA warpgroup calls this between two barriers of the cluster.
template <typename Tr, typename Shared>
__device__ __forceinline__ void combine(const Decode& p, Shared& shared) {
  constexpr int kMax = kSparseDecodeMaxSplits, kE = Tr::kE;
  const DecodeTile tile(p, Tr::kN);
  const int lane = threadIdx.x % 32, rank = cluster_rank(), splits = p.num_splits();
  // A warp has 64 columns of one row at a time, two per lane.
#pragma unroll 1
  for (int i = threadIdx.x * 2; i < (Tr::kN >> p.log_splits) * kE; i += 2 * 128) {
    const int row = rank + i / kE * splits, column = i % kE, head = tile.head + row;
    if (tile.first_row + row >= p.per_group) break;
    float2 x[kMax];
#pragma unroll
    for (int split = 0; split < kMax; ++split) {
      x[split] = make_float2(0.f, 0.f);
      if (split < splits) {
        x[split] = *reinterpret_cast<const float2*>(
            cluster_peer(partial_row<Tr>(shared, row) + column, split));
      }
    }
    float2 of = make_float2(-INFINITY, 0.f);  // the maximum and the sum of split `lane`
    if (lane < splits) of = *cluster_peer(&shared.notes.rows[row], lane);
    const float max = max_over_lanes(of.x);
    const float weight = exp2_approx((of.x - finite_max(max)) * kLog2E);
    const float total = sum_over_lanes(of.y * weight);
    float2 y = make_float2(0.f, 0.f);
#pragma unroll
    for (int split = 0; split < kMax; ++split) {
      const float w = __shfl_sync(~0u, weight, split);
      if (split < splits) {
        y.x = fmaf(w, x[split].x, y.x);
        y.y = fmaf(w, x[split].y, y.y);
      }
    }
    // If all scores are -inf the output is zero, or NaN if it has an infinite value.
    CombinedRow combined(max, total);
    if (combined.empty) {
      combined.factor = 1.f;
    } else if (p.sinks) {
      combined.apply_sink(p.sinks[int64_t{tile.request(p)} * p.sinks_stride + head]);
    }
    const int64_t out_row = int64_t{tile.token} * p.heads + head;
    store_pair(static_cast<__nv_bfloat16*>(p.out) + out_row * kE + column, y.x * combined.factor,
               y.y * combined.factor, true);
    if (column == 0) {
      p.max_logit[out_row] = isnan(total) ? total : max;  // fmaxf drops NaN
      p.log_sum[out_row] = log_of_sum(total);
    }
  }
}

// Unpacking takes more registers than copying.
template <typename Tr, bool kFp8>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeCtasPerSm)
    decode_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = kFp8 ? 160 : 192, kProducer = kFp8 ? 96 : 64;
  static_assert(registers_fit(kDecodeCtasPerSm, 1, kConsumer, kProducer));
  using Shared = DecodeShared<Tr, kFp8>;
  auto& shared = dynamic_shared<Shared>();
  find_list_end<kDecodeThreads>(p, DecodeTile(p, Tr::kN), shared.notes);
  if constexpr (kFp8) initialise(shared.codes);
  mla::initialise(shared);  // makes the end of the list visible, too
  // Shared memory must outlast the reads of other CTAs, so the cluster waits before and after them.
  const auto wait_for_cluster = [] { cluster_sync(); };
  if (threadIdx.x / 128 == 1) {
    lower_registers<kProducer>();
    produce<Tr, kFp8>(p, shared);
    wait_for_cluster();
    wait_for_cluster();
  } else {
    raise_registers<kConsumer>();
    mla::consume_few<Tr>(DecodeWork<Shared>{p.scale}, shared);
    wait_for_cluster();
    combine<Tr>(p, shared);
    wait_for_cluster();
  }
}

}  // namespace jax_dsa::sparse_attention
