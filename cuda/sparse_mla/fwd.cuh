// Sparse MLA, forward: for one query and 64 of its heads at a time,
//
//     s_i = scale * q . kv[idx_i]          lse = log sum_i exp(s_i)
//     out = gate * sum_i exp(s_i - lse) kv[idx_i, :512]    gate = 1 / (1 + exp(sink - lse))
//
// Blocks are persistent and take work items (query, group of keys, 64 heads) in turn, so that an
// item's first keys travel while the one before is written out. The selected keys come in tiles of
// 64, an even and an odd one in flight.
//
// Warpgroups:
//   0 (left)   scores and softmax of the even tiles; columns 0..255 of the output
//   1 (right)  scores and softmax of the odd tiles; columns 256..511 of the output
//   2          gathers Q and the keys, 16 bytes a cp.async
// Both of the first two multiply every tile's probabilities P with their half of its values: their
// own P from registers, the other's from shared memory. While one is in its softmax the tensor
// cores have the other's products to do.
//
// Running maximum: P of a tile is relative to a reference of its row that follows the maximum
// lazily - it moves only when a score exceeds it by 2^8, so the accumulators are rarely rescaled
// and P stays in [0, 256]. The tiles' references form one chain (even, odd, even, ...) and both
// warpgroups add the tiles in this order, so each accumulator only ever follows it.
//
// Shared memory, in blocks of 64 rows by 64 columns of bf16 (8 KiB, 128-byte swizzle; see
// common/tile.cuh):
//   q      D/64 blocks
//   keys   2 tiles of 9 blocks; P of a tile takes its ninth once the scores have used it
//   stage  1 KiB a warp, through which outputs leave in 64-byte pieces
//   and references, row sums, validity bits and mbarriers, ~3 KiB
// A key tile fills and drains in parts. It is freed by rows, 0..31 before 32..63, in the order in
// which the products with V read them; the scores wait for columns, the owner's half of the values
// before the others with the ninth block.
#pragma once

#include "common/limits.h"
#include "common/softmax.cuh"
#include "mla/consumer.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

// One warpgroup's half of an item's results: its columns of the output, and from the left one lse.
template <int kSide>
__device__ __forceinline__ void write_results(const SparseMlaFwdParams& p, int number,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t stage) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const Item item(p, number);
  const int64_t head = item.token * p.heads + item.head + row;
  const int rows_left = item.heads - row;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    const bool empty = total == 0.f;
    const float lse = rows.lse(r, total);
    factor[r] = empty ? 0.f : 1.f / total;
    if (r * 8 < rows_left) {
      if (p.sinks) {
        const float sink = p.sinks[int64_t{item.batch} * p.sinks_stride + item.head + row + r * 8];
        if (!empty) factor[r] /= sink_divisor(sink, lse);
      }
      if (kSide == 0 && lane % 4 == 0) p.lse[head + r * 8] = lse;
    }
  }
  auto* out = static_cast<__nv_bfloat16*>(p.out) + head * kMlaValueDim + kSide * 256;
  mla::store_rows<kMlaValueDim>(o, factor, stage, out, rows_left);
}

// -inf in the scores of warpgroup kSide's tile that do not count; `valid` are those of its keys
// that do.
template <int kSide, typename Shared>
__device__ __forceinline__ void hide_scores(const SparseMlaFwdParams&, const Shared&,
                                            uint64_t valid, float (&s)[32]) {
  mla::hide_columns(s, valid);
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
