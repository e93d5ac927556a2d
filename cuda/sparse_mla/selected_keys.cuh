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

// The slots of one split. The split's tiles are numbered from 0. Those of the first list precede
// those of the second one, so a tile has slots of one list.
struct SelectedSlots {
  Slots lists[2];  // slots of the second list are numbered from p.first_slots on
  int split;

  __device__ SelectedSlots(const Decode& p, int64_t token, int group, int split)
      : lists{slots(p, p, 0, token, group), slots(p, p.extra, p.first_slots, token, group)},
        split(split) {}

  // Returns whether a tile has slots of the second list.
  __device__ bool is_extra(const Decode& p, int tile) const {
    return first_slot(p, tile) >= p.first_slots;
  }
  // Returns the index in row `row` of a tile.
  __device__ int index(const Decode& p, int tile, int row) const {
    return slots(p, tile).index(first_slot(p, tile) + row);
  }
  __device__ bool is_valid(const Decode& p, int tile, int index) const {
    return slots(p, tile).is_valid(index);
  }
  // Returns the number of the split's tiles up to the last one with a valid slot.
  __device__ int tiles(const Decode& p, int lane) const {
    const int length = lists[1].length > p.first_slots ? lists[1].length : max(lists[0].length, 0);
    const int own = ceil_div(max(ceil_div(length, kTile) - split, 0), p.splits) * kTile;
    return count_tiles(
        own, lane, [&](int tile, int row) { return index(p, tile, row); },
        [&](int tile, int index) { return is_valid(p, tile, index); });
  }

 private:
  // Returns a list whose slots are numbered from `first` on.
  template <typename Keys>
  __device__ static Slots slots(const Decode& p, const Keys& keys, int first, int64_t token,
                                int group) {
    Slots x(keys.indices + (token * p.groups + group) * keys.slots - first, keys.slots,
            static_cast<int>(min(keys.keys, int64_t{INT32_MAX})));
    if (keys.topk_length) x.length = min(x.length, __ldg(keys.topk_length + token));
    if (keys.ends) x.limit = min(x.limit, __ldg(keys.ends + token));
    x.length += first;
    return x;
  }
  __device__ int first_slot(const Decode& p, int tile) const {
    return (tile * p.splits + split) * kTile;
  }
  __device__ Slots slots(const Decode& p, int tile) const {
    return is_extra(p, tile) ? lists[1] : lists[0];
  }
};

// The keys that the slots select. Only what is computed here depends on a tile's cache. Finding a
// key takes two dependent loads (index, page), so the loads for the next tiles are in flight beside
// this tile's keys. Parameters of the caches are selected value by value, because indexed loads of
// parameters take longer.
template <int kD, bool kRecords>
class SelectedKeys : public SelectedSlots {
  using Format = KeyFormat<kD, kRecords>;

  const int32_t* tables[2];  // the request's page tables, or null
  const char* kv[2];         // the group's first key of the request in each cache
  int group;

 public:
  struct Location {
    int page, offset;
  };

  __device__ SelectedKeys(const SelectedSlots& slots, const Decode& p, int batch, int group)
      : SelectedSlots(slots),
        tables{table(p, batch), table(p.extra, batch)},
        kv{first_key(p, p, batch, group), first_key(p, p.extra, batch, group)},
        group(group) {}

  // Returns where an index of a tile points. A flat cache is treated as one page.
  __device__ Location location(const Decode& p, int tile, int index) const {
    const bool extra = is_extra(p, tile), valid = is_valid(p, tile, index);
    const int32_t* const table = extra ? tables[1] : tables[0];
    const uint32_t factor = extra ? p.divisors[1].factor : p.divisors[0].factor;
    const int shift = extra ? p.divisors[1].shift : p.divisors[0].shift;
    const int page_size = extra ? p.extra.page_size : p.page_size;
    const int page = static_cast<int>(uint64_t{static_cast<uint32_t>(index)} * factor >> shift);
    return {load_now(table + page, valid && table, valid ? 0 : -1), index - page * page_size};
  }
  // Returns the key at a location of a tile.
  __device__ mla::KeySource key(const Decode& p, int tile, Location at) const {
    const bool extra = is_extra(p, tile);
    const char* const from = extra ? kv[1] : kv[0];
    const int pages = extra ? p.extra.pages : p.pages;
    const int page_size = extra ? p.extra.page_size : p.page_size;
    if (at.page < 0 || at.page >= pages) return {};
    const auto first_row = static_cast<uint32_t>(at.page * page_size);
    const uint32_t row_bytes = p.groups * Format::kRowBytes;
    if constexpr (Format::kPageRecords) {
      const int64_t page_keys = int64_t{page_size} * p.groups;
      const int64_t key = int64_t{at.offset} * p.groups;  // of group 0, counted within the page
      return {from + uint64_t{first_row} * row_bytes + key * Format::kKeyBytes,
              page_keys * kMlaPageRecordValues -
                  (key + group) * (kMlaPageRecordValues - kMlaPageRecordScales)};
    } else {
      return {from + uint64_t{first_row + at.offset} * row_bytes};
    }
  }

 private:
  template <typename Keys>
  __device__ static const int32_t* table(const Keys& keys, int batch) {
    return keys.page_table + int64_t{batch} * keys.page_slots;
  }
  template <typename Keys>
  __device__ static const char* first_key(const Decode& p, const Keys& keys, int batch, int group) {
    return static_cast<const char*>(keys.kv) +
           batch * keys.batch_rows * (p.groups * Format::kRowBytes) + group * Format::kKeyBytes;
  }
};

}  // namespace jax_dsa::sparse_mla
