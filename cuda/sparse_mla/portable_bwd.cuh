// Sparse MLA, backward pass, with instructions of sm_80. bwd.cuh has the mathematics.
//
// Tiling. A work tile is (query, KV head group, 64 or 32 heads), and a CTA computes all gradients
// of one. Q and dout of its heads are in shared memory. It has 12 warps with 48 columns each (D =
// 576) or 8 warps with 64, and loops over tiles of 16 of the selected keys:
//   1. Scores and dP = dout V^T, as mla/portable.cuh has them: the first 2 or 1 groups of four
//   warps.
//   2. P and dS, by the same warps, to shared memory in bf16.
//   3. Each warp multiplies its own columns: dq += dS K stays in registers, and dS^T Q + P^T dout
//   is
//      added to dkv in global memory.
//
// With `by_rows`, a CTA processes all heads that a stored row sums over, one head tile after the
// other. The first one stores its rows, the others add theirs. Nothing is reduced by atomics, so
// results are bit-identical on every run.
//
// Shared memory for D = 576 and 64 heads: Q 72 KiB, dout 64 KiB, keys 2 x 18 KiB, scores and dP 32
// KiB, P and dS 8 KiB. GPUs with 99 KiB have 32 heads and a single buffer of keys and of scores.
#pragma once

#include "common/gather.cuh"
#include "mla/portable.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

inline constexpr int kRowHeads = 128;  // heads that a stored row sums over

// kSlots: key tiles in shared memory. kShares: scores and dP take turns in one buffer.
template <int kD_, int kHeads_, int kSlots_, bool kShares_>
struct PortableBwdTraits {
  static constexpr int kD = kD_, kHeads = kHeads_, kSlots = kSlots_, kKeys = 16;
  static constexpr bool kShares = kShares_;
  static constexpr int kGroups = kHeads / 32, kBlocks = kD / 64, kValueBlocks = kMlaValueDim / 64;
  static constexpr int kColumns = kD % 48 == 0 ? 48 : 64;  // of a warp
  static constexpr int kWarps = kD / kColumns, kThreads = kWarps * 32;
  using Scores = mla::PortableTraits<kD, 32, kGroups, kKeys, 16, kSlots, 1>;
  using Values = mla::PortableTraits<kMlaValueDim, 32, kGroups, kKeys, 16, kSlots, 1>;
  static constexpr int kGroupScores = Scores::kParts * 32 * kKeys;
};

// What a CTA knows of its work tile. It is in shared memory to save registers.
struct PortableBwdWork {
  int64_t token;  // batch * queries + query
  int batch, group;
  int first, last;     // head tiles within the KV head group
  int64_t stored_row;  // the stored row of slot 0, by rows
  const char* kv;      // key 0
  float* dkv;          // its gradient

  template <int kD, int kHeads>
  __device__ static PortableBwdWork find(const SparseMlaBwdParams& p) {
    const int heads = p.heads / p.groups, set = p.by_rows ? kRowHeads : kHeads;
    const int sets = ceil_div(heads, set), rest = blockIdx.x / sets;
    PortableBwdWork w;
    const int at = blockIdx.x - rest * sets;
    w.group = rest % p.groups;
    const int query = rest / p.groups;
    w.token = p.first_query + query;
    w.batch = static_cast<int>(w.token) / static_cast<int>(p.queries);
    w.first = at * (set / kHeads);
    w.last = min(w.first + set / kHeads, ceil_div(heads, kHeads));
    w.stored_row = ((int64_t{query} * p.groups + w.group) * sets + at) *
                   (ceil_div(p.slots, kTile) * int64_t{kTile});
    const int64_t key = (w.batch * p.keys * p.groups + w.group) * kD;
    w.kv = static_cast<const char*>(p.kv) + key * 2;
    w.dkv = p.dkv + key;
    return w;
  }
};

template <typename Tr>
struct alignas(128) PortableBwdShared {
  uint8_t q[Tr::kBlocks][Tr::kHeads * 128];  // then dq
  uint8_t dout[Tr::kValueBlocks][Tr::kHeads * 128];
  uint8_t keys[Tr::kSlots][Tr::kBlocks][Tr::kKeys * 128];
  uint8_t p_ds[Tr::kHeads * 128];  // columns 0..15: P, 16..31: dS
  float scores[Tr::kShares ? 1 : 2][Tr::kGroups][Tr::kGroupScores];
  float max_logit[Tr::kHeads], log_sum[Tr::kHeads], delta[Tr::kHeads];
  int32_t index[Tr::kSlots][Tr::kKeys];  // -1: not valid
  alignas(16) uint8_t valid[Tr::kSlots][Tr::kKeys];
  PortableBwdWork work;
};

// Adds two neighboring columns to a stored row, or stores them.
__device__ __forceinline__ void store_or_add(uint32_t* to, float a, float b, bool adds) {
  if (adds) {
    const float2 x = unpack_bf16(*to);
    a += x.x, b += x.y;
  }
  *to = pack_bf16(a, b);
}

