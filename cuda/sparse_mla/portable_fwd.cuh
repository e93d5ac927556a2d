// Sparse MLA, forward pass and decode, with instructions of sm_80. fwd.cuh and decode.cuh have the
// mathematics.
//
// Tiling. A work tile is (query, KV head group, KV split, 64, 32 or 16 heads), and a CTA computes
// one. It loops over tiles of 16 or 32 of the selected keys. Heads are the rows of a product. The
// output of 32 heads by 512 columns is in the registers of a group of four warps, each of which has
// 128 columns. With 64 heads, a CTA has two groups.
//
// The loop over the tiles is that of mla/portable.cuh. The values are the first 512 columns of the
// keys. FP8 records are unpacked as mla/portable_records.cuh says.
//
// Results of several splits are combined by combine.cu.
//
// Shared memory for D = 576, 64 heads and 32 keys: Q 72 KiB, keys 3 x 36 KiB, scores 32 KiB,
// probabilities 8 KiB.
#pragma once

#include "mla/portable_records.cuh"
#include "sparse_mla/selected_keys.cuh"

namespace jax_dsa::sparse_mla {

template <typename Tr, bool kRecords>
struct alignas(128) PortableShared : mla::PortableShared<Tr> {
  [[no_unique_address]] mla::RecordPartsIf<Tr, kRecords> records;
};

template <int kHeads>
struct PortableWork {
  int64_t token;  // batch * queries + query
  int batch, group, split;
  int first, heads;  // the first head within the KV head group, and how many there are

  __device__ PortableWork(const Decode& p) {
    const int tiles = ceil_div(p.heads / p.groups, kHeads);
    const int rest = blockIdx.x / tiles, item = rest / p.splits;
    split = rest - item * p.splits;
    group = item % p.groups;
    token = item / p.groups;
    batch = static_cast<int>(token) / static_cast<int>(p.queries);
    first = (static_cast<int>(blockIdx.x) - rest * tiles) * kHeads;
    heads = min(p.heads / p.groups - first, kHeads);
  }
  // Returns the row of the first head in [batch, queries, heads].
  __device__ int64_t row(const Decode& p) const {
    return token * p.heads + group * (p.heads / p.groups) + first;
  }
  // Returns the work tile of 64 heads whose partial results have this one's as a part.
  __device__ int partial_tile(const Decode& p) const {
    const int item = static_cast<int>(token) * p.groups + group;
    return item * ceil_div(p.heads / p.groups, mla::kHeads) + first / mla::kHeads;
  }
};

template <typename Tr>
__host__ __device__ inline int64_t portable_work_tiles(const Decode& p) {
  return p.batch * p.queries * p.groups * p.splits * ceil_div(p.heads / p.groups, Tr::kHeads);
}

// Fills the slots with a work tile's keys, in order. All threads of the CTA call its functions.
template <typename Tr, bool kRecords>
class KeyLoader {
  static constexpr int kCopies = ceil_div(Tr::kKeys, Tr::kThreads / 8);  // rows per thread
  using Selected = SelectedKeys<Tr::kD, kRecords>;

 public:
  static constexpr bool kUnpacks = kRecords;

  template <int kHeads>
  __device__ KeyLoader(const Decode& p, PortableShared<Tr, kRecords>& shared,
                       const PortableWork<kHeads>& work)
      : p(p),
        shared(shared),
        selected(SelectedSlots(p, work.token, work.group, work.split), p, work.batch, work.group),
        tiles(selected.tiles(p, threadIdx.x % 32) * kPerTile) {
    mla::for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
      location[i] = selected.location(p, 0, slot_index(0, row));
      index[i] = slot_index(1, row);
    });
  }

  __device__ int tile_count() const { return tiles; }

  // Issues the copies of the next tile and closes their group, which is empty after the last tile.
  __device__ __forceinline__ void load() {
    if (next < tiles) {
      const uint64_t keep = l2_policy_evict_last();
      mla::for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
        const mla::KeySource key = selected.key(p, next / kPerTile, location[i]);
        location[i] = selected.location(p, (next + 1) / kPerTile, index[i]);
        index[i] = slot_index(next + 2, row);
        if constexpr (kRecords) {
          shared.records.copy(i, key, keep);
          is_valid[i] = key.exists();
        } else {
          const int slot = next % Tr::kSlots;
          mla::gather_row<Tr::kKeys, Tr::kBlocks>(smem_address(shared.keys[slot]), row, key.at,
                                                  key.exists(), keep);
          if (threadIdx.x % 8 == 0) shared.valid[slot][row] = key.exists();
        }
      });
      ++next;
    }
    cp_async_commit();
  }

  // Unpacks the last loaded records to their slot.
  __device__ __forceinline__ void unpack() {
    if constexpr (kRecords) {
      const int slot = (next - 1) % Tr::kSlots;
      shared.records.unpack(smem_address(shared.keys[slot]), [&](int i, int row) {
        if (threadIdx.x % 8 == 0) shared.valid[slot][row] = is_valid[i];
      });
    }
  }
  __device__ __forceinline__ void landed(int) const {}
  __device__ __forceinline__ void adjust(int, float (&)[Tr::kLaneKeys]) const {}
  __device__ __forceinline__ void weigh(int, float (&)[Tr::kLaneKeys]) const {}

 private:
  static constexpr int kPerTile = kTile / Tr::kKeys;

  __device__ int slot_index(int tile, int row) const {
    return selected.index(p, tile / kPerTile, tile % kPerTile * Tr::kKeys + row);
  }

  const Decode& p;
  PortableShared<Tr, kRecords>& shared;
  Selected selected;
  int tiles, next = 0;
  // Of the rows of the next tile, and of the one after it.
  typename Selected::Location location[kCopies];
  int index[kCopies];
  bool is_valid[kCopies];  // whether the rows of the last loaded records are valid
};

