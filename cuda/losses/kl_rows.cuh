// The KL of rows of logits x and teachers t, with its gradient, in one kernel:
//
//     M = sum_i t_i        p_i = t_i / M        q_i = exp(x_i - m) / sum_j exp(x_j - m)
//     kl = sum_i p_i (log p_i - log q_i)        dkl / dx_i = q_i - p_i
//
// over the slots that are used. Each CTA processes one row. A row that fits in the registers of a
// CTA is read once. A longer row is read a second time, mostly from the L2. Each thread computes
// the maximum and the sums of its own slots. Lanes combine them by shuffles, and warps through
// shared memory. All sums have a fixed order.
//
// The kernel is bound by memory bandwidth, with 12 bytes per slot. All loads of a row that fits in
// the registers are issued before the first use.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.h"
#include "losses/losses.h"

namespace jax_dsa::losses {

// Sums over some slots of a row: the largest logit, the sum of exp(x - largest), and the sum of the
// teacher. Without a finite logit, the exponentials are relative to 0.
struct Totals {
  float largest, sum, mass;

  __device__ float base() const { return largest == -INFINITY ? 0.f : largest; }
  // A NaN in the teacher must reach the results, so the test is not mass > 0.
  __device__ bool counts() const { return !(mass <= 0.f); }

  __device__ void combine(const Totals& other) {
    const Totals own = *this;
    largest = fmaxf(own.largest, other.largest);
    sum = own.sum * exp2_approx((own.largest - base()) * kLog2E) +
          other.sum * exp2_approx((other.largest - base()) * kLog2E);
    mass = own.mass + other.mass;
  }
};

template <int kThreads>
struct KlShared {
  Totals totals[kThreads / 32];
  float kl[kThreads / 32];
};

template <int kThreads>
struct SumShared {
  float total[kThreads / 32];
  int counted[kThreads / 32];
};

// Which slots are used: those with a logit above -inf, those marked as valid, or the row's range.
enum class Mask { kLogits, kValid, kRanges };

template <int kPerThread>
struct Slots {
  float x[kPerThread], t[kPerThread];
  uint32_t used;  // bit i: slot i is used; unused slots have x = -inf, t = 0
};

// One row. The CTA processes kStep slots at a time, of which each thread has kPerThread, in vectors
// of kWidth neighbours. With kResident, kStep slots cover the whole row.
template <Mask kMask, int kThreads, int kPerThread, int kWidth, bool kResident>
struct KlRow {
  static_assert(kPerThread <= 32 && (kWidth == 4 || kWidth == 1));
  static constexpr int kStep = kThreads * kPerThread;

  const float* logits;
  const float* teacher;
  const bool* valid;
  float* grad;
  float row_weight;
  int low, high;  // range of slots that may be used

  __device__ KlRow(const KlRowsParams& p, int64_t row)
      : logits(p.logits + row * p.slots),
        teacher(p.teacher + row * p.slots),
        valid(p.valid + row * p.slots),
        grad(p.grad + row * p.slots),
        row_weight(p.row_weight),
        low(0),
        high(static_cast<int>(p.slots)) {
    if (kMask == Mask::kRanges) {
      low = max(__ldg(p.starts + row), 0);
      high = min(__ldg(p.ends + row), high);
    }
  }

  // Returns the index of the thread's slot i, the first of a vector, in the step that starts at
  // base.
  __device__ static int slot_index(int base, int i) {
    return base + (i / kWidth * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
  }

  __device__ void load(int base, Slots<kPerThread>& s) const {
    uint32_t marks[kPerThread / kWidth];  // one byte per slot
#pragma unroll
    for (int i = 0; i < kPerThread; i += kWidth) {
      const int at = slot_index(base, i);
      if constexpr (kWidth == 4) {
        float4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, t = {};
        marks[i / 4] = 0;
        if (at < high) {
          const auto* from = reinterpret_cast<const float4*>(logits + at);
          const auto* target = reinterpret_cast<const float4*>(teacher + at);
          x = kResident ? __ldcs(from) : *from, t = kResident ? __ldcs(target) : *target;
          if (kMask == Mask::kValid) {
            marks[i / 4] = *reinterpret_cast<const uint32_t*>(valid + at);
          }
        }
        s.x[i] = x.x, s.x[i + 1] = x.y, s.x[i + 2] = x.z, s.x[i + 3] = x.w;
        s.t[i] = t.x, s.t[i + 1] = t.y, s.t[i + 2] = t.z, s.t[i + 3] = t.w;
      } else {
        s.x[i] = at < high ? logits[at] : -INFINITY;
        s.t[i] = at < high ? teacher[at] : 0.f;
        marks[i] = kMask == Mask::kValid && at < high ? valid[at] : 0;
      }
    }
    s.used = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = slot_index(base, i) + i % kWidth;
      const bool used = kMask == Mask::kLogits  ? s.x[i] > -INFINITY
                        : kMask == Mask::kValid ? (marks[i / kWidth] >> (i % kWidth * 8) & 1) != 0
                                                : at >= low && at < high;
      s.used |= used ? 1u << i : 0u;
      s.x[i] = used ? s.x[i] : -INFINITY;
      s.t[i] = used ? s.t[i] : 0.f;
    }
  }

