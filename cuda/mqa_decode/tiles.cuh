// Tiles of keys in the mqa_decode kernels: where they lie, how they are copied, and what of them
// which query sees.
//
// A tile that all of a request's queries see is plain. Others are copied with zeros for keys that
// no query sees, and marked; if there are several queries, each score is compared with its query's
// range. A probability of zero does not hide a NaN or an infinity of a value: in a tile that some
// queries see and others do not, such values become zeros, and the scores of those who do see them
// NaN.
#pragma once

#include "common/gather.cuh"
#include "common/softmax.cuh"
#include "mla/record_tiles.cuh"
#include "mla/rows.cuh"
#include "mqa_decode/plan.cuh"

namespace jax_dsa::mqa_decode {

// Rows follow each other, and all of each is copied.
using Gather = GatherOf<true>;

// A tile that not all of the queries of several see.
struct MixedTile {
  int key;  // its first; -1: the tile is not mixed
  int batch;
  int row;  // the first of the rows that are multiplied with it, of the group
};

// What the producer tells of a piece and of kTiles tiles, and what kThreads threads
// find out before.
template <int kTiles, int kThreads>
struct Notes {
  static constexpr bool kRecords = false;  // the producer unpacks them
  int tiles;                               // of the piece whose Q is here
  MixedTile mixed[kTiles];
  ValidRows bad[kTiles];  // of a mixed tile: whose values are not all finite
  Piece pieces[kPieces];
  Share share;
  typename ShareFinder<kThreads>::Scratch scratch;
};

// The keys that a query sees.
struct Range {
  int start, end;

  __device__ Range(const Decode& p, const MixedTile& tile, int row) {
    const int query = min((tile.row + row) / p.per_group, static_cast<int>(p.queries) - 1);
    const int64_t token = tile.batch * p.queries + query;
    start = __ldg(p.starts + token);
    end = __ldg(p.ends + token);
  }
  __device__ bool has(int key) const { return start <= key && key < end; }
};

// What the warpgroups that multiply know of their block's pieces.
template <typename Shared>
struct Work {
  const Decode& p;
  float scale;

  __device__ explicit Work(const Decode& p) : p(p), scale(p.scale) {}
  __device__ static const auto& notes() { return dynamic_shared<Shared>().notes; }
  __device__ static Piece piece(int number) { return notes().pieces[number % kPieces]; }
};
template <typename Shared>
__device__ int first_item(const Work<Shared>&) {
  return 0;
}
template <typename Shared>
__device__ int item_step(const Work<Shared>&) {
  return 1;
}
template <typename Shared>
__device__ int item_count(const Work<Shared>& w) {
  return w.notes().share.pieces;
}
// The largest score is a result if there is a place for it.
template <typename Shared>
__device__ float lazy_margin(const Work<Shared>& w) {
  return w.p.top ? 0.f : mla::kLazyMargin;
}

// Where the keys of a piece lie.
struct Keys {
  const Decode& p;
  const int32_t* table;  // of the request, or null
  Seen seen;
  int first;
  int64_t before;  // rows before the request's first

  __device__ Keys(const Decode& p, const Walk& walk)
      : p(p),
        table(p.page_table ? p.page_table + int64_t{walk.piece.batch} * p.page_slots : nullptr),
        seen(walk.seen),
        first(walk.first),
        before(walk.piece.batch * p.batch_rows) {}

  // The page of the piece's `i`-th key, -1 if no query sees the key; a flat array is one page.
  __device__ int page(int i) const {
    const int key = first + i;
    const bool counts = seen.low <= key && key < seen.high;
    if (!table) return counts ? 0 : -1;
    return load_now(table + (counts ? key / p.page_size : 0), counts, -1);
  }
  // Its row after `before`, -1 if there is none.
  __device__ int row(int i, int page) const {
    const int key = first + i;
    if (!table) return page < 0 ? -1 : key;
    return page >= 0 && page < p.pages ? page * p.page_size + key % p.page_size : -1;
  }
};

// Where records lie.
struct RecordsAt {
  const char* first;
  uint32_t stride;

