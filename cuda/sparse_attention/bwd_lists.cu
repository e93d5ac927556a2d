// What the backward kernels of sparse attention need before they run: delta and the inverse lists.

#include "common/launch.cuh"
#include "sparse_attention/bwd_inverse.cuh"
#include "sparse_attention/launch.h"

namespace jax_dsa {
namespace sparse_attention {
namespace {

// ---- delta --------------------------------------------------------------------------------------

inline constexpr int kDeltaThreads = 256;
inline constexpr int kDeltaLanes = 16;  // lanes that share a row
inline constexpr int kDeltaRounds = 4;  // rows of a lane, all of whose loads are in flight at once
inline constexpr int kDeltaRows = kDeltaThreads / kDeltaLanes * kDeltaRounds;  // of a CTA

// Writes delta [batch, queries, heads]. It is 0 for rows that see no key.
template <DType kType>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ SparseAttentionBwdParams p, float* delta) {
  const int lane = thread_index() % kDeltaLanes;
  const int64_t first = int64_t{blockIdx.x} * kDeltaRows + thread_index() / kDeltaLanes;
  const int64_t rows = p.batch * p.queries * p.heads;
  const auto row = [&](int i) { return first + i * (kDeltaThreads / kDeltaLanes); };
  float max_logit[kDeltaRounds], dlse[kDeltaRounds], sum[kDeltaRounds] = {};
#pragma unroll
  for (int i = 0; i < kDeltaRounds; ++i) {
    max_logit[i] = load_now(p.max_logit + row(i), row(i) < rows, 0.f);
    dlse[i] = load_now(p.dlse + row(i), row(i) < rows, 0.f);
  }
  for (int e = lane * 8; e < p.value_dim; e += kDeltaLanes * 8) {
    uint32_t x[kDeltaRounds][4], y[kDeltaRounds][4];
#pragma unroll
    for (int i = 0; i < kDeltaRounds; ++i) {
      const int64_t at = row(i) * p.value_dim + e;
      load_16_now<0>(static_cast<const uint16_t*>(p.out) + at, row(i) < rows, x[i]);
      load_16_now<0>(static_cast<const uint16_t*>(p.dout) + at, row(i) < rows, y[i]);
    }
#pragma unroll
    for (int i = 0; i < kDeltaRounds; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack_16<kType>(x[i][j]), b = unpack_16<kType>(y[i][j]);
        sum[i] += a.x * b.x + a.y * b.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDeltaRounds; ++i) {
#pragma unroll
    for (int d = kDeltaLanes / 2; d > 0; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    if (lane == 0 && row(i) < rows) {
      delta[row(i)] = max_logit[i] == -INFINITY ? 0.f : sum[i] - dlse[i];
    }
  }
}

// ---- inverse lists ------------------------------------------------------------------------------

// Visits the entries of all queries of a chunk. Without kFill it counts them, with kFill it writes
// them. Queries come in ascending order: the CTA finishes a tile of TileLists before the next one,
// and within a tile, a warp processes all queries that see a key tile.
template <bool kFill>
__global__ void __launch_bounds__(kInverseThreads)
    inverse_kernel(const __grid_constant__ SparseAttentionBwdParams p,
                   const __grid_constant__ TileLists unions,
                   const __grid_constant__ InverseLists inverse) {
  constexpr int kAtOnce = 8;  // entries of a union whose key tiles a warp looks up together
  auto& ends = dynamic_shared<int[kMaxTileQueries]>();
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int64_t pair = blockIdx.x / inverse.chunks, chunk = blockIdx.x % inverse.chunks;
  const int64_t first_tile = chunk * unions.tiles / inverse.chunks;
  const int64_t last_tile = (chunk + 1) * unions.tiles / inverse.chunks;
  int32_t* const cursors = inverse.cursors + int64_t{blockIdx.x} * inverse.key_tiles;
  const int block_size = p.lists.block_size;
  const int tile_keys = inverse.tile_keys, shift = tile_keys == kTile ? 6 : 7;

  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    const int64_t index = pair * unions.tiles + tile;
    const int32_t* const rows = unions.rows + index * unions.capacity;
    const uint32_t* const words = unions.queries + index * unions.capacity * unions.words;
    const int count = unions.counts[index];
    const int64_t first_query = tile * unions.tile_queries;
    __syncthreads();
    for (int i = thread_index(); i < unions.tile_queries; i += kInverseThreads) {
      ends[i] = first_query + i < p.queries
                    ? key_end(p.lists, pair / p.groups * p.queries + first_query + i, p.keys)
                    : 0;
    }
    __syncthreads();

    // Visits the entries of key tile `key_tile`, whose blocks start at entry `entry` of the union.
    const auto visit = [&](int entry, int key_tile) {
      const int first_key = key_tile << shift;
      for (int word = 0; word < unions.words; ++word) {
        const int i = word * 32 + lane, end = i < unions.tile_queries ? ends[i] : 0;
        // Calls emit(mask) for each entry of this lane's query but the last, whose mask it returns.
        const auto for_each_mask = [&](auto emit) {
          uint64_t mask = 0;
          for (int x = entry; x < count; ++x) {
            const int row = rows[x];
            if (row >= first_key + tile_keys) break;
            const int low = max(row - first_key, 0);
            const int high = min(min(row + block_size, end) - first_key, tile_keys);
            if (!(words[int64_t{x} * unions.words + word] >> lane & 1) || low >= high) continue;
            const uint64_t keys = tile_keys > kTile ? static_cast<uint64_t>(high)
                                                    : ~uint64_t{0} >> (kTile - high + low) << low;
            if (mask & keys) emit(mask), mask = 0;
            mask |= keys;
          }
          return mask;
        };
        int masks = 0;
        const uint64_t last_mask = for_each_mask([&](uint64_t) { ++masks; });
        const bool several = masks > 0;
        masks += last_mask != 0;
        const int sum = inclusive_scan(masks), all = __shfl_sync(~0u, sum, 31);
        if (all == 0) continue;
        int at = 0;
        if (lane == 0) at = atomicAdd(&cursors[key_tile], all);
        if constexpr (kFill) {
          at = __shfl_sync(~0u, at, 0) + sum - masks;
          int64_t to = inverse.starts[pair * inverse.key_tiles + key_tile] + at;
          const auto write = [&](uint64_t mask) {
            inverse.queries[to] = static_cast<int32_t>(first_query + i), inverse.keys[to] = mask;
            ++to;
          };
          if (several) for_each_mask(write);
          if (last_mask != 0) write(last_mask);
        }
      }
    };

    for (int base = warp * kAtOnce; base < count; base += kInverseThreads / 32 * kAtOnce) {
      // The key tiles of this lane's entry to which no earlier entry belongs.
      int first = 0, last = -1;
      if (lane < kAtOnce && base + lane < count) {
        const int row = rows[base + lane];
        first = row >> shift;
        last = min((row + block_size - 1) >> shift, inverse.key_tiles - 1);
        if (base + lane > 0)
          first = max(first, ((rows[base + lane - 1] + block_size - 1) >> shift) + 1);
      }
      for (uint32_t left = __ballot_sync(~0u, first <= last); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int stop = __shfl_sync(~0u, last, from);
        for (int i = __shfl_sync(~0u, first, from); i <= stop; ++i) visit(base + from, i);
      }
    }
  }
}

// Turns the counts of a key tile's chunks into places within its list. One thread per key tile.
__global__ void __launch_bounds__(kInverseThreads)
    chunk_sums_kernel(const __grid_constant__ InverseLists inverse) {
  const int64_t tile = int64_t{blockIdx.x} * kInverseThreads + thread_index();
  if (tile >= inverse.tiles) return;
  const int64_t pair = tile / inverse.key_tiles, key_tile = tile % inverse.key_tiles;
  int32_t* const cursors = inverse.cursors + pair * inverse.chunks * inverse.key_tiles + key_tile;
  constexpr int kAtOnce = 16;  // counts that are loaded together
  int sum = 0;
  for (int first = 0; first < inverse.chunks; first += kAtOnce) {
    int counts[kAtOnce];
    const auto at = [&](int i) { return cursors + int64_t{first + i} * inverse.key_tiles; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) counts[i] = first + i < inverse.chunks ? *at(i) : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < inverse.chunks) *at(i) = sum;
      sum += counts[i];
    }
  }
  inverse.counts[tile] = sum;
}

// One CTA finds where the lists start, and divides them into work items. A step of the main kernel
// has `step_entries` entries. There are up to `max_ranges` ranges of queries.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ InverseLists inverse, int step_entries, int max_ranges) {
  auto& warp_sums = dynamic_shared<int64_t[kPlanThreads / 32]>();
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  // Adds up value(tile) of all key tiles. Calls visit(tile, before) for each, where `before` is
  // `start` plus the sum of the tiles before it. Returns `start` plus the sum of all tiles. The
  // same thread has a tile in every call.
  const auto scan = [&](int64_t start, auto value, auto visit) {
    int64_t before = start;
    for (int64_t first = 0; first < inverse.tiles; first += kPlanThreads) {
      const int64_t tile = first + thread_index();
      const int64_t x = tile < inverse.tiles ? value(tile) : 0;
      const int64_t sum = inclusive_scan(x);
      if (lane == 31) warp_sums[warp] = sum;
      __syncthreads();
      int64_t earlier = before;
      for (int i = 0; i < kPlanThreads / 32; ++i) {
        if (i < warp) earlier += warp_sums[i];
        before += warp_sums[i];
      }
      if (tile < inverse.tiles) visit(tile, earlier + sum - x);
      __syncthreads();
    }
    return before;
  };

