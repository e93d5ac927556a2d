// Decode attention for up to 32 rows (queries times heads) of a KV head group at a time.
//
// The MMA warpgroup, its shared memory and its barriers are those of mla/few_heads.cuh, with keys
// as the rows of the products. Values may be in an array of their own. Two CTAs share an SM. This
// file adds which keys there are (plan.cuh), how they are copied (tiles.cuh) and where results go:
// those of a KV split to the combine kernel or to the other CTAs of the cluster, those of a whole
// work tile to `out`.
#pragma once

#include "mla/cluster_splits.cuh"
#include "mla/producer.cuh"
#include "mqa_decode/tiles.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kFewThreads = mla::kFewThreads;
inline constexpr int kFewCtasPerSm = mla::kFewCtasPerSm;

template <typename Tr>
using FewNotes = Notes<Tr::kValidStages, 128>;
template <typename Tr>
using FewShared = mla::FewShared<Tr, FewNotes<Tr>>;

// Which of this thread's key rows of a tile are valid, and the stage with the tile's notes.
struct SplitKeyRows : mla::ValidKeyRows {
  int stage;
};
template <typename Shared>
__device__ __forceinline__ SplitKeyRows valid_key_rows(const Work<Shared>&, const Shared& shared,
                                                       int stage, int warp, int lane) {
  return {{shared.valid[stage], warp, lane}, stage};
}
template <typename Shared, int kN>
__device__ __forceinline__ void mask_scores(const Work<Shared>& w, const SplitKeyRows& rows,
                                            float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    s[i] = rows.valid[i / 2 % 2] ? __fmul_rn(s[i], w.scale) : -INFINITY;
  }
  const MixedTile tile = w.notes().mixed[rows.stage];
  if (tile.key < 0) return;
  using HeadColumns = mla::HeadColumns<kN * 2>;
  const int warp = thread_index() / 32 % 4, lane = thread_index() % 32;
  const int key = tile.key + warp * 16 + lane / 4;
  const mla::ValidKeyRows nonfinite(w.notes().nonfinite[rows.stage], warp, lane);
#pragma unroll
  for (int c = 0; c < HeadColumns::kHeadsPerThread; ++c) {
    const QueryRange range(w.p, tile, HeadColumns::head(c));
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (HeadColumns::local_head(i) != c) continue;
      const int r = i / 2 % 2;
      if (!range.has(key + r * 8)) {
        s[i] = -INFINITY;
      } else if (nonfinite.valid[r]) {
        s[i] = NAN;
      }
    }
  }
}

// Whether the CTAs of this launch are clusters. Only a kernel for 16 rows can have them.
template <typename Tr>
__device__ __forceinline__ bool runs_in_clusters(const Decode& p) {
  return Tr::kN == kClusterRows && p.in_clusters;
}

template <typename Shared, typename Tr>
__device__ void write_few_results(const Work<Shared>& w, int work_index, int tiles,
                                  const float (&o)[Tr::kValueBlocks][Tr::kN / 2],
                                  mla::HeadColumns<Tr::kN>& columns,
                                  mla::FewShared<Tr, FewNotes<Tr>>& shared) {
  constexpr int kN = Tr::kN;
  using HeadColumns = mla::HeadColumns<kN>;
  const Decode& p = w.p;
  const KvSplit split = w.split(work_index);
  // Another barrier must separate two reductions. Only key tiles contain one.
  if (tiles > 0) {
    mla::reduce_over_keys<kN>(columns.sum, shared.exchange, [](float a, float b) { return a + b; });
  }
  if (runs_in_clusters<Tr>(p)) {
    mla::store_cluster_split<Tr>(shared, o, columns);
    return;
  }
  const int dim = thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
#pragma unroll
  for (int c = 0; c < HeadColumns::kHeadsPerThread; ++c) {
    const int row = HeadColumns::head(c);
    if (split.row + row >= p.rows) continue;
    const int row_index = p.row_index(split.batch, split.group, split.row + row);
    const float factor = finish_row(p, split, kN, row, row_index, columns.running_max[c],
                                    columns.sum[c], threadIdx.x < 4);
    const auto store = [&](auto* to) {
#pragma unroll
      for (int m = 0; m < Tr::kValueBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          if (HeadColumns::local_head(i) != c) continue;
          to[m * 64 + dim + i / 2 % 2 * 8] = scale_output(o[m][i], factor);
        }
      }
    };
    if (split.partial_index >= 0 || p.out_float) {
      store(float_row(p, split, kN, row, row_index));
    } else {
      store(static_cast<__nv_bfloat16*>(p.out) + int64_t{row_index} * Tr::kE);
    }
  }
}

