// Decode attention of up to 32 rows, queries times heads, of a group at a time. The warpgroup that
// multiplies, its shared memory and its barriers are those of sparse MLA's forward kernel for few
// heads (sparse_mla/fwd_few.cuh), with keys as the rows of the products; values may lie apart from
// the keys. Two blocks share a SM. What differs is which keys there are (plan.cuh), how
// they come (tiles.cuh) and where results go: a piece's to the merge kernel, an item's that is
// whole to `out`.
#pragma once

#include "mla/few_heads.cuh"
#include "mla/producer.cuh"
#include "mqa_decode/tiles.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kFewThreads = mla::kFewThreads;
inline constexpr int kFewBlocks = mla::kFewBlocks;

template <typename Tr>
using FewNotes = Notes<Tr::kBits, 128>;
template <typename Tr>
using FewShared = mla::FewShared<Tr, FewNotes<Tr>>;

// Which of this thread's rows of a tile count, and where to look for whom.
struct SeenRows : mla::CountingRows {
  int slot;
};
template <typename Shared>
__device__ __forceinline__ SeenRows counting_rows(const Work<Shared>&, const Shared& shared,
                                                  int slot, int warp, int lane) {
  return {{shared.valid[slot], warp, lane}, slot};
}
template <typename Shared, int kN>
__device__ __forceinline__ void hide_scores(const Work<Shared>& w, const SeenRows& rows,
                                            float scale_log2, float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) s[i] = rows.counts[i / 2 % 2] ? s[i] * scale_log2 : -INFINITY;
  const MixedTile tile = w.notes().mixed[rows.slot];
  if (tile.key < 0) return;
  using Columns = mla::Columns<kN * 2>;
  const int warp = thread_index() / 32 % 4, lane = thread_index() % 32;
  const int key = tile.key + warp * 16 + lane / 4;
  const mla::CountingRows bad(w.notes().bad[rows.slot], warp, lane);
#pragma unroll
  for (int c = 0; c < Columns::kHeadsOfThread; ++c) {
    const Range range(w.p, tile, Columns::head(c));
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (Columns::of(i) != c) continue;
      const int r = i / 2 % 2;
      if (!range.has(key + r * 8)) {
        s[i] = -INFINITY;
      } else if (bad.counts[r]) {
        s[i] = NAN;
      }
    }
  }
}

template <typename Shared, typename Tr>
__device__ void write_few(const Work<Shared>& w, int number, int tiles,
                          const float (&o)[Tr::kValues][Tr::kN / 2], mla::Columns<Tr::kN>& columns,
                          mla::FewShared<Tr, FewNotes<Tr>>& shared) {
  constexpr int kN = Tr::kN;
  using Columns = mla::Columns<kN>;
  const Decode& p = w.p;
  const Piece piece = w.piece(number);
  // Between two exchanges there must be another barrier, which only tiles have.
  if (tiles > 0) {
    mla::over_rows<kN>(columns.sum, shared.exchange, [](float a, float b) { return a + b; });
  }
  const int dim = thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
#pragma unroll
  for (int c = 0; c < Columns::kHeadsOfThread; ++c) {
    const int row = Columns::head(c);
    if (piece.row + row >= p.rows) continue;
    const int place = p.place(piece.batch, piece.group, piece.row + row);
    const float factor =
        end_row(p, piece, kN, row, place, columns.reference[c], columns.sum[c], threadIdx.x < 4);
    const auto store = [&](auto* to) {
#pragma unroll
      for (int m = 0; m < Tr::kValues; ++m) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          if (Columns::of(i) != c) continue;
          to[m * 64 + dim + i / 2 % 2 * 8] = factor == 0.f ? 0.f : o[m][i] * factor;
        }
      }
    };
    if (piece.slot >= 0 || p.top) {
      store(row_of_floats(p, piece, kN, row, place));
    } else {
      store(static_cast<__nv_bfloat16*>(p.out) + int64_t{place} * Tr::kE);
    }
  }
}

