// The producer warpgroup of the dK and dV kernel of sparse attention. See bwd_dkv.cuh.
#pragma once

#include "common/tma.cuh"
#include "sparse_attention/bwd_plan.cuh"

namespace jax_dsa::sparse_attention {

// Returns the work item with number `index`.
__device__ inline DkvItem item_at(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                                  unsigned index) {
  const InversePlan plan = *inverse.plan;
  if (index >= plan.items) return {.done = true};
  const InverseItem item = inverse.items[index];
  const int pair = item.tile / inverse.key_tiles, before = item.part * plan.part_entries;
  const int count = inverse.counts[item.tile];
  return {.batch = pair / p.groups,
          .group = pair % p.groups,
          .key = item.tile % inverse.key_tiles * kTile,
          .entries = min(count - before, plan.part_entries),
          .first = inverse.starts[item.tile] + before,
          .part = item.part,
          .several = count > plan.part_entries,
          .parts_added = inverse.parts_added + int64_t{item.tile} * 8};
}

// Load warp: takes work items and issues the TMA loads of their steps.
template <typename Tr>
__device__ void load_steps(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                           const StepShape& shape, const CUtensorMap& q_map,
                           const CUtensorMap& k_map, const CUtensorMap& v_map,
                           const CUtensorMap& dout_map, DkvShared<Tr>& shared) {
  const int lane = thread_index() % 32;
  const int row_bytes = shape.heads * 128;
  RingPlace<Tr::kStages> ring = {0, 1};
  for (uint32_t parity = 1;; parity ^= 1) {
    unsigned index = 0;
    if (lane == 0) index = atomicAdd(&inverse.plan->next_item, 1u);
    const DkvItem item = item_at(p, inverse, __shfl_sync(~0u, index, 0));
    mbarrier_wait(&shared.item_free, parity);
    if (lane == 0) {
      shared.item = item;
      mbarrier_arrive(&shared.item_full);
      if (item.entries > 0) {
        mbarrier_arrive_expect(&shared.kv_full, (Tr::kDBlocks + Tr::kEBlocks) * kBlockBytes);
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.k[block], &k_map, &shared.kv_full, block * 64, item.group, item.key,
                   item.batch);
        }
        for (int block = 0; block < Tr::kEBlocks; ++block) {
          tma_load(shared.v[block], &v_map, &shared.kv_full, block * 64, item.group, item.key,
                   item.batch);
        }
      }
    }
    if (item.done) return;
    // A step after the last entry repeats that entry, so that all rows are finite.
    const auto query_of = [&](int step, int i) {
      const int entry = shape.steps_of_entry > 1 ? step / shape.steps_of_entry
                                                 : step * shape.entries + i;
      return inverse.queries[item.first + min(entry, item.entries - 1)];
    };
    const int steps = shape.steps(item.entries);
    int queries[2] = {}, next[2] = {};
    const auto fetch = [&](int step) {
      next[0] = query_of(step, lane);
      if (shape.entries > 32) next[1] = query_of(step, lane + 32);
    };
    if (steps > 0) fetch(0);
    for (int step = 0; step < steps; ++step) {
      const int at = ring.index;
      queries[0] = next[0], queries[1] = next[1];
      if (step + 1 < steps) fetch(step + 1);
      const int head = item.group * shape.heads * shape.steps_of_entry +
                       step % shape.steps_of_entry * shape.heads;
      mbarrier_wait(&shared.free[at], ring.parity);
      if (lane == 0) {
        mbarrier_arrive_expect(&shared.full[at],
                               shape.entries * row_bytes * (Tr::kDBlocks + Tr::kEBlocks));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int entry = lane + 32 * i;
        if (entry >= shape.entries) break;
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.q[at][block] + entry * row_bytes, &q_map, &shared.full[at], block * 64,
                   head, queries[i], item.batch);
        }
        for (int block = 0; block < Tr::kEBlocks; ++block) {
          tma_load(shared.dout[at][block] + entry * row_bytes, &dout_map, &shared.full[at],
                   block * 64, head, queries[i], item.batch);
        }
      }
      ring.advance();
    }
  }
}

