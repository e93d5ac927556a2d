// dK and dV of sparse attention.
//
//   P  = exp(scale * S - max_logit - log_sum)      S = Q K^T       dV = P^T dO
//   dS = P * (dP - delta)                          dP = dO V^T     dK = scale * dS^T Q
//
// with delta = rowsum(O * dO) - dlse.
//
// Tiling. A work item is (batch, KV head, 64 keys), or a part of the list of their queries.
// Persistent CTAs take items from an atomic counter and loop over the steps of their lists
// (bwd_inverse.cuh). A step has the rows of q and dout of as many queries as 64 rows can hold, or
// 48 with 256 dims; each head of a group is a row. dK and dV stay in registers. The parts of a list
// are added to global memory in their order, so that the sums are always the same.
//
// Operand layout. The kernel computes S^T and dP^T, with keys as the M dimension. The accumulator
// fragments of P^T and dS^T then feed the dV and dK MMAs from registers. K and V, the other A
// operands, stay in registers too if there is room.
//
// Warpgroups.
//   0  MMA: S, P and dV. It passes P on in shared memory.
//   1  MMA: dP, dS and dK
//   2  producer: copies rows of q and dout with cp.async, and prepares lse, delta and the bits of
//      hidden keys (bwd_producer.cuh)
// A warpgroup computes the exponentials of P, or dS, while the tensor cores work for the other.
//
// Rows of a step that belong to no entry are zeros, and P is 0 there. P is also 0 for keys that a
// query does not see, whatever K holds.
//
// Shared memory for D = E = 128 (bytes): K, V 32 Ki; Q, dO 5 stages x 32 Ki; P 2 x 8 Ki.
#pragma once

#include "common/wgmma.cuh"
#include "sparse_attention/bwd_producer.cuh"

namespace jax_dsa::sparse_attention {

// Stores or adds a warp's 16 rows of a sum, multiplied by `factor`. `out` points to row lane / 4,
// rows are `stride` floats apart, and `rows_left` counts rows from there.
template <int kN>
__device__ __forceinline__ void store_sums(const float (&sum)[kN], float factor, float* out,
                                           int64_t stride, int rows_left, int columns, bool add) {
  constexpr int kAtOnce = 16;  // pairs of floats that are loaded together
  const int column = thread_index() % 4 * 2;
  const auto at = [&](int i) { return out + i % 4 / 2 * 8 * stride + i / 4 * 8 + column; };
#pragma unroll
  for (int first = 0; first < kN; first += 2 * kAtOnce) {
    float2 x[kAtOnce];
    bool valid[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + 2 * n;
      valid[n] = i % 4 * 4 < rows_left && i / 4 * 8 + column < columns;
      x[n] = {0.f, 0.f};
      if (add && valid[n]) x[n] = __ldcg(reinterpret_cast<const float2*>(at(i)));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + 2 * n;
      store_pair(at(i), x[n].x + sum[i] * factor, x[n].y + sum[i + 1] * factor, valid[n]);
    }
  }
}

// The main loop of an MMA warpgroup: warpgroup 0 if kProbabilities, else warpgroup 1.
template <typename Tr, bool kProbabilities>
__device__ void consume(const SparseAttentionBwdParams& p, DkvShared<Tr>& shared) {
  constexpr int kScores = Tr::kRows / 2, kSteps = Tr::kRows / 16;
  constexpr int kDim = kProbabilities ? Tr::kD : Tr::kE;     // of the first product
  constexpr int kSumDim = kProbabilities ? Tr::kE : Tr::kD;  // of the second product
  // Recompute thread-dependent indices in every step. Keeping them live would cost registers that
  // the MMA needs.
  const auto lane_now = [] { return thread_index() & 31; };
  const auto warp_now = [] { return thread_index() >> 5 & 3; };
  const uint8_t* const keys = kProbabilities ? shared.k[0] : shared.v[0];
  const auto first_rows = [&](int at) {
    return smem_address(kProbabilities ? shared.q[at][0] : shared.dout[at][0]);
  };
  const auto second_rows = [&](int at) {
    return smem_address(kProbabilities ? shared.dout[at][0] : shared.q[at][0]);
  };
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(barrier);
  };
  const float scale_log2 = p.scale * kLog2E;

