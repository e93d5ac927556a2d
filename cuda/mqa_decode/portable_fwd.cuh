// Decode attention with instructions of sm_80.
//
// Work tiles, work ranges and KV splits are those of plan.cuh. Each CTA iterates over the splits of
// its range. The loop over the keys of a split is that of mla/portable.cuh, for tiles of 16, 32 or
// 64 rows (queries times heads) and 16 to 64 keys. Values may be in an array of their own; they
// then follow the keys in a slot. tiles.cuh says which keys a query sees and what happens to values
// that are not finite. Results of splits are combined by combine.cu.
//
// Shared memory for D = 576, 64 rows and 32 keys: Q 72 KiB, keys 3 x 36 KiB, scores 32 KiB,
// probabilities 8 KiB. For D = E = 128, 32 rows and 64 keys: Q 8 KiB, keys and values 2 x 32 KiB,
// scores 8 KiB, probabilities 4 KiB.
#pragma once

#include "mla/portable_records.cuh"
#include "mqa_decode/tiles.cuh"

namespace jax_dsa::mqa_decode {

// The KV split that a CTA processes, and the state of the SplitIterator that has found it. It is in
// shared memory to save registers.
struct CurrentSplit {
  KvSplit split;
  VisibleKeys visible;
  int first_key, tiles;
  int index, batch, tile;
  bool exists;

  // Moves on to the next split. Called by a warp.
  __device__ void advance(const Decode& p, const WorkRange& range, int tile_rows) {
    SplitIterator x(p, range, tile_rows);
    if (index >= 0) {
      x.index = index, x.batch = batch, x.tile = tile, x.visible = visible;
    }
    const bool found = x.next();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      *this = {x.split, x.visible, x.first_key, x.tiles, x.index, x.batch, x.tile, found};
    }
  }
};

template <typename Tr, bool kRecords>
struct alignas(128) PortableShared : mla::PortableShared<Tr> {
  [[no_unique_address]] mla::RecordPartsIf<Tr, kRecords> records;
  WorkRange range;
  typename WorkRangeFinder<Tr::kThreads>::Scratch scratch;
  CurrentSplit current;
};

// Fills the slots with the keys and values of the current split, see mla::attend_tiles.
template <typename Tr, bool kRecords>
class SplitLoader {
  static constexpr int kKeys = Tr::kKeys;
  // Flags in PortableShared::valid: the key is visible, and its values are not all finite.
  static constexpr uint8_t kVisible = 1, kNonfinite = 2;

 public:
  static constexpr bool kUnpacks = kRecords;

  __device__ SplitLoader(const Decode& p, PortableShared<Tr, kRecords>& shared)
      : p(p), shared(shared), page(KeyLocator(p, shared.current).page(lookup_row())) {
    const CurrentSplit& x = shared.current;
    const int keys = min(x.tiles * kTile, x.visible.high - x.first_key);
    tiles = x.tiles > 0 ? ceil_div(keys, kKeys) : 0;
    first = (x.split.batch * p.batch_rows * p.groups + x.split.group) * kRowBytes;
  }

  // The number of tiles up to the last visible key.
  __device__ int tile_count() const { return tiles; }

