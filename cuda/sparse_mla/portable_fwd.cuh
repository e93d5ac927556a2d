// Sparse MLA, forward pass and decode, with instructions of sm_80. fwd.cuh and decode.cuh have the
// mathematics.
//
// Tiling. A work tile is (query, KV head group, KV split, 64, 32 or 16 heads), and a CTA computes
// one. It loops over tiles of 16 or 32 of the selected keys. Heads are the rows of a product. The
// output of 32 heads by 512 columns is in the registers of a group of four warps, each of which has
// 128 columns. With 64 heads, a CTA has two groups.
//
// Steps. For each key tile, a group multiplies the scores, computes their softmax, and multiplies
// the probabilities by the values, which are the first 512 columns of the same tile. The second
// group is half a tile behind the first: while one group is in its scores and its softmax, the
// other one multiplies values. A step is half a tile. Each two steps, all warps meet at a barrier,
// after which the slot of a tile that both groups have finished is filled again. If there is only
// one group, another CTA on the SM fills its gaps.
//
// FP8 records. Each thread copies its parts of a tile's records to a buffer of its own. When they
// have landed, it unpacks them to bf16 in a slot, and issues the copies of the next tile.
//
// Results of several splits are combined by combine.cu.
//
// Shared memory for D = 576, 64 heads and 32 keys: Q 72 KiB, keys 3 x 36 KiB, scores 16 KiB,
// probabilities 8 KiB.
#pragma once

#include "mla/portable.cuh"
#include "mla/records.cuh"
#include "sparse_mla/selected_keys.cuh"

namespace jax_dsa::sparse_mla {

// The parts of records that each thread copies at a time: of each of its rows, 64 codes, 8 bf16
// values and a scale.
template <typename Tr>
struct alignas(16) RecordParts {
  static constexpr int kThreads = Tr::kThreads < Tr::kKeys * 8 ? Tr::kThreads : Tr::kKeys * 8;
  static constexpr int kCopies = Tr::kKeys * 8 / kThreads;  // rows per thread
  uint8_t codes[kCopies][4][kThreads][16];
  uint8_t values[kCopies][kThreads][16];
  float scales[kCopies][kThreads];
};
struct NoParts {};

template <typename Tr, bool kRecords>
struct alignas(128) PortableShared {
  uint8_t q[Tr::kBlocks][Tr::kHeads * 128];  // then the outputs
  uint8_t keys[Tr::kSlots][Tr::kBlocks][Tr::kKeys * 128];
  uint8_t probabilities[Tr::kGroups][Tr::kRows * 128];
  float scores[Tr::kGroups][Tr::kParts * Tr::kRows * Tr::kKeys];
  float factor[Tr::kGroups][Tr::kRows];  // of a group's outputs
  alignas(16) uint8_t valid[Tr::kSlots][Tr::kKeys];
  [[no_unique_address]] std::conditional_t<kRecords, RecordParts<Tr>, NoParts> records;
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

 public:
  template <int kHeads>
  __device__ KeyLoader(const Decode& p, PortableShared<Tr, kRecords>& shared,
                       const PortableWork<kHeads>& work)
      : p(p),
        shared(shared),
        selected(p, work.token, work.batch, work.group, work.split),
        tiles(selected.tiles(p, threadIdx.x % 32) * (kTile / Tr::kKeys)),
        kv(static_cast<const char*>(p.kv) + work.group * kRowBytes +
           work.batch * p.batch_rows * p.groups * kRowBytes) {
    mla::for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
      location[i] = selected.location(p, slot_index(0, row));
      index[i] = slot_index(1, row);
    });
  }

  __device__ int tile_count() const { return tiles; }

  // Issues the copies of the next tile and closes their group, which is empty after the last tile.
  __device__ __forceinline__ void load() {
    if (next < tiles) {
      const uint64_t keep = l2_policy_evict_last();
      mla::for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
        const int cache_row = selected.cache_row(p, location[i]);
        location[i] = selected.location(p, index[i]);
        index[i] = slot_index(next + 2, row);
        const char* const from = kv + uint64_t{static_cast<uint32_t>(max(cache_row, 0))} *
                                          static_cast<uint32_t>(p.groups * kRowBytes);
        if constexpr (kRecords) {
          copy_record(i, from, cache_row >= 0, keep);
          is_valid[i] = cache_row >= 0;
        } else {
          const int slot = next % Tr::kSlots;
          mla::gather_row<Tr::kKeys, Tr::kBlocks>(smem_address(shared.keys[slot]), row, from,
                                                  cache_row >= 0, keep);
          if (threadIdx.x % 8 == 0) shared.valid[slot][row] = cache_row >= 0;
        }
      });
      ++next;
    }
    cp_async_commit();
  }

  // Unpacks the last loaded records to their slot.
  __device__ __forceinline__ void unpack() {
    if constexpr (kRecords) {
      const int slot = (next - 1) % Tr::kSlots, chunk = threadIdx.x % 8;
      mla::for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
        if (chunk == 0) shared.valid[slot][row] = is_valid[i];
        const uint32_t to = smem_address(shared.keys[slot][chunk]) + row * 128;
        const float scale = shared.records.scales[i][threadIdx.x];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t codes[8];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            load_shared_16(smem_address(shared.records.codes[i][half * 2 + j][threadIdx.x]),
                           reinterpret_cast<uint32_t (&)[4]>(codes[j * 4]));
          }
          mla::unpack_values(codes, scale, [&](int j, const uint32_t (&y)[4]) {
            store_shared_16(to + ((half * 4 + j) ^ row % 8) * 16, y);
          });
        }
        uint32_t values[4];
        load_shared_16(smem_address(shared.records.values[i][threadIdx.x]), values);
        store_shared_16(smem_address(shared.keys[slot][8]) + row * 128 + (chunk ^ row % 8) * 16,
                        values);
      });
    }
  }

 private:
  static constexpr int kRowBytes = kRecords ? kMlaRecordBytes : Tr::kD * 2;

  __device__ int slot_index(int tile, int row) const {
    constexpr int kPerTile = kTile / Tr::kKeys;
    return selected.index(p, tile / kPerTile * kTile, tile % kPerTile * Tr::kKeys + row);
  }
  // A thread copies the 64 codes of a block. They have one scale.
  __device__ __forceinline__ void copy_record(int i, const char* from, bool valid,
                                              uint64_t policy) {
    const int block = threadIdx.x % 8;
    auto& to = shared.records;
    const uint32_t codes = whole_sum(smem_address(to.codes[i][0][0]), threadIdx.x * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      cp_async_16(codes + j * static_cast<uint32_t>(sizeof(to.codes[0][0])),
                  from + block * 64 + j * 16, valid, policy);
    }
    cp_async_16(whole_sum(smem_address(to.values[i][0]), threadIdx.x * 16), from + 528 + block * 16,
                valid, policy);
    cp_async_4(whole_sum(smem_address(to.scales[i]), threadIdx.x * 4), from + 512 + block / 2 * 4,
               valid);
  }

  const Decode& p;
  PortableShared<Tr, kRecords>& shared;
  SelectedKeys selected;
  int tiles, next = 0;
  const char* kv;
  // Of the rows of the next tile, and of the one after it.
  SelectedKeys::Location location[kCopies];
  int index[kCopies];
  bool is_valid[kCopies];  // whether the rows of the last loaded records are valid
};

