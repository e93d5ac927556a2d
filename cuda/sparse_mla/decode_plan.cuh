// Work tiles of the sparse MLA decode kernels and the layout of their partial results. See
// decode.cuh.
#pragma once

#include "mla/plan.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/sparse_mla_decode.h"

namespace jax_dsa::sparse_mla {

// For any index >= 0, index / page_size is index * factor >> shift. Without pages it is 0.
struct PageDivisor {
  uint32_t factor = 0;
  int shift = 31;

  template <typename Keys>
  explicit PageDivisor(const Keys& keys) {
    if (keys.page_table == nullptr || keys.page_size <= 0) return;
    while (int64_t{1} << (shift - 31) < keys.page_size) ++shift;
    factor = static_cast<uint32_t>((uint64_t{1} << shift) / keys.page_size + 1);
  }
};

// The parameters, and what the launcher derives from them.
struct Decode : SparseMlaDecodeParams {
  PageDivisor divisors[2];  // of the cache and of the second one
  int first_slots;  // slots of the first list, filled up to whole tiles; slots from here on are
                    // those of the second list

  explicit Decode(const SparseMlaDecodeParams& p)
      : SparseMlaDecodeParams(p),
        divisors{PageDivisor(p), PageDivisor(p.extra)},
        first_slots(p.extra.slots > 0 ? ceil_div(p.slots, kTile) * kTile : INT32_MAX) {
    if (page_table == nullptr) become_one_page(*this);
    if (extra.page_table == nullptr) become_one_page(extra);
  }

 private:
  // Flat caches are treated as one page.
  template <typename Keys>
  static void become_one_page(Keys& keys) {
    keys.pages = 1;
    keys.page_slots = 0;
  }
};

// The same for several splits per work tile.
struct SplitDecode : Decode {
  using Decode::Decode;
};

template <bool kRecords_>
struct DecodeNotes : mla::ProducerNotes {
  static constexpr bool kRecords = kRecords_;
};
template <int kD, bool kRecords>
using DecodeShared = mla::Shared<kD, DecodeNotes<kRecords>>;

// Split `index` of a work tile of the forward kernel: the key tiles index, index + splits, ... of
// its slots, so that rows whose slots end early are still divided evenly. The heads of one query
// are neighbors, so that they share keys in the L2.
struct WorkSplit {
  int work_tile, index;

  __device__ WorkSplit(const Decode& p, int work_index) {
    const int tiles = ceil_div(p.heads / p.groups, mla::kHeads);
    const int rest = work_index / tiles;
    index = rest % p.splits;
    work_tile = rest / p.splits * tiles + (work_index - rest * tiles);
  }
};

__host__ __device__ inline int64_t work_tile_count(const Decode& p) {
  return work_tile_count(static_cast<const SparseMlaFwdParams&>(p)) * p.splits;
}

// Returns where this warp's partial outputs of a work tile and split lie. A split stores the
// maxima, sums and normalized outputs of its 64 heads. Outputs are ordered by warpgroup, warp and
// column group (8 columns), as the accumulator's lanes hold them: a lane has two columns of rows
// lane / 4 and lane / 4 + 8 of its warp's 16 rows.
inline constexpr int kColumnGroups = 32;  // column groups: 16 rows by 8 columns each
__device__ __forceinline__ float4* partial_columns(const Decode& p, int work_tile, int split,
                                                   int side, int warp) {
  const int64_t result = int64_t{work_tile} * p.splits + split;
  return reinterpret_cast<float4*>(p.partial) +
         ((result * 2 + side) * 4 + warp) * (kColumnGroups * 32);
}
__device__ inline float2* partial_rows(const Decode& p, int work_tile, int split) {
  return p.partial_rows + (int64_t{work_tile} * p.splits + split) * mla::kHeads;
}

// Returns how many strips of 16 rows a work tile has.
__host__ __device__ inline int row_strips(const SparseMlaFwdParams& p) {
  return ceil_div(min(p.heads / p.groups, mla::kHeads), 16);
}

// CTAs of the combine kernel for 16 rows; each has 64 columns.
inline constexpr int kCombineCtas = 8;

// Launches the kernel that combines the splits of a work tile (combine.cu).
cudaError_t launch_combine(const Decode& p, cudaStream_t stream);

// Returns whether the decode kernels accept a cache.
template <typename Keys>
bool is_valid(const Keys& x, bool page_records, int groups) {
  if (x.page_table == nullptr) return !page_records;
  // The values of page records are copied 16 bytes at a time.
  if (page_records && int64_t{x.page_size} * groups * kMlaPageRecordBytes % 16 != 0) return false;
  return x.page_size > 0 && x.pages >= 0 && x.page_slots >= 0 &&
         int64_t{x.pages} * x.page_size <= INT32_MAX &&
         x.keys == int64_t{x.page_slots} * x.page_size;
}

// Returns whether the decode kernels accept the parameters.
inline bool is_valid(const Decode& p) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return false;
  if (p.dim != 576 && p.dim != 512) return false;
  if (p.splits < 1 || p.splits > kSparseMlaMaxSplits) return false;
  if (p.splits > 1) {
    if (p.partial == nullptr || p.partial_rows == nullptr) return false;
    const int64_t work_tiles = sparse_mla_decode_work_tiles(p.batch, p.queries, p.heads, p.groups);
    if (work_tiles * row_strips(p) * kCombineCtas > INT32_MAX) return false;
  }
  // Slot numbers are computed a few tiles past a row's end.
  constexpr int kMaxSlots = INT32_MAX - 8 * kTile * kSparseMlaMaxSplits;
  if (sparse_mla_decode_slots(p.slots, p.extra.slots) > kMaxSlots) return false;
  const bool page_records = p.records && p.dim == 512;
  return is_valid(static_cast<const SparseMlaDecodeParams&>(p), page_records, p.groups) &&
         (p.extra.slots == 0 || is_valid(p.extra, page_records, p.groups));
}

}  // namespace jax_dsa::sparse_mla