// An operand b whose product sums over the rows of a tile with kRows rows. It starts at any
// multiple of 16 columns.
template <int kRows>
class ColumnOperand {
 public:
  __device__ __forceinline__ ColumnOperand(uint32_t tile, int column)
      : tile(tile), column(column) {}
  __device__ __forceinline__ void load(int n, int k, uint32_t (&x)[4]) const {
    Operand<Side::kB, true, kRows>(tile, 0, column + 16 * n).load(0, k, x);
  }

 private:
  uint32_t tile;
  int column;
};

// Adds 16 rows and 16 columns of gradients of keys to `dkv`, or to the stored rows from
// `stored_row` on. Rows without an index are left out.
__device__ __forceinline__ void add_columns(const SparseMlaBwdParams& p, const float (&dk)[8],
                                            const int32_t* index, int64_t stored_row, float* dkv,
                                            int column, bool adds) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = index[lane / 4 + r * 8];
    if (key < 0) continue;
    if (p.by_rows) {
      auto* const to = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.rows) +
                                                   (stored_row + lane / 4 + r * 8) * p.dim +
                                                   column + lane % 4 * 2);
      store_or_add(to, dk[r * 2], dk[r * 2 + 1], adds);
      store_or_add(to + 4, dk[4 + r * 2], dk[5 + r * 2], adds);
    } else {
      // The columns are in the order of sparse_mla_dkv_place.
      red_add(dkv + int64_t{key} * (p.groups * p.dim) + column + lane % 4 * 4, dk[r * 2],
              dk[r * 2 + 1], dk[4 + r * 2], dk[5 + r * 2]);
    }
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    portable_bwd_kernel(const __grid_constant__ SparseMlaBwdParams p) {
  constexpr int kKeys = Tr::kKeys, kHeads = Tr::kHeads, kRowBytes = Tr::kD * 2;
  constexpr bool kAhead = Tr::kSlots > 1;
  using Scores = typename Tr::Scores;
  auto& shared = dynamic_shared<PortableBwdShared<Tr>>();
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  PortableBwdWork& work = shared.work;
  if (threadIdx.x == 0) work = PortableBwdWork::find<Tr::kD, kHeads>(p);
  __syncthreads();
  const Slots slots(p, work.token, work.group);
  const int tiles = count_tiles(slots, lane) * (kTile / kKeys);
  const bool scores_here = warp < Tr::kGroups * 4;
  const uint32_t q = smem_address(shared.q), dout = smem_address(shared.dout);
  const uint32_t p_ds = smem_address(shared.p_ds);

  for (int head_tile = work.first; head_tile < work.last; ++head_tile) {
    const int head = head_tile * kHeads, heads = min(p.heads / p.groups - head, kHeads);
    const int64_t row = work.token * p.heads + work.group * (p.heads / p.groups) + head;

    // ---- copies of keys
    int next = 0, index = -1;
    mla::for_each_row<kKeys, Tr::kThreads>([&](int, int r) { index = slots.index(r); });
    const auto load = [&] {
      if (next < tiles) {
        const int slot = next % Tr::kSlots;
        mla::for_each_row<kKeys, Tr::kThreads>([&](int, int r) {
          const bool valid = slots.is_valid(index);
          mla::gather_row<kKeys, Tr::kBlocks>(
              smem_address(shared.keys[slot]), r,
              work.kv + int64_t{valid ? index : 0} * (p.groups * kRowBytes), valid,
              l2_policy_evict_last());
          if (threadIdx.x % 8 == 0) {
            shared.valid[slot][r] = valid;
            shared.index[slot][r] = valid ? index : -1;
          }
          index = slots.index((next + 1) * kKeys + r);
        });
        ++next;
      }
      cp_async_commit();
    };

    // ---- Q, dout, and what the heads need
    if (tiles > 0) {
      const auto copy = [&]<int kBlocks>(uint32_t to, const void* from) {
        mla::for_each_row<kHeads, Tr::kThreads>([&](int, int r) {
          const bool exists = r < heads;
          mla::gather_row<kHeads, kBlocks>(
              to, r,
              static_cast<const char*>(from) + (row + (exists ? r : 0)) * int64_t{kBlocks * 128},
              exists, l2_policy_evict_first());
        });
      };
      copy.template operator()<Tr::kBlocks>(q, p.q);
      copy.template operator()<Tr::kValueBlocks>(dout, p.dout);
      load();
      for (int r = warp; r < kHeads; r += Tr::kWarps) {
        float sum = 0.f;
        if (r < heads) {
          const int64_t at = (row + r) * kMlaValueDim + lane * 16;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t x[4], y[4];
            load_16_now<0>(static_cast<const __nv_bfloat16*>(p.out) + at + i * 8, true, x);
            load_16_now<0>(static_cast<const __nv_bfloat16*>(p.dout) + at + i * 8, true, y);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float2 a = unpack_bf16(x[j]), b = unpack_bf16(y[j]);
              sum += a.x * b.x + a.y * b.y;
            }
          }
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (lane == 0) {
          shared.max_logit[r] = r < heads ? p.max_logit[row + r] : 0.f;
          shared.log_sum[r] = r < heads ? p.log_sum[row + r] : 0.f;
          shared.delta[r] = r < heads ? sum - p.dlse[row + r] : 0.f;
        }
      }
    }

    float dq[kHeads / 16][Tr::kColumns / 2];
    clear_fragments(dq);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int slot = tile % Tr::kSlots;
      const uint32_t keys = smem_address(shared.keys[slot]);
      cp_async_wait_group<0>();
      __syncthreads();
      if constexpr (kAhead) load();

      // ---- P and dS
      const int group = warp / 4;
      float s[Scores::kLaneKeys], dp[Scores::kLaneKeys];
      if (scores_here) {
        const mla::ScoreOperands<Scores> x(q, keys, group);
        mla::multiply_scores<Scores>(x.q, x.keys, shared.scores[0][group]);
      }
      if constexpr (Tr::kShares) {
        __syncthreads();
        if (scores_here) {
          mla::load_scores<Scores>(shared.scores[0][group], shared.valid[slot], s);
        }
        __syncthreads();
      }
      float (&of_dp)[Tr::kGroups][Tr::kGroupScores] = shared.scores[Tr::kShares ? 0 : 1];
      if (scores_here) {
        const mla::ScoreOperands<typename Tr::Values> x(dout, keys, group);
        mla::multiply_scores<typename Tr::Values>(x.q, x.keys, of_dp[group]);
      }
      __syncthreads();
      if (scores_here) {
        if constexpr (!Tr::kShares) {
          mla::load_scores<Scores>(shared.scores[0][group], shared.valid[slot], s);
        }
        mla::load_scores<Scores>(of_dp[group], shared.valid[slot], dp);
        const int r = group * 32 + mla::lane_row<Scores>();
        const float max_logit = shared.max_logit[r], log_sum = shared.log_sum[r];
        const float delta = shared.delta[r];
#pragma unroll
        for (int i = 0; i < Scores::kLaneKeys; ++i) {
          const bool valid = s[i] != -INFINITY;
          s[i] =
              valid ? exp2_approx((__fmul_rn(s[i], p.scale) - max_logit - log_sum) * kLog2E) : 0.f;
          dp[i] = valid ? s[i] * (dp[i] - delta) * p.scale : 0.f;
        }
        mla::store_probabilities<Scores>(p_ds + group * (32 * 128), s);
        mla::store_probabilities<Scores, kKeys>(p_ds + group * (32 * 128), dp);
      }
      __syncthreads();

      // ---- this warp's columns of dq and of dkv
      const int column = warp * Tr::kColumns;
      multiply_tiles<DType::kBF16, 1>(dq, Operand<Side::kA, false, kHeads>(p_ds, 0, kKeys),
                                      ColumnOperand<kKeys>(keys, column));
      uint32_t of_p[1][kHeads / 16][4], of_ds[1][kHeads / 16][4];
#pragma unroll
      for (int k = 0; k < kHeads / 16; ++k) {
        Operand<Side::kA, true, kHeads>(p_ds, 0, 0).load(0, k, of_p[0][k]);
        Operand<Side::kA, true, kHeads>(p_ds, 0, kKeys).load(0, k, of_ds[0][k]);
      }
#pragma unroll 1
      for (int i = 0; i < Tr::kColumns; i += 16) {
        float dk[1][8];
        clear_fragments(dk);
        multiply_tiles<DType::kBF16, kHeads / 16>(dk, RegisterOperand<1, kHeads / 16>{of_ds},
                                                  ColumnOperand<kHeads>(q, column + i));
        if (column + i < kMlaValueDim) {
          multiply_tiles<DType::kBF16, kHeads / 16>(dk, RegisterOperand<1, kHeads / 16>{of_p},
                                                    ColumnOperand<kHeads>(dout, column + i));
        }
        add_columns(p, dk[0], shared.index[slot], work.stored_row + tile * kKeys, work.dkv,
                    column + i, head_tile > work.first);
      }
      if constexpr (!kAhead) {
        __syncthreads();
        load();
      }
    }

    // ---- dq, through the tile of Q
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
      for (int i = 0; i < Tr::kColumns / 2; i += 8) {
        store_fragment<DType::kBF16, kHeads, 8>(q, m * 16, warp * Tr::kColumns + i * 2,
                                                [&](int j) { return dq[m][i + j]; });
      }
    }
    __syncthreads();
    mla::for_each_row<kHeads, Tr::kThreads>([&](int, int r) {
      const int chunk = threadIdx.x % 8;
      auto* const to = static_cast<__nv_bfloat16*>(p.dq) + (row + r) * Tr::kD + chunk * 8;
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) {
        uint32_t x[4];
        load_shared_16(q + (b * kHeads + r) * 128 + (chunk ^ r % 8) * 16, x);
        store_16(to + b * 64, x, r < heads);
      }
    });
    __syncthreads();  // before the next head tile's copies
  }
}

}  // namespace jax_dsa::sparse_mla
