// Finds the keys that a query's slots select in a cache. See decode.cuh.
#pragma once

#include "common/gather.cuh"
#include "common/ptx.cuh"
#include "sparse_mla/decode_plan.cuh"

namespace jax_dsa::sparse_mla {

// The slots of one split, and the cache rows that they select. Finding a row takes two dependent
// loads (index, page), so the loads for the next tiles are in flight beside this tile's keys.
struct SelectedKeys {
  Slots slots;           // starts at the split's first tile
  const int32_t* table;  // the request's page table, or null

  struct Location {
    int page, offset;
  };

  __device__ SelectedKeys(const Decode& p, int64_t token, int batch, int group, int split)
      : slots(p, token, group),
        table(p.page_table ? p.page_table + int64_t{batch} * p.page_slots : nullptr) {
    slots.row += split * kTile;
    slots.length = max(slots.length, 0) - split * kTile;
  }

  // Returns the index in row `row` of the tile that starts at slot `first` of the split's own
  // slots.
  __device__ int index(const Decode& p, int first, int row) const {
    return slots.index(first * p.splits + row);
  }
  // Returns the number of the split's tiles up to the last one with a valid slot.
  __device__ int tiles(const Decode& p, int lane) const {
    const int own = ceil_div(max(slots.length, 0), kTile * p.splits) * kTile;
    return count_tiles(slots, own, lane, [&](int first, int row) { return index(p, first, row); });
  }

  __device__ Location location(const Decode& p, int index) const {
    const bool valid = slots.is_valid(index);
    if (!table) return {valid ? 0 : -1, index};
    const int page =
        static_cast<int>(uint64_t{static_cast<uint32_t>(index)} * p.page_factor >> p.page_shift);
    return {load_now(table + page, valid, -1), index - page * p.page_size};
  }
  // Returns the row in the cache, or -1 if there is none. A flat cache is treated as one page.
  __device__ int cache_row(const Decode& p, Location at) const {
    const int pages = table ? p.pages : 1;
    return at.page >= 0 && at.page < pages ? at.page * p.page_size + at.offset : -1;
  }
};

}  // namespace jax_dsa::sparse_mla
