// Sparse MLA, decode: the forward kernel (fwd.cuh) for so few queries that their heads alone would
// leave most of the GPU idle.
//
// Tiling. Each (query, KV head group, 64 heads) is divided into KV splits p. With n splits, each
// split processes every n-th tile of the selected keys. combine.cu combines the splits.
//
// The MMA warpgroups are the forward kernel's (mla/consumer.cuh), with the same tiles, shared
// memory and barriers. Two things differ. Keys may come from two caches, through page tables, and
// as FP8 records; the records are unpacked to bf16 in shared memory (decode_producer.cuh). Results
// go to `out` if there is one split, and otherwise as float32 to `partial`. A split without a valid
// slot writes only its maximum, -inf, and its sum, kNoSum, there.
#pragma once

#include "common/limits.h"
#include "mla/consumer.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/decode_producer.cuh"
#include "sparse_mla/fwd.cuh"

namespace jax_dsa::sparse_mla {

// With one split per work tile, its results are final.
template <int kSide>
__device__ __forceinline__ void write_results(const Decode& p, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t staging) {
  write_results<kSide>(static_cast<const SparseMlaFwdParams&>(p),
                       WorkSplit(p, work_index).work_tile, o, rows, staging);
}

// Stores are predicated instead of branched around. A wgmma is in flight meanwhile, and the
// compiler would make it finish before a branch.
template <int kSide>
__device__ __forceinline__ void write_results(const SplitDecode& p, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const WorkSplit split(p, work_index);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    factor[r] = output_factor(total, total);
    if (kSide == 0 && lane % 4 == 0) {
      partial_rows(p, split.work_tile, split.index)[warp * 16 + r * 8 + lane / 4] =
          make_float2(rows.running_max[r], total);
    }
  }
  const bool any = __any_sync(~0u, (factor[0] != kUndefined) | (factor[1] != kUndefined));
  const bool needed = any & (warp * 16 < WorkTile(p, split.work_tile).heads);
  float4* to = partial_columns(p, split.work_tile, split.index, kSide, warp) + lane;
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float_as_uint(o[i * 4 + j] * factor[j / 2]);
    store_16(to + i * 32, x, needed);
  }
}

template <int kD, bool kRecords, typename Params>
__global__ void __launch_bounds__(mla::kThreads, 1)
    decode_kernel(const __grid_constant__ Params p) {
  constexpr int kConsumer = 216, kProducer = 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<DecodeShared<kD, kRecords>>();
  mla::initialise(shared);
  launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    mla::consume<kD, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<kConsumer>();
    mla::consume<kD, 1>(p, shared);
  } else {
    lower_registers<kProducer>();
    produce<kD, kRecords>(p, shared);
  }
}

}  // namespace jax_dsa::sparse_mla
