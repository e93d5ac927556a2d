// dK and dV of sparse attention.
//
//   P  = exp(scale * S - max_logit - log_sum)      S = Q K^T       dV = P^T dO
//   dS = P * (dP - delta)                          dP = dO V^T     dK = scale * dS^T Q
//
// with delta = rowsum(O * dO) - dlse.
//
// Tiling. A work item is (batch, KV head, 64 or 128 keys), or a part of the list of their queries.
// Persistent CTAs take items from an atomic counter and loop over the steps of their lists
// (bwd_inverse.cuh). A step has the rows of q and dout of as many queries as 64 rows can hold, or
// 48 with 256 dims; each head of a group is a row. dK and dV stay in registers. The parts of a list
// are added to global memory in their order, so that the sums are always the same.
//
// Operand layout. The kernel computes S^T and dP^T, with keys as the M dimension. The accumulator
// fragments of P^T and dS^T then feed the dV and dK MMAs from registers. K and V, the other A
// operands, stay in registers too if there is room.
//
// Warpgroups, for 64 keys (consume).
//   0  MMA: S, P and dV. It passes P on in shared memory.
//   1  MMA: dP, dS and dK
//   2  producer: copies rows of q and dout with cp.async, and prepares lse, delta and the bits of
//      hidden keys (bwd_producer.cuh)
// Warpgroups, for 128 keys (consume_keys).
//   0, 1  MMA: all products of 64 keys each
//   2     producer
// A warpgroup computes the exponentials of P, or dS, while the tensor cores work for the other.
// With 128 keys, the rows of q and dout are read half as often. This needs lists that are the same
// for both halves of the keys, so blocks of 128.
//
// Rows of a step that belong to no entry are zeros, and P is 0 there. P is also 0 for keys that a
// query does not see, whatever K holds.
//
// Shared memory for D = E = 128 (bytes):
//   64 keys   K, V 32 Ki; Q, dO 5 stages x 32 Ki; P 2 x 8 Ki
//   128 keys  K, V 64 Ki; Q, dO 4 stages x 32 Ki
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

// Waits until the same warp of the CTA that has the part before this one has stored its sums.
__device__ __forceinline__ void wait_for_part(const DkvItem& item) {
  if (item.part == 0) return;
  if (thread_index() % 32 == 0) counter_wait(item.parts_added + thread_index() / 32, item.part);
  __syncwarp();
}

// Lets the next part of the list continue, once this warp has stored its sums.
__device__ __forceinline__ void finish_part(const DkvItem& item) {
  if (!item.several) return;
  __syncwarp();
  if (thread_index() % 32 == 0) counter_add(item.parts_added + thread_index() / 32);
}

// Returns the values of the rows of a thread's scores i and i + 1.
template <int kRows>
__device__ __forceinline__ float2 of_rows(const float (&x)[kRows], int i) {
  return *reinterpret_cast<const float2*>(&x[i / 4 * 8 + thread_index() % 4 * 2]);
}

// Computes P from the scores of the step in stage `at`. `warp_key` is the warp's first key in the
// tile.
template <typename Tr>
__device__ __forceinline__ void probabilities(uint32_t (&packed)[Tr::kRows / 16][4],
                                              float (&s)[Tr::kRows / 2],
                                              const DkvShared<Tr>& shared, int at, int flags,
                                              int warp_key, float scale, float scale_log2) {
  float to_log2 = scale_log2;
  if (__builtin_expect(flags & kHugeRows, 0)) {
    masked_attention::subtract_huge_rows<false>(s, shared.huge_rows[at], scale);
    to_log2 = kLog2E;
  }
#pragma unroll
  for (int i = 0; i < Tr::kRows / 2; i += 2) {
    const float2 lse = of_rows(shared.lse[at], i);
    packed[i / 8][i / 2 % 4] = pack_16<Tr::kType>(exp2_approx(fmaf(s[i], to_log2, -lse.x)),
                                                  exp2_approx(fmaf(s[i + 1], to_log2, -lse.y)));
  }
  if (flags & kSomeHidden) {
    const int lane = thread_index() % 32;
    const auto* const bits =
        reinterpret_cast<const uint16_t*>(&shared.seen[at][warp_key + lane / 4]);
    const uint32_t seen = bits[lane % 4] | bits[8 * 4 + lane % 4] << 16;
#pragma unroll
    for (int c = 0; c < Tr::kRows / 8; ++c) {
      packed[c / 2][c % 2 * 2] &= spread_top_bits<0>(seen << c);
      packed[c / 2][c % 2 * 2 + 1] &= spread_top_bits<1>(seen << c);
    }
  }
}