template <typename Tr, bool kRecords>
__device__ void produce_few(const Decode& p, FewShared<Tr>& shared) {
  constexpr int kTileBlocks = Tr::kTileBlocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t policy = l2_policy_evict_first();
  const bool leader = threadIdx.x % 128 == 0;
  // the row of a tile whose location this lane looks up
  const int tile_row =
      kRecords ? mla::record_row(warp, lane % 2, lane) : Gather::row(warp, lane % 16 / 4, lane % 4);
  const uint32_t ring = smem_address(shared.ring);
  Gather gather(warp, lane / 8, lane % 8);
  const mla::UnpackedRows unpacked(ring);
  using Place = RingPlace<Tr::kRingBlocks>;
  Place at;
  RingPlace<Tr::kValidStages> valid_at;

  // Copy the queries of a static split while the MMA warpgroup waits for the lengths.
  const bool early = p.static_splits > 0;
  if (early) {
    copy_queries<Tr::kD, Tr::kN>(p, static_split(p, Tr::kN), smem_address(shared.q), policy);
  }
  wait_for(shared.notes.range);
  for (SplitIterator iterator(p, shared.notes.range, Tr::kN); iterator.next();) {
    const KvSplit& split = iterator.split;
    const int tiles = iterator.tiles;
    const KeyLocator keys(p, iterator);
    int page = keys.page(tile_row);
    if (leader) shared.notes.splits[iterator.index % kSplitsKept] = split;
    mla::begin_work_tile(shared, iterator.index % 2, tiles, [&] {
      if (!early) copy_queries<Tr::kD, Tr::kN>(p, split, smem_address(shared.q), policy);
    });
    const RecordLocator record_at(p, keys, split);

    for (int tile = 0; tile < tiles; ++tile) {
      const int key = keys.first_key + tile * kTile, row = keys.row(tile * kTile + tile_row, page);
      const bool mixed = p.queries > 1 && !keys.visible.seen_by_all(key);
      if (tile + 1 < tiles) page = keys.page((tile + 1) * kTile + tile_row);
      const uint32_t bits = kRecords ? mla::record_valid_bits(row)
                                     : point_gather(p, keys, split, p.k, Tr::kD, row, gather);
      const auto publish = [&] {
        if (leader) shared.notes.mixed[valid_at.index] = {mixed ? key : -1, split.batch, split.row};
        if (lane == 0) {
          shared.valid[valid_at.index].set(warp, bits);
          mbarrier_arrive(&shared.valid_full[valid_at.index]);
        }
      };
      const auto wait_free = [&](Place place) {
        mbarrier_wait(&shared.free[place.index], place.parity ^ 1);
      };
      const Place start = at;
      if constexpr (kRecords) {
        static_assert(Tr::kLeadingBlocks == 1);
        // Each scale's values are unpacked first for one half of the rows, then for the other.
        mla::RecordLoader records[2];
        mla::RecordCodes in_flight[mla::kStepsHeld];
        records[0].seek<0>(row, record_at);
        records[1].seek<1>(row, record_at);
        const auto load = [&]<int kStep>() {
          records[kStep % 2].load<kStep / 2>(in_flight[kStep % mla::kStepsHeld]);
        };
        load.template operator()<0>();
        load.template operator()<1>();
        load.template operator()<2>();
        wait_free(at);
        if (!mixed) publish();
        unpacked.copy_bf16_values<0, 0>(at.index * kBlockBytes, row, record_at, policy);
        unpacked.copy_bf16_values<1, 0>(at.index * kBlockBytes, row, record_at, policy);
        if (!mixed) cp_async_arrive(&shared.full[at.index]);
        at.advance();
        const auto step = [&]<int kStep>() {
          constexpr int kScale = kStep / 2, kHalf = kStep % 2;
          constexpr int kNext = kStep + mla::kStepsAhead;
          if constexpr (kNext < mla::kUnpackSteps) load.template operator()<kNext>();
          const Place then = at + 1;
          if constexpr (kHalf == 0) wait_free(at), wait_free(then);
          const float scale = __shfl_sync(~0u, records[kHalf].scales[kHalf], kScale, 4);
          unpacked.store<kHalf>(at.index * kBlockBytes, then.index * kBlockBytes,
                                in_flight[kStep % mla::kStepsHeld], scale);
          if constexpr (kHalf == 1) {
            if (!mixed) {
              fence_async_proxy();  // makes ordinary stores visible to wgmma
              mbarrier_arrive(&shared.full[at.index]);
              mbarrier_arrive(&shared.full[then.index]);
            }
            at = at + 2;
          }
        };
        mla::for_each_step(step);
      } else {
#pragma unroll 1
        for (int i = 0; i < kTileBlocks; ++i, at.advance()) {
          const int block = Tr::kSeparateValues && i >= Tr::kLeadingBlocks ? i - Tr::kLeadingBlocks
                                                                           : Tr::column_block(i);
          if (Tr::kSeparateValues && i == Tr::kLeadingBlocks)
            point_gather(p, keys, split, p.v, Tr::kE, row, gather);
          wait_free(at);
          if (i == 0 && !mixed) publish();
          gather.copy_block(ring + at.index * kBlockBytes, 0, block, policy);
          if (!mixed) cp_async_arrive(&shared.full[at.index]);
        }
      }
      if (mixed) {
        cp_async_wait();
        __syncwarp();
        uint32_t rows = 0;
#pragma unroll 1
        for (int i = Tr::kLeadingBlocks; i < kTileBlocks; ++i) {
          rows |= zero_nonfinite(gather, ring + (start + i).index * kBlockBytes);
        }
        const uint32_t nonfinite = gather_row_bits(rows);
        if (lane == 0) shared.notes.nonfinite[valid_at.index].set(warp, nonfinite);
        fence_async_proxy();
        publish();
#pragma unroll 1
        for (int i = 0; i < kTileBlocks; ++i) mbarrier_arrive(&shared.full[(start + i).index]);
      }
      valid_at.advance();
    }
  }
  if (early) cp_async_wait();  // also if the range has no split
}

