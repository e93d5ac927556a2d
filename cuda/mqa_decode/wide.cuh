// Decode attention for more than 32 rows (queries times heads) of a KV head group, where values are
// the first 512 of a key's 576 or 512 elements. 64 rows are multiplied at a time.
//
// The MMA warpgroups, their shared memory and their barriers are those of mla/consumer.cuh. This
// file adds which keys there are (plan.cuh), how they are copied (tiles.cuh) and where results go:
// those of a KV split to the combine kernel, those of a whole work tile to `out`.
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
__device__ __forceinline__ void mask_scores(const Work<Shared>& w, const Shared& shared,
                                            uint64_t valid, float (&s)[32]) {
  mla::mask_columns(s, valid);
  const MixedTile tile = shared.notes.mixed[kSide];
  if (tile.key < 0) return;
  const uint64_t nonfinite = shared.notes.nonfinite[kSide].all();
  const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane / 4;
  const QueryRange range[2] = {{w.p, tile, row}, {w.p, tile, row + 8}};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (!range[i / 2 % 2].has(tile.key + column)) {
      s[i] = -INFINITY;
    } else if (nonfinite >> column & 1) {
      s[i] = NAN;
    }
  }
}

template <int kSide, typename Shared>
__device__ __forceinline__ void write_results(const Work<Shared>& w, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t) {
  const Decode& p = w.p;
  const KvSplit split = w.split(work_index);
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float factor[2];
  int64_t row_index[2];
  bool has[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + r * 8 + lane / 4;
    has[r] = split.row + row < p.rows;
    row_index[r] = has[r] ? p.row_index(split.batch, split.group, split.row + row) : 0;
    factor[r] = finish_row(p, split, kWideRows, row, row_index[r], rows.running_max[r],
                           rows.total(r), kSide == 0 && lane % 4 == 0 && has[r]);
  }
  const auto value = [&](int i) { return scale_output(o[i], factor[i / 2 % 2]); };
  if (split.partial_index >= 0) {
    const int64_t line = (int64_t{split.partial_index} * 2 + kSide) * 128 + warp * 32;
    float* to = p.partial + line * 128 + lane * 4;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      store_4(to + i * 32, {value(i), value(i + 1), value(i + 2), value(i + 3)});
    }
  } else if (p.out_float) {
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
      const int r = i / 2 % 2, column = kSide * 256 + i / 4 * 8 + lane % 4 * 2;
      store_pair(static_cast<float*>(p.out) + row_index[r] * kWideValues + column, value(i),
                 value(i + 1), has[r]);
    }
  } else {
    const uint32_t staging = smem_address(dynamic_shared<Shared>().staging[kSide * 4 + warp]);
    store_rows<DType::kBF16>(
        o, factor, staging,
        static_cast<__nv_bfloat16*>(p.out) + row_index[0] * kWideValues + kSide * 256,
        (row_index[1] - row_index[0]) * (kWideValues / 8), has[1] ? 16 : has[0], 256);
  }
}