// Replaces P by dS, for 16 rows of the step from row 16 k on.
template <typename Tr>
__device__ __forceinline__ void to_gradients(uint32_t (&packed)[4],
                                             const float (&dp)[Tr::kRows / 2], int k,
                                             const float (&delta)[Tr::kRows], bool hidden) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = 8 * k + 2 * j;
    const float2 x = of_rows(delta, i);
    const float2 ds = masked_attention::score_gradients(unpack_16<Tr::kType>(packed[j]),
                                                        {dp[i] - x.x, dp[i + 1] - x.y}, hidden);
    packed[j] = pack_16<Tr::kType>(ds.x, ds.y);
  }
}

// The main loop of an MMA warpgroup with 64 keys: warpgroup 0 if kProbabilities, else warpgroup 1.
template <typename Tr, bool kProbabilities>
__device__ void consume(const SparseAttentionBwdParams& p, DkvShared<Tr>& shared) {
  constexpr int kScores = Tr::kRows / 2, kSteps = Tr::kRows / 16;
  constexpr int kDim = kProbabilities ? Tr::kD : Tr::kE;     // of the first product
  constexpr int kSumDim = kProbabilities ? Tr::kE : Tr::kD;  // of the second product
  // Recompute thread-dependent indices in every step. Keeping them live would cost registers that
  // the MMA needs.
  const auto lane_now = [] { return thread_index() & 31; };
  const auto warp_now = [] { return thread_index() >> 5 & 3; };
  const uint8_t* const keys = kProbabilities ? &shared.k[0][0] : &shared.v[0][0];
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
  RingPlace<Tr::kPBuffers> p_ring = {0, kProbabilities};

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
    // The address of a thread's 16 bytes of P for 16 columns.
    const uint32_t p_address = smem_address(shared.passed.p[p_at]) + (thread_index() & 127) * 16;
    uint32_t packed[kSteps][4];  // P or dS
    wgmma_wait<0>();
    wgmma_pin(s);
    if constexpr (kProbabilities) {
      probabilities<Tr>(packed, s, shared, at, flags, warp_now() * 16, p.scale, scale_log2);
      mbarrier_wait(&shared.passed.free[p_at], p_ring.parity);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) store_shared_16(p_address + k * (128 * 16), packed[k]);
      arrive(&shared.passed.full[p_at]);
    } else {
      mbarrier_wait(&shared.passed.full[p_at], p_ring.parity);
      const bool hidden = flags & kSomeHidden;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_shared_16(p_address + k * (128 * 16), packed[k]);
        to_gradients<Tr>(packed[k], s, k, shared.delta[at], hidden);
      }
      arrive(&shared.passed.free[p_at]);
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
    wait_for_part(item);
    store_sums(sum, kProbabilities ? 1.f : p.scale, out, int64_t{p.groups} * dim,
               static_cast<int>(p.keys) - row, dim, item.part > 0);
    finish_part(item);
  }
}

