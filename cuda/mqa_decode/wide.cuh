// Decode attention of more than 32 rows, queries times heads, of a group, where values are the
// first 512 of a key's 576 or 512 dimensions: 64 rows are multiplied at a time. The warpgroups that
// multiply, their shared memory and their barriers are those of sparse MLA's forward kernel
// (sparse_mla/fwd.cuh). What differs is which keys there are (plan.cuh), how they come (tiles.cuh)
// and where results go: a piece's to the merge kernel, an item's that is whole to `out`.
#pragma once

#include "common/store_rows.cuh"
#include "mla/consumer.cuh"
#include "mla/producer.cuh"
#include "mqa_decode/tiles.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kWideRows = 64;
inline constexpr int kWideThreads = mla::kThreads;
inline constexpr int kWideValues = kMlaValueDim;

using WideNotes = Notes<2, 256>;
template <int kD>
using WideShared = mla::Shared<kD, WideNotes>;

template <int kSide, typename Shared>
__device__ __forceinline__ void hide_scores(const Work<Shared>& w, const Shared& shared,
                                            uint64_t valid, float (&s)[32]) {
  mla::hide_columns(s, valid);
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
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t) {
  const Decode& p = w.p;
  const Piece piece = w.piece(number);
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float factor[2];
  int64_t place[2];
  bool has[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + r * 8 + lane / 4;
    has[r] = piece.row + row < p.rows;
    place[r] = has[r] ? p.place(piece.batch, piece.group, piece.row + row) : 0;
    factor[r] = end_row(p, piece, kWideRows, row, place[r], rows.reference[r], rows.total(r),
                        kSide == 0 && lane % 4 == 0 && has[r]);
  }
  const auto value = [&](int i) {
    const int r = i / 2 % 2;
    return factor[r] == 0.f ? 0.f : o[i] * factor[r];
  };
  if (piece.slot >= 0) {
    const int64_t line = (int64_t{piece.slot} * 2 + kSide) * 128 + warp * 32;
    float* to = p.partial + line * 128 + lane * 4;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      store_4(to + i * 32, {value(i), value(i + 1), value(i + 2), value(i + 3)});
    }
  } else if (p.top) {
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
      const int r = i / 2 % 2, column = kSide * 256 + i / 4 * 8 + lane % 4 * 2;
      store_pair(static_cast<float*>(p.out) + place[r] * kWideValues + column, value(i),
                 value(i + 1), has[r]);
    }
  } else {
    const uint32_t stage = smem_address(dynamic_shared<Shared>().stage[kSide * 4 + warp]);
    store_rows<DType::kBF16>(
        o, factor, stage, static_cast<__nv_bfloat16*>(p.out) + place[0] * kWideValues + kSide * 256,
        (place[1] - place[0]) * (kWideValues / 8), has[1] ? 16 : has[0], 256);
  }
}

