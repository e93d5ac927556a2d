// The producer warpgroup of the sparse MLA decode kernel: finds and gathers Q and the selected
// keys, from a flat or paged cache of bf16 or of FP8 records. See decode.cuh.
#pragma once

#include "common/ptx.cuh"
#include "mla/producer.cuh"
#include "mla/record_tiles.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

// A part's share of one row of indices, and the rows of the cache that they stand for. Finding a
// row takes two loads, one after the other: those of the tiles to come travel beside this one's
// keys.
struct Selected {
  Slots slots;           // from the part's first tile on
  const int32_t* table;  // of the request, or null

  struct Place {
    int page, offset;
  };

  __device__ Selected(const Decode& p, const Item& item, int split)
      : slots(p, item.token, item.group),
        table(p.page_table ? p.page_table + int64_t{item.batch} * p.page_slots : nullptr) {
    slots.row += split * kTile;
    slots.length = max(slots.length, 0) - split * kTile;
  }

  // The index in row `row` of the part's tile that starts at slot `first` of its own.
  __device__ int index(const Decode& p, int first, int row) const {
    return slots.index(first * p.splits + row);
  }
  // The part's tiles up to the last one with a slot that counts.
  __device__ int tiles(const Decode& p, int lane) const {
    const int own = ceil_div(max(slots.length, 0), kTile * p.splits) * kTile;
    return tiles_that_count(slots, own, lane,
                            [&](int first, int row) { return index(p, first, row); });
  }

  __device__ Place place(const Decode& p, int index) const {
    const bool counts = slots.counts(index);
    if (!table) return {counts ? 0 : -1, index};
    const int page =
        static_cast<int>(uint64_t{static_cast<uint32_t>(index)} * p.page_factor >> p.page_shift);
    return {load_now(table + page, counts, -1), index - page * p.page_size};
  }
  // The cache's row, -1 if there is none. A flat cache is one page.
  __device__ int find(const Decode& p, Place at) const {
    const int pages = table ? p.pages : 1;
    return at.page >= 0 && at.page < pages ? at.page * p.page_size + at.offset : -1;
  }
};

template <int kD, bool kRecords>
__device__ void produce(const Decode& p, DecodeShared<kD, kRecords>& shared) {
  constexpr int kRowBytes = kRecords ? kMlaRecordBytes : kD * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  const int items = item_count(p);
  const int slot = Gather::row(warp, lane % 4, sub);  // whose index this lane reads
  const uint32_t stride = p.groups * kRowBytes;
  Gather gather(warp, sub, chunk);
  const mla::RecordsInPlace records(shared.keys[0][0]);
  uint32_t item_parity = 0;
  uint32_t phases = 0;  // a bit for each parity

  for (int number = blockIdx.x; number < items; number += gridDim.x, item_parity ^= 1) {
    const Part part(p, number);
    const Item item(p, part.item);
    const Selected selected(p, item, part.split);
    const int first = selected.index(p, 0, slot), second = selected.index(p, kTile, slot);
    int index = selected.index(p, 2 * kTile, slot);
    const int tiles = selected.tiles(p, lane);
    Selected::Place place = selected.place(p, first);

    mla::begin_item(shared, item_parity, tiles, [&] {
      gather_queries(p, item, gather, sub, chunk, shared, l2_policy_evict_first());
    });

    const char* kv = static_cast<const char*>(p.kv) + item.group * kRowBytes +
                     item.batch * p.batch_rows * stride;
    const auto at = [&](int row) { return kv + uint64_t{static_cast<uint32_t>(row)} * stride; };
    int row = -1;                        // in the cache, of this lane's slot of a tile
    int next = selected.find(p, place);  // of the tile after it; `place` and `index` are further on
    place = selected.place(p, second);
    const auto advance = [&](int tile) {
      row = next;
      next = selected.find(p, place);
      place = selected.place(p, index);
      index = selected.index(p, (tile + 3) * kTile, slot);
      // There is little time between room for a tile's records and their use: from memory they
      // would take longer.
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
          const int its = __shfl_sync(~0u, row, i, 8);
          gather.valid[i] = its >= 0;
          gather.from[i] = at(max(its, 0)) + chunk * 16;
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
