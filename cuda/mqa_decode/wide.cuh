// Decode attention of more than 32 rows, queries times heads, of a group, where values are the
// first 512 of a key's 576 or 512 dimensions: 64 rows are multiplied at a time. The warpgroups that
// multiply, their shared memory and their barriers are those of sparse MLA's forward kernel
// (sparse_mla/fwd.cuh). What differs is which keys there are (plan.cuh), how they come (tiles.cuh)
// and where results go: a piece's to the merge kernel, an item's that is whole to `out`.
#pragma once

#include "mqa_decode/tiles.cuh"
#include "sparse_mla/fwd.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kWideRows = 64;
inline constexpr int kWideThreads = sparse_mla::kThreads;
inline constexpr int kWideValues = kSparseMlaValueDim;

using WideNotes = Notes<2, kWideThreads>;
template <int kD>
using WideShared = sparse_mla::Shared<kD, WideNotes>;

template <int kSide, typename Shared>
__device__ __forceinline__ void hide_scores(const Work<Shared>& w, const Shared& shared,
                                            uint64_t valid, float (&s)[32]) {
  sparse_mla::hide_columns(s, valid);
  const MixedTile tile = shared.notes.mixed[kSide];
  if (tile.key < 0) return;
  const uint64_t bad = shared.notes.bad[kSide].all();
  const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane / 4;
  const Range range[2] = {{w.p, tile, row}, {w.p, tile, row + 8}};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (!range[i / 2 % 2].has(tile.key + column)) {
      s[i] = -INFINITY;
    } else if (bad >> column & 1) {
      s[i] = NAN;
    }
  }
}

template <int kSide, typename Shared>
__device__ __forceinline__ void write_results(const Work<Shared>& w, int number,
                                              const float (&o)[128], const sparse_mla::Rows& rows,
                                              uint32_t) {
  const Decode& p = w.p;
  const Piece piece = w.piece(number);
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float factor[2];
  int place[2];
  bool has[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + r * 8 + lane / 4;
    has[r] = piece.row + row < p.rows;
    place[r] = has[r] ? p.place(piece.batch, piece.group, piece.row + row) : 0;
    factor[r] = end_row(p, piece, kWideRows, row, place[r], rows.reference[r], rows.total(r),
                        kSide == 0 && lane % 4 == 0 && has[r]);
  }
  const auto store = [&](auto* first, auto* second, auto pair) {
    decltype(first) const to[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
      const int r = i / 2 % 2;
      const float a = factor[r] == 0.f ? 0.f : o[i] * factor[r];
      const float b = factor[r] == 0.f ? 0.f : o[i + 1] * factor[r];
      pair(to[r] + kSide * 256 + i / 4 * 8 + lane % 4 * 2, a, b, has[r]);
    }
  };
  if (piece.slot >= 0 || p.top) {
    const int row = warp * 16 + lane / 4;
    store(row_of_floats(p, piece, kWideRows, row, place[0]),
          row_of_floats(p, piece, kWideRows, row + 8, place[1]), store_pair_kept);
  } else {
    auto* out = static_cast<__nv_bfloat16*>(p.out);
    store(out + int64_t{place[0]} * kWideValues, out + int64_t{place[1]} * kWideValues,
          [](__nv_bfloat16* to, float a, float b, bool valid) { store_pair(to, a, b, valid); });
  }
}

template <int kD>
__device__ void produce_wide(const Decode& p, WideShared<kD>& shared) {
  constexpr int kBlocks = kD / 64;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t drop = l2_policy_evict_first();
  const bool leader = threadIdx.x % 128 == 0;
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // whose place this lane looks up
  Gather gather(warp, lane / 8, lane % 8);
  uint32_t parity[2] = {0, 0};

  for (Walk walk(p, shared.notes.share, kWideRows); walk.next();) {
    const Piece& piece = walk.piece;
    const int tiles = walk.tiles;
    const Keys keys(p, walk);
    int page = keys.page(slot);
    if (leader) shared.notes.pieces[walk.number % kPieces] = piece;
    sparse_mla::begin_item(shared, walk.number % 2, tiles, [&] {
      copy_queries<kD, kWideRows>(p, piece, smem_address(shared.q), drop);
    });

    FetchAhead<kD> fetch(p, keys, tiles);
    for (int tile = 0; tile < tiles; ++tile) {
      const int key = keys.first + tile * kTile, row = keys.row(tile * kTile + slot, page);
      const bool mixed = p.queries > 1 && !keys.seen.by_all(key);
      if (tile + 1 < tiles) page = keys.page((tile + 1) * kTile + slot);
      auto fill = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        uint64_t (&full)[2] = shared.key_full[kParity];
        const uint32_t to = smem_address(shared.keys[kParity]);
        const auto wait_free = [&](int part) {
          mbarrier_wait(&shared.key_free[kParity][part], parity[kParity] ^ 1);
        };
        const auto publish = [&](uint32_t bits) {
          if (leader) shared.notes.mixed[kParity] = {mixed ? key : -1, piece.batch, piece.row};
          if (lane == 0) {
            shared.valid[kParity].set(warp, bits);
            mbarrier_arrive(&full[0]);
          }
        };
        const uint32_t bits = aim(p, keys, piece, p.k, kD, row, gather);
        wait_free(0);
        if (!mixed) {
          publish(bits);
          gather.copy<0, 8, 0>(to, drop);
          wait_free(1);
          gather.copy<kOwn, kOwn + 4, 1>(to, drop);
          cp_async_arrive(&full[0]);
          gather.copy<kOther, kOther + 4, 1>(to, drop);
          gather.copy<8, kBlocks, 0>(to, drop);
          gather.copy<8, kBlocks, 1>(to, drop);
          cp_async_arrive(&full[1]);
        } else {
          wait_free(1);
#pragma unroll 1
          for (int block = 0; block < kBlocks; ++block) gather.copy_block(to, block, drop);
          cp_async_wait();
          uint32_t rows = 0;
#pragma unroll 1
          for (int block = 0; block < 8; ++block) {
            rows |= drop_not_finite(gather, to + block * kBlockBytes);
          }
          const uint32_t bad = bits_of_rows(rows);
          if (lane == 0) shared.notes.bad[kParity].set(warp, bad);
          fence_async_proxy();
          publish(bits);
          mbarrier_arrive(&full[0]);
          mbarrier_arrive(&full[1]);
        }
        parity[kParity] ^= 1;
      };
      if (tile % 2 == 0) {
        fill.template operator()<0>();
      } else {
        fill.template operator()<1>();
      }
      if (leader) fetch(tile);
    }
  }
}

template <int kD>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = 208, kProducer = 88;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<WideShared<kD>>();
  sparse_mla::initialise(shared);
  let_next_begin();
  find_share(p, shared.notes.scratch, shared.notes.share);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    sparse_mla::consume<kD, 0>(Work<WideShared<kD>>(p), shared);
  } else if (warpgroup == 1) {
    raise_registers<kConsumer>();
    sparse_mla::consume<kD, 1>(Work<WideShared<kD>>(p), shared);
  } else {
    lower_registers<kProducer>();
    produce_wide<kD>(p, shared);
  }
}

}  // namespace jax_dsa::mqa_decode