  float sum[kSumDim / 2], s[kScores];
  uint32_t fragments[Tr::kInRegisters ? kDim / 16 : 1][4];  // of K or V
  RingPlace<Tr::kStages> ring;
  RingPlace<kPBuffers> p_ring = {0, kProbabilities};

  // Issues the first product of the step in the stage at `place`: S or dP.
  const auto start_scores = [&](const RingPlace<Tr::kStages>& place) {
    const int at = uniform(place.index);
    mbarrier_wait(&shared.full[at], place.parity);
    const uint64_t rows = k_major_descriptor(first_rows(at));
    const uint64_t own_keys = k_major_descriptor(smem_address(keys));
    wgmma_forget(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const uint64_t b = rows + i / 4 * (Tr::kRowsBytes / 16) + i % 4 * 2;
      if constexpr (Tr::kInRegisters) {
        wgmma_16<Tr::kType, kKMajor>(s, fragments[i], b, i > 0);
      } else {
        wgmma_16<Tr::kType, kKMajor, kKMajor>(s, own_keys + i / 4 * (kBlockBytes / 16) + i % 4 * 2,
                                              b, i > 0);
      }
    }
    wgmma_commit();
  };

  // Processes one step, whose first product has been issued, and issues that of the next.
  const auto step = [&](bool more) {
    const int at = uniform(ring.index), p_at = uniform(p_ring.index);
    const int flags = uniform(shared.flags[at]);
    // Returns the values of the rows of scores i and i + 1.
    const auto of_rows = [&](const float (&x)[Tr::kRows], int i) {
      return *reinterpret_cast<const float2*>(&x[i / 4 * 8 + lane_now() % 4 * 2]);
    };
    // The address of a thread's 16 bytes of P for 16 columns.
    const uint32_t p_address = smem_address(shared.p[p_at]) + (thread_index() & 127) * 16;
    uint32_t packed[kSteps][4];  // P or dS
    wgmma_wait<0>();
    wgmma_pin(s);
    if constexpr (kProbabilities) {
      float to_log2 = scale_log2;
      if (__builtin_expect(flags & kHugeRows, 0)) {
        masked_attention::subtract_huge_rows<false>(s, shared.huge_rows[at], p.scale);
        to_log2 = kLog2E;
      }
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const float2 lse = of_rows(shared.lse[at], i);
        packed[i / 8][i / 2 % 4] = pack_16<Tr::kType>(exp2_approx(fmaf(s[i], to_log2, -lse.x)),
                                                      exp2_approx(fmaf(s[i + 1], to_log2, -lse.y)));
      }
      if (flags & kSomeHidden) {
        const auto* const bits =
            reinterpret_cast<const uint16_t*>(&shared.seen[at][warp_now() * 16 + lane_now() / 4]);
        const uint32_t seen = bits[lane_now() % 4] | bits[8 * 4 + lane_now() % 4] << 16;
#pragma unroll
        for (int c = 0; c < Tr::kRows / 8; ++c) {
          packed[c / 2][c % 2 * 2] &= spread_top_bits<0>(seen << c);
          packed[c / 2][c % 2 * 2 + 1] &= spread_top_bits<1>(seen << c);
        }
      }
      mbarrier_wait(&shared.p_free[p_at], p_ring.parity);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) store_shared_16(p_address + k * (128 * 16), packed[k]);
      arrive(&shared.p_full[p_at]);
    } else {
      mbarrier_wait(&shared.p_full[p_at], p_ring.parity);
      const bool hidden = flags & kSomeHidden;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_shared_16(p_address + k * (128 * 16), packed[k]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * k + 2 * j;
          const float2 delta = of_rows(shared.delta[at], i);
          const float2 dp = {s[i] - delta.x, s[i + 1] - delta.y};
          const float2 ds =
              masked_attention::score_gradients(unpack_16<Tr::kType>(packed[k][j]), dp, hidden);
          packed[k][j] = pack_16<Tr::kType>(ds.x, ds.y);
        }
      }
      arrive(&shared.p_free[p_at]);
    }
    wgmma_pin(packed);
    const uint64_t rows = mn_major_descriptor(second_rows(at), Tr::kRowsBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(sum, packed[k], rows + k * (16 * 128 / 16), true);
    }
    wgmma_commit();
    ring.advance(), p_ring.advance();
    if (more) start_scores(ring);
    wgmma_wait<0>();
    wgmma_pin(sum);
    arrive(&shared.free[at]);
  };

  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.kv_full, parity);
    DkvItem item = shared.item;
    if (item.done) return;
    const int steps = uniform(item.steps);