// Combines the splits of the cluster's work tile.
template <typename Tr>
__device__ __forceinline__ void combine_in_cluster(const Decode& p, FewShared<Tr>& shared) {
  const KvSplit tile = static_split(p, Tr::kN);
  const auto place_of = [&](int row) -> mla::CombinedPlace {
    const int of_group = tile.row + row, head = tile.group * p.per_group + of_group % p.per_group;
    return {p.sinks ? p.sinks + int64_t{tile.batch} * p.sinks_stride + head : nullptr,
            p.row_index(tile.batch, tile.group, of_group)};
  };
  const auto store = [&]<int kColumns>(int64_t i, const float (&y)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      if (p.out_float) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + i + c) =
            make_float2(y[c], y[c + 1]);
      } else {
        store_pair(static_cast<__nv_bfloat16*>(p.out) + i + c, y[c], y[c + 1], true);
      }
    }
  };
  mla::combine_cluster_splits<Tr>(p, shared, p.static_splits, min(p.rows - tile.row, Tr::kN),
                                  place_of, store);
}

// Unpacking takes more registers than copying.
template <typename Tr, bool kRecords>
__global__ void __launch_bounds__(kFewThreads, kFewCtasPerSm)
    few_kernel(const __grid_constant__ Decode p) {
  constexpr int kConsumer = kRecords ? 160 : 192, kProducer = kRecords ? 96 : 64;
  static_assert(registers_fit(kFewCtasPerSm, 1, kConsumer, kProducer));
  auto& shared = dynamic_shared<FewShared<Tr>>();
  // Shared memory must outlast the reads of other CTAs, so the cluster waits before and after them.
  const auto wait_for_cluster = [] { cluster_sync(); };
  const bool in_clusters = runs_in_clusters<Tr>(p);
  initialise(shared.notes.range);
  mla::initialise(shared);
  launch_dependents();
  if (threadIdx.x / 128 == 1) {
    lower_registers<kProducer>();
    produce_few<Tr, kRecords>(p, shared);
    if (in_clusters) wait_for_cluster(), wait_for_cluster();
  } else {
    find_work_range<128>(p, shared.notes.scratch, shared.notes.range);
    raise_registers<kConsumer>();
    mla::consume_few(Work<FewShared<Tr>>(p), shared);
    if (in_clusters) {
      wait_for_cluster();
      combine_in_cluster<Tr>(p, shared);
      wait_for_cluster();
    }
  }
}

}  // namespace jax_dsa::mqa_decode
