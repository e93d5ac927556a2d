// What comes before and after the masked attention backward kernel, query by query.
#pragma once

#include "common/store_rows.cuh"
#include "masked_attention/bwd_plan.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kRowsThreads = 256;

// lse, delta = sum(out * dout) - dlse and `dead` of a step's 64 queries; sets dq to zero. A warp
// takes a query at a time.
template <DType kType>
__global__ void __launch_bounds__(kRowsThreads)
    rows_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
                const __grid_constant__ BwdWorkspace w, int64_t steps, int dq_dim,
                float lse_factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t number = blockIdx.x, pair = number / steps, step = number - pair * steps;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  for (int i = warp; i < kStepQueries; i += kRowsThreads / 32) {
    const int64_t query = step * kStepQueries + i;
    float lse = INFINITY, delta = 0.f;
    bool dead = false;
    if (query < p.queries) {
      const int64_t row = (batch * p.queries + query) * p.heads + head;
      lse = p.lse[row];
      dead = lse == -INFINITY;
      const auto* const out = static_cast<const uint16_t*>(p.out) + row * p.value_dim;
      const auto* const dout = static_cast<const uint16_t*>(p.dout) + row * p.value_dim;
      float sum = 0.f;
      for (int e = lane * 8; e < p.value_dim; e += 256) {
        uint32_t x[4], y[4];
        load_16_now<0>(out + e, true, x);
        load_16_now<0>(dout + e, true, y);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 a = unpack_16<kType>(x[j]), b = unpack_16<kType>(y[j]);
          sum += a.x * b.x + a.y * b.y;
        }
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      delta = dead ? 0.f : sum - p.dlse[row];
      lse = dead ? INFINITY : lse * lse_factor;
    }
    if (lane == 0) {
      w.lse[number * kStepQueries + i] = lse;
      w.delta[number * kStepQueries + i] = delta;
      dynamic_shared<bool[kStepQueries]>()[i] = dead;
    }
  }
  if (threadIdx.x < kMostParts * 4) w.added[number * (kMostParts * 4) + threadIdx.x] = 0;
  const float4 zero = {0.f, 0.f, 0.f, 0.f};
  auto* const dq = reinterpret_cast<float4*>(w.dq + number * kStepQueries * dq_dim);
  for (int i = threadIdx.x; i < kStepQueries * dq_dim / 4; i += kRowsThreads) dq[i] = zero;
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
