// Gathers the rows that a query's indices select into shared-memory tiles (common/tile.cuh). A
// warpgroup of producer warps fills a tile.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"

namespace jax_dsa {

// The list of indices of one token and KV head group.
struct Slots {
  const int32_t* row;
  int length;
  int limit;  // keys from here on are masked

  __device__ Slots(const int32_t* row, int length, int limit)
      : row(row), length(length), limit(limit) {}

  // Takes the list from the parameters of sparse MLA or attn_dist.
  template <typename Params>
  __device__ Slots(const Params& p, int64_t token, int group)
      : row(p.indices + (token * p.groups + group) * p.slots),
        length(p.topk_length ? min(p.slots, __ldg(p.topk_length + token)) : p.slots),
        limit(static_cast<int>(min(p.keys, int64_t{INT32_MAX}))) {
    if (p.ends) limit = min(limit, __ldg(p.ends + token));
  }

  // Returns the index in a slot; -1 for slots from `length` on.
  __device__ int index(int slot) const { return load_now(row + slot, slot < length, -1); }
  __device__ bool is_valid(int index) const { return index >= 0 && index < limit; }
};

// Returns how many tiles of the first `length` slots there are, up to the last tile with a valid
// slot. All lanes of a warp must call it. index(tile, row) returns the index for row `row` of a
// tile, and is_valid(tile, index) says whether it is valid; both are also called for tiles beyond
// the end. The search begins at the end, because most lists are full.
template <typename Index, typename IsValid>
__device__ __forceinline__ int count_tiles(int length, int lane, Index index, IsValid is_valid) {
  constexpr int kStep = 256;
  for (int base = (length - 1) / kStep * kStep; length > 0 && base >= 0; base -= kStep) {
    int found[kStep / 32], last = -1;
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i) {
      found[i] = index(base / kTile + i / 2, i % 2 * 32 + lane);
    }
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i) {
      if (__any_sync(~0u, is_valid(base / kTile + i / 2, found[i]))) last = i;
    }
    if (last >= 0) return (base + 32 * last) / kTile + 1;
  }
  return 0;
}
__device__ __forceinline__ int count_tiles(const Slots& slots, int lane) {
  return count_tiles(
      slots.length, lane, [&](int tile, int row) { return slots.index(tile * kTile + row); },
      [&](int, int index) { return slots.is_valid(index); });
}

// Which rows of a tile are valid: bit r % 8 of byte r / 8.
struct alignas(8) ValidRows {
  uint8_t bytes[kTile / 8];

  // Sets the bits of a warp's 16 rows, in the order of GatherOf::row. One lane per warp calls this.
  __device__ void set(int warp, uint32_t bits) {
    bytes[warp] = bits;
    bytes[warp + 4] = bits >> 8;
  }
  __device__ bool operator[](int row) const { return bytes[row / 8] >> (row % 8) & 1; }
  __device__ uint64_t all() const { return *reinterpret_cast<const uint64_t*>(bytes); }
};

// One producer thread's copies of a tile. Eight lanes copy a row, each one 16-byte chunk per block.
// A lane copies two rows in each half of the tile. With kAlone it uses cp_async_16_alone.
template <bool kAlone>
struct GatherOf {
  uint32_t offset[2];   // offset in a block of shared memory, for even and odd i
  const char* from[4];  // the source of row(warp, i, sub)
  bool valid[4];        // invalid rows are filled with zeros

  __device__ GatherOf(int warp, int sub, int chunk) {
    offset[0] = (warp * 8 + sub) * 128 + (chunk ^ sub) * 16;
    offset[1] = (warp * 8 + 4 + sub) * 128 + (chunk ^ (sub + 4)) * 16;
  }

  // Returns the tile row that lane 8 * sub + chunk of a warp copies as its i-th of four.
  __device__ static int row(int warp, int i, int sub) {
    return i / 2 * 32 + warp * 8 + i % 2 * 4 + sub;
  }

  // Returns one bit per row of the warp, in the order of `row`: whether the row has an index. Lane
  // 8 * sub + i, for i < 4, passes the index of row (i, sub), or -1 if there is none.
  __device__ static uint32_t bits(int index) {
    const int lane = threadIdx.x % 32;
    return __ballot_sync(~0u, __shfl_sync(~0u, index, lane % 4 * 8 + lane / 4) >= 0) & 0xffff;
  }

  // Sets the source rows of a tile. Lanes 0 to 15 pass the indices of the warp's 16 slots, in the
  // order of `row`, and whether they are valid. Returns the validity bits in the same order.
  __device__ __forceinline__ uint32_t set_rows(const char* kv, int64_t stride, int sub, int index,
                                               bool is_valid) {
    const uint32_t bits = __ballot_sync(~0u, is_valid) & 0xffff;
    const int safe = is_valid ? index : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      valid[i] = bits >> (i * 4 + sub) & 1;
      from[i] = kv + __shfl_sync(~0u, safe, i * 4 + sub) * stride;
    }
    return bits;
  }

  // Copies half kHalf (32 rows) of blocks kFirst to kLast - 1.
  template <int kFirst, int kLast, int kHalf>
  __device__ void copy(uint32_t to, uint64_t policy) const {
#pragma unroll
    for (int block = kFirst; block < kLast; ++block) {
#pragma unroll
      for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
        copy_16(whole_sum(to, offset[i % 2]) + block * kBlockBytes + kHalf * 4096,
                from[i] + block * 128, valid[i], policy);
      }
    }
  }

  // Copies all rows of one source block to block `at` of the tile.
  __device__ void copy_block(uint32_t to, int at, int block, uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copy_16(whole_sum(to, offset[i % 2]) + at * kBlockBytes + i / 2 * 4096, from[i] + block * 128,
              valid[i], policy);
    }
  }
  __device__ void copy_block(uint32_t to, int block, uint64_t policy) const {
    copy_block(to, block, block, policy);
  }

 private:
  __device__ static void copy_16(uint32_t to, const char* from, bool valid, uint64_t policy) {
    if constexpr (kAlone) {
      cp_async_16_alone(to, from, valid, policy);
    } else {
      cp_async_16(to, from, valid, policy);
    }
  }
};
using Gather = GatherOf<false>;

}  // namespace jax_dsa
