// The producer of sparse attention over caches: finds the rows of the listed keys and copies keys
// and values to shared memory (common/tile.cuh).
//
// FP8 caches. A half tile, the keys or the values of 64 rows, arrives as codes in a stage of its
// own by cp.async. Each thread then converts the codes that it has copied to bf16, exactly, into
// the ring of the MMA warpgroup. That multiplies scores and probabilities by the factors of their
// rows.
#pragma once

#include "common/gather.cuh"
#include "mla/few_heads.cuh"
#include "mla/producer.cuh"
#include "mla/record_tiles.cuh"
#include "sparse_attention/decode.h"

namespace jax_dsa::sparse_attention {

inline constexpr int kDecodeThreads = mla::kFewThreads;
inline constexpr int kDecodeCtasPerSm = mla::kFewCtasPerSm;

// The parameters, and what the launcher derives from them.
struct Decode : SparseAttentionDecodeParams {
  int per_group;       // query heads per KV head
  int row_tiles;       // row tiles per KV head
  int log_splits;      // a work tile has 2^log_splits CTAs
  int log_block_size;  // block_size = 2^log_block_size

  explicit Decode(const SparseAttentionDecodeParams& params)
      : SparseAttentionDecodeParams(params),
        per_group(heads / groups),
        row_tiles(0),
        log_splits(0),
        log_block_size(0) {
    while (1 << log_block_size < block_size) ++log_block_size;
  }
  __host__ __device__ int num_splits() const { return 1 << log_splits; }
};

// The work tile of this CTA's cluster.
struct DecodeTile {
  int token, group;  // token = request * queries + query
  int first_row;     // within the query heads of the group
  int head;          // of the first row

  __device__ DecodeTile(const Decode& p, int tile_rows) {
    const int tile = blockIdx.x >> p.log_splits, list = tile / p.row_tiles;
    token = list / p.groups;
    group = list - token * p.groups;
    first_row = (tile - list * p.row_tiles) * tile_rows;
    head = group * p.per_group + first_row;
  }
  __device__ int request(const Decode& p) const { return token / static_cast<int>(p.queries); }
  __device__ const int32_t* blocks(const Decode& p) const {
    return p.blocks + (int64_t{token} * p.groups + group) * p.slots;
  }
  // Returns the number of blocks that have a key which the query sees.
  __device__ int num_blocks(const Decode& p, int end) const {
    return (end + p.block_size - 1) >> p.log_block_size;
  }
  // Returns the end of the keys that the query sees.
  __device__ int end(const Decode& p) const {
    return max(min(__ldg(p.ends + token), static_cast<int>(p.keys)), 0);
  }
};

// What the producer and the prologue tell the MMA warpgroup. `kStages` is 0 without factors.
struct RowFactors {
  float keys[kTile], values[kTile];
};
template <int kStages>
struct DecodeNotes {
  static constexpr bool kRecords = false;
  // list_length reads these with loads of 16 bytes. They must not reach `tiles`, which another
  // thread may write meanwhile.
  alignas(16) int list_ends[kDecodeThreads / 32];
  int tiles;  // key tiles of this CTA
  RowFactors factors[kStages > 0 ? kStages : 1];
};

// ---- shared memory ------------------------------------------------------------------------------

// The codes of half a tile. A thread's copies are chunk lane % 4 of each block of 64 values, for
// its row in either half of the tile (mla::record_row).
template <int kD>
struct CodeStage {
  uint8_t codes[kD / 64][2][128][16];
  float scales[2][128];  // with the keys: factors of the keys and of the values
  uint32_t valid[4];     // with the keys: validity bits of each warp's rows
};
template <int kD>
struct CodeStages {
  static constexpr int kCount = kD == 64 ? 8 : kD == 128 ? 4 : 2;
  CodeStage<kD> stages[kCount];
  uint64_t full[kCount];
};
template <int kD>
__device__ void initialise(CodeStages<kD>& codes) {
  if (threadIdx.x == 0) {
    for (auto& barrier : codes.full) mbarrier_init(&barrier, 128);
  }
}

template <int kD, int kN, bool kFp8>
struct DecodeTraits : mla::FewTraits<kD, kN, kD, true> {};

// The codes take their room from the ring.
template <int kD, int kN>
struct DecodeTraits<kD, kN, true> : mla::FewTraits<kD, kN, kD, true> {
  using Base = mla::FewTraits<kD, kN, kD, true>;
  static constexpr int kCodeBytes = sizeof(CodeStages<kD>) + 2048;  // with the factors
  static constexpr int kFit = Base::kBlocksThatFit - ceil_div(kCodeBytes, kBlockBytes);
  static constexpr int kRingBlocks = kFit < 8 ? kFit : 8;
  static constexpr int kValidStages =
      ceil_div(kRingBlocks + Base::kLeadingBlocks, Base::kTileBlocks);
};

template <typename Tr, bool kFp8_>
struct alignas(1024) DecodeShared : mla::FewShared<Tr, DecodeNotes<0>> {
  static constexpr bool kFp8 = false;
};
template <typename Tr>
struct alignas(1024) DecodeShared<Tr, true> : mla::FewShared<Tr, DecodeNotes<Tr::kValidStages>> {
  static constexpr bool kFp8 = true;
  CodeStages<Tr::kD> codes;
};

// ---- lists --------------------------------------------------------------------------------------

// Finds the last slot whose block has a key that the query sees. All threads call this before a
// barrier. `list_length` then returns the number of slots up to that one.
template <int kThreads, typename Notes>
__device__ __forceinline__ void find_list_end(const Decode& p, const DecodeTile& tile,
                                              Notes& notes) {
  const int32_t* const blocks = tile.blocks(p);
  const int num_blocks = tile.num_blocks(p, tile.end(p));
  int last = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.slots; i += kThreads) {
    const int block = __ldg(blocks + i);
    if (block >= 0 && block < num_blocks) last = i + 1;
  }
  last = __reduce_max_sync(~0u, last);
  if (threadIdx.x % 32 == 0) notes.list_ends[threadIdx.x / 32] = last;
}
template <typename Notes>
__device__ __forceinline__ int list_length(const Notes& notes) {
  int length = 0;
#pragma unroll
  for (const int end : notes.list_ends) length = max(length, end);
  return length;
}