template <typename Tr, bool kRecords>
__device__ void produce_few(const Decode& p, FewShared<Tr>& shared) {
  constexpr int kBlocks = Tr::kBlocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t drop = l2_policy_evict_first();
  const bool leader = threadIdx.x % 128 == 0;
  // Whose place this lane looks up.
  const int slot =
      kRecords ? mla::record_row(warp, lane % 2, lane) : Gather::row(warp, lane % 16 / 4, lane % 4);
  const uint32_t ring = smem_address(shared.ring);
  Gather gather(warp, lane / 8, lane % 8);
  const mla::Unpacked unpacked(ring);
  using Place = RingPlace<Tr::kRing>;
  Place at;
  RingPlace<Tr::kBits> bits_at;

  for (Walk walk(p, shared.notes.share, Tr::kN); walk.next();) {
    const Piece& piece = walk.piece;
    const int tiles = walk.tiles;
    const Keys keys(p, walk);
    int page = keys.page(slot);
    if (leader) shared.notes.pieces[walk.number % kPieces] = piece;
    mla::begin_item(shared, walk.number % 2, tiles,
                    [&] { copy_queries<Tr::kD, Tr::kN>(p, piece, smem_address(shared.q), drop); });
    const RecordsAt record_at(p, keys, piece);

    for (int tile = 0; tile < tiles; ++tile) {
      const int key = keys.first + tile * kTile, row = keys.row(tile * kTile + slot, page);
      const bool mixed = p.queries > 1 && !keys.seen.by_all(key);
      if (tile + 1 < tiles) page = keys.page((tile + 1) * kTile + slot);
      const uint32_t bits =
          kRecords ? mla::bits_of_records(row) : aim(p, keys, piece, p.k, Tr::kD, row, gather);
      const auto publish = [&] {
        if (leader) shared.notes.mixed[bits_at.index] = {mixed ? key : -1, piece.batch, piece.row};
        if (lane == 0) {
          shared.valid[bits_at.index].set(warp, bits);
          mbarrier_arrive(&shared.valid_full[bits_at.index]);
        }
      };
      const auto wait_free = [&](Place place) {
        mbarrier_wait(&shared.free[place.index], place.parity ^ 1);
      };
      const Place start = at;
      if constexpr (kRecords) {
        static_assert(Tr::kLead == 1);
        // Of each scale's values first one half of the rows, then the other.
        mla::Records records[2];
        mla::Unpacking travelling[mla::kStepsHeld];
        records[0].aim<0>(row, record_at);
        records[1].aim<1>(row, record_at);
        const auto load = [&]<int kStep>() {
          records[kStep % 2].load<kStep / 2>(travelling[kStep % mla::kStepsHeld]);
        };
        load.template operator()<0>();
        load.template operator()<1>();
        load.template operator()<2>();
        wait_free(at);
        if (!mixed) publish();
        unpacked.copy_last<0, 0>(at.index * kBlockBytes, row, record_at, drop);
        unpacked.copy_last<1, 0>(at.index * kBlockBytes, row, record_at, drop);
        if (!mixed) cp_async_arrive(&shared.full[at.index]);
        at.advance();
        const auto step = [&]<int kStep>() {
          constexpr int kScale = kStep / 2, kHalf = kStep % 2;
          constexpr int kNext = kStep + mla::kStepsAhead;
          if constexpr (kNext < mla::kSteps) load.template operator()<kNext>();
          const Place then = at + 1;
          if constexpr (kHalf == 0) wait_free(at), wait_free(then);
          const float scale = __shfl_sync(~0u, records[kHalf].scales[kHalf], kScale, 4);
          unpacked.store<kHalf>(at.index * kBlockBytes, then.index * kBlockBytes,
                                travelling[kStep % mla::kStepsHeld], scale);
          if constexpr (kHalf == 1) {
            if (!mixed) {
              fence_async_proxy();  // ordinary stores, which wgmma reads
              mbarrier_arrive(&shared.full[at.index]);
              mbarrier_arrive(&shared.full[then.index]);
            }
            at = at + 2;
          }
        };
        mla::each_step(step);
      } else {
#pragma unroll 1
        for (int i = 0; i < kBlocks; ++i, at.advance()) {
          const int block = Tr::kApart && i >= Tr::kLead ? i - Tr::kLead : Tr::columns(i);
          if (Tr::kApart && i == Tr::kLead) aim(p, keys, piece, p.v, Tr::kE, row, gather);
          wait_free(at);
          if (i == 0 && !mixed) publish();
          gather.copy_block(ring + at.index * kBlockBytes, 0, block, drop);
          if (!mixed) cp_async_arrive(&shared.full[at.index]);
        }
      }
      if (mixed) {
        cp_async_wait();
        __syncwarp();
        uint32_t rows = 0;
#pragma unroll 1
        for (int i = Tr::kLead; i < kBlocks; ++i) {
          rows |= drop_not_finite(gather, ring + (start + i).index * kBlockBytes);
        }
        const uint32_t bad = bits_of_rows(rows);
        if (lane == 0) shared.notes.bad[bits_at.index].set(warp, bad);
        fence_async_proxy();
        publish();
#pragma unroll 1
        for (int i = 0; i < kBlocks; ++i) mbarrier_arrive(&shared.full[(start + i).index]);
      }
      bits_at.advance();
    }
  }
}

// Unpacking takes more registers than copying.
template <typename Tr, bool kRecords>
__global__ void __launch_bounds__(kFewThreads, kFewBlocks)
    few_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = kRecords ? 160 : 192, kProducer = kRecords ? 96 : 64;
  static_assert(registers_fit(kFewBlocks, 1, kConsumer, kProducer));
  auto& shared = dynamic_shared<FewShared<Tr>>();
  initialise(shared.notes.share);
  mla::initialise(shared);
  launch_dependents();
  if (threadIdx.x / 128 == 1) {
    lower_registers<kProducer>();
    wait_for(shared.notes.share);
    produce_few<Tr, kRecords>(p, shared);
  } else {
    ShareFinder<128>(p, shared.notes.scratch, shared.notes.share).find_last_item();
    raise_registers<kConsumer>();
    mla::consume_few(Work<FewShared<Tr>>(p), shared);
  }
}

}  // namespace jax_dsa::mqa_decode
