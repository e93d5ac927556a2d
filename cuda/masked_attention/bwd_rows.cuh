// What comes before and after the masked attention backward kernel, query by query.
#pragma once

#include "common/store_rows.cuh"
#include "masked_attention/bwd_plan.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kRowsThreads = 256;

// lse, delta = sum(out * dout) - dlse and `dead` of a step's 64 queries; sets dq to zero, and the
// ticket. 16 lanes take a query, all of its step's at once: it takes many loads under way to hide
// their latency.
template <DType kType>
__global__ void __launch_bounds__(kRowsThreads)
    rows_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
                const __grid_constant__ BwdWorkspace w, int64_t steps, int dq_dim,
                float lse_factor) {
  constexpr int kAtOnce = kRowsThreads / 16, kRounds = kStepQueries / kAtOnce;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % 16;
  const int64_t number = blockIdx.x, pair = number / steps, step = number - pair * steps;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  const int64_t first = step * kStepQueries + threadIdx.x / 16;
  const auto row = [&](int round) {
    return (batch * p.queries + first + round * kAtOnce) * p.heads + head;
  };
  const auto there = [&](int round) { return first + round * kAtOnce < p.queries; };

  if (number == 0 && threadIdx.x == 0) *w.ticket = 0;
  float lse[kRounds], dlse[kRounds], sum[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    lse[i] = load_now(p.lse + row(i), there(i), INFINITY);
    dlse[i] = load_now(p.dlse + row(i), there(i), 0.f);
  }
  for (int e = part * 8; e < p.value_dim; e += 128) {
    uint32_t x[kRounds][4], y[kRounds][4];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int64_t at = row(i) * p.value_dim + e;
      load_16_now<0>(static_cast<const uint16_t*>(p.out) + at, there(i), x[i]);
      load_16_now<0>(static_cast<const uint16_t*>(p.dout) + at, there(i), y[i]);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack_16<kType>(x[i][j]), b = unpack_16<kType>(y[i][j]);
        sum[i] += a.x * b.x + a.y * b.y;
      }
    }
  }
  if (threadIdx.x < kMostParts * 4) w.added[number * (kMostParts * 4) + threadIdx.x] = 0;
  const float4 zero = {0.f, 0.f, 0.f, 0.f};
  auto* const dq = reinterpret_cast<float4*>(w.dq + number * kStepQueries * dq_dim);
  for (int i = threadIdx.x; i < kStepQueries * dq_dim / 4; i += kRowsThreads) dq[i] = zero;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int d = 8; d > 0; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    const int query = threadIdx.x / 16 + i * kAtOnce;
    const bool dead = lse[i] == -INFINITY;
    if (part == 0) {
      w.lse[number * kStepQueries + query] = there(i) && !dead ? lse[i] * lse_factor : INFINITY;
      w.delta[number * kStepQueries + query] = there(i) && !dead ? sum[i] - dlse[i] : 0.f;
      dynamic_shared<bool[kStepQueries]>()[query] = dead;
    }
  }
  __syncthreads();
  if (warp > 0) return;
  const auto& all = dynamic_shared<bool[kStepQueries]>();
  const uint64_t low = __ballot_sync(~0u, all[lane]), high = __ballot_sync(~0u, all[lane + 32]);
  if (lane == 0) w.dead[number] = high << 32 | low;
}

// dq has the accumulators of a step's parts one after the other: of each, four floats of all 128
// threads side by side. `part` counts those of all steps.
template <int kN>
__device__ __forceinline__ float* dq_place(float* dq, int64_t part) {
  return dq + part * (kN * 128) + threadIdx.x % 128 * 4;
}