  __device__ __forceinline__ void load() {
    const CurrentSplit& x = shared.current;
    if (next < tiles) {
      int found = 0;
      if (p.page_table) {
        const KeyLocator keys(p, x);
        const int own = next * kKeys + lookup_row();
        found = keys.row(own, page);
        page = keys.page(own + kKeys);
      }
      const int slot = next % Tr::kSlots;
      const uint64_t policy = l2_policy_evict_first();
      mla::for_each_row<kKeys, Tr::kThreads>([&](int i, int row) {
        const int key = x.first_key + next * kKeys + row;  // the row in a flat array
        int cache_row = x.visible.low <= key && key < x.visible.high ? key : -1;
        if (p.page_table) cache_row = mla::looked_up(found, i);
        const bool valid = cache_row >= 0;
        const int64_t at = first + uint64_t{static_cast<uint32_t>(max(cache_row, 0))} *
                                       static_cast<uint32_t>(p.groups * kRowBytes);
        const char* const k = static_cast<const char*>(p.k) + at;
        if constexpr (kRecords) {
          shared.records.copy(i, {valid ? k : nullptr}, policy);
          is_valid[i] = valid;
        } else {
          const uint32_t to = smem_address(shared.keys[slot]);
          mla::gather_row<kKeys, Tr::kBlocks>(to, row, k, valid, policy);
          if constexpr (Tr::kSeparateValues) {
            static_assert(Tr::kE == Tr::kD);
            mla::gather_row<kKeys, Tr::kValueBlocks>(to + Tr::kBlocks * (kKeys * 128), row,
                                                     static_cast<const char*>(p.v) + at, valid,
                                                     policy);
          }
          if (threadIdx.x % 8 == 0) shared.valid[slot][row] = valid ? kVisible : 0;
        }
      });
      ++next;
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void unpack() {
    if constexpr (kRecords) {
      const int tile = next - 1, slot = tile % Tr::kSlots;
      shared.records.unpack(smem_address(shared.keys[slot]), [&](int i, int row) {
        if (threadIdx.x % 8 == 0) shared.valid[slot][row] = is_valid[i] ? kVisible : 0;
      });
      if (is_mixed(tile)) {
        __syncwarp();
        zero_nonfinite_values(tile);
      }
    }
  }

  __device__ __forceinline__ void landed(int tile) const {
    if constexpr (!kRecords) {
      if (is_mixed(tile)) zero_nonfinite_values(tile);
    }
  }

  // Hides keys that the query of a row does not see.
  __device__ __forceinline__ void adjust(int tile, float (&s)[Tr::kLaneKeys]) const {
    if (!is_mixed(tile)) return;
    const CurrentSplit& x = shared.current;
    const int own = mla::lane_key<Tr>(), key = x.first_key + tile * kKeys + own;
    const QueryRange range(p, {key, x.split.batch, x.split.row},
                           mla::group_index() * Tr::kRows + mla::lane_row<Tr>());
    const uint8_t* const flags = shared.valid[tile % Tr::kSlots] + own;
#pragma unroll
    for (int i = 0; i < Tr::kLaneKeys; ++i) {
      if (!range.has(key + i)) {
        s[i] = -INFINITY;
      } else if (flags[i] & kNonfinite) {
        s[i] = NAN;
      }
    }
  }
  __device__ __forceinline__ void weigh(int, float (&)[Tr::kLaneKeys]) const {}

 private:
  static constexpr int kRowBytes = kRecords ? kMlaRecordBytes : Tr::kD * 2;

  __device__ static int lookup_row() { return mla::lookup_row<kKeys, Tr::kThreads>(); }
  // Whether some of several queries see the tile and others do not.
  __device__ bool is_mixed(int tile) const {
    const CurrentSplit& x = shared.current;
    return p.queries > 1 && !x.visible.seen_by_all(x.first_key + tile * kKeys, kKeys);
  }
  // Replaces values that are not finite by zeros, in this warp's rows of a tile.
  __device__ void zero_nonfinite_values(int tile) const {
    const int slot = tile % Tr::kSlots, lane = threadIdx.x % 32, chunk = lane % 8;
    mla::for_each_row<kKeys, Tr::kThreads>([&](int, int row) {
      const uint32_t at = smem_address(shared.keys[slot][Tr::kFirstValueBlock]) + row * 128 +
                          (chunk ^ row % 8) * 16;
      bool nonfinite = false;
#pragma unroll 1
      for (int b = 0; b < Tr::kValueBlocks; ++b) {
        nonfinite |= zero_nonfinite_chunk(at + b * (kKeys * 128));
      }
      const uint32_t lanes = __ballot_sync(~0u, nonfinite);
      if (chunk == 0 && (lanes >> lane & 0xff)) shared.valid[slot][row] |= kNonfinite;
    });
  }

  const Decode& p;
  PortableShared<Tr, kRecords>& shared;
  int tiles, next = 0;
  int page;       // of the row of the next tile that this lane looks up
  int64_t first;  // where the request's rows begin, in bytes
  // Whether the rows of the last loaded records are valid.
  bool is_valid[ceil_div(kKeys, Tr::kThreads / 8)];
};

// Writes the results of a group's rows, whose outputs are `o` and which are owned by lanes.
template <typename Tr, bool kRecords>
__device__ __forceinline__ void write_portable_results(
    const Decode& p, int group, const mla::PortableRow& state,
    const float (&o)[Tr::kRows / 16][Tr::kOutputs], PortableShared<Tr, kRecords>& shared) {
  const KvSplit split = shared.current.split;
  const int lane = thread_index() % 32, warp = uniform(thread_index() / 32 % 4);
  const auto row_index = [&](int row) {
    return p.row_index(split.batch, split.group, split.row + row);
  };
  const float total = mla::over_row<Tr>(state.sum, [](float a, float b) { return a + b; });
  if (lane < Tr::kWarpRows) {
    const int own = mla::lane_row<Tr>(), row = group * Tr::kRows + own;
    shared.factor[group][own] =
        split.row + row < p.rows
            ? finish_row(p, split, Tr::kHeads, row, row_index(row), state.running_max, total, true)
            : kUndefined;
  }
  mla::sync_group();
#pragma unroll
  for (int j = 0; j < Tr::kRows / 8; ++j) {
    const int own = j * 8 + lane / 4, row = group * Tr::kRows + own;
    if (split.row + row >= p.rows) continue;
    const float factor = shared.factor[group][own];
    const int index = row_index(row), column = warp * (Tr::kE / 4) + lane % 4 * 2;
    const auto store = [&](auto* to) {
#pragma unroll
      for (int i = 0; i < Tr::kOutputs; i += 4) {
        const float* const x = &o[j / 2][i + j % 2 * 2];
        store_pair(to + column + i * 2, scale_output(x[0], factor), scale_output(x[1], factor),
                   true);
      }
    };
    if (split.partial_index >= 0 || p.out_float) {
      store(float_row(p, split, Tr::kHeads, row, index));
    } else {
      store(static_cast<__nv_bfloat16*>(p.out) + int64_t{index} * Tr::kE);
    }
  }
}

template <typename Tr, bool kRecords>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_fwd_kernel(const __grid_constant__ Decode p) {
  static_assert(!kRecords || Tr::kD == 576);
  auto& shared = dynamic_shared<PortableShared<Tr, kRecords>>();
  CurrentSplit& current = shared.current;
  const int group = mla::group_index();
  initialise(shared.range);
  if (threadIdx.x == 0) current.index = -1;
  __syncthreads();
  launch_dependents();
  find_work_range<Tr::kThreads>(p, shared.scratch, shared.range);
#pragma unroll 1
  for (;;) {
    __syncthreads();  // the last split is finished
    if (threadIdx.x < 32) current.advance(p, shared.range, Tr::kHeads);
    __syncthreads();
    if (!current.exists) return;
    SplitLoader<Tr, kRecords> loader(p, shared);
    const int tiles = loader.tile_count();
    if (tiles > 0) {
      const KvSplit& split = current.split;
      mla::for_each_row<Tr::kHeads, Tr::kThreads>([&](int, int row) {
        const bool exists = split.row + row < p.rows;
        const int64_t index =
            p.row_index(split.batch, split.group, exists ? split.row + row : split.row);
        mla::gather_row<Tr::kHeads, Tr::kBlocks>(
            smem_address(shared.q), row, static_cast<const char*>(p.q) + index * (Tr::kD * 2),
            exists, l2_policy_evict_first());
      });
    }
    mla::PortableRow row;
    float o[Tr::kRows / 16][Tr::kOutputs];
    mla::attend_tiles<Tr>(shared, loader, tiles, group, p.scale,
                          p.exact_max ? 0.f : mla::kLazyMargin, row, o);
    write_portable_results<Tr, kRecords>(p, group, row, o, shared);
  }
}

}  // namespace jax_dsa::mqa_decode