  __device__ static Totals totals(const Slots<kPerThread>& s) {
    Totals all = {-INFINITY, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) all.largest = fmaxf(all.largest, s.x[i]);
    const float base = all.base();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      all.sum += exp2_approx((s.x[i] - base) * kLog2E);
      all.mass += s.t[i];
    }
    return all;
  }

  // Writes the gradient and returns the sum of the KL over the thread's slots, in log2 units.
  __device__ float finish(int base, const Slots<kPerThread>& s, const Totals& all) const {
    const bool counts = all.counts();
    const float largest = all.base(), log2_sum = all.sum == 0.f ? 0.f : log2_approx(all.sum);
    const float rescale =
        all.mass < 0x1p-100f ? 0x1p100f : 1.f;  // the inverse of a tiny mass would be infinite
    const float inverse = counts ? 1.f / (all.mass * rescale) : 0.f;
    float kl = 0.f;
#pragma unroll
    for (int i = 0; i < kPerThread; i += kWidth) {
      float g[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float target = s.t[i + j] * rescale * inverse;
        const float log2_q = fmaf(s.x[i + j] - largest, kLog2E, -log2_sum);
        const float term = fmaf(target, log2_approx(target) - log2_q, kl);
        if (!(target <= 0.f)) kl = term;
        const bool used = counts && (s.used >> (i + j) & 1);
        g[j] = used ? row_weight * (exp2_approx(log2_q) - target) : 0.f;
      }
      const int at = slot_index(base, i);
      if (at >= high) continue;
      if constexpr (kWidth == 4) {
        store_4(grad + at, g);
      } else {
        grad[at] = g[0];
      }
    }
    return kl;
  }
};

template <Mask kMask, int kThreads, int kPerThread, int kWidth, bool kResident>
__global__ void __launch_bounds__(kThreads) kl_rows_kernel(const __grid_constant__ KlRowsParams p) {
  using Row = KlRow<kMask, kThreads, kPerThread, kWidth, kResident>;
  auto& shared = dynamic_shared<KlShared<kThreads>>();
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Row row(p, blockIdx.x);
  const int first = row.low / kWidth * kWidth;

  Slots<kPerThread> slots;
  row.load(first, slots);
  Totals all = Row::totals(slots);
  if constexpr (!kResident) {
    for (int base = first + Row::kStep; base < row.high; base += Row::kStep) {
      row.load(base, slots);
      all.combine(Row::totals(slots));
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    all.combine({__shfl_xor_sync(~0u, all.largest, d), __shfl_xor_sync(~0u, all.sum, d),
                 __shfl_xor_sync(~0u, all.mass, d)});
  }
  if (lane == 0) shared.totals[warp] = all;
  __syncthreads();
  all = shared.totals[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) all.combine(shared.totals[i]);

  float kl = 0.f;
  if constexpr (kResident) {
    kl = row.finish(first, slots, all);
  } else {
    for (int base = first; base < row.high; base += Row::kStep) {
      row.load(base, slots);
      kl += row.finish(base, slots, all);
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) kl += __shfl_xor_sync(~0u, kl, d);
  if (lane == 0) shared.kl[warp] = kl;
  __syncthreads();
  if (threadIdx.x == 0) {
    kl = shared.kl[0];
    for (int i = 1; i < kWarps; ++i) kl += shared.kl[i];
    p.kl[blockIdx.x] = kl * kLn2;
    p.counts[blockIdx.x] = all.counts();
  }
}

// One CTA per batch entry. Each thread adds up rows in order, then lanes and warps are combined.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sum_kl_kernel(const __grid_constant__ SumKlParams p) {
  auto& shared = dynamic_shared<SumShared<kThreads>>();
  const int64_t first = blockIdx.x * p.rows;
  float total = 0.f;
  int counted = 0;
  for (int64_t row = threadIdx.x; row < p.rows; row += kThreads) {
    total += p.kl[first + row];
    counted += p.counts[first + row];
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    total += __shfl_xor_sync(~0u, total, d);
    counted += __shfl_xor_sync(~0u, counted, d);
  }
  if (threadIdx.x % 32 == 0) {
    shared.total[threadIdx.x / 32] = total;
    shared.counted[threadIdx.x / 32] = counted;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  total = p.add ? p.total[blockIdx.x] : 0.f;
  counted = p.add ? p.counted[blockIdx.x] : 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    total += shared.total[i];
    counted += shared.counted[i];
  }
  p.total[blockIdx.x] = total;
  p.counted[blockIdx.x] = counted;
}

// Processes the last row first, because the kernel that wrote x left its last rows in the L2. If x
// is scaled in place, a row whose factor equals the row weight is already right and is not read.
template <int kThreads, int kWidth>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const __grid_constant__ ScaleRowsParams p) {
  const int64_t row = p.rows - 1 - blockIdx.x;
  const float factor = __ldg(p.factor + row) / p.row_weight;
  const float* x = p.x + row * p.slots;
  float* out = p.out + row * p.slots;
  if (factor == 1.f && x == out) return;
  for (int64_t i = threadIdx.x * kWidth; i < p.slots; i += kThreads * kWidth) {
    if constexpr (kWidth == 4) {
      const float4 four = *reinterpret_cast<const float4*>(x + i);
      store_4(out + i, {four.x * factor, four.y * factor, four.z * factor, four.w * factor});
    } else {
      out[i] = x[i] * factor;
    }
  }
}

}  // namespace jax_dsa::losses