// The key tiles of this CTA.
struct TileRange {
  int first, count;

  __device__ TileRange(const Decode& p, int list_length) {
    const int tiles = ceil_div(list_length << p.log_block_size, kTile);
    const int split = blockIdx.x & (p.num_splits() - 1);
    const auto begin = [&](int split) {
      return static_cast<int>(int64_t{tiles} * split >> p.log_splits);
    };
    first = begin(split);
    count = begin(split + 1) - first;
  }
};

// Finds the cache rows of this lane's row of each tile of kKeys keys. Blocks are loaded two tiles
// ahead and pages one tile ahead.
template <int kKeys>
class RowFinder {
  const Decode& p_;
  const int32_t* blocks_;
  const int32_t* table_;  // the page table, or null
  int end_, num_blocks_;
  int position_;  // of the row after the next one, in the sequence of listed keys
  int key_, page_, next_block_;

  __device__ int load_block(int position) const {
    const int slot = position >> p_.log_block_size;
    return load_now(blocks_ + slot, slot < p_.slots, -1);
  }
  __device__ void set_key(int block, int position) {
    const bool has = block >= 0 && block < num_blocks_;
    const int key = has ? (block << p_.log_block_size) + (position & (p_.block_size - 1)) : end_;
    key_ = key < end_ ? key : -1;
    page_ = table_ ? load_now(table_ + (key_ < 0 ? 0 : key_ / p_.page_size), key_ >= 0, -1) : key_;
  }

 public:
  // `position` is that of the lane's row in the CTA's first tile.
  __device__ RowFinder(const Decode& p, const DecodeTile& tile, int position)
      : p_(p),
        blocks_(tile.blocks(p)),
        table_(p.page_table ? p.page_table + int64_t{tile.request(p)} * p.page_slots : nullptr),
        end_(tile.end(p)),
        num_blocks_(tile.num_blocks(p, end_)),
        position_(position + kKeys) {
    const int block = load_block(position);
    next_block_ = load_block(position_);
    set_key(block, position);
  }