// Writes the results of a group's heads, whose outputs are `o` and whose rows are owned by lanes.
template <typename Tr, bool kRecords>
__device__ __forceinline__ void write_portable_results(const Decode& p,
                                                       const PortableWork<Tr::kHeads>& work,
                                                       int group, const mla::PortableRow& row,
                                                       float (&o)[Tr::kRows / 16][64],
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
      p.max_logit[first + own] = row.running_max;
      p.log_sum[first + own] = log_of_sum(total);
    }
    shared.factor[group][own] = total == 0.f ? 0.f : 1.f / denominator;
  }
  mla::sync_group();
  const uint32_t staging = smem_address(shared.q) + group * (Tr::kRows * 128);
#pragma unroll
  for (int m = 0; m < Tr::kRows / 16; ++m) {
    const int r = m * 16 + lane / 4;
    const float factor[2] = {shared.factor[group][r], shared.factor[group][r + 8]};
    if (p.splits > 1) {
      const bool any = __any_sync(~0u, (factor[0] != 0.f) | (factor[1] != 0.f));
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
        return factor[i / 2 % 2] == 0.f ? 0.f : o[m][i] * factor[i / 2 % 2];
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
  constexpr int kAhead = Tr::kSlots - Tr::kGroups;  // tiles whose copies are in flight
  static_assert(kAhead >= 1 && (!kRecords || Tr::kD == 576));
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
  if constexpr (kRecords) {
    loader.load();
    cp_async_wait();
    if (tiles > 0) loader.unpack();
    loader.load();
  } else {
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) loader.load();
  }

  mla::PortableRow row;
  float o[Tr::kRows / 16][64];
  clear_fragments(o);
  const uint32_t probabilities = smem_address(shared.probabilities[group]);
#pragma unroll 1
  for (int step = 0; step < 2 * tiles + Tr::kGroups - 1; ++step) {
    if (step % 2 == 0) {
      cp_async_wait_group<kRecords ? 0 : kAhead - 1>();
      __syncthreads();
      if constexpr (kRecords) {
        if (step / 2 + 1 < tiles) loader.unpack();
      }
      loader.load();
    }
    const int own = step - group;
    if (own < 0 || own >= 2 * tiles) continue;
    const int slot = own / 2 % Tr::kSlots;
    const uint32_t keys = smem_address(shared.keys[slot]);
    if (own % 2 == 0) {
      float* const scores = shared.scores[group];
      mla::multiply_scores<Tr>(smem_address(shared.q), keys, group, scores);
      mla::sync_group();
      float s[Tr::kLaneKeys];
      mla::load_scores<Tr>(scores, shared.valid[slot], s);
      const float factor = row.softmax<Tr>(s, p.scale, mla::kLazyMargin);
      mla::store_probabilities<Tr>(probabilities, s);
      if (thread_index() % 32 < Tr::kWarpRows) shared.factor[group][mla::lane_row<Tr>()] = factor;
      mla::sync_group();
    } else {
      const int lane_row = thread_index() % 32 / 4;
#pragma unroll
      for (int m = 0; m < Tr::kRows / 16; ++m) {
        const float factor[2] = {shared.factor[group][m * 16 + lane_row],
                                 shared.factor[group][m * 16 + lane_row + 8]};
        if (__any_sync(~0u, (factor[0] != 1.f) | (factor[1] != 1.f))) {
#pragma unroll
          for (int i = 0; i < 64; ++i) o[m][i] *= factor[i / 2 % 2];
        }
      }
      multiply_tiles<DType::kBF16, Tr::kKeys / 16>(
          o, Operand<Side::kA, false, Tr::kRows>(probabilities, 0, 0),
          Operand<Side::kB, true, Tr::kKeys>(keys, 0, uniform(thread_index() / 32 % 4) * 128));
    }
  }
  mla::sync_group();
  write_portable_results<Tr, kRecords>(p, work, group, row, o, shared);
}

}  // namespace jax_dsa::sparse_mla
