// Finds the keys that a query's slots select in one or two caches. See decode.cuh.
#pragma once

#include "common/gather.cuh"
#include "common/ptx.cuh"
#include "sparse_mla/decode_plan.cuh"

namespace jax_dsa::sparse_mla {

// How a cache holds keys. A page with the keys of `n` tokens and heads has n * kRowBytes bytes.
// Neighboring keys start kKeyBytes apart. Scales of page records follow the page's last key.
template <int kD, bool kRecords>
struct KeyFormat {
  static constexpr bool kPageRecords = kRecords && kD == 512;
  static constexpr int kRowBytes = !kRecords      ? kD * 2
                                   : kPageRecords ? kMlaPageRecordBytes
                                                  : kMlaRecordBytes;
  static constexpr int kKeyBytes = kPageRecords ? kMlaPageRecordValues : kRowBytes;
};

// The slots of one split, and the keys that they select. The split's tiles are numbered from 0.
// Those of the first list precede those of the second one, so a tile has keys of one cache, and
// only what is computed here depends on which. Finding a key takes two dependent loads (index,
// page), so the loads for the next tiles are in flight beside this tile's keys.
struct SelectedKeys {
  Slots lists[2];
  int batch, group, split;

  struct Location {
    int page, offset;
  };

  __device__ SelectedKeys(const Decode& p, int64_t token, int batch, int group, int split)
      : lists{slots(p, p.lists[0], token, group), slots(p, p.lists[1], token, group)},
        batch(batch),
        group(group),
        split(split) {}

  // Returns the index in row `row` of a tile.
  __device__ int index(const Decode& p, int tile, int row) const {
    const int place = tile * p.splits + split;
    const int first = place < p.first_tiles ? 0 : p.first_tiles;
    return slots(p, tile).index((place - first) * kTile + row);
  }
  // Returns the number of the split's tiles up to the last one with a valid slot.
  __device__ int tiles(const Decode& p, int lane) const {
    const int all = lists[1].length > 0 ? p.first_tiles + ceil_div(lists[1].length, kTile)
                                        : ceil_div(max(lists[0].length, 0), kTile);
    const int own = ceil_div(max(all - split, 0), p.splits) * kTile;
    return count_tiles(
        own, lane, [&](int tile, int row) { return index(p, tile, row); },
        [&](int tile, int index) { return slots(p, tile).is_valid(index); });
  }

  // Returns where an index of a tile points. A flat cache is treated as one page.
  __device__ Location location(const Decode& p, int tile, int index) const {
    const KeyList& list = p.lists[is_extra(p, tile)];
    const bool valid = slots(p, tile).is_valid(index);
    if (!list.page_table) return {valid ? 0 : -1, index};
    const int page = static_cast<int>(uint64_t{static_cast<uint32_t>(index)} * list.page_factor >>
                                      list.page_shift);
    return {load_now(list.page_table + int64_t{batch} * list.page_slots + page, valid, -1),
            index - page * list.page_size};
  }
  // Returns the key at a location of a tile.
  template <int kD, bool kRecords>
  __device__ mla::KeySource key(const Decode& p, int tile, Location at) const {
    using Format = KeyFormat<kD, kRecords>;
    const KeyList& list = p.lists[is_extra(p, tile)];
    if (at.page < 0 || at.page >= (list.page_table ? list.pages : 1)) return {};
    const int64_t first_row = batch * list.batch_rows + at.page * list.page_size;
    const int64_t key = int64_t{at.offset} * p.groups + group;  // counted within the page
    const char* const from = static_cast<const char*>(list.kv) +
                             first_row * (p.groups * Format::kRowBytes) + key * Format::kKeyBytes;
    if constexpr (!Format::kPageRecords) return {from};
    const int64_t page_keys = int64_t{list.page_size} * p.groups;
    return {from, (page_keys - key) * kMlaPageRecordValues + key * kMlaPageRecordScales};
  }

 private:
  __device__ static Slots slots(const Decode& p, const KeyList& list, int64_t token, int group) {
    Slots x(list.indices + (token * p.groups + group) * list.slots, list.slots,
            static_cast<int>(min(list.keys, int64_t{INT32_MAX})));
    if (list.topk_length) x.length = min(x.length, __ldg(list.topk_length + token));
    if (list.ends) x.limit = min(x.limit, __ldg(list.ends + token));
    return x;
  }
  __device__ bool is_extra(const Decode& p, int tile) const {
    return tile * p.splits + split >= p.first_tiles;
  }
  __device__ Slots slots(const Decode& p, int tile) const {
    return is_extra(p, tile) ? lists[1] : lists[0];
  }
};

}  // namespace jax_dsa::sparse_mla
