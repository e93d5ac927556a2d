// Makes the unions of the lists of neighbouring queries. The blocks of a tile's queries are entered
// into a table of all blocks, or sorted if that is cheaper or if a query names a block twice.

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
  uint32_t repeated;      // whether a slot names a block that its query has named before
  SortedBlock blocks[1];  // `padded` of them. A table has two words in place of each
};

// Each CTA makes the union of one tile. `padded` is a power of two, at least the tile's capacity
// and the number of threads. If `table_shift` is not negative, the blocks are entered into tables
// with a place for each 2^table_shift rows of k, one after the other.
__global__ void __launch_bounds__(1024)
    union_kernel(const __grid_constant__ ListCall p, const __grid_constant__ TileLists lists,
                 int padded, int table_shift) {
  auto& shared = dynamic_shared<UnionShared>();
  SortedBlock* const blocks = shared.blocks;
  const ForcedBlocks forced(p);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int slots = p.lists.slots + forced.count();
  const int64_t index = blockIdx.x, list = index / lists.tiles;
  const int64_t batch = list / p.groups, group = list - batch * p.groups;
  const int64_t first_query = (index - list * lists.tiles) * lists.tile_queries;

  // Returns the block that a slot of a query names.
  const auto named = [&](int query, int slot) -> SortedBlock {
    if (first_query + query >= p.queries) return {SortedBlock::kNone};
    const int64_t at = batch * p.queries + first_query + query;
    const int64_t block = block_of(
        p.lists, forced, p.lists.indices + (at * p.groups + group) * p.lists.slots, at, slot);
    const int64_t row = first_key(p.lists, at) + block * p.lists.block_size;
    if (block < 0 || row < 0 || row >= key_end(p.lists, at, p.keys)) return {SortedBlock::kNone};
    return SortedBlock::of(row, query, slot >= p.lists.slots);
  };

  if (table_shift >= 0) {
    auto* const table = reinterpret_cast<uint32_t*>(blocks);
    const int places = 2 * padded / lists.words;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int own_chunks = ceil_div(places, threads);  // of 32 places, consecutive ones of a warp
    if (thread == 0) shared.repeated = 0;
    int entries = 0;  // of the tables before
    for (int64_t first = 0; first << table_shift < p.keys; first += places) {
      for (int i = thread; i < 2 * padded; i += threads) table[i] = 0;
      __syncthreads();
      // Enters `count` slots of each query, from slot `begin` on.
      const auto enter = [&](int begin, int count) {
        for (int i = thread; i < count * lists.tile_queries; i += threads) {
          const SortedBlock x = named(i / count, begin + i % count);
          const int64_t place = (x.row() >> table_shift) - first;
          if (!x.exists() || place < 0 || place >= places) continue;
          const uint32_t bit = 1u << x.query() % 32;
          const uint32_t before = atomicOr(&table[place * lists.words + x.query() / 32], bit);
          if (!x.forced() && (before & bit)) atomicOr(&shared.repeated, 1u);
        }
        __syncthreads();
      };
      enter(0, p.lists.slots);
      if (forced.count() > 0) enter(p.lists.slots, forced.count());
      if (shared.repeated) break;
      // Calls visit(place, exists, ballot of exists) for 32 places of the warp at a time.
      const auto for_places = [&](auto visit) {
#pragma unroll 1
        for (int i = 0; i < own_chunks; ++i) {
          const int place = (warp * own_chunks + i) * 32 + lane;
          uint32_t any = 0;
          for (int w = 0; place < places && w < lists.words; ++w) {
            any |= table[place * lists.words + w];
          }
          visit(place, any != 0, __ballot_sync(~0u, any != 0));
        }
      };
      int count = 0;
      for_places([&](int, bool, uint32_t all) { count += __popc(all); });
      if (lane == 0) shared.warp_sums[warp] = count;
      __syncthreads();
      int entry = entries;
      for (int w = 0; w < warps; ++w) {
        if (w < warp) entry += shared.warp_sums[w];
        entries += shared.warp_sums[w];
      }
      for_places([&](int place, bool exists, uint32_t all) {
        const int64_t to = index * lists.capacity + entry + __popc(all & ((1u << lane) - 1));
        entry += __popc(all);
        if (!exists) return;
        lists.rows[to] = static_cast<int>((first + place) << table_shift);
        for (int w = 0; w < lists.words; ++w) {
          lists.queries[to * lists.words + w] = table[place * lists.words + w];
        }
      });
      __syncthreads();
    }
    if (!shared.repeated) {
      if (thread == 0) lists.counts[index] = entries;
      return;
    }
  }

  for (int i = thread; i < padded; i += threads) {
    const int query = slots > 0 ? i / slots : 0;
    blocks[i] =
        i < lists.capacity ? named(query, i - query * slots) : SortedBlock{SortedBlock::kNone};
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
  // A table costs a read of all lists and of its places. Sorting costs more per block, the more
  // blocks there are: with 8192 of them it takes about ten times as long as one table.
  const int shift = p.lists.starts ? 0 : log2_of(p.lists.block_size);
  const int64_t tables = ceil_div(p.keys >> shift, int64_t{2 * padded / lists.words});
  const bool use_tables = tables > 0 && tables <= padded / 1024;
  return launch_blocks(union_kernel, tiles, threads, bytes, stream, p, lists, padded,
                       use_tables ? shift : -1);
}

}  // namespace sparse_attention

int64_t sparse_attention_fwd_workspace_bytes(const SparseAttentionFwdParams& p) {
  using namespace sparse_attention;
  const int queries = p.heads > 0 && sizes_fit(p) ? tile_queries(p, kTileRows) : 0;
  return queries > 0 ? kTileCounterBytes + tile_lists_bytes(p, queries) : 0;
}

}  // namespace jax_dsa
