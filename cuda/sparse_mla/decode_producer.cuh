// The producer warpgroup of the sparse MLA decode kernel: it finds and gathers Q and the selected
// keys, from a flat or paged cache of bf16 keys or of FP8 records. See decode.cuh.
#pragma once

#include "common/ptx.cuh"
#include "mla/producer.cuh"
#include "mla/record_tiles.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"
#include "sparse_mla/selected_keys.cuh"

namespace jax_dsa::sparse_mla {

template <int kD, bool kRecords>
__device__ void produce(const Decode& p, DecodeShared<kD, kRecords>& shared) {
  constexpr int kRowBytes = kRecords ? kMlaRecordBytes : kD * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  const int work_tiles = work_tile_count(p);
  const int slot = Gather::row(warp, lane % 4, sub);  // the row of a tile whose index this lane
                                                      // reads
  const uint32_t stride = p.groups * kRowBytes;
  Gather gather(warp, sub, chunk);
  const mla::RecordsInPlace records(shared.keys[0][0]);
  uint32_t q_parity = 0;
  uint32_t phases = 0;  // one bit per tile parity

  for (int work_index = blockIdx.x; work_index < work_tiles;
       work_index += gridDim.x, q_parity ^= 1) {
    const WorkSplit split(p, work_index);
    const WorkTile work_tile(p, split.work_tile);
    const SelectedKeys selected(p, work_tile.token, work_tile.batch, work_tile.group, split.index);
    const int first = selected.index(p, 0, slot), second = selected.index(p, kTile, slot);
    int index = selected.index(p, 2 * kTile, slot);
    const int tiles = selected.tiles(p, lane);
    SelectedKeys::Location location = selected.location(p, first);

    mla::begin_work_tile(shared, q_parity, tiles, [&] {
      gather_queries(p, work_tile, gather, sub, chunk, shared, l2_policy_evict_first());
    });

    const char* kv = static_cast<const char*>(p.kv) + work_tile.group * kRowBytes +
                     work_tile.batch * p.batch_rows * stride;
    const auto at = [&](int row) { return kv + uint64_t{static_cast<uint32_t>(row)} * stride; };
    int row = -1;  // cache row of this lane's slot of the current tile
    int next = selected.cache_row(p, location);  // the same for the next tile; `location` and
                                                 // `index` are one and two tiles further on
    location = selected.location(p, second);
    const auto advance = [&](int tile) {
      row = next;
      next = selected.cache_row(p, location);
      location = selected.location(p, index);
      index = selected.index(p, (tile + 3) * kTile, slot);
      // Little time passes between the release of a record buffer and the use of its next records,
      // so fetch these from memory to the L2 beforehand.
      if (kRecords && chunk < 4 && next >= 0) prefetch_l2(at(next), kRowBytes);
    };
    const auto publish = [&](int parity) {
      const uint32_t bits = Gather::bits(row);
      if (lane == 0) {
        shared.valid[parity].set(warp, bits);
        mbarrier_arrive(&shared.key_full[parity][0]);
      }
    };
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t free = ~phases >> tile % 2 & 1;
      auto fill = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        const uint32_t to = smem_address(shared.keys[kParity]);
        advance(tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int cache_row = __shfl_sync(~0u, row, i, 8);
          gather.valid[i] = cache_row >= 0;
          gather.from[i] = at(max(cache_row, 0)) + chunk * 16;
        }
        mbarrier_wait(&shared.key_free[kParity][0], free);
        publish(kParity);
        gather.template copy<0, 8, 0>(to, keep);
        mbarrier_wait(&shared.key_free[kParity][1], free);
        gather.template copy<kOwn, kOwn + 4, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][0]);
        gather.template copy<kOther, kOther + 4, 1>(to, keep);
        gather.template copy<8, kD / 64, 0>(to, keep);
        gather.template copy<8, kD / 64, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][1]);
      };
      const auto fill_records = [&](int parity) {
        advance(tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mbarrier_wait(&shared.key_free[parity][half], free);
          if (half == 0) publish(parity);
          records.copy(parity, half, row, at, keep);
          cp_async_arrive(&shared.key_full[parity][half]);
        }
      };
      if constexpr (kRecords) {
        fill_records(tile % 2);
      } else if (tile % 2 == 0) {
        fill.template operator()<0>();
      } else {
        fill.template operator()<1>();
      }
      phases ^= 1 << tile % 2;
    }
  }
}

}  // namespace jax_dsa::sparse_mla
