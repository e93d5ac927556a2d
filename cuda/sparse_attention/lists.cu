// Makes the unions of the lists of neighbouring queries: sorts the blocks of all queries of a tile.

#include "common/launch.cuh"
#include "sparse_attention/launch.h"
#include "sparse_attention/lists.cuh"

namespace jax_dsa {
namespace sparse_attention {
namespace {

// A block of a query as a number whose order is that of rows, then queries, then forced blocks
// after those of slots.
struct SortedBlock {
  uint64_t bits;

  static constexpr uint64_t kNone = ~uint64_t{0};
  __device__ static SortedBlock of(int64_t row, int query, bool forced) {
    return {static_cast<uint64_t>(row) << 8 | query << 1 | static_cast<int>(forced)};
  }
  __device__ bool exists() const { return bits != kNone; }
  __device__ int row() const { return static_cast<int>(bits >> 8); }
  __device__ int query() const { return static_cast<int>(bits >> 1 & 127); }
  __device__ bool forced() const { return bits & 1; }
  __device__ bool same_row(SortedBlock x) const { return bits >> 8 == x.bits >> 8; }
  __device__ bool same_query(SortedBlock x) const { return bits >> 1 == x.bits >> 1; }
};
static_assert(kMaxTileQueries <= 128);

struct UnionShared {
  int warp_sums[32];
  SortedBlock blocks[1];  // `padded` of them
};

// Each CTA makes the union of one tile. `padded` is a power of two, at least the tile's capacity
// and the number of threads.
__global__ void __launch_bounds__(1024)
    union_kernel(const __grid_constant__ ListCall p, const __grid_constant__ TileLists lists,
                 int padded) {
  auto& shared = dynamic_shared<UnionShared>();
  SortedBlock* const blocks = shared.blocks;
  const ForcedBlocks forced(p);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int slots = p.lists.slots + forced.count();
  const int64_t index = blockIdx.x, list = index / lists.tiles;
  const int64_t batch = list / p.groups, group = list - batch * p.groups;
  const int64_t first_query = (index - list * lists.tiles) * lists.tile_queries;

  for (int i = thread; i < padded; i += threads) {
    SortedBlock x = {SortedBlock::kNone};
    const int query = slots > 0 ? i / slots : 0, slot = i - query * slots;
    if (i < lists.capacity && first_query + query < p.queries) {
      const int64_t at = batch * p.queries + first_query + query;
      const int64_t block = block_of(
          p.lists, forced, p.lists.indices + (at * p.groups + group) * p.lists.slots, at, slot);
      const int64_t row = first_key(p.lists, at) + block * p.lists.block_size;
      if (block >= 0 && row >= 0 && row < key_end(p.lists, at, p.keys)) {
        x = SortedBlock::of(row, query, slot >= p.lists.slots);
      }
    }
    blocks[i] = x;
  }
  __syncthreads();
  for (int run = 2; run <= padded; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int i = thread; i < padded / 2; i += threads) {
        const int low = 2 * i - (i & (apart - 1)), high = low + apart;
        const SortedBlock x = blocks[low], y = blocks[high];
        if ((x.bits > y.bits) == ((low & run) == 0)) blocks[low] = y, blocks[high] = x;
      }
      __syncthreads();
    }
  }

  // A block becomes an entry if it is the first of its row, or if its query has named it before. A
  // forced block that its query has named does not count.
  const int run = padded / threads, begin = thread * run;
  const auto repeated = [&](int i) { return i > 0 && blocks[i].same_query(blocks[i - 1]); };
  const auto is_first = [&](int i) { return i == 0 || !blocks[i].same_row(blocks[i - 1]); };
  const auto is_entry = [&](int i) {
    return blocks[i].exists() && (is_first(i) || (repeated(i) && !blocks[i].forced()));
  };
  int count = 0;
  for (int i = begin; i < begin + run; ++i) count += is_entry(i);
  const int sum = inclusive_scan(count);
  if (thread % 32 == 31) shared.warp_sums[thread / 32] = sum;
  __syncthreads();
  int entry = sum - count, total = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w < thread / 32) entry += shared.warp_sums[w];
    total += shared.warp_sums[w];
  }
  if (thread == 0) lists.counts[index] = total;
  for (int i = begin; i < begin + run; ++i) {
    if (!is_entry(i)) continue;
    const int64_t to = index * lists.capacity + entry;
    lists.rows[to] = blocks[i].row();
    for (int w = 0; w < lists.words; ++w) {
      uint32_t bits = 0;
      const auto add = [&](int query) {
        if (query / 32 == w) bits |= 1u << query % 32;
      };
      add(blocks[i].query());
      for (int j = i + 1; is_first(i) && j < padded && blocks[j].same_row(blocks[i]); ++j) {
        add(blocks[j].query());
      }
      lists.queries[to * lists.words + w] = bits;
    }
    ++entry;
  }
}

}  // namespace

cudaError_t make_unions(const ListCall& p, const TileLists& lists, cudaStream_t stream) {
  const int64_t tiles = p.batch * p.groups * lists.tiles;
  if (tiles > INT32_MAX || lists.capacity > kMaxTileEntries) return cudaErrorInvalidValue;
  int padded = 32;
  while (padded < lists.capacity) padded *= 2;
  const int threads = std::min(padded, padded <= 512 ? 128 : 1024);
  const int bytes = static_cast<int>(sizeof(UnionShared) + padded * sizeof(SortedBlock));
  return launch_blocks(union_kernel, tiles, threads, bytes, stream, p, lists, padded);
}

}  // namespace sparse_attention

int64_t sparse_attention_fwd_workspace_bytes(const SparseAttentionFwdParams& p) {
  using namespace sparse_attention;
  const int queries = p.heads > 0 && sizes_fit(p) ? tile_queries(p, kTileRows) : 0;
  return queries > 0 ? kTileCounterBytes + tile_lists_bytes(p, queries) : 0;
}

}  // namespace jax_dsa
