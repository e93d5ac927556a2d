// Items of the keys' kind of the sparse MLA backward kernel: for one half of the columns, over the
// tiles of 64 slots of a step,
//
//     dkv[slot] += sum over up to 128 heads of dS[slot] q + P[slot] dout
//
// with slots as rows of the products, so that one reduction into global memory serves all heads:
// two head tiles of a row, or one each of two rows, in whose common tiles both have the same keys.
// Half 0 has columns 0..255 and the first 32 of the ninth block, half 1 the others. The two
// multiplying warpgroups take the tiles in turns, so that one reduces while the other multiplies.
// Or, if kRows, the sums are stored as rows of their own, in bf16, for sum_rows.cuh. See bwd.cuh.
#pragma once

#include "common/wgmma.cuh"
#include "sparse_mla/bwd_plan.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::sparse_mla {

struct KeysItem {
  int half, first_tile, head_tiles;

  __device__ KeysItem(const BwdWork& work, const BwdItem& item)
      : half(item.part % 2),
        first_tile(item.part / 2 * kKeyTiles),
        head_tiles(min(work.sources() - first_tile, kKeyTiles)) {}
};

// Copies the columns of q and dout, and P and dS once they are written.
template <int kD>
__device__ void produce_keys(const SparseMlaBwdParams& p, const BwdWork& work, const BwdItem& item,
                             BwdShared<kD>& shared, uint32_t& parity) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t drop = l2_policy_evict_first();
  const KeysItem keys(work, item);
  auto& to = shared.keys;
  Gather gather(warp, sub, chunk);
  const auto source = [&](int i) {
    const HeadTile heads(p, work, item.step, keys.first_tile + i);
    const int64_t sums = int64_t{heads.row} * work.row_sums() + (i == 0 ? item.part / 2 : 0);
    return TileList::Source{heads.tiles(p, lane), heads.slots(p),
                            (heads.batch(p) * p.keys * p.groups + heads.group) * kD,
                            sums * work.slot_tiles * kTile};
  };
  TileList list = {.head_tiles = keys.head_tiles, .source = {source(0), source(work.span - 1)}};
  list.common = work.span == 1 ? list.source[0].tiles
                : p.order      ? common_tiles(p, work)[item.step]
                               : 0;
  const int count = list.count();

  for (int tile = 0; tile < keys.head_tiles && count > 0; ++tile) {
    const HeadTile heads(p, work, item.step, keys.first_tile + tile);
    const auto copy_columns = [&](const void* from, int row_blocks, int first, int count,
                                  void* block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Gather::row(warp, i, sub);
        gather.valid[i] = row < heads.heads;
        gather.from[i] = static_cast<const char*>(from) +
                         (heads.first + (gather.valid[i] ? row : 0)) * row_blocks * 128 +
                         first * 128 + chunk * 16;
      }
      for (int i = 0; i < count; ++i) gather.copy_block(smem_address(block), i, drop);
    };
    copy_columns(p.q, kD / 64, keys.half * 4, 4, to.q[tile]);
    if (kD > 512) copy_columns(p.q, kD / 64, 8, 1, to.q[tile][4]);
    copy_columns(p.dout, 8, keys.half * 4, 4, to.dout[tile]);
  }
  cp_async_arrive(&shared.rows_full);
  if (thread % 128 != 0) return;
  shared.list = list;
  mbarrier_arrive(&shared.rows_full);
  BwdCounters& counters = bwd_counters(p)[item.step];
  // Eight warps store a head tile. All tiles of the step are waited for, whichever are read here.
  counter_wait(&counters.written, 8 * work.sources());
  for (int n = 0; n < count; ++n) {
    const int turn = n % 2;
    int tile, first, number;
    list.find(n, &tile, &first, &number);
    mbarrier_wait(&shared.image_free[turn], (parity >> turn & 1) ^ 1);
    parity ^= 1u << turn;
    mbarrier_arrive_expect(&shared.image_full[turn], number * kTileImages * kBlockBytes);
    for (int i = first; i < first + number; ++i) {
      bulk_load(to.images[turn][i],
                image(p, work, item.step, keys.first_tile + i) + tile * kTileImages * kBlockBytes,
                kTileImages * kBlockBytes, &shared.image_full[turn]);
    }
  }
  for (int turn = 0; turn < 2; ++turn) {
    mbarrier_wait(&shared.image_free[turn], (parity >> turn & 1) ^ 1);
  }
  counter_add(&counters.read);
}

