// Packs the records of the backward pass. A CTA packs one record; kHeadThreads threads handle a
// head, with 16 bytes each.
#pragma once

#include "common/softmax.cuh"
#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

template <int kD>
__global__ void __launch_bounds__(kTileHeads* kD / 8)
    pack_kernel(const __grid_constant__ BwdPlan x) {
  using R = Record<kD>;
  constexpr int kHeadThreads = kD / 8;
  const Plan& plan = x.plan;
  const HTreeFwdParams& p = plan.p;
  const int row = threadIdx.x / kHeadThreads, chunk = threadIdx.x % kHeadThreads;
  const int64_t at = blockIdx.x / plan.head_tiles;  // query of the chunk, in order of rows
  const int head = static_cast<int>(blockIdx.x % plan.head_tiles) * kTileHeads + row;
  const int64_t bg = at / plan.chunk.queries;
  const int64_t token = (plan.chunk.first_batch + bg / p.groups) * p.queries +
                        plan.chunk.first_query + at % plan.chunk.queries;
  const bool valid = head < plan.group_heads;
  const int64_t source = token * p.heads + bg % p.groups * plan.group_heads + (valid ? head : 0);
  const auto load = [&](const void* from, uint32_t (&y)[4]) {
    load_16_now<0>(static_cast<const char*>(from) + (source * kD + chunk * 8) * 2, valid, y);
  };
  uint32_t q[4], out[4], dout[4];
  load(p.q, q), load(x.out, out), load(x.dout, dout);
  float sum = 0.f;
  bool live = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    dout[i] = scaled_bf16(dout[i], x.first_factor);
    const float2 a = unpack_bf16(out[i]), b = unpack_bf16(dout[i]);
    sum += a.x * b.x + a.y * b.y;
    live |= (dout[i] & 0x7fff7fff) != 0;
  }
#pragma unroll
  for (int mask = 1; mask < kHeadThreads; mask *= 2) {
    sum += __shfl_xor_sync(~0u, sum, mask);
    live |= __shfl_xor_sync(~0u, int{live}, mask) != 0;
  }
  const float dlse = valid ? x.dlse[source] * x.first_factor : 0.f;
  live |= dlse != 0.f;
  uint8_t* const record = x.records + int64_t{blockIdx.x} * R::kBytes;
  const uint32_t to = swizzled<kD>(row, chunk);
  *reinterpret_cast<uint4*>(record + to) =
      live ? make_uint4(q[0], q[1], q[2], q[3]) : make_uint4(0, 0, 0, 0);
  *reinterpret_cast<uint4*>(record + R::kRows + to) =
      live ? make_uint4(dout[0], dout[1], dout[2], dout[3]) : make_uint4(0, 0, 0, 0);
  // The logarithm of the sum is lost in the log-sum-exp of huge scores.
  const float max_logit = live ? x.max_logit[source] : -INFINITY;
  live &= max_logit != -INFINITY;
  const bool exact = live && fabsf(max_logit) * kLog2E > kExactBaseLimit;
  int* const any_exact = reinterpret_cast<int*>(record + R::kExact);
  if (threadIdx.x == 0) *any_exact = 0;
  __syncthreads();
  if (chunk != 0) return;
  if (exact) atomicOr(any_exact, 1);
  const float above = live ? x.log_sum[source] * kLog2E : INFINITY;
  reinterpret_cast<float*>(record + R::kLse)[row] =
      live && !exact ? fmaf(max_logit, kLog2E, above) : above;
  reinterpret_cast<float*>(record + R::kBase)[row] = exact ? max_logit : 0.f;
  reinterpret_cast<float*>(record + R::kDelta)[row] = live ? sum - dlse : 0.f;
}

}  // namespace jax_dsa::htree
