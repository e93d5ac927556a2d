// Work items of the sparse MLA decode kernels and where their partial results lie. See decode.cuh.
#pragma once

#include "mla/plan.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/sparse_mla_decode.h"

namespace jax_dsa::sparse_mla {

// The parameters, and what the launcher derives from them: index / page_size for any index >= 0 is
// index * page_factor >> page_shift.
struct Decode : SparseMlaDecodeParams {
  uint32_t page_factor;
  int page_shift;

  explicit Decode(const SparseMlaDecodeParams& p) : SparseMlaDecodeParams(p) {
    page_shift = 31;
    while (int64_t{1} << (page_shift - 31) < p.page_size) ++page_shift;
    page_factor =
        static_cast<uint32_t>(p.page_size > 0 ? (uint64_t{1} << page_shift) / p.page_size + 1 : 0);
  }
};

// ... where there are several parts an item.
struct SplitDecode : Decode {
  using Decode::Decode;
};

template <bool kRecords_>
struct DecodeNotes : mla::Tiles {
  static constexpr bool kRecords = kRecords_;
};
template <int kD, bool kRecords>
using DecodeShared = mla::Shared<kD, DecodeNotes<kRecords>>;

// Part `split` of an item of the forward kernel: the tiles split, split + splits, ... of its slots,
// so that rows whose slots end early are still dealt out evenly. The heads of one query are
// neighbours, for the L2.
struct Part {
  int item, split;

  __device__ Part(const Decode& p, int number) {
    const int tiles = ceil_div(p.heads / p.groups, mla::kHeads);
    const int rest = number / tiles;
    split = rest % p.splits;
    item = rest / p.splits * tiles + (number - rest * tiles);
  }
};

__host__ __device__ inline int64_t item_count(const Decode& p) {
  return item_count(static_cast<const SparseMlaFwdParams&>(p)) * p.splits;
}

// Partial results of an item and split: of its 64 heads, lse and the normalised output, by
// warpgroup, warp, and eight columns at a time as the accumulator's owners hold them: a lane has
// rows lane / 4 and lane / 4 + 8 of its warp's 16, two columns of each.
inline constexpr int kPieces = 32;  // of 16 rows and 8 columns
__device__ __forceinline__ float4* partial_pieces(const Decode& p, int item, int split, int side,
                                                  int warp) {
  const int64_t part = int64_t{item} * p.splits + split;
  return reinterpret_cast<float4*>(p.partial) + ((part * 2 + side) * 4 + warp) * (kPieces * 32);
}
__device__ inline float* partial_lse(const Decode& p, int item, int split) {
  return p.partial_lse + (int64_t{item} * p.splits + split) * mla::kHeads;
}

}  // namespace jax_dsa::sparse_mla