// Writes the results of a group's heads, whose outputs are `o` and whose rows are owned by lanes.
template <typename Tr, bool kRecords>
__device__ __forceinline__ void write_portable_results(const Decode& p,
                                                       const PortableWork<Tr::kHeads>& work,
                                                       int group, const mla::PortableRow& row,
                                                       float (&o)[Tr::kRows / 16][Tr::kOutputs],
                                                       PortableShared<Tr, kRecords>& shared) {
  const int lane = thread_index() % 32, warp = uniform(thread_index() / 32 % 4);
  const int own = mla::lane_row<Tr>(), heads = work.heads - group * Tr::kRows;
  const int64_t first = work.row(p) + group * Tr::kRows;
  const float total = mla::over_row<Tr>(row.sum, [](float a, float b) { return a + b; });
  if (lane < Tr::kWarpRows) {
    float denominator = total;
    if (p.splits > 1) {
      partial_rows(p, work.partial_tile(p),
                   work.split)[work.first % mla::kHeads + group * Tr::kRows + own] =
          make_float2(row.running_max, total);
    } else if (own < heads) {
      if (p.sinks && total != 0.f) {
        const int head = work.group * (p.heads / p.groups) + work.first + group * Tr::kRows + own;
        denominator +=
            sink_weight(p.sinks[int64_t{work.batch} * p.sinks_stride + head], row.running_max);
      }
      p.max_logit[first + own] = max_with_nan(row.running_max, total);
      p.log_sum[first + own] = log_of_sum(total);
    }
    shared.factor[group][own] = output_factor(total, denominator);
  }
  mla::sync_group();
  const uint32_t staging = smem_address(shared.q) + group * (Tr::kRows * 128);
#pragma unroll
  for (int m = 0; m < Tr::kRows / 16; ++m) {
    const int r = m * 16 + lane / 4;
    const float factor[2] = {shared.factor[group][r], shared.factor[group][r + 8]};
    if (p.splits > 1) {
      const bool any = __any_sync(~0u, (factor[0] != kUndefined) | (factor[1] != kUndefined));
      if (!any || m * 16 >= heads) continue;
      const int strip = (work.first % mla::kHeads + group * Tr::kRows) / 16 + m;
      float4* const to = partial_columns(p, work.partial_tile(p), work.split, warp / 2, strip) +
                         warp % 2 * (kColumnGroups / 2 * 32) + lane;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        to[i * 32] = make_float4(o[m][4 * i] * factor[0], o[m][4 * i + 1] * factor[0],
                                 o[m][4 * i + 2] * factor[1], o[m][4 * i + 3] * factor[1]);
      }
    } else {
      store_fragment<DType::kBF16, Tr::kHeads, 64>(staging, m * 16, warp * 128, [&](int i) {
        return scale_output(o[m][i], factor[i / 2 % 2]);
      });
    }
  }
  if (p.splits > 1) return;
  __syncwarp();
  store_tile<Tr::kHeads, Tr::kRows, 2, 32>(
      staging + warp * 2 * (Tr::kHeads * 128),
      static_cast<__nv_bfloat16*>(p.out) + first * kMlaValueDim + warp * 128, kMlaValueDim, heads,
      128, lane);
}

template <typename Tr, bool kRecords>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_fwd_kernel(const __grid_constant__ Decode p) {
  auto& shared = dynamic_shared<PortableShared<Tr, kRecords>>();
  launch_dependents();
  const int group = mla::group_index();
  const PortableWork<Tr::kHeads> work(p);
  KeyLoader<Tr, kRecords> loader(p, shared, work);
  const int tiles = loader.tile_count();
  if (tiles > 0) {
    load_tile<Tr::kHeads, Tr::kBlocks, Tr::kThreads>(
        smem_address(shared.q), static_cast<const __nv_bfloat16*>(p.q) + work.row(p) * Tr::kD,
        Tr::kD, Tr::kD, [&](int row) { return row < work.heads; });
  }
  mla::PortableRow row;
  float o[Tr::kRows / 16][Tr::kOutputs];
  mla::attend_tiles<Tr>(shared, loader, tiles, group, p.scale, mla::kLazyMargin, row, o);
  write_portable_results<Tr, kRecords>(p, work, group, row, o, shared);
}

}  // namespace jax_dsa::sparse_mla