// Adds the warp's 16 rows of an accumulator to global memory, 8 rows by 32 columns at a time
// through `stage`, so that eight lanes have 128 bytes of a row side by side: reductions of 32 bytes
// run at 60 % of the rate. In the stage chunk c of row r is at chunk c ^ 2 (r % 4), so that the
// quads of four rows store to different banks. Of this lane's columns to[i] is where those of row
// 4 * i + lane / 8 belong, if bit i of `counts` is set.
template <int kN>
__device__ __forceinline__ void reduce_rows(const float (&x)[kN], uint32_t stage,
                                            float* const (&to)[4], int columns, uint32_t counts) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const uint32_t write = stage + row * 128 + lane % 2 * 8;
#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i * 16 + j * 4 + half * 2;
        store_shared_8(write + ((2 * j + lane % 4 / 2) ^ row % 4 * 2) * 16, x[at], x[at + 1]);
      }
      __syncwarp();
      float sum[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int from = k * 4 + lane / 8;
        load_shared_16(stage + from * 128 + ((lane % 8) ^ from % 4 * 2) * 16, sum[k]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        red_add(to[half * 2 + k] + columns + i * 32, sum[k][0], sum[k][1], sum[k][2], sum[k][3],
                counts >> (half * 2 + k) & 1);
      }
      __syncwarp();
    }
  }
}

// Warpgroup `side` takes the tiles of its parity.
template <int kD, bool kRows>
__device__ void consume_keys(const SparseMlaBwdParams& p, const BwdWork& work, const BwdItem& item,
                             BwdShared<kD>& shared, int side, uint32_t& item_parity,
                             uint32_t& parity) {
  constexpr bool kNinth = kD > 512;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const KeysItem keys(work, item);
  auto& at = shared.keys;
  const int slot = warp * 16 + lane % 16;  // of a tile, whose index this lane loads
  const uint32_t stage = smem_address(at.stage[side * 4 + warp]);
  const int64_t stride = int64_t{p.groups} * kD;

  mbarrier_wait(&shared.rows_full, item_parity);
  item_parity ^= 1;
  const int count = shared.list.count();
  for (int n = side; n < count; n += 2, parity ^= 1) {
    int tile, first, number;
    shared.list.find(n, &tile, &first, &number);
    const TileList::Source& source = shared.list.source[first];
    const int index = source.slots.index(tile * kTile + slot);
    float values[128] = {}, rest[kNinth ? 16 : 4] = {};
    mbarrier_wait(&shared.image_full[side], parity);
#pragma unroll 1
    for (int i = 0; i < number; ++i) {
      const int head_tile = first + i;
      const uint64_t probabilities =
          mn_major_descriptor(smem_address(at.images[side][head_tile][0]), kBlockBytes);
      const uint64_t gradients =
          mn_major_descriptor(smem_address(at.images[side][head_tile][1]), kBlockBytes);
      const uint64_t q = mn_major_descriptor(smem_address(at.q[head_tile]), kBlockBytes);
      const uint64_t q_ninth =
          mn_major_descriptor(smem_address(at.q[head_tile][4]) + keys.half * 64, kBlockBytes);
      const uint64_t dout = mn_major_descriptor(smem_address(at.dout[head_tile]), kBlockBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t step = k * (16 * 128 / 16);
        wgmma_bf16<kMNMajor, kMNMajor>(values, gradients + step, q + step, true);
        wgmma_bf16<kMNMajor, kMNMajor>(values, probabilities + step, dout + step, true);
        if constexpr (kNinth)
          wgmma_bf16<kMNMajor, kMNMajor>(rest, gradients + step, q_ninth + step, true);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_pin(values);
    if constexpr (kNinth) wgmma_pin(rest);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.image_free[side]);

    if constexpr (kRows) {
      const float one[2] = {1.f, 1.f};
      auto* const to = static_cast<__nv_bfloat16*>(p.rows) +
                       (source.sums + tile * kTile + warp * 16 + lane / 4) * kD;
      store_rows<kD>(values, one, stage, to + keys.half * 256, kTile);
      if constexpr (kNinth) store_rows<kD>(rest, one, stage, to + 512 + keys.half * 32, kTile);
    } else {
      float* const dkv = p.dkv + source.dkv + lane % 8 * 4;
      float* to[4];
      uint32_t counts = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = __shfl_sync(~0u, index, i * 4 + lane / 8);
        const bool exists = source.slots.counts(key);
        counts |= uint32_t{exists} << i;
        to[i] = dkv + (exists ? key : 0) * stride;
      }
      reduce_rows(values, stage, to, keys.half * 256, counts);
      if constexpr (kNinth) reduce_rows(rest, stage, to, 512 + keys.half * 32, counts);
    }
  }
}

}  // namespace jax_dsa::sparse_mla
