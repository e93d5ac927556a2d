// The producer warpgroup of the sparse MLA decode kernel: it finds and gathers Q and the selected
// keys, from flat or paged caches of bf16 keys or of FP8 records. See decode.cuh.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "mla/page_record_tiles.cuh"
#include "mla/producer.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"
#include "sparse_mla/selected_keys.cuh"

namespace jax_dsa::sparse_mla {

template <int kD, bool kRecords>
__device__ void produce(const Decode& p, DecodeShared<kD, kRecords>& shared) {
  using Format = KeyFormat<kD, kRecords>;
  using Selected = SelectedKeys<kD, kRecords>;
  using Records = std::conditional_t<kD == 576, mla::RecordsInPlace, mla::PageRecordsInPlace>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  const int work_tiles = work_tile_count(p);
  const int slot = Gather::row(warp, lane % 4, sub);  // the row of a tile whose index this lane
                                                      // reads
  Gather gather(warp, sub, chunk);
  const Records records(shared.keys[0][0]);
  uint32_t q_parity = 0;
  uint32_t phases = 0;  // one bit per tile parity

  for (int work_index = blockIdx.x; work_index < work_tiles;
       work_index += gridDim.x, q_parity ^= 1) {
    const WorkSplit split(p, work_index);
    const WorkTile work_tile(p, split.work_tile);
    const SelectedSlots slots(p, work_tile.token, work_tile.group, split.index);
    const int first = slots.index(p, 0, slot), second = slots.index(p, 1, slot);
    int index = slots.index(p, 2, slot);
    const int tiles = slots.tiles(p, lane);
    const Selected selected(slots, p, work_tile.batch, work_tile.group);
    typename Selected::Location location = selected.location(p, 0, first);

    mla::begin_work_tile(shared, q_parity, tiles, [&] {
      gather_queries(p, work_tile, gather, sub, chunk, shared, l2_policy_evict_first());
    });

    mla::KeySource key;                                  // of this lane's slot of the current tile
    mla::KeySource next = selected.key(p, 0, location);  // the same for the next tile; `location`
                                                         // and `index` are one and two tiles
                                                         // further on
    location = selected.location(p, 1, second);
    const auto advance = [&](int tile) {
      key = next;
      next = selected.key(p, tile + 1, location);
      location = selected.location(p, tile + 2, index);
      index = selected.index(p, tile + 3, slot);
      // Little time passes between the release of a record buffer and the use of its next records,
      // so fetch these from memory to the L2 beforehand.
      if (kRecords && next.exists()) {
        if (chunk < 4) {
          prefetch_l2(next.at, Format::kKeyBytes);
        } else if (Format::kPageRecords) {
          prefetch_line_l2(next.at + next.scales);
        }
      }
    };
    const auto publish = [&](int parity) {
      const uint32_t bits = Gather::bits(key.exists() ? 0 : -1);
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
          const char* const from = mla::shuffled(key.at, i);
          gather.valid[i] = from != nullptr;
          gather.from[i] = from + chunk * 16;
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
          records.copy(parity, half, key, keep);
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