  const int64_t entries = scan(
      0, [&](int64_t tile) { return int64_t{inverse.counts[tile]}; },
      [&](int64_t tile, int64_t before) {
        inverse.starts[tile] = before;
        inverse.parts[tile] = 0;
        for (int i = 0; i < 8; ++i) inverse.parts_added[tile * 8 + i] = 0;
      });
  const int64_t most_parts = inverse.tiles < kParts ? kParts : kPartsOfManyTiles;
  const int64_t steps =
      max(ceil_div(ceil_div(entries, int64_t{step_entries}), most_parts), int64_t{kMinPartSteps});
  const int part_entries = static_cast<int>(steps * step_entries);
  const int64_t full_ranges = entries / (inverse.tiles * kMinRangeSteps * step_entries);
  const int ranges = static_cast<int>(max(min(full_ranges, int64_t{max_ranges}), int64_t{1}));
  // Returns the number of entries in the list of a key tile before a range.
  const auto entries_before = [&](int64_t tile, int range) {
    if (range == ranges) return inverse.counts[tile];
    const int64_t chunk =
        tile / inverse.key_tiles * inverse.chunks + int64_t{range} * inverse.chunks / ranges;
    return inverse.cursors[chunk * inverse.key_tiles + tile % inverse.key_tiles];
  };
  int64_t items = 0;
  for (int range = 0; range < ranges; ++range) {
    // A list without entries has an item in the first range, which writes zeros.
    const auto parts = [&](int64_t tile) {
      const int count = entries_before(tile, range + 1) - entries_before(tile, range);
      return ceil_div(count, part_entries) + (range == 0 && inverse.counts[tile] == 0);
    };
    items = scan(
        items, [&](int64_t tile) { return int64_t{parts(tile)}; },
        [&](int64_t tile, int64_t before) {
          const int count = inverse.counts[tile], number = parts(tile);
          const int end = entries_before(tile, range + 1), before_range = inverse.parts[tile];
          int first = entries_before(tile, range);
          for (int i = 0; i < number; ++i, first += part_entries) {
            const int own = min(end - first, part_entries);
            inverse.items[before + i] = {inverse.starts[tile] + first, static_cast<int32_t>(tile),
                                         before_range + i, own, own < count};
          }
          inverse.parts[tile] = before_range + number;
        });
  }
  if (thread_index() == 0) *inverse.plan = {0, static_cast<unsigned>(items)};
}

