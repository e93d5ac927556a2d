// dKV tiles of the sparse MLA backward kernel. For one half of the columns, and for the key tiles
// of one KV partition of a step:
//
//   dkv[slot] += sum over up to 128 heads of dS[slot] q + P[slot] dout
//
// Tiling. Slots are the rows of the MMAs, so that one reduction into global memory serves all
// heads: two head tiles of one row, or one head tile each of two rows. The latter have the same
// keys in their common key tiles. Half 0 has columns 0..255 and the first 32 columns of the ninth
// block, half 1 the others. If kRows, the sums are stored as rows in bf16 for sum_rows.cu and not
// reduced.
//
// Warpgroups.
//   0, 1  MMA: alternate key tiles, so that one reduces while the other multiplies
//   2     producer: copies q and dout, and P and dS tiles once they are written
//
// See bwd.cuh.
#pragma once

#include "common/wgmma.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/bwd_plan.cuh"
#include "sparse_mla/bwd_rows.cuh"

namespace jax_dsa::sparse_mla {

struct DkvTile {
  int half, first_head_tile, head_tiles;

  __device__ DkvTile(const BwdWork& work, const BwdWorkTile& work_tile)
      : half(work_tile.within_step % 2),
        first_head_tile(work_tile.within_step / 2 * kDkvHeadTiles),
        head_tiles(min(work.step_head_tiles() - first_head_tile, kDkvHeadTiles)) {}
};

// Copies one half of the columns of q and dout, and P and dS tiles once they are written. Until
// `wait_for_previous_tile` returns, the previous work tile may still be finishing.
template <int kD, typename F>
__device__ void produce_dkv(const SparseMlaBwdParams& p, const BwdWork& work,
                            const BwdWorkTile& work_tile, BwdShared<kD>& shared, uint32_t& parity,
                            F wait_for_previous_tile) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t drop = l2_policy_evict_first();
  const DkvTile dkv_tile(work, work_tile);
  auto& to = shared.dkv;
  Gather gather(warp, sub, chunk);
  const auto row_of = [&](int i) {
    const HeadTile heads(p, work, work_tile.step, dkv_tile.first_head_tile + i);
    const int64_t stored_rows =
        int64_t{heads.row} * work.stored_rows_per_slot() + work_tile.within_step / 2;
    return KeyTileList::Row{heads.tiles(p, lane), heads.slots(p),
                            (heads.batch(p) * p.keys * p.groups + heads.group) * kD,
                            stored_rows * work.key_tiles * kTile};
  };
  const KeyTileList::Row first = row_of(0), second = row_of(work.rows_per_step - 1);
  const int common = work.rows_per_step == 1 ? first.tiles
                     : p.order               ? common_tiles(p, work)[work_tile.step]
                                             : 0;
  const KeyTileList list(dkv_tile.head_tiles, first, second, common, work_tile.partition,
                         work.partitions);
  const int count = list.tiles();

  const int head_tiles = count > 0 ? dkv_tile.head_tiles : 0;
  const auto copy_columns = [&](int tile, const void* from, int row_blocks, int first_block,
                                int count, void* block) {
    const HeadTile heads(p, work, work_tile.step, dkv_tile.first_head_tile + tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Gather::row(warp, i, sub);
      gather.valid[i] = row < heads.heads;
      gather.from[i] = static_cast<const char*>(from) +
                       (heads.first + (gather.valid[i] ? row : 0)) * row_blocks * 128 +
                       first_block * 128 + chunk * 16;
    }
    for (int i = 0; i < count; ++i) gather.copy_block(smem_address(block), i, drop);
  };
  for (int tile = 0; tile < head_tiles; ++tile) {
    copy_columns(tile, p.q, kD / 64, dkv_tile.half * 4, 4, to.q[tile]);
    copy_columns(tile, p.dout, 8, dkv_tile.half * 4, 4, to.dout[tile]);
  }
  wait_for_previous_tile();
  for (int tile = 0; kD > 512 && tile < head_tiles; ++tile) {
    copy_columns(tile, p.q, kD / 64, 8, 1, to.ninth[tile]);
  }
  cp_async_arrive(&shared.rows_full);
  if (thread % 128 != 0) return;
  shared.list = list;
  mbarrier_arrive(&shared.rows_full);
  BwdCounters& counters = bwd_counters(p)[work_tile.step];
  // Four warps store the P and dS tiles of a head tile. This waits for all head tiles of the step,
  // whichever are read here.
  counter_wait(&counters.written, 4 * work.step_head_tiles());
  for (int n = 0; n < count; ++n) {
    const int side = n % 2;
    int tile, first_head_tile, head_tile_count;
    list.find(n, &tile, &first_head_tile, &head_tile_count);
    mbarrier_wait(&shared.p_ds_free[side], (parity >> side & 1) ^ 1);
    parity ^= 1u << side;
    mbarrier_arrive_expect(&shared.p_ds_full[side], head_tile_count * kPdsBlocks * kBlockBytes);
    for (int i = first_head_tile; i < first_head_tile + head_tile_count; ++i) {
      bulk_load(to.p_ds[side][i],
                p_ds_tiles(p, work, work_tile.step, dkv_tile.first_head_tile + i) +
                    tile * kPdsBlocks * kBlockBytes,
                kPdsBlocks * kBlockBytes, &shared.p_ds_full[side], drop);
    }
  }
  for (int side = 0; side < 2; ++side) {
    mbarrier_wait(&shared.p_ds_free[side], (parity >> side & 1) ^ 1);
  }
  counter_add(&counters.read);
}