  __device__ RecordsAt(const Decode& p, const Keys& keys, const Piece& piece)
      : first(static_cast<const char*>(p.k) +
              (keys.before * p.groups + piece.group) * kMlaRecordBytes),
        stride(p.groups * kMlaRecordBytes) {}
  __device__ const char* operator()(int row) const {
    return first + uint64_t{static_cast<uint32_t>(row)} * stride;
  }
};

// A lane's part of a warp's 16 rows of a tile: their pointers of `columns` values each.
__device__ __forceinline__ uint32_t aim(const Decode& p, const Keys& keys, const Piece& piece,
                                        const void* from, int columns, int row, Gather& gather) {
  const int sub = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
  const int64_t stride = int64_t{p.groups} * columns * 2;
  const char* base = static_cast<const char*>(from) + keys.before * stride +
                     int64_t{piece.group} * columns * 2 + chunk * 16;
  return gather.aim(base, stride, sub, row, row >= 0);
}

// Zeros for what this lane has copied to a block and is not finite; a bit for each of its four rows
// that had such.
__device__ __forceinline__ uint32_t drop_not_finite(const Gather& gather, uint32_t block) {
  uint32_t rows = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = block + gather.offset[i % 2] + i / 2 * 4096;
    uint32_t x[4];
    load_shared_16(at, x);
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bad |= (x[j] & 0x7f80) == 0x7f80 || (x[j] & 0x7f800000) == 0x7f800000;
    }
    if (bad) store_shared_16(at, {0, 0, 0, 0});
    rows |= uint32_t{bad} << i;
  }
  return rows;
}
// Those bits of all lanes, in the order of `Gather::row`.
__device__ __forceinline__ uint32_t bits_of_rows(uint32_t rows) {
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

// Copies a piece's Q to blocks of kRows rows, with zeros for rows that it has not; by a warpgroup.
template <int kD, int kRows>
__device__ __forceinline__ void copy_queries(const Decode& p, const Piece& piece, uint32_t q,
                                             uint64_t policy) {
  const int warp = threadIdx.x / 32 % 4, sub = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kRows; i += 16) {
    const int row = i + warp * 4 + sub;
    const bool has = piece.row + row < p.rows;
    const int64_t place = p.place(piece.batch, piece.group, has ? piece.row + row : piece.row);
    const char* from = static_cast<const char*>(p.q) + place * (kD * 2) + chunk * 16;
    const uint32_t to = whole_sum(q, row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
    for (int block = 0; block < kD / 64; ++block) {
      cp_async_16_alone(to + block * (kRows * 128), from + block * 128, has, policy);
    }
  }
}

// Where a row of a piece's results goes, as f32: to the merge kernel, or it is final.
__device__ __forceinline__ float* row_of_floats(const Decode& p, const Piece& piece, int tile_rows,
                                                int row, int place) {
  return piece.slot < 0 ? static_cast<float*>(p.out) + int64_t{place} * p.value_dim
                        : p.partial + (int64_t{piece.slot} * tile_rows + row) * p.value_dim;
}

// Of a row that has ended: stores its sums, and returns by what to multiply its output.
__device__ __forceinline__ float end_row(const Decode& p, const Piece& piece, int tile_rows,
                                         int row, int place, float reference, float total,
                                         bool store) {
  const bool empty = total == 0.f;
  const float lse = empty ? -INFINITY : (reference + log2f(total)) * kLn2;
  const float top = isnan(total) ? total : reference * kLn2;  // fmaxf drops NaN
  // Where all scores are -inf the output is zeros, or by an infinite value NaN, which has to show.
  float factor = empty ? (piece.has_tiles ? 1.f : 0.f) : 1.f / total;
  if (piece.slot >= 0) {
    if (store) p.partial_rows[int64_t{piece.slot} * tile_rows + row] = make_float2(lse, top);
    return factor;
  }
  if (p.sinks && !empty) {
    const int head = piece.group * p.per_group + (piece.row + row) % p.per_group;
    factor /= sink_divisor(p.sinks[int64_t{piece.batch} * p.sinks_stride + head], lse);
  }
  if (store) {
    p.lse[place] = lse;
    if (p.top) p.top[place] = top;
  }
  return factor;
}

}  // namespace jax_dsa::mqa_decode
