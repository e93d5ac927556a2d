// The producer warpgroup of the dK and dV kernel of sparse attention. See bwd_dkv.cuh.
#pragma once

#include "common/tma.cuh"
#include "sparse_attention/bwd_plan.cuh"

namespace jax_dsa::sparse_attention {

// Returns the work item with number `index`.
template <typename Tr>
__device__ DkvItem item_at(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                           const StepShape& shape, const InversePlan& plan, unsigned index) {
  if (index >= plan.items) return {.done = true};
  const InverseItem item = inverse.items[index];
  const int pair = item.tile / inverse.key_tiles;
  return {.batch = pair / p.groups,
          .group = pair % p.groups,
          .key = item.tile % inverse.key_tiles * Tr::kKeys,
          .steps = shape.steps(item.entries),
          .entries = item.entries,
          .first = item.first,
          .part = item.part,
          .several = item.several,
          .parts_added = inverse.parts_added + int64_t{item.tile} * 8};
}

// Shares a work item with all warps, and loads K and V. One thread calls this.
template <typename Tr>
__device__ void share_item(const DkvItem& item, const CUtensorMap& k_map, const CUtensorMap& v_map,
                           DkvShared<Tr>& shared, uint32_t parity) {
  mbarrier_wait(&shared.item_free, parity ^ 1);
  shared.item = item;
  mbarrier_arrive(&shared.item_full);
  if (item.steps == 0) {
    mbarrier_arrive(&shared.kv_full);
    return;
  }
  mbarrier_arrive_expect(&shared.kv_full, (Tr::kDBlocks + Tr::kEBlocks) * Tr::kKeyBlockBytes);
  for (int block = 0; block < Tr::kDBlocks; ++block) {
    tma_load(shared.k[block], &k_map, &shared.kv_full, block * 64, item.group, item.key,
             item.batch);
  }
  for (int block = 0; block < Tr::kEBlocks; ++block) {
    tma_load(shared.v[block], &v_map, &shared.kv_full, block * 64, item.group, item.key,
             item.batch);
  }
}

// What the MMA warpgroups need to know of the rows of a step. A lane has two rows and two entries.
struct StepRows {
  float max_logit[2], log_sum[2], delta[2];
  uint64_t keys[2];  // the keys that the entries see, as in InverseLists

  // Loads it. `begin` is the first entry of the step within the item, and `first_row` is the row of
  // q of the batch entry's first query.
  template <typename Tr>
  __device__ StepRows(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                      const float* delta_of, const StepShape& shape, const DkvShared<Tr>& shared,
                      const DkvItem& item, int begin, int first_row) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i, own = row < Tr::kRows ? shared.entry_of_row[row] : Tr::kRows;
      const int n = begin + own;
      const bool exists = own < shape.entries && n < item.entries;
      const int query = load_now(inverse.queries + item.first + n, exists, 0);
      const int at = first_row + query * p.heads + row - own * shape.heads;
      max_logit[i] = load_now(p.max_logit + at, exists, -INFINITY);
      log_sum[i] = load_now(p.log_sum + at, exists, 0.f);
      delta[i] = load_now(delta_of + at, exists, 0.f);
      const bool listed = row < shape.entries && begin + row < item.entries;
      uint32_t x[2];
      load_8_now(inverse.keys + item.first + begin + row, listed, x);
      keys[i] = uint64_t{x[1]} << 32 | x[0];
    }
  }

  // Writes it to the stage `at`.
  template <typename Tr>
  __device__ void store(const StepShape& shape, DkvShared<Tr>& shared, int at) const {
    const int lane = thread_index() % 32;
    HugeRow huge_rows[2];
    bool any_huge = false, all = shape.entries * shape.heads == Tr::kRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      const RowLse lse(max_logit[i], log_sum[i]);
      if (row < Tr::kRows) {
        shared.lse[at][row] = lse.log2, shared.delta[at][row] = delta[i];
      }
      all = all && (row >= shape.entries || keys[i] == Tr::kAllSeen);
      huge_rows[i] = lse.huge;
      any_huge = any_huge || lse.is_huge;
    }
    any_huge = __any_sync(~0u, any_huge);
    const bool hidden = !__all_sync(~0u, all);
    if (any_huge) {
      for (int i = 0; i < 2; ++i) {
        if (lane + 32 * i < Tr::kRows) shared.huge_rows[at][lane + 32 * i] = huge_rows[i];
      }
    }
    if (hidden) {
      uint64_t seen[Tr::kKeys / 32] = {};  // of keys lane + 32 i
#pragma unroll 1
      for (int entry = 0; entry < shape.entries; ++entry) {
        const uint64_t x = __shfl_sync(~0u, entry < 32 ? keys[0] : keys[1], entry % 32);
        const uint64_t columns = shared.entry_columns[entry];
#pragma unroll
        for (int i = 0; i < Tr::kKeys / 32; ++i) {
          if (Tr::sees(x, lane + 32 * i)) seen[i] |= columns;
        }
      }
#pragma unroll
      for (int i = 0; i < Tr::kKeys / 32; ++i) shared.seen[at][lane + 32 * i] = seen[i];
    }
    if (lane == 0) shared.flags[at] = (hidden ? kSomeHidden : 0) | (any_huge ? kHugeRows : 0);
  }
};