// Adds a thread's accumulators of a part.
template <int kN>
__device__ __forceinline__ void add_dq(const float (&x)[kN], float* dq, int64_t part) {
  float* const sum = dq_place<kN>(dq, part);
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    red_add(sum + i * 128, x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

// In deterministic sums each warp adds its share of a part when those of all items before have
// added theirs. That it has added is counted late, since waiting for its reductions takes long.
template <typename Tr>
__device__ __forceinline__ void count_added(BwdShared<Tr>& shared) {
  uint32_t*& counter = shared.adding[thread_index() >> 5];
  __syncwarp();
  if ((thread_index() & 31) == 0 && counter) {
    counter_add(counter);
    counter = nullptr;
  }
}
template <typename Tr>
__device__ __forceinline__ void wait_for_turn(const BwdWorkspace& w, BwdShared<Tr>& shared,
                                              int64_t step, int part, uint32_t turn) {
  uint32_t* const counter = w.added + (step * kMostParts + part) * 4 + (thread_index() >> 5 & 3);
  count_added(shared);
  counter_wait(counter, turn);
  __syncwarp();
  if ((thread_index() & 31) == 0) shared.adding[thread_index() >> 5] = counter;
}

// Stores a warp's rows of dk and dv of an item's keys: the columns from dk_column and dv_column on.
// `row` is the thread's, `rows` how many keys an item has.
template <DType kType, int kK, int kV>
__device__ __forceinline__ void store_keys(const MaskedAttentionBwdParams& p, const BwdItem& item,
                                           const float (&dk)[kK], const float (&dv)[kV], int row,
                                           int rows, int dk_column, int dv_column, uint8_t* stage) {
  const int64_t at = (int64_t{item.batch} * p.keys + item.key + row) * p.groups + item.group;
  const int rows_left = static_cast<int>(min(p.keys - item.key, int64_t{rows})) - row;
  const float dk_factor[2] = {item.some ? p.scale : 0.f, item.some ? p.scale : 0.f};
  const float dv_factor[2] = {item.some ? 1.f : 0.f, item.some ? 1.f : 0.f};
  store_rows<kType>(dk, dk_factor, smem_address(stage),
                    static_cast<uint16_t*>(p.dk) + at * p.dim + dk_column,
                    int64_t{p.groups} * p.dim, rows_left, p.dim - dk_column);
  store_rows<kType>(dv, dv_factor, smem_address(stage),
                    static_cast<uint16_t*>(p.dv) + at * p.value_dim + dv_column,
                    int64_t{p.groups} * p.value_dim, rows_left, p.value_dim - dv_column);
}

// A multiplying warp's way through the items: `step(accumulate)` does a step and tells whether it
// was its item's last, `store(item)` stores what came of them.
template <typename Tr, typename Step, typename Store>
__device__ __forceinline__ void walk_items(BwdShared<Tr>& shared, Step step, Store store) {
  uint32_t kv_parity = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.item_full, parity);
    if (shared.item.over) return;
    if (shared.item.some) {
      mbarrier_wait(&shared.kv_full, kv_parity);
      mbarrier_wait(&shared.kv_clean, kv_parity);
      kv_parity ^= 1;
      for (bool accumulate = false; !step(accumulate);) accumulate = true;
    }
    const BwdItem item = shared.item;
    __syncwarp();
    if ((thread_index() & 31) == 0) mbarrier_arrive(&shared.kv_free);
    store(item);
  }
}

// dq of a step's 64 queries, scaled and rounded.
template <DType kType, int kParts, int kPartColumns>
__global__ void __launch_bounds__(128 * kParts)
    dq_kernel(const __grid_constant__ MaskedAttentionBwdParams p, float* dq, int64_t steps) {
  constexpr int kN = kPartColumns / 2;  // of a thread
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, part = threadIdx.x / 128;
  const int64_t number = blockIdx.x, pair = number / steps, step = number - pair * steps;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  const float* const from = dq_place<kN>(dq, number * kParts + part);
  float x[kN];
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(from + i * 128));
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
  const int64_t query = step * kStepQueries + warp * 16 + lane / 4;
  const int64_t row = (batch * p.queries + query) * p.heads + head;
  const int rows_left =
      static_cast<int>(min(p.queries - step * kStepQueries, int64_t{kStepQueries})) -
      (warp * 16 + lane / 4);
  const float factor[2] = {p.scale, p.scale};
  auto& stage = dynamic_shared<uint8_t[4 * kParts][1024]>();
  store_rows<kType>(x, factor, smem_address(stage[threadIdx.x / 32]),
                    static_cast<uint16_t*>(p.dq) + row * p.dim + part * kPartColumns,
                    int64_t{p.heads} * p.dim, rows_left, p.dim - part * kPartColumns);
}

}  // namespace jax_dsa::masked_attention