template <int kD, bool kRecords>
__device__ void produce_wide(const Decode& p, WideShared<kD>& shared) {
  constexpr int kBlocks = kD / 64;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t drop = l2_policy_evict_first();
  const bool leader = threadIdx.x % 128 == 0;
  // Whose place this lane looks up.
  const int slot =
      kRecords ? mla::record_row(warp, lane % 2, lane) : Gather::row(warp, lane % 16 / 4, lane % 4);
  Gather gather(warp, lane / 8, lane % 8);
  const mla::Unpacked unpacked(smem_address(shared.keys));
  uint32_t phases = 0;  // a bit for each parity

  for (Walk walk(p, shared.notes.share, kWideRows); walk.next();) {
    const Piece& piece = walk.piece;
    const int tiles = walk.tiles;
    const Keys keys(p, walk);
    int page = keys.page(slot);
    if (leader) shared.notes.pieces[walk.number % kPieces] = piece;
    mla::begin_item(shared, walk.number % 2, tiles,
                    [&] { copy_queries<kD, kWideRows>(p, piece, smem_address(shared.q), drop); });

    int row = -1;  // in the cache, of this lane's slot of the next tile
    const auto advance = [&](int tile) {
      row = keys.row(tile * kTile + slot, page);
      if (tile + 1 < tiles) page = keys.page((tile + 1) * kTile + slot);
    };
    const auto publish = [&](int parity, int key, bool mixed, uint32_t bits) {
      if (leader) shared.notes.mixed[parity] = {mixed ? key : -1, piece.batch, piece.row};
      if (lane == 0) {
        shared.valid[parity].set(warp, bits);
        mbarrier_arrive(&shared.key_full[parity][0]);
      }
    };
    const auto drop_bad = [&](int parity) {
      const uint32_t to = smem_address(shared.keys[parity]);
      uint32_t rows = 0;
#pragma unroll 1
      for (int block = 0; block < 8; ++block) {
        rows |= drop_not_finite(gather, to + block * kBlockBytes);
      }
      const uint32_t bad = bits_of_rows(rows);
      if (lane == 0) shared.notes.bad[parity].set(warp, bad);
      fence_async_proxy();
    };

    const RecordsAt at(p, keys, piece);
    mla::Unpacking travelling[mla::kStepsHeld];
    mla::Records records;
    const auto load = [&]<int kStep>() {
      if constexpr (kStep % 4 == 0) records.aim<kStep / 4>(row, at);
      records.load<kStep % 4>(travelling[kStep % mla::kStepsHeld]);
    };
    if (kRecords && tiles > 0) {
      advance(0);
      load.template operator()<0>();
      load.template operator()<1>();
      load.template operator()<2>();
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int key = keys.first + tile * kTile;
      // Looked up here: later, ptxas 13.0 spills what the copies need.
      const int its_row = kRecords ? -1 : keys.row(tile * kTile + slot, page);
      const bool mixed = p.queries > 1 && !keys.seen.by_all(key);
      if (!kRecords && tile + 1 < tiles) page = keys.page((tile + 1) * kTile + slot);
      const uint32_t free = ~phases >> tile % 2 & 1;
      const auto wait_free = [&](int parity, int part) {
        mbarrier_wait(&shared.key_free[parity][part], free);
      };
      const auto copy = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        uint64_t (&full)[2] = shared.key_full[kParity];
        const uint32_t to = smem_address(shared.keys[kParity]);
        const uint32_t bits = aim(p, keys, piece, p.k, kD, its_row, gather);
        wait_free(kParity, 0);
        if (!mixed) {
          publish(kParity, key, mixed, bits);
          gather.copy<0, 8, 0>(to, drop);
          wait_free(kParity, 1);
          gather.copy<kOwn, kOwn + 4, 1>(to, drop);
          cp_async_arrive(&full[0]);
          gather.copy<kOther, kOther + 4, 1>(to, drop);
          gather.copy<8, kBlocks, 0>(to, drop);
          gather.copy<8, kBlocks, 1>(to, drop);
          cp_async_arrive(&full[1]);
        } else {
          wait_free(kParity, 1);
#pragma unroll 1
          for (int block = 0; block < kBlocks; ++block) gather.copy_block(to, block, drop);
          cp_async_wait();
          drop_bad(kParity);
          publish(kParity, key, mixed, bits);
          mbarrier_arrive(&full[0]);
          mbarrier_arrive(&full[1]);
        }
      };
      // Registers wait for what they load, so let it be in the L2 by then.
      const auto fetch = [&](int its_row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int its = __shfl_sync(~0u, its_row, half, 4);
          if (its < 0) continue;
          const char* from = at(its) + lane % 4 * 128;
          prefetch_line_l2(from);
          if (lane % 4 < 2) prefetch_line_l2(from + 512);
        }
      };
      // The bytes of the steps to come are under way while those of one are unpacked.
      const auto unpack = [&](int parity) {
        const uint32_t to = parity * (mla::kKeyBlocks * kBlockBytes);
        const uint32_t bits = mla::bits_of_records(row);
        if (tile + 1 < tiles) fetch(keys.row((tile + 1) * kTile + slot, page));
        wait_free(parity, 0);
        if (!mixed) publish(parity, key, mixed, bits);
        const auto step = [&]<int kStep>() {
          constexpr int kNext = kStep + mla::kStepsAhead;
          if constexpr (kStep == mla::kSteps / 2) {
            wait_free(parity, 1);
            unpacked.copy_last<0, 8>(to, row, at, drop);
            unpacked.copy_last<1, 8>(to, row, at, drop);
          }
          if constexpr (kNext < mla::kSteps) {
            load.template operator()<kNext>();
          } else if (tile + 1 < tiles) {
            if constexpr (kNext == mla::kSteps) advance(tile + 1);
            load.template operator()<kNext - mla::kSteps>();
          }
          const float scale = __shfl_sync(~0u, records.scales[kStep / 4], kStep % 4, 4);
          const uint32_t block = to + kStep % 4 * 2 * kBlockBytes;
          unpacked.store<kStep / 4>(block, block + kBlockBytes, travelling[kStep % mla::kStepsHeld],
                                    scale);
        };
        mla::each_step(step);
        if (mixed) {
          __syncwarp();
          drop_bad(parity);
          publish(parity, key, mixed, bits);
        } else {
          fence_async_proxy();  // ordinary stores, which wgmma reads
        }
        mbarrier_arrive(&shared.key_full[parity][0]);
        cp_async_arrive(&shared.key_full[parity][1]);
      };
      if constexpr (kRecords) {
        unpack(tile % 2);
      } else if (tile % 2 == 0) {
        copy.template operator()<0>();
      } else {
        copy.template operator()<1>();
      }
      phases ^= 1 << tile % 2;
    }
  }
}

// Unpacking takes more registers than copying.
template <int kD, bool kRecords>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = kRecords ? 208 : 216, kProducer = kRecords ? 88 : 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<WideShared<kD>>();
  initialise(shared.notes.share);
  mla::initialise(shared);
  launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 2) {
    lower_registers<kProducer>();
    wait_for(shared.notes.share);
    produce_wide<kD, kRecords>(p, shared);
    return;
  }
  ShareFinder<256>(p, shared.notes.scratch, shared.notes.share).find_last_item();
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    mla::consume<kD, 0>(Work<WideShared<kD>>(p), shared);
  } else {
    raise_registers<kConsumer>();
    mla::consume<kD, 1>(Work<WideShared<kD>>(p), shared);
  }
}

}  // namespace jax_dsa::mqa_decode
