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
#include "mla/rows.cuh"
#include "sparse_mla/bwd_plan.cuh"
#include "sparse_mla/bwd_rows.cuh"

namespace jax_dsa::sparse_mla {

struct KeysItem {
  int half, first_tile, head_tiles;

  __device__ KeysItem(const BwdWork& work, const BwdItem& item)
      : half(item.part % 2),
        first_tile(item.part / 2 * kKeyTiles),
        head_tiles(min(work.sources() - first_tile, kKeyTiles)) {}
};

// Copies the columns of q and dout, and P and dS once they are written. The item before may still
// be at its end until `wait_for_last` returns.
template <int kD, typename F>
__device__ void produce_keys(const SparseMlaBwdParams& p, const BwdWork& work, const BwdItem& item,
                             BwdShared<kD>& shared, uint32_t& parity, F wait_for_last) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t drop = l2_policy_evict_first();
  const KeysItem keys(work, item);
  auto& to = shared.keys;
  Gather gather(warp, sub, chunk);
  const auto source = [&](int i) {
    const HeadTile heads(p, work, item.step, keys.first_tile + i);
    const int64_t sums = int64_t{heads.row} * work.row_sums() + item.part / 2;
    return TileList::Source{heads.tiles(p, lane), heads.slots(p),
                            (heads.batch(p) * p.keys * p.groups + heads.group) * kD,
                            sums * work.slot_tiles * kTile};
  };
  const TileList::Source first = source(0), second = source(work.span - 1);
  const int common = work.span == 1 ? first.tiles : p.order ? common_tiles(p, work)[item.step] : 0;
  const TileList list(keys.head_tiles, first, second, common, item.window, work.windows);
  const int count = list.tiles();

  const int head_tiles = count > 0 ? keys.head_tiles : 0;
  const auto copy_columns = [&](int tile, const void* from, int row_blocks, int first, int count,
                                void* block) {
    const HeadTile heads(p, work, item.step, keys.first_tile + tile);
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
  for (int tile = 0; tile < head_tiles; ++tile) {
    copy_columns(tile, p.q, kD / 64, keys.half * 4, 4, to.q[tile]);
    copy_columns(tile, p.dout, 8, keys.half * 4, 4, to.dout[tile]);
  }
  wait_for_last();
  for (int tile = 0; kD > 512 && tile < head_tiles; ++tile) {
    copy_columns(tile, p.q, kD / 64, 8, 1, to.ninth[tile]);
  }
  cp_async_arrive(&shared.rows_full);
  if (thread % 128 != 0) return;
  shared.list = list;
  mbarrier_arrive(&shared.rows_full);
  BwdCounters& counters = bwd_counters(p)[item.step];
  // Four warps store a head tile. All tiles of the step are waited for, whichever are read here.
  counter_wait(&counters.written, 4 * work.sources());
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
                kTileImages * kBlockBytes, &shared.image_full[turn], drop);
    }
  }
  for (int turn = 0; turn < 2; ++turn) {
    mbarrier_wait(&shared.image_free[turn], (parity >> turn & 1) ^ 1);
  }
  counter_add(&counters.read);
}

// Warpgroup `side` takes the tiles of its parity. Both warpgroups and both halves run the same
// code, so that it stays in the instruction cache beside that of the queries' kind.
template <int kD, bool kRows, bool kPacked>
__device__ void consume_keys(const SparseMlaBwdParams& p, const BwdWork& work, const BwdItem& item,
                             BwdShared<kD>& shared, int side, uint32_t& item_parity,
                             uint32_t& parity) {
  constexpr bool kNinth = kD > 512;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const KeysItem keys(work, item);
  auto& at = shared.keys;
  const int slot = warp * 16 + lane % 16;  // of a tile, whose index this lane loads
  const uint32_t stage = smem_address(at.stage[side * 4 + warp]);

  mbarrier_wait(&shared.rows_full, item_parity);
  item_parity ^= 1;
  const int count = shared.list.tiles();
  int tile, first, number, index;
  const auto find = [&](int n) {
    shared.list.find(n, &tile, &first, &number);
    index = shared.list.source[first].slots.index(tile * kTile + slot);
  };
  if (side < count) find(side);
  for (int n = side; n < count; n += 2, parity ^= 1) {
    float values[128] = {}, rest[kNinth ? 16 : 4] = {};
    mbarrier_wait(&shared.image_full[side], parity);
#pragma unroll 1
    for (int i = 0; i < number; ++i) {
      const int head_tile = first + i;
      const uint64_t probabilities =
          k_major_descriptor(smem_address(at.images[side][head_tile][0]));
      const uint64_t gradients = k_major_descriptor(smem_address(at.images[side][head_tile][1]));
      const uint64_t q = mn_major_descriptor(smem_address(at.q[head_tile]), kBlockBytes);
      const uint64_t q_ninth =
          mn_major_descriptor(smem_address(at.ninth[head_tile]) + keys.half * 64, kBlockBytes);
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
    // Where the sums go, and the next tile, are looked up before the reductions: whatever a warp
    // asks of memory after them waits for them.
    const TileList::Source& source = shared.list.source[first];
    const int64_t first_sum = source.sums + tile * kTile;
    KeyRows rows(p.dkv + source.dkv + keys.half * 256, int64_t{p.groups} * kD, source.slots, index,
                 kPacked ? kMemberBits : 0);
    if (n + 2 < count) find(n + 2);
    wgmma_wait<0>();
    wgmma_pin(values);
    if constexpr (kNinth) wgmma_pin(rest);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.image_free[side]);

    if constexpr (kRows) {
      const float one[2] = {1.f, 1.f};
      auto* const to =
          static_cast<__nv_bfloat16*>(p.rows) + (first_sum + warp * 16 + lane / 4) * kD;
      mla::store_rows<kD>(values, one, stage, to + keys.half * 256, kTile);
      if constexpr (kNinth) mla::store_rows<kD>(rest, one, stage, to + 512 + keys.half * 32, kTile);
    } else {
      const auto reduce = [&]<bool kAll>() {
        reduce_rows<kAll>(values, rows);
        if constexpr (kNinth) {
          rows.move(512 + keys.half * (32 - 256));
          reduce_rows<kAll>(rest, rows);
        }
      };
      if (__all_sync(~0u, rows.counts == 15)) {
        reduce.template operator()<true>();
      } else {
        reduce.template operator()<false>();
      }
    }
  }
}

}  // namespace jax_dsa::sparse_mla
