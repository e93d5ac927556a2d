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

#include "mla/cluster_splits.cuh"
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

// Stores the partial result in shared memory.
template <typename Shared, typename Tr, typename Notes>
__device__ __forceinline__ void write_few_results(const DecodeWork<Shared>&, int, int tiles,
                                                  const float (&o)[Tr::kValueBlocks][Tr::kN / 2],
                                                  mla::HeadColumns<Tr::kN>& columns,
                                                  mla::FewShared<Tr, Notes>& shared) {
  // A barrier must separate two reductions. Every key tile has one.
  if (tiles > 0) {
    mla::reduce_over_keys<Tr::kN>(columns.sum, shared.exchange,
                                  [](float a, float b) { return a + b; });
  }
  mla::store_cluster_split<Tr>(shared, o, columns);
}

// Combines the partial results of the cluster.
template <typename Tr, typename Shared>
__device__ __forceinline__ void combine(const Decode& p, Shared& shared) {
  const DecodeTile tile(p, Tr::kN);
  const auto place_of = [&](int row) -> mla::CombinedPlace {
    const int head = tile.head + row;
    return {p.sinks ? p.sinks + int64_t{tile.request(p)} * p.sinks_stride + head : nullptr,
            int64_t{tile.token} * p.heads + head};
  };
  const auto store = [&]<int kColumns>(int64_t i, const float (&y)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      store_pair(static_cast<__nv_bfloat16*>(p.out) + i + c, y[c], y[c + 1], true);
    }
  };
  mla::combine_cluster_splits<Tr>(p, shared, p.num_splits(),
                                  min(p.per_group - tile.first_row, Tr::kN), place_of, store);
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