// All warps copy the rows of q and dout of all steps, with cp.async: a TMA box has the rows of one
// query only, and many small boxes are slow. The warps take turns in preparing the rest of what the
// MMA warpgroups need.
template <typename Tr>
__device__ void produce(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                        const float* delta, const StepShape& shape, const CUtensorMap& k_map,
                        const CUtensorMap& v_map, DkvShared<Tr>& shared) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  // Eight lanes copy a row, each one 16-byte chunk of each block. A thread has every 16th row.
  constexpr int kOwnRows = Tr::kRows / 16;
  const int own_row = warp * 4 + sub;
  const uint32_t offset = own_row * 128 + (chunk ^ own_row % 8) * 16;
  RingPlace<Tr::kStages> ring = {0, 1};
  const bool scheduler = warp == 0 && lane == 0;
  const InversePlan plan = *inverse.plan;
  unsigned index = 0;
  if (scheduler) index = atomicAdd(&inverse.plan->next_item, 1u);
  int turn = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    if (scheduler) {
      share_item(item_at<Tr>(p, inverse, shape, plan, index), k_map, v_map, shared, parity);
      index = atomicAdd(&inverse.plan->next_item, 1u);  // of the next item, long before its use
    }
    __syncwarp();
    mbarrier_wait(&shared.item_full, parity);
    const DkvItem item = shared.item;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.item_free);
    if (item.done) return;
    const int first_row =
        static_cast<int>(item.batch * p.queries * p.heads) + item.group * shape.heads;
    int next[kOwnRows] = {};  // the queries of this thread's rows in the next step, or -1
    const auto fetch = [&](int step) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const int own = shared.entry_of_row[own_row + 16 * i];
        const int n = step * shape.entries + own;
        next[i] =
            load_now(inverse.queries + item.first + n, own < shape.entries && n < item.entries, -1);
      }
    };
    if (item.steps > 0) fetch(0);
#pragma unroll 1
    for (int step = 0; step < item.steps; ++step) {
      const int at = ring.index;
      int rows[kOwnRows];  // rows of q and dout
      bool valid[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const int row = own_row + 16 * i;
        valid[i] = next[i] >= 0;
        rows[i] = first_row + next[i] * p.heads + row - shared.entry_of_row[row] * shape.heads;
      }
      if (step + 1 < item.steps) fetch(step + 1);
      const auto copy = [&]<int kBlocks>(const void* x, int dim,
                                         uint8_t (&to)[kBlocks][Tr::kRowsBytes]) {
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const char* const from =
              static_cast<const char*>(x) + int64_t{rows[i]} * (dim * 2) + chunk * 16;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            cp_async_16(whole_sum(smem_address(to), offset) + block * Tr::kRowsBytes + i * 2048,
                        from + block * 128, valid[i] && block * 64 + chunk * 8 < dim, keep);
          }
        }
      };
      const auto copy_all = [&] {
        mbarrier_wait(&shared.free[at], ring.parity);
        copy(p.q, p.dim, shared.q[at]);
        copy(p.dout, p.value_dim, shared.dout[at]);
        cp_async_arrive(&shared.full[at]);
      };
      if (turn == warp) {
        const StepRows own(p, inverse, delta, shape, shared, item, step * shape.entries, first_row);
        copy_all();
        own.store(shape, shared, at);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.full[at]);
      } else {
        copy_all();
      }
      turn = (turn + 1) % 4;
      ring.advance();
    }
  }
}

}  // namespace jax_dsa::sparse_attention