#pragma unroll
    for (float& x : sum) x = 0.f;
    if (steps > 0) {
      if constexpr (Tr::kInRegisters) {
        const int lane = lane_now(), row = warp_now() * 16 + lane % 16;
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
          const int chunk = (i % 4 * 2 + lane / 16) ^ (lane % 8);
          load_matrix_x4(smem_address(keys) + i / 4 * kBlockBytes + row * 128 + chunk * 16,
                         fragments[i]);
        }
        arrive(&shared.item_free);
      }
      start_scores(ring);
      for (int left = steps; left > 0; --left) step(left > 1);
    }
    if constexpr (!Tr::kInRegisters) item = shared.item;  // so that it needs no registers above
    if (!Tr::kInRegisters || steps == 0) arrive(&shared.item_free);

    const int dim = kProbabilities ? p.value_dim : p.dim;
    const int row = item.key + warp_now() * 16 + lane_now() / 4;
    float* const out = (kProbabilities ? p.dv : p.dk) +
                       ((item.batch * p.keys + row) * p.groups + item.group) * dim;
    uint32_t* const parts_added = item.parts_added + thread_index() / 32;
    if (item.part > 0) {
      if (lane_now() == 0) counter_wait(parts_added, item.part);
      __syncwarp();
    }
    store_sums(sum, kProbabilities ? 1.f : p.scale, out, int64_t{p.groups} * dim,
               static_cast<int>(p.keys) - row, dim, item.part > 0);
    if (item.several) {
      __syncwarp();
      if (lane_now() == 0) counter_add(parts_added);
    }
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    dkv_kernel(const __grid_constant__ SparseAttentionBwdParams p,
               const __grid_constant__ InverseLists inverse, const float* delta,
               const __grid_constant__ StepShape shape, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map) {
  auto& shared = dynamic_shared<DkvShared<Tr>>();
  const int thread = threadIdx.x;
  if (thread == 0) {
    mbarrier_init(&shared.item_full, 1);
    mbarrier_init(&shared.item_free, 12);
    mbarrier_init(&shared.kv_full, 1);
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&shared.full[i], 128 + 1);
      mbarrier_init(&shared.free[i], 8);
    }
    for (int i = 0; i < kPBuffers; ++i) {
      mbarrier_init(&shared.p_full[i], 4);
      mbarrier_init(&shared.p_free[i], 4);
    }
    mbarrier_init_fence();
  }
  if (thread < shape.entries) {
    uint64_t columns = 0;
    for (int i = thread * shape.heads; i < (thread + 1) * shape.heads; ++i) {
      columns |= uint64_t{1} << column_bit(i);
    }
    shared.entry_columns[thread] = columns;
  }
  if (thread < Tr::kRows) shared.entry_of_row[thread] = thread / shape.heads;
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, true>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, false>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    produce<Tr>(p, inverse, delta, shape, k_map, v_map, shared);
  }
}

}  // namespace jax_dsa::sparse_attention