  // Returns the row in the next tile, counted from the first row of the request or of the pool, or
  // -1 if the query sees no key there.
  __device__ int next() {
    int row = key_;
    if (table_) {
      row = page_ >= 0 && page_ < p_.pages ? page_ * p_.page_size + key_ % p_.page_size : -1;
    }
    set_key(next_block_, position_);
    position_ += kKeys;
    next_block_ = load_block(position_);
    return row;
  }
};

// ---- the producer -------------------------------------------------------------------------------

// Copies the work tile's Q to blocks of kRows rows. Rows beyond the group's heads become zeros.
template <int kD, int kRows>
__device__ __forceinline__ void copy_queries(const Decode& p, const DecodeTile& tile, uint32_t q,
                                             uint64_t policy) {
  const int warp = threadIdx.x / 32 % 4, sub = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kRows; i += 16) {
    const int row = i + warp * 4 + sub;
    const bool has = tile.first_row + row < p.per_group;
    const int64_t from_row = int64_t{tile.token} * p.heads + tile.head + (has ? row : 0);
    const char* from = static_cast<const char*>(p.q) + from_row * (kD * 2) + chunk * 16;
    const uint32_t to = whole_sum(q, row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
    for (int block = 0; block < kD / 64; ++block) {
      cp_async_16_alone(to + block * (kRows * 128), from + block * 128, has, policy);
    }
  }
}

// Copies key tiles of bf16 caches.
template <typename Tr, typename Shared>
__device__ __forceinline__ void produce_tiles(const Decode& p, const DecodeTile& tile, int position,
                                              int tiles, int64_t rows_before, uint64_t policy,
                                              Shared& shared) {
  using Gather = GatherOf<true>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t ring = smem_address(shared.ring);
  const int64_t stride = int64_t{p.groups} * Tr::kD * 2;
  const int64_t offset = rows_before * stride + int64_t{tile.group} * Tr::kD * 2 + lane % 8 * 16;
  Gather gather(warp, lane / 8, lane % 8);
  RowFinder<kTile> rows(p, tile, position + Gather::row(warp, lane % 16 / 4, lane % 4));
  RingPlace<Tr::kRingBlocks> at;
  RingPlace<Tr::kValidStages> valid_at;
  for (int i = 0; i < tiles; ++i, valid_at.advance()) {
    const int row = rows.next();
    const auto point = [&](const void* from) {
      return gather.set_rows(static_cast<const char*>(from) + offset, stride, lane / 8, row,
                             row >= 0);
    };
    const uint32_t bits = point(p.k);
#pragma unroll 1
    for (int block = 0; block < Tr::kTileBlocks; ++block, at.advance()) {
      if (block == Tr::kLeadingBlocks) point(p.v);
      mbarrier_wait(&shared.free[at.index], at.parity ^ 1);
      if (block == 0 && lane == 0) {
        shared.valid[valid_at.index].set(warp, bits);
        mbarrier_arrive(&shared.valid_full[valid_at.index]);
      }
      gather.copy_block(ring + at.index * kBlockBytes, 0, block % Tr::kLeadingBlocks, policy);
      cp_async_arrive(&shared.full[at.index]);
    }
  }
}

