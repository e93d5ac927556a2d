// Which queries meet a block: marks in a bitmap, which are counted, and then every query of a block
// knows its place in the block's list. Nothing depends on the order in which threads come.
#pragma once

#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

inline constexpr int kVisitThreads = 128;

// A query a thread block. First marks the blocks that it meets; in a second run, with kWrites, puts
// the meetings where they belong.
template <int kR, bool kWrites>
__global__ void __launch_bounds__(kVisitThreads) visit_kernel(const __grid_constant__ BwdPlan x) {
  constexpr uint32_t kAll = kR == 32 ? ~0u : (1u << kR) - 1;
  const Plan& plan = x.plan;
  const HTreeFwdParams& p = plan.p;
  const QueryChunk& chunk = plan.chunk;
  const int64_t row = blockIdx.x, bg = row / chunk.queries;
  const int query = static_cast<int>(row % chunk.queries);
  const int64_t token = (chunk.first_batch + bg / p.groups) * p.queries + chunk.first_query + query;
  const int position = __ldg(p.positions + token);
  for (int layer = 0; layer < plan.layers.count; ++layer) {
    const BlockList blocks = BlockList::of<kR>(plan, position, row, layer);
    const int n = candidates<kR>(plan, position, layer);
    const uint32_t* const masks = chunk.masks + ((layer - 1) * chunk.rows + row) * p.top_k;
    for (int i = threadIdx.x; i < blocks.count; i += kVisitThreads) {
      const int place = blocks[i];
      if (place == INT_MAX) break;  // no selection that is whole has that
      const int left = (layer ? n - 1 : n) - kR * i;
      uint32_t masked = layer ? masks[i] : 0;
      if (left < kR) masked |= ~0u << left;
      if ((masked & kAll) == kAll) continue;
      const int64_t list = bg * plan.layers.blocks + plan.layers.first[layer] + place;
      const int64_t word = list * x.words + query / 32;
      const uint32_t bit = 1u << query % 32;
      if constexpr (!kWrites) {
        atomicOr(&x.marks[word], bit);
      } else {
        const uint32_t rotation = blocks.list == nullptr ? n - 1 : n - 1 - kR * i;
        const int64_t at =
            x.starts[list] + x.marks_before[word] + __popc(x.marks[word] & (bit - 1));
        for (int head_tile = 0; head_tile < plan.head_tiles; ++head_tile) {
          const uint32_t record = query * plan.head_tiles + head_tile;
          x.visits[at * plan.head_tiles + head_tile] = {record | rotation << 16, masked};
        }
      }
    }
  }
}

inline constexpr int kCountThreads = 256;
inline constexpr int kScheduleThreads = 1024;

// A list a warp.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ BwdPlan x) {
  const int64_t list = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (list >= x.lists()) return;
  int before = 0;
  for (int first = 0; first < x.words; first += 32) {
    const int word = first + lane;
    const int marks = word < x.words ? __popc(x.marks[list * x.words + word]) : 0;
    const int sum = inclusive_scan(marks);
    if (word < x.words) x.marks_before[list * x.words + word] = before + sum - marks;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) x.counts[list] = before;
}

// Starts of the lists, and their segments as items; by one thread block.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ BwdPlan x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto& sums = dynamic_shared<int[kThreads / 32]>();
  // What the threads before this one have; adds that of all to `total`.
  const auto scan = [&](int mine, int& total) {
    const int sum = inclusive_scan(mine);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = total + sum - mine;
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
    __syncthreads();
    return before;
  };
  const int lists = static_cast<int>(x.lists());
  const auto has_segment = [&](int list, int segment) {
    return int64_t{x.counts[list]} * x.plan.head_tiles > int64_t{segment} * kSegment;
  };
  int visits = 0, work_tiles = 0;
  for (int first = 0; first < lists; first += kThreads) {
    const int list = first + threadIdx.x;
    const int start = scan(list < lists ? x.counts[list] : 0, visits);
    if (list < lists) x.starts[list] = start;
    const bool has = list < lists && has_segment(list, 0);
    const int at = scan(has, work_tiles);
    if (has) x.work_tiles[at] = {list, 0};
  }
  for (int segment = 1, begin = 0; begin < work_tiles;
       ++segment) {  // of the lists of the last items
    const int end = work_tiles;
    __syncthreads();  // they are written
    for (int first = begin; first < end; first += kThreads) {
      const int i = first + threadIdx.x;
      const int list = i < end ? x.work_tiles[i].list : 0;
      const bool has = i < end && has_segment(list, segment);
      const int at = scan(has, work_tiles);
      if (has) x.work_tiles[at] = {list, segment};
    }
    begin = end;
  }
  if (threadIdx.x == 0) x.tile_counter[1] = work_tiles;
}

}  // namespace jax_dsa::htree
