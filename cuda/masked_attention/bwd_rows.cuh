// Row-wise kernels before and after the masked attention backward kernel, and the functions of the
// main kernel that access their arrays.
#pragma once

#include "common/store_rows.cuh"
#include "masked_attention/bwd_plan.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kRowsThreads = 256;

struct RowsShared {
  bool fully_masked[kStepQueries], huge[kStepQueries];
};

// Computes lse, delta = rowsum(O * dO) - dlse, the bits of fully masked queries and the huge rows
// of one step per CTA. Also clears dQ and the tile counter. 16 lanes share a query, and all 64
// queries are in flight at once, because hiding the latency takes many outstanding loads.
template <DType kType>
static __global__ void __launch_bounds__(kRowsThreads)
    rows_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
                const __grid_constant__ BwdWorkspace w, int64_t steps, int dq_dim,
                float lse_factor) {
  constexpr int kRowsPerRound = kRowsThreads / 16, kRounds = kStepQueries / kRowsPerRound;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group_lane = threadIdx.x % 16;
  const int64_t index = blockIdx.x, pair = index / steps, step = index - pair * steps;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  const int64_t first = step * kStepQueries + threadIdx.x / 16;
  const auto row = [&](int round) {
    return (batch * p.queries + first + round * kRowsPerRound) * p.heads + head;
  };
  const auto exists = [&](int round) { return first + round * kRowsPerRound < p.queries; };

  if (index == 0 && threadIdx.x == 0) *w.tile_counter = 0;
  float max_logit[kRounds], log_sum[kRounds], dlse[kRounds], sum[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    max_logit[i] = load_now(p.max_logit + row(i), exists(i), 0.f);
    log_sum[i] = load_now(p.log_sum + row(i), exists(i), INFINITY);
    dlse[i] = load_now(p.dlse + row(i), exists(i), 0.f);
  }
  for (int e = group_lane * 8; e < p.value_dim; e += 128) {
    uint32_t x[kRounds][4], y[kRounds][4];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int64_t at = row(i) * p.value_dim + e;
      load_16_now<0>(static_cast<const uint16_t*>(p.out) + at, exists(i), x[i]);
      load_16_now<0>(static_cast<const uint16_t*>(p.dout) + at, exists(i), y[i]);
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
  if (threadIdx.x < kMaxDqSlices * 4) w.add_counts[index * (kMaxDqSlices * 4) + threadIdx.x] = 0;
  const float4 zero = {0.f, 0.f, 0.f, 0.f};
  auto* const dq = reinterpret_cast<float4*>(w.dq + index * kStepQueries * dq_dim);
  for (int i = threadIdx.x; i < kStepQueries * dq_dim / 4; i += kRowsThreads) dq[i] = zero;
  auto& shared = dynamic_shared<RowsShared>();
  const auto is_huge = [&](int i) {
    return fabsf(max_logit[i]) * kLog2E > kHugeRow && max_logit[i] != -INFINITY;
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int d = 8; d > 0; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    const int query = threadIdx.x / 16 + i * kRowsPerRound;
    const bool fully_masked = max_logit[i] == -INFINITY;
    if (group_lane == 0) {
      const float lse = is_huge(i) ? 0.f : (max_logit[i] + log_sum[i]) * lse_factor;
      w.lse[index * kStepQueries + query] = exists(i) && !fully_masked ? lse : INFINITY;
      w.delta[index * kStepQueries + query] = exists(i) && !fully_masked ? sum[i] - dlse[i] : 0.f;
      shared.fully_masked[query] = fully_masked, shared.huge[query] = is_huge(i);
    }
  }
  __syncthreads();
  const bool any_huge = __any_sync(~0u, shared.huge[lane] || shared.huge[lane + 32]);
  if (any_huge && group_lane == 0) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      w.huge_rows[index * kStepQueries + threadIdx.x / 16 + i * kRowsPerRound] =
          is_huge(i) ? HugeRow{max_logit[i], log_sum[i]} : HugeRow{0.f, 0.f};
    }
  }
  if (warp > 0) return;
  const uint64_t low = __ballot_sync(~0u, shared.fully_masked[lane]);
  const uint64_t high = __ballot_sync(~0u, shared.fully_masked[lane + 32]);
  if (lane == 0) w.fully_masked[index] = high << 32 | low, w.huge[index] = any_huge;
}

// dQ in the workspace holds the accumulator fragments of the slices of all steps. A slice consists
// of parts, one for each kThreads of its 128 threads. A part holds first four floats of each
// thread, then the next four, and so on. kThreads is 32 where bulk reductions add the part of a
// warp. `slice` counts the slices of all steps.
template <int kN, int kThreads>
__device__ __forceinline__ float* dq_fragment(float* dq, int64_t slice) {
  const int thread = threadIdx.x % 128;
  return dq + slice * (kN * 128) + thread / kThreads * (kN * kThreads) + thread % kThreads * 4;
}