// Copies and converts key tiles of FP8 caches.
template <typename Tr, typename Shared>
__device__ __forceinline__ void produce_fp8_tiles(const Decode& p, const DecodeTile& tile,
                                                  int position, int tiles, int64_t rows_before,
                                                  uint64_t policy, Shared& shared) {
  constexpr int kD = Tr::kD, kStages = CodeStages<kD>::kCount;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int64_t stride = int64_t{p.groups} * kD;
  const int64_t offset = rows_before * stride + int64_t{tile.group} * kD + lane % 4 * 16;
  const mla::UnpackedRows unpacked(smem_address(shared.ring));
  // Lanes l and l + 1 of each four look up their row in halves 0 and 1 of the tile.
  const int tile_row = mla::record_row(warp, lane % 2, lane);
  RowFinder<kTile> rows(p, tile, position + tile_row);
  int row = -1;

  // Requests a half tile: the keys of a tile, or then its values.
  const auto request = [&](int half) {
    if (half >= 2 * tiles) return;
    CodeStage<kD>& stage = shared.codes.stages[half % kStages];
    const bool keys = half % 2 == 0;
    if (keys) {
      row = rows.next();
      const uint32_t bits = mla::record_valid_bits(row);
      if (lane == 0) stage.valid[warp] = bits;
      if (lane % 4 < 2) {
        const int64_t at = (rows_before + max(row, 0)) * p.groups + tile.group;
        if (p.k_scale)
          cp_async_4(whole_sum(smem_address(stage.scales[0]), thread * 4), p.k_scale + at,
                     row >= 0);
        if (p.v_scale)
          cp_async_4(whole_sum(smem_address(stage.scales[1]), thread * 4), p.v_scale + at,
                     row >= 0);
      }
    }
    const char* const base = static_cast<const char*>(keys ? p.k : p.v) + offset;
    const uint32_t to = whole_sum(smem_address(stage.codes), thread * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int cache_row = __shfl_sync(~0u, row, i, 4);
      const char* const from = base + max(cache_row, 0) * stride;
#pragma unroll
      for (int block = 0; block < kD / 64; ++block) {
        cp_async_16_alone(to + (block * 2 + i) * 2048, from + block * 64, cache_row >= 0, policy);
      }
    }
    cp_async_arrive(&shared.codes.full[half % kStages]);
  };
  for (int half = 0; half < kStages; ++half) request(half);

  RingPlace<Tr::kRingBlocks> at;
  RingPlace<Tr::kValidStages> valid_at;
  RingPlace<kStages> from;
  for (int half = 0; half < 2 * tiles; ++half, from.advance()) {
    const CodeStage<kD>& stage = shared.codes.stages[from.index];
    mbarrier_wait(&shared.codes.full[from.index], from.parity);
#pragma unroll 1
    for (int block = 0; block < kD / 64; ++block, at.advance()) {
      mbarrier_wait(&shared.free[at.index], at.parity ^ 1);
      if (half % 2 == 0 && block == 0) {
        RowFactors& factors = shared.notes.factors[valid_at.index];
        if (lane % 4 < 2) {
          factors.keys[tile_row] = p.k_scale ? stage.scales[0][thread] : 1.f;
          factors.values[tile_row] = p.v_scale ? stage.scales[1][thread] : 1.f;
        }
        __syncwarp();
        if (lane == 0) {
          shared.valid[valid_at.index].set(warp, stage.valid[warp]);
          mbarrier_arrive(&shared.valid_full[valid_at.index]);
        }
        valid_at.advance();
      }
      const uint32_t to = at.index * kBlockBytes;
      uint32_t codes[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_shared_16(smem_address(stage.codes[block][i][thread]), codes[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // eight codes of half i / 2
        uint32_t y[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[4];
          unpack_e4m3(codes[i / 2][i % 2 * 2 + j], x);
          y[j * 2] = pack_bf16(x[0], x[1]);
          y[j * 2 + 1] = pack_bf16(x[2], x[3]);
        }
        store_shared_16(unpacked.chunk[i % 2] + to + i / 2 * 4096, y);
      }
      fence_async_proxy();  // makes ordinary stores visible to wgmma
      mbarrier_arrive(&shared.full[at.index]);
    }
    request(half + kStages);
  }
}

template <typename Tr, bool kFp8, typename Shared>
__device__ __forceinline__ void produce(const Decode& p, Shared& shared) {
  const DecodeTile tile(p, Tr::kN);
  const TileRange tiles(p, list_length(shared.notes));
  const uint64_t policy = l2_policy_evict_first();
  const int64_t rows_before = tile.request(p) * p.batch_rows;
  mla::begin_work_tile(shared, 0, tiles.count, [&] {
    copy_queries<Tr::kD, Tr::kN>(p, tile, smem_address(shared.q), policy);
  });
  if (tiles.count == 0) return;
  if constexpr (kFp8) {
    produce_fp8_tiles<Tr>(p, tile, tiles.first * kTile, tiles.count, rows_before, policy, shared);
  } else {
    produce_tiles<Tr>(p, tile, tiles.first * kTile, tiles.count, rows_before, policy, shared);
  }
}

}  // namespace jax_dsa::sparse_attention