// Returns the number of ranges of queries of which the L2 cache holds q and dout of a KV head,
// beside other data.
int num_ranges(const SparseAttentionBwdParams& p, int64_t l2_bytes, int chunks) {
  const int64_t bytes = p.queries * (p.heads / p.groups) * (p.dim + p.value_dim) * 2;
  const int64_t most = std::min(kMaxRanges, chunks);
  return static_cast<int>(std::clamp(ceil_div(bytes, l2_bytes / 3 + 1), int64_t{1}, most));
}

}  // namespace

cudaError_t compute_delta(const SparseAttentionBwdParams& p, float* delta, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.batch * p.queries * p.heads, int64_t{kDeltaRows});
  return launch_blocks(
      p.dtype == DType::kBF16 ? delta_kernel<DType::kBF16> : delta_kernel<DType::kF16>, blocks,
      kDeltaThreads, 0, stream, p, delta);
}

cudaError_t build_inverse_lists(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                                int step_entries, cudaStream_t stream) {
  const InverseLists& inverse = w.inverse;
  const int64_t blocks = p.batch * p.groups * inverse.chunks;
  if (blocks > INT32_MAX || inverse.tiles > (INT32_MAX - kParts) / kMaxRanges)
    return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  DSA_RETURN_IF_CUDA_ERROR(clear(inverse.cursors, inverse.tiles * inverse.chunks * 4, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(inverse_kernel<false>, blocks, kInverseThreads,
                                         kMaxTileQueries * 4, stream, p, w.unions, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(chunk_sums_kernel,
                                         ceil_div(inverse.tiles, int64_t{kInverseThreads}),
                                         kInverseThreads, 0, stream, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(plan_kernel, 1, kPlanThreads, kPlanThreads / 32 * 8,
                                         stream, inverse, step_entries,
                                         num_ranges(p, device.l2_bytes, inverse.chunks)));
  return launch_blocks(inverse_kernel<true>, blocks, kInverseThreads, kMaxTileQueries * 4, stream,
                       p, w.unions, inverse);
}

}  // namespace sparse_attention

int64_t sparse_attention_bwd_workspace_bytes(const SparseAttentionBwdParams& p) {
  using namespace sparse_attention;
  const int queries = p.heads > 0 && sizes_fit(p) ? tile_queries(p, kTileRows) : 0;
  // Tiles of 64 keys need at least as much as larger ones.
  return queries == 0 ? 0 : BwdWorkspace(p, queries, kTile).bytes;
}

}  // namespace jax_dsa