template <int kD, bool kRecords>
__device__ void produce_wide(const Decode& p, WideShared<kD>& shared) {
  constexpr int kTileBlocks = kD / 64;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t policy = l2_policy_evict_first();
  const bool leader = threadIdx.x % 128 == 0;
  // the row of a tile whose location this lane looks up
  const int tile_row =
      kRecords ? mla::record_row(warp, lane % 2, lane) : Gather::row(warp, lane % 16 / 4, lane % 4);
  Gather gather(warp, lane / 8, lane % 8);
  const mla::UnpackedRows unpacked(smem_address(shared.keys));
  uint32_t phases = 0;  // one bit per tile parity

  // Copy the queries of a static split while the MMA warpgroups wait for the lengths.
  const KvSplit own = p.static_splits > 0 ? static_split(p, kWideRows) : KvSplit{.row = p.rows};
  const bool early = own.row < p.rows;
  if (early) copy_queries<kD, kWideRows>(p, own, smem_address(shared.q), policy);
  wait_for(shared.notes.range);
  for (SplitIterator iterator(p, shared.notes.range, kWideRows); iterator.next();) {
    const KvSplit& split = iterator.split;
    const int tiles = iterator.tiles;
    const KeyLocator keys(p, iterator);
    int page = keys.page(tile_row);
    if (leader) shared.notes.splits[iterator.index % kSplitsKept] = split;
    mla::begin_work_tile(shared, iterator.index % 2, tiles, [&] {
      if (!early) copy_queries<kD, kWideRows>(p, split, smem_address(shared.q), policy);
    });

    int row = -1;  // cache row of this lane's row of the next tile
    const auto advance = [&](int tile) {
      row = keys.row(tile * kTile + tile_row, page);
      if (tile + 1 < tiles) page = keys.page((tile + 1) * kTile + tile_row);
    };
    const auto publish = [&](int parity, int key, bool mixed, uint32_t bits) {
      if (leader) shared.notes.mixed[parity] = {mixed ? key : -1, split.batch, split.row};
      if (lane == 0) {
        shared.valid[parity].set(warp, bits);
        mbarrier_arrive(&shared.key_full[parity][0]);
      }
    };
    const auto zero_bad_values = [&](int parity) {
      const uint32_t to = smem_address(shared.keys[parity]);
      uint32_t rows = 0;
#pragma unroll 1
      for (int block = 0; block < 8; ++block) {
        rows |= zero_nonfinite(gather, to + block * kBlockBytes);
      }
      const uint32_t nonfinite = gather_row_bits(rows);
      if (lane == 0) shared.notes.nonfinite[parity].set(warp, nonfinite);
      fence_async_proxy();
    };

    const RecordLocator at(p, keys, split);
    mla::RecordCodes in_flight[mla::kStepsHeld];
    mla::RecordLoader records;
    const auto load = [&]<int kStep>() {
      if constexpr (kStep % 4 == 0) records.seek<kStep / 4>(row, at);
      records.load<kStep % 4>(in_flight[kStep % mla::kStepsHeld]);
    };
    if (kRecords && tiles > 0) {
      advance(0);
      load.template operator()<0>();
      load.template operator()<1>();
      load.template operator()<2>();
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int key = keys.first_key + tile * kTile;
      // Look up the row here. If it is looked up later, ptxas 13.0 spills what the copies need.
      const int cache_row = kRecords ? -1 : keys.row(tile * kTile + tile_row, page);
      const bool mixed = p.queries > 1 && !keys.visible.seen_by_all(key);
      if (!kRecords && tile + 1 < tiles) page = keys.page((tile + 1) * kTile + tile_row);
      const uint32_t free = ~phases >> tile % 2 & 1;
      const auto wait_free = [&](int parity, int half) {
        mbarrier_wait(&shared.key_free[parity][half], free);
      };
      const auto copy = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        uint64_t (&full)[2] = shared.key_full[kParity];
        const uint32_t to = smem_address(shared.keys[kParity]);
        const uint32_t bits = point_gather(p, keys, split, p.k, kD, cache_row, gather);
        wait_free(kParity, 0);
        if (!mixed) {
          publish(kParity, key, mixed, bits);
          gather.copy<0, 8, 0>(to, policy);
          wait_free(kParity, 1);
          gather.copy<kOwn, kOwn + 4, 1>(to, policy);
          cp_async_arrive(&full[0]);
          gather.copy<kOther, kOther + 4, 1>(to, policy);
          gather.copy<8, kTileBlocks, 0>(to, policy);
          gather.copy<8, kTileBlocks, 1>(to, policy);
          cp_async_arrive(&full[1]);
        } else {
          wait_free(kParity, 1);
#pragma unroll 1
          for (int block = 0; block < kTileBlocks; ++block) gather.copy_block(to, block, policy);
          cp_async_wait();
          zero_bad_values(kParity);
          publish(kParity, key, mixed, bits);
          mbarrier_arrive(&full[0]);
          mbarrier_arrive(&full[1]);
        }
      };
      // Registers wait for the records that they load, so prefetch these to the L2.
      const auto prefetch_records = [&](int own_row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int cache_row = __shfl_sync(~0u, own_row, half, 4);
          if (cache_row < 0) continue;
          const char* from = at(cache_row) + lane % 4 * 128;
          prefetch_line_l2(from);
          if (lane % 4 < 2) prefetch_line_l2(from + 512);
        }
      };
      // The bytes of the next steps are in flight while those of one step are unpacked.
      const auto unpack = [&](int parity) {
        const uint32_t to = parity * (mla::kKeyBlocks * kBlockBytes);
        const uint32_t bits = mla::record_valid_bits(row);
        if (tile + 1 < tiles) prefetch_records(keys.row((tile + 1) * kTile + tile_row, page));
        wait_free(parity, 0);
        if (!mixed) publish(parity, key, mixed, bits);
        const auto step = [&]<int kStep>() {
          constexpr int kNext = kStep + mla::kStepsAhead;
          if constexpr (kStep == mla::kUnpackSteps / 2) {
            wait_free(parity, 1);
            unpacked.copy_bf16_values<0, 8>(to, row, at, policy);
            unpacked.copy_bf16_values<1, 8>(to, row, at, policy);
          }
          if constexpr (kNext < mla::kUnpackSteps) {
            load.template operator()<kNext>();
          } else if (tile + 1 < tiles) {
            if constexpr (kNext == mla::kUnpackSteps) advance(tile + 1);
            load.template operator()<kNext - mla::kUnpackSteps>();
          }
          const float scale = __shfl_sync(~0u, records.scales[kStep / 4], kStep % 4, 4);
          const uint32_t block = to + kStep % 4 * 2 * kBlockBytes;
          unpacked.store<kStep / 4>(block, block + kBlockBytes, in_flight[kStep % mla::kStepsHeld],
                                    scale);
        };
        mla::for_each_step(step);
        if (mixed) {
          __syncwarp();
          zero_bad_values(parity);
          publish(parity, key, mixed, bits);
        } else {
          fence_async_proxy();  // makes ordinary stores visible to wgmma
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
  if (early) cp_async_wait();  // also if the range has no split
}

// Unpacking takes more registers than copying.
template <int kD, bool kRecords>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = kRecords ? 208 : 216, kProducer = kRecords ? 88 : 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<WideShared<kD>>();
  initialise(shared.notes.range);
  mla::initialise(shared);
  launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 2) {
    lower_registers<kProducer>();
    produce_wide<kD, kRecords>(p, shared);
    return;
  }
  find_work_range<256>(p, shared.notes.scratch, shared.notes.range);
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    mla::consume<kD, 0>(Work<WideShared<kD>>(p), shared);
  } else {
    raise_registers<kConsumer>();
    mla::consume<kD, 1>(Work<WideShared<kD>>(p), shared);
  }
}

}  // namespace jax_dsa::mqa_decode
