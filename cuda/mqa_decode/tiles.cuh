// Key tiles of the mqa_decode kernels: where the keys lie, how they are copied, and which query
// sees which of them.
//
// Most tiles are seen by all queries of the request. In other tiles, keys that no query sees are
// copied as zeros. If there are several queries, such a tile is mixed: each score is compared with
// its query's range. A probability of zero does not suppress a NaN or an infinity in a value. So
// values of a mixed tile that are not finite become zeros, and the scores of queries that see them
// become NaN.
#pragma once

#include "common/gather.cuh"
#include "common/softmax.cuh"
#include "mla/record_tiles.cuh"
#include "mla/rows.cuh"
#include "mqa_decode/splits.cuh"

namespace jax_dsa::mqa_decode {

// Rows are contiguous and are copied whole, so no neighbor needs to be prefetched.
using Gather = GatherOf<true>;

// A tile that some of several queries see and others do not.
struct MixedTile {
  int key;  // first key of the tile; -1: the tile is not mixed
  int batch;
  int row;  // first row, within the KV head group, that is multiplied with the tile
};

// What the producer tells the consumers about a split and about kStages key tiles, and what
// kThreads threads compute before.
template <int kStages, int kThreads>
struct Notes {
  static constexpr bool kRecords = false;  // the producer unpacks records
  int tiles;                               // key tiles of the split whose Q is in shared memory
  MixedTile mixed[kStages];
  ValidRows nonfinite[kStages];  // keys of a mixed tile whose values are not all finite
  KvSplit splits[kSplitsKept];
  WorkRange range;
  typename WorkRangeFinder<kThreads>::Scratch scratch;
};

// The keys that a query sees.
struct QueryRange {
  int start, end;

  __device__ QueryRange(const Decode& p, const MixedTile& tile, int row) {
    const int query = min((tile.row + row) / p.per_group, static_cast<int>(p.queries) - 1);
    const int64_t token = tile.batch * p.queries + query;
    start = __ldg(p.starts + token);
    end = __ldg(p.ends + token);
  }
  __device__ bool has(int key) const { return start <= key && key < end; }
};

// The work source of the MMA warpgroups: see mla/consumer.cuh and mla/few_heads.cuh.
template <typename Shared>
struct Work {
  const Decode& p;
  float scale;

  __device__ explicit Work(const Decode& p) : p(p), scale(p.scale) {}
  __device__ static const auto& notes() { return dynamic_shared<Shared>().notes; }
  __device__ static KvSplit split(int work_index) {
    return notes().splits[work_index % kSplitsKept];
  }
};
template <typename Shared>
__device__ int first_work_tile(const Work<Shared>&) {
  return 0;
}
template <typename Shared>
__device__ int work_tile_step(const Work<Shared>&) {
  return 1;
}
template <typename Shared>
__device__ int work_tile_count(const Work<Shared>& w) {
  return w.notes().range.splits();
}
template <typename Shared>
__device__ float lazy_margin(const Work<Shared>& w) {
  return w.p.exact_max ? 0.f : mla::kLazyMargin;
}

// Finds the keys of a split.
struct KeyLocator {
  const Decode& p;
  const int32_t* table;  // the page table, or null
  VisibleKeys visible;
  int first_key;
  int64_t rows_before;  // rows before the request's first row

  // `keys` tells about the split, as a SplitIterator does.
  template <typename SplitKeys>
  __device__ KeyLocator(const Decode& p, const SplitKeys& keys)
      : p(p),
        table(p.page_table ? p.page_table + int64_t{keys.split.batch} * p.page_slots : nullptr),
        visible(keys.visible),
        first_key(keys.first_key),
        rows_before(keys.split.batch * p.batch_rows) {}

  // Returns the page of the split's i-th key, or -1 if no query sees the key. A flat array is
  // treated as one page.
  __device__ int page(int i) const {
    const int key = first_key + i;
    const bool visible_key = visible.low <= key && key < visible.high;
    if (!table) return visible_key ? 0 : -1;
    return load_now(table + (visible_key ? key / p.by_page_size : 0), visible_key, -1);
  }
  // Returns the key's row, counted from `rows_before`, or -1 if there is none.
  __device__ int row(int i, int page) const {
    const int key = first_key + i;
    if (!table) return page < 0 ? -1 : key;
    return page >= 0 && page < p.pages ? page * p.page_size + key % p.by_page_size : -1;
  }
};

// Finds the records of a split.
struct RecordLocator {
  const char* first;
  uint32_t stride;