// The main loop of MMA warpgroup `warpgroup` with 128 keys. Both run the same code.
template <typename Tr>
__device__ void consume_keys(const SparseAttentionBwdParams& p, DkvShared<Tr>& shared,
                             int warpgroup) {
  constexpr int kScores = Tr::kRows / 2, kSteps = Tr::kRows / 16;
  const auto lane_now = [] { return thread_index() & 31; };
  // Returns the warp's first key in the tile.
  const auto warp_key = [&] { return warpgroup * 64 + (thread_index() >> 5 & 3) * 16; };
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(barrier);
  };
  const float scale_log2 = p.scale * kLog2E;
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.k) + warpgroup * kBlockBytes);
  const uint64_t own_values = k_major_descriptor(smem_address(shared.v) + warpgroup * kBlockBytes);

  float dk[Tr::kD / 2], dv[Tr::kE / 2];
  RingPlace<Tr::kStages> ring;

  const auto step = [&] {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.full[at], ring.parity);
    const uint32_t q = smem_address(shared.q[at]), dout = smem_address(shared.dout[at]);
    const int flags = uniform(shared.flags[at]);
    float s[kScores];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          s, own_keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          k_major_descriptor(q) + i / 4 * (Tr::kRowsBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    uint32_t packed[kSteps][4];  // P, then dS
    probabilities<Tr>(packed, s, shared, at, flags, warp_key(), p.scale, scale_log2);
    wgmma_pin(packed);
    // dP takes the registers of the scores; see masked_attention::consume_keys.
    float (&dp)[kScores] = s;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kE / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          dp, own_values + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          k_major_descriptor(dout) + i / 4 * (Tr::kRowsBytes / 16) + i % 4 * 2, i > 0 || p.dim < 0);
    }
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(
          dv, packed[k], mn_major_descriptor(dout, Tr::kRowsBytes) + k * (16 * 128 / 16), true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(dp);
    uint32_t gradients[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) gradients[k][j] = packed[k][j];
      to_gradients<Tr>(gradients[k], dp, k, shared.delta[at], flags & kSomeHidden);
    }
    wgmma_pin(gradients);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(
          dk, gradients[k], mn_major_descriptor(q, Tr::kRowsBytes) + k * (16 * 128 / 16), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(dv);
    wgmma_pin(dk);
    arrive(&shared.free[at]);
    ring.advance();
  };

  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.kv_full, parity);
    if (shared.item.done) return;
#pragma unroll
    for (float& x : dk) x = 0.f;
#pragma unroll
    for (float& x : dv) x = 0.f;
#pragma unroll 1
    for (int left = uniform(shared.item.steps); left > 0; --left) step();
    const DkvItem item = shared.item;
    arrive(&shared.item_free);
    const int row = item.key + warp_key() + lane_now() / 4;
    const int64_t at = (item.batch * p.keys + row) * p.groups + item.group;
    const int rows_left = static_cast<int>(p.keys) - row;
    wait_for_part(item);
    store_sums(dv, 1.f, p.dv + at * p.value_dim, int64_t{p.groups} * p.value_dim, rows_left,
               p.value_dim, item.part > 0);
    store_sums(dk, p.scale, p.dk + at * p.dim, int64_t{p.groups} * p.dim, rows_left, p.dim,
               item.part > 0);
    finish_part(item);
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
    if constexpr (Tr::kPBuffers > 0) {
      for (int i = 0; i < Tr::kPBuffers; ++i) {
        mbarrier_init(&shared.passed.full[i], 4);
        mbarrier_init(&shared.passed.free[i], 4);
      }
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
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    if constexpr (Tr::kKeys > kTile) {
      consume_keys<Tr>(p, shared, warpgroup);
    } else if (warpgroup == 0) {
      consume<Tr, true>(p, shared);
    } else {
      consume<Tr, false>(p, shared);
    }
  } else {
    lower_registers<Tr::kProducerRegisters>();
    produce<Tr>(p, inverse, delta, shape, k_map, v_map, shared);
  }
}

}  // namespace jax_dsa::sparse_attention