// Warpgroup `side` processes the key tiles of its parity. Both warpgroups and both halves run the
// same code, so that it stays in the instruction cache together with the code of dQ tiles.
template <int kD, bool kRows, bool kPacked>
__device__ void consume_dkv(const SparseMlaBwdParams& p, const BwdWork& work,
                            const BwdWorkTile& work_tile, BwdShared<kD>& shared, int side,
                            uint32_t& rows_parity, uint32_t& parity) {
  constexpr bool kNinth = kD > 512;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const DkvTile dkv_tile(work, work_tile);
  auto& at = shared.dkv;
  const int slot = warp * 16 + lane % 16;  // of a key tile; this lane loads its index
  const uint32_t staging = smem_address(at.staging[side * 4 + warp]);

  mbarrier_wait(&shared.rows_full, rows_parity);
  rows_parity ^= 1;
  const int count = shared.list.tiles();
  int tile, first_head_tile, head_tile_count, index;
  const auto find = [&](int n) {
    shared.list.find(n, &tile, &first_head_tile, &head_tile_count);
    index = shared.list.rows[first_head_tile].slots.index(tile * kTile + slot);
  };
  if (side < count) find(side);
  for (int n = side; n < count; n += 2, parity ^= 1) {
    float values[128] = {}, rest[kNinth ? 16 : 4] = {};
    mbarrier_wait(&shared.p_ds_full[side], parity);
#pragma unroll 1
    for (int i = 0; i < head_tile_count; ++i) {
      const int head_tile = first_head_tile + i;
      const uint64_t probabilities = k_major_descriptor(smem_address(at.p_ds[side][head_tile][0]));
      const uint64_t gradients = k_major_descriptor(smem_address(at.p_ds[side][head_tile][1]));
      const uint64_t q = mn_major_descriptor(smem_address(at.q[head_tile]), kBlockBytes);
      const uint64_t q_ninth =
          mn_major_descriptor(smem_address(at.ninth[head_tile]) + dkv_tile.half * 64, kBlockBytes);
      const uint64_t dout = mn_major_descriptor(smem_address(at.dout[head_tile]), kBlockBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t step = k * (16 * 128 / 16);
        wgmma_bf16<kKMajor, kMNMajor>(values, gradients + k * 2, q + step, true);
        wgmma_bf16<kKMajor, kMNMajor>(values, probabilities + k * 2, dout + step, true);
        if constexpr (kNinth)
          wgmma_bf16<kKMajor, kMNMajor>(rest, gradients + k * 2, q_ninth + step, true);
      }
      wgmma_commit();
    }
    // Look up the targets of the sums, and the next key tile, before the reductions. Any load that
    // a warp issues after its reductions waits for them.
    const KeyTileList::Row& row = shared.list.rows[first_head_tile];
    const int64_t stored_row = row.stored_row + tile * kTile;
    KeyRows rows(p.dkv + row.dkv + dkv_tile.half * 256, int64_t{p.groups} * kD, row.slots, index,
                 kPacked ? kHeadMaskBits : 0);
    if (n + 2 < count) find(n + 2);
    wgmma_wait<0>();
    wgmma_pin(values);
    if constexpr (kNinth) wgmma_pin(rest);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.p_ds_free[side]);

    if constexpr (kRows) {
      const float one[2] = {1.f, 1.f};
      auto* const to =
          static_cast<__nv_bfloat16*>(p.rows) + (stored_row + warp * 16 + lane / 4) * kD;
      mla::store_rows<kD>(values, one, staging, to + dkv_tile.half * 256, kTile);
      if constexpr (kNinth)
        mla::store_rows<kD>(rest, one, staging, to + 512 + dkv_tile.half * 32, kTile);
    } else {
      const auto reduce = [&]<bool kAll>() {
        reduce_rows<kAll>(values, rows);
        if constexpr (kNinth) {
          rows.move(512 + dkv_tile.half * (32 - 256));
          reduce_rows<kAll>(rest, rows);
        }
      };
      if (__all_sync(~0u, rows.valid == 15)) {
        reduce.template operator()<true>();
      } else {
        reduce.template operator()<false>();
      }
    }
  }
}

}  // namespace jax_dsa::sparse_mla