  __device__ RecordLocator(const Decode& p, const KeyLocator& keys, const KvSplit& split)
      : first(static_cast<const char*>(p.k) +
              (keys.rows_before * p.groups + split.group) * kMlaRecordBytes),
        stride(p.groups * kMlaRecordBytes) {}
  __device__ const char* operator()(int row) const {
    return first + uint64_t{static_cast<uint32_t>(row)} * stride;
  }
};

// Points `gather` to this lane's chunks of the warp's 16 rows of a tile, each `columns` values
// wide.
__device__ __forceinline__ uint32_t point_gather(const Decode& p, const KeyLocator& keys,
                                                 const KvSplit& split, const void* from,
                                                 int columns, int row, Gather& gather) {
  const int sub = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
  const int64_t stride = int64_t{p.groups} * columns * 2;
  const char* base = static_cast<const char*>(from) + keys.rows_before * stride +
                     int64_t{split.group} * columns * 2 + chunk * 16;
  return gather.set_rows(base, stride, sub, row, row >= 0);
}

// Writes zeros over the eight values at this address if one of them is not finite. Returns whether
// one is.
__device__ __forceinline__ bool zero_nonfinite_chunk(uint32_t at) {
  uint32_t x[4];
  load_shared_16(at, x);
  bool nonfinite = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    nonfinite |= (x[j] & 0x7f80) == 0x7f80 || (x[j] & 0x7f800000) == 0x7f800000;
  }
  if (nonfinite) store_shared_16(at, {0, 0, 0, 0});
  return nonfinite;
}

// Replaces values that are not finite by zeros, among those that this lane has copied to a block.
// Returns a bit for each of the lane's four rows that had such values.
__device__ __forceinline__ uint32_t zero_nonfinite(const Gather& gather, uint32_t block) {
  uint32_t rows = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = block + gather.offset[i % 2] + i / 2 * 4096;
    rows |= uint32_t{zero_nonfinite_chunk(at)} << i;
  }
  return rows;
}
// Returns these bits of all lanes, in the order of `Gather::row`.
__device__ __forceinline__ uint32_t gather_row_bits(uint32_t rows) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t lanes = __ballot_sync(~0u, rows >> i & 1);
#pragma unroll
    for (int sub = 0; sub < 4; ++sub) {
      bits |= uint32_t{(lanes >> sub * 8 & 0xff) != 0} << (i * 4 + sub);
    }
  }
  return bits;
}

// Copies a split's Q to blocks of kRows rows. Rows beyond the KV head group's rows become zeros.
// Called by a warpgroup.
template <int kD, int kRows>
__device__ __forceinline__ void copy_queries(const Decode& p, const KvSplit& split, uint32_t q,
                                             uint64_t policy) {
  const int warp = threadIdx.x / 32 % 4, sub = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kRows; i += 16) {
    const int row = i + warp * 4 + sub;
    const bool has = split.row + row < p.rows;
    const int64_t row_index =
        p.row_index(split.batch, split.group, has ? split.row + row : split.row);
    const char* from = static_cast<const char*>(p.q) + row_index * (kD * 2) + chunk * 16;
    const uint32_t to = whole_sum(q, row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
    for (int block = 0; block < kD / 64; ++block) {
      cp_async_16_alone(to + block * (kRows * 128), from + block * 128, has, policy);
    }
  }
}

// Returns where the float32 outputs of a row go: to the workspace, or to `out` if they are final.
__device__ __forceinline__ float* float_row(const Decode& p, const KvSplit& split, int tile_rows,
                                            int row, int row_index) {
  return split.partial_index < 0
             ? static_cast<float*>(p.out) + int64_t{row_index} * p.value_dim
             : p.partial + (int64_t{split.partial_index} * tile_rows + row) * p.value_dim;
}

// Finishes a row: stores its maximum and sum. Returns the factor for its outputs.
__device__ __forceinline__ float finish_row(const Decode& p, const KvSplit& split, int tile_rows,
                                            int row, int row_index, float running_max, float total,
                                            bool store) {
  const bool empty = total == 0.f;
  // If all scores are -inf the output is zero, unless an infinite value has made it NaN, which must
  // be visible.
  float factor = empty ? (split.has_tiles ? 1.f : kUndefined) : 1.f / total;
  if (split.partial_index >= 0) {
    if (store) {
      p.partial_rows[int64_t{split.partial_index} * tile_rows + row] =
          make_float2(running_max, total);
    }
    return factor;
  }
  if (p.sinks && !empty) {
    const int head = split.group * p.per_group + (split.row + row) % p.per_group;
    const float sink = p.sinks[int64_t{split.batch} * p.sinks_stride + head];
    factor = 1.f / (total + sink_weight(sink, running_max));
  }
  if (store) {
    p.max_logit[row_index] = max_with_nan(running_max, total);
    p.log_sum[row_index] = log_of_sum(total);
  }
  return factor;
}

}  // namespace jax_dsa::mqa_decode