// The other warps take steps in turn. They write what each row needs: lse, delta, and which keys it
// sees.
template <typename Tr>
__device__ void prepare_steps(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                              const float* delta, const StepShape& shape, DkvShared<Tr>& shared,
                              int warp) {
  const int lane = thread_index() % 32;
  RingPlace<Tr::kStages> ring = {0, 1};
  int turn = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.item_full, parity);
    const DkvItem item = shared.item;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.item_free);
    if (item.done) return;
    const int steps = shape.steps(item.entries);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const bool mine = turn == warp;
      turn = turn + 1 < Tr::kPrepareWarps ? turn + 1 : 0;
      if (!mine) continue;
      int query[2] = {};
      uint64_t keys[2] = {};
      bool all = shape.entries * shape.heads == kRows;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int entry = lane + 32 * i;
        if (entry >= shape.entries) continue;
        const int n = shape.steps_of_entry > 1 ? step / shape.steps_of_entry
                                               : step * shape.entries + entry;
        query[i] = inverse.queries[item.first + min(n, item.entries - 1)];
        if (n < item.entries) keys[i] = inverse.keys[item.first + n];
        all = all && keys[i] == ~uint64_t{0};
      }
      const bool hidden = !__all_sync(~0u, all);
      const int head = item.group * shape.heads * shape.steps_of_entry +
                       step % shape.steps_of_entry * shape.heads;
      float max_logit[2], log_sum[2], row_delta[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane + 32 * i, entry = row / shape.heads;
        const int first = __shfl_sync(~0u, query[0], entry % 32);
        const int second = __shfl_sync(~0u, query[1], entry % 32);
        const bool exists = entry < shape.entries;
        const int64_t at = (item.batch * p.queries + (entry < 32 ? first : second)) * p.heads +
                           head + row - entry * shape.heads;
        max_logit[i] = exists ? p.max_logit[at] : -INFINITY;
        log_sum[i] = exists ? p.log_sum[at] : 0.f;
        row_delta[i] = exists ? delta[at] : 0.f;
      }
      const int at = ring.index;
      mbarrier_wait(&shared.free[at], ring.parity);
      bool huge[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool empty = max_logit[i] == -INFINITY;
        huge[i] = fabsf(max_logit[i]) * kLog2E > kHugeRow && !empty;
        const float lse = huge[i] ? 0.f : (max_logit[i] + log_sum[i]) * kLog2E;
        shared.lse[at][lane + 32 * i] = empty ? INFINITY : lse;
        shared.delta[at][lane + 32 * i] = row_delta[i];
      }
      const bool any_huge = __any_sync(~0u, huge[0] || huge[1]);
      if (any_huge) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          shared.huge_rows[at][lane + 32 * i] =
              huge[i] ? HugeRow{max_logit[i], log_sum[i]} : HugeRow{0.f, 0.f};
        }
      }
      if (hidden) {
        uint64_t seen[2] = {};
        for (int entry = 0; entry < shape.entries; ++entry) {
          const uint64_t x = __shfl_sync(~0u, entry < 32 ? keys[0] : keys[1], entry % 32);
          const uint64_t columns = shared.entry_columns[entry];
          if (x >> lane & 1) seen[0] |= columns;
          if (x >> lane >> 32 & 1) seen[1] |= columns;
        }
        shared.seen[at][lane] = seen[0], shared.seen[at][lane + 32] = seen[1];
      }
      if (lane == 0) {
        shared.flags[at] = (hidden ? kSomeHidden : 0) | (any_huge ? kHugeRows : 0);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full[at]);
    }
  }
}

}  // namespace jax_dsa::sparse_attention