// Adds the accumulator fragment of a thread to a slice.
template <int kN>
__device__ __forceinline__ void add_dq(const float (&x)[kN], float* dq, int64_t slice) {
  float* const sum = dq_fragment<kN, 128>(dq, slice);
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    red_add(sum + i * 128, x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

// Deterministic sums: a warp adds its fragment of a slice after all earlier work tiles have added
// theirs. wait_for_earlier_adds waits for them. The counter is incremented late, in
// publish_pending_add, because waiting for the completion of the reductions takes long.
template <typename Tr>
__device__ __forceinline__ void publish_pending_add(BwdShared<Tr>& shared) {
  uint32_t*& counter = shared.pending_add[thread_index() >> 5];
  __syncwarp();
  if ((thread_index() & 31) == 0 && counter) {
    counter_add(counter);
    counter = nullptr;
  }
}
template <typename Tr>
__device__ __forceinline__ void wait_for_earlier_adds(const BwdWorkspace& w, BwdShared<Tr>& shared,
                                                      int64_t step, int slice,
                                                      uint32_t earlier_adds) {
  uint32_t* const counter =
      w.add_counts + (step * kMaxDqSlices + slice) * 4 + (thread_index() >> 5 & 3);
  publish_pending_add(shared);
  counter_wait(counter, earlier_adds);
  __syncwarp();
  if ((thread_index() & 31) == 0) shared.pending_add[thread_index() >> 5] = counter;
}

// Stores a warp's rows of dK and dV, the columns from dk_column and dv_column on. `row` is the row
// of the thread in the work tile, `rows` the number of keys of a work tile.
template <DType kType, int kK, int kV>
__device__ __forceinline__ void store_dk_dv(const MaskedAttentionBwdParams& p,
                                            const BwdWorkTile& work_tile, const float (&dk)[kK],
                                            const float (&dv)[kV], int row, int rows, int dk_column,
                                            int dv_column, uint8_t* stage) {
  const int64_t at =
      (int64_t{work_tile.batch} * p.keys + work_tile.key + row) * p.groups + work_tile.group;
  const int rows_left = static_cast<int>(min(p.keys - work_tile.key, int64_t{rows})) - row;
  const float dk_factor[2] = {work_tile.nonempty ? p.scale : kUndefined,
                              work_tile.nonempty ? p.scale : kUndefined};
  const float dv_factor[2] = {work_tile.nonempty ? 1.f : kUndefined,
                              work_tile.nonempty ? 1.f : kUndefined};
  store_rows<kType>(dk, dk_factor, smem_address(stage),
                    static_cast<uint16_t*>(p.dk) + at * p.dim + dk_column,
                    int64_t{p.groups} * p.dim, rows_left, p.dim - dk_column);
  store_rows<kType>(dv, dv_factor, smem_address(stage),
                    static_cast<uint16_t*>(p.dv) + at * p.value_dim + dv_column,
                    int64_t{p.groups} * p.value_dim, rows_left, p.value_dim - dv_column);
}

// Masks the scores of the step in stage `at` and subtracts its huge rows, as its flags say. row()
// is the thread's first row in the work tile. Returns the factor of the scores in log2 units, which
// is `to_log2` unless there are huge rows.
template <typename Tr, int kScores, typename Row>
__device__ __forceinline__ float apply_flags(int flags, float (&s)[kScores], const BwdWorkspace& w,
                                             const BwdShared<Tr>& shared, int at, Row row,
                                             float scale, float to_log2) {
  if (__builtin_expect(flags != 0, 0)) {
    if (flags & kPartial) mask_scores(s, &shared.bits[at][row()]);
    if (flags & kHugeRows) {
      subtract_huge_rows<Tr::kGeneral>(s, w.huge_rows + shared.stage[at].step * kStepQueries,
                                       scale);
      to_log2 = kLog2E;
    }
  }
  return to_log2;
}

struct DoNothing {
  __device__ void operator()() const {}
};

// The loop of an MMA warp over work tiles. `step(accumulate)` processes a step and returns whether
// it was the last one of its work tile; `store(work_tile)` stores the results; `begin()` precedes
// the first step of each work tile.
template <typename Tr, typename Step, typename Store, typename Begin = DoNothing>
__device__ __forceinline__ void for_each_work_tile(BwdShared<Tr>& shared, Step step, Store store,
                                                   Begin begin = {}) {
  uint32_t kv_parity = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.work_tile_full, parity);
    if (shared.work_tile.done) return;
    if (shared.work_tile.nonempty) {
      mbarrier_wait(&shared.kv_full, kv_parity);
      mbarrier_wait(&shared.kv_cleared, kv_parity);
      kv_parity ^= 1;
      begin();
      for (bool accumulate = false; !step(accumulate);) accumulate = true;
    }
    const BwdWorkTile work_tile = shared.work_tile;
    __syncwarp();
    if ((thread_index() & 31) == 0) mbarrier_arrive(&shared.kv_free);
    store(work_tile);
  }
}

// Scales and rounds dQ; one CTA per step of 64 queries.
template <DType kType, int kDqSlices, int kDqSliceColumns, int kThreads>
__global__ void __launch_bounds__(128 * kDqSlices)
    dq_kernel(const __grid_constant__ MaskedAttentionBwdParams p, float* dq, int64_t steps) {
  constexpr int kN = kDqSliceColumns / 2;  // registers per thread
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, slice = threadIdx.x / 128;
  const int64_t index = blockIdx.x, pair = index / steps, step = index - pair * steps;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  const float* const from = dq_fragment<kN, kThreads>(dq, index * kDqSlices + slice);
  float x[kN];
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(from + i * kThreads));
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
  const int64_t query = step * kStepQueries + warp * 16 + lane / 4;
  const int64_t row = (batch * p.queries + query) * p.heads + head;
  const int rows_left =
      static_cast<int>(min(p.queries - step * kStepQueries, int64_t{kStepQueries})) -
      (warp * 16 + lane / 4);
  const float factor[2] = {p.scale, p.scale};
  auto& stage = dynamic_shared<uint8_t[4 * kDqSlices][1024]>();
  store_rows<kType>(x, factor, smem_address(stage[threadIdx.x / 32]),
                    static_cast<uint16_t*>(p.dq) + row * p.dim + slice * kDqSliceColumns,
                    int64_t{p.heads} * p.dim, rows_left, p.dim - slice * kDqSliceColumns);
}

}  // namespace jax_dsa::masked_attention
