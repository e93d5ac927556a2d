// dK and dV of sparse attention, with instructions of sm_80. bwd_dkv.cuh has the mathematics.
//
// Tiling. A work item is (batch, KV head, 64 keys), or a part of the list of their queries
// (bwd_inverse.cuh). Persistent CTAs take items from an atomic counter and loop over the steps of
// their lists. A step has the rows of q and dout of as many queries as kStep rows can hold. dK and
// dV stay in registers. The parts of a list are added to global memory in their order, so that the
// sums are always the same. With 256 dims and little shared memory, a CTA walks over the list
// twice, for 32 keys each.
//
// Warps. All warps take part in every product. With 8 warps and D = E = 128, warp tiles are
//   S, dP   64 rows x 64 keys:  2 x 4 warps with 32 x 16 each
//   dV, dK  64 keys x 128 dims: 2 x 4 warps with 32 x 32 each
// P and dS go through shared memory, as [rows, keys].
//
// Shared memory for D = E = 128: K, V 32 KiB; Q, dO 32 KiB; P, dS 16 KiB. With 64 dims, two CTAs
// share an SM, so that one copies the rows of its next step while the other multiplies.
#pragma once

#include "common/mma_tile.cuh"
#include "sparse_attention/bwd_inverse.cuh"
#include "sparse_attention/portable_dq.cuh"

namespace jax_dsa::sparse_attention {

template <DType kType_, int kD_, int kE_, int kKeys_, int kStep_, int kCtas_>
struct PortableDkvTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_, kKeys = kKeys_, kStep = kStep_, kCtas = kCtas_;
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64;
  static constexpr int kWarps = kStep / 8, kThreads = kWarps * 32;
  // Warp tiles: kRowTiles * 16 rows by kScoreKeys keys of S and dP; 32 keys by kSlice columns of
  // each block of dK and dV.
  static constexpr int kRowTiles = kStep / 32, kScoreKeys = kKeys * 2 / kWarps;
  static constexpr int kKeyWarps = kKeys / 32, kSlice = 64 * kKeyWarps / kWarps;
  static_assert(kTile % kKeys == 0 && kScoreKeys % 16 == 0 && kSlice % 16 == 0);
};

// A work item. See InverseItem.
struct PortableDkvItem {
  int batch, group, key, entries, part;
  int64_t first;  // the first entry
  bool several, done;
  uint32_t* parts_added;
};

template <typename Tr>
struct alignas(128) PortableDkvShared {
  uint8_t k[Tr::kDBlocks][Tr::kKeys * 128];
  uint8_t v[Tr::kEBlocks][Tr::kKeys * 128];
  uint8_t q[Tr::kDBlocks][Tr::kStep * 128];
  uint8_t dout[Tr::kEBlocks][Tr::kStep * 128];
  uint8_t p[Tr::kStep * 128], ds[Tr::kStep * 128];
  PortableRowSums sums[Tr::kStep];
  uint64_t seen[Tr::kStep];  // the keys that a row sees
  PortableDkvItem item;
};

// Returns the next work item. One thread calls this.
__device__ inline PortableDkvItem take_item(const SparseAttentionBwdParams& p,
                                            const InverseLists& inverse) {
  const unsigned index = atomicAdd(&inverse.plan->next_item, 1u);
  if (index >= inverse.plan->items) return {.done = true};
  const InverseItem item = inverse.items[index];
  const int pair = item.tile / inverse.key_tiles;
  return {.batch = pair / p.groups,
          .group = pair % p.groups,
          .key = item.tile % inverse.key_tiles * kTile,
          .entries = item.entries,
          .part = item.part,
          .first = item.first,
          .several = item.several,
          .done = false,
          .parts_added = inverse.parts_added + int64_t{item.tile} * 8};
}

// Stores or adds a warp's 32 keys and kSlice columns of each block of a sum. `out` is the row of
// its first key, and `rows` of the 32 exist.
template <int kSlice, int kN>
__device__ __forceinline__ void store_sums(const float (&sum)[2][kN], float factor, float* out,
                                           int64_t stride, int rows, int first_column, int columns,
                                           bool add) {
  const int lane = thread_index() & 31;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      const int row = m * 16 + i / 2 % 2 * 8 + lane / 4;
      const int column = first_column + slice_column<kSlice>(i / 8) + i / 4 % 2 * 8 + lane % 4 * 2;
      if (row >= rows || column >= columns) continue;
      auto* const to = reinterpret_cast<float2*>(out + row * stride + column);
      float2 x = {sum[m][i] * factor, sum[m][i + 1] * factor};
      if (add) {
        const float2 before = __ldcg(to);
        x.x += before.x, x.y += before.y;
      }
      *to = x;
    }
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_dkv_kernel(const __grid_constant__ SparseAttentionBwdParams p,
                        const __grid_constant__ InverseLists inverse, const float* delta) {
  constexpr DType kType = Tr::kType;
  constexpr int kStep = Tr::kStep, kKeys = Tr::kKeys, kM = Tr::kRowTiles;
  constexpr int kScores = Tr::kScoreKeys / 2;
  auto& shared = dynamic_shared<PortableDkvShared<Tr>>();
  PortableDkvItem& item = shared.item;
  const int heads = p.heads / p.groups, step_entries = kStep / heads;
  const uint32_t k_tile = smem_address(shared.k), v_tile = smem_address(shared.v);
  const uint32_t q_tile = smem_address(shared.q), dout_tile = smem_address(shared.dout);
  const uint32_t p_tile = smem_address(shared.p), ds_tile = smem_address(shared.ds);
  // The place of the warp in the warp tiles, recomputed where it is used.
  const auto lane = [] { return thread_index() & 31; };
  const auto warp = [] { return thread_index() >> 5; };
  const auto score_row = [&] { return warp() % 2 * (kStep / 2); };
  const auto score_key = [&] { return warp() / 2 * Tr::kScoreKeys; };
  const auto own_key = [&] { return warp() % Tr::kKeyWarps * 32; };
  const auto own_column = [&] { return warp() / Tr::kKeyWarps * Tr::kSlice; };
  const auto row_of = [&](int m, int r) { return score_row() + 16 * m + lane() / 4 + r * 8; };

  // The row of q and dout of row r of the step that starts at entry `begin`, or -1.
  const auto find_row = [&](int begin, int r) -> int {
    const int entry = r / heads, n = begin + entry;
    if (entry >= step_entries || n >= item.entries) return -1;
    const int query = __ldg(inverse.queries + item.first + n);
    return static_cast<int>((item.batch * p.queries + query) * p.heads) + item.group * heads + r -
           entry * heads;
  };
  // Issues the copies of the step that starts at entry `begin`.
  const auto load_step = [&](int begin) {
    constexpr int kRowStep = Tr::kThreads / 8;
    static_assert(kStep == 2 * kRowStep);  // a thread copies parts of two rows
    const int own = thread_index() / 8;
    const int first = find_row(begin, own), second = find_row(begin, own + kRowStep);
    const auto copy = [&]<int kBlocks>(uint32_t to, const void* x, int dim) {
      gather_tile<kStep, kBlocks, Tr::kThreads>(to, dim, [&](int r) {
        const int row = r < kRowStep ? first : second;
        return row < 0 ? nullptr : static_cast<const uint16_t*>(x) + int64_t{row} * dim;
      });
    };
    copy.template operator()<Tr::kDBlocks>(q_tile, p.q, p.dim);
    copy.template operator()<Tr::kEBlocks>(dout_tile, p.dout, p.value_dim);
    if (const int r = thread_index(); r < kStep) {
      const int row = find_row(begin, r);
      shared.sums[r] = row < 0 ? PortableRowSums{0.f, 0.f, 0.f}
                               : PortableRowSums{p.max_logit[row], p.log_sum[row], delta[row]};
      shared.seen[r] = row < 0 ? 0 : __ldg(inverse.keys + item.first + begin + r / heads);
    }
  };

  for (;;) {
    __syncthreads();  // all have read the last item
    if (threadIdx.x == 0) item = take_item(p, inverse);
    __syncthreads();
    if (item.done) return;
#pragma unroll 1
    for (int half = 0; half < kTile / kKeys; ++half) {
      const int first_key = item.key + half * kKeys;
      const int keys_left = max(static_cast<int>(p.keys) - first_key, 0);
      float dk[2][Tr::kD * Tr::kSlice / 128], dv[2][Tr::kE * Tr::kSlice / 128];
      clear_fragments(dk);
      clear_fragments(dv);
      if (item.entries > 0) {
        const int64_t row = (item.batch * p.keys + first_key) * p.groups + item.group;
        const auto copy = [&]<int kBlocks>(uint32_t to, const void* x, int dim) {
          load_tile<kKeys, kBlocks, Tr::kThreads>(to, static_cast<const uint16_t*>(x) + row * dim,
                                                  int64_t{p.groups} * dim, dim,
                                                  [&](int r) { return r < keys_left; });
        };
        copy.template operator()<Tr::kDBlocks>(k_tile, p.k, p.dim);
        copy.template operator()<Tr::kEBlocks>(v_tile, p.v, p.value_dim);
        load_step(0);
      }
#pragma unroll 1
      for (int begin = 0; begin < item.entries; begin += step_entries) {
        cp_async_wait();
        __syncthreads();
        float s[kM][kScores], dp[kM][kScores];
        clear_fragments(s);
        multiply_tiles<kType, Tr::kD / 16>(s,
                                           Operand<Side::kA, false, kStep>(q_tile, score_row(), 0),
                                           Operand<Side::kB, false, kKeys>(k_tile, score_key(), 0));
        clear_fragments(dp);
        multiply_tiles<kType, Tr::kE / 16>(
            dp, Operand<Side::kA, false, kStep>(dout_tile, score_row(), 0),
            Operand<Side::kB, false, kKeys>(v_tile, score_key(), 0));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = row_of(m, r);
            const PortableRowSums sums = shared.sums[row];
            const auto seen = static_cast<uint32_t>(shared.seen[row] >>
                                                    (half * kKeys + score_key() + lane() % 4 * 2));
#pragma unroll
            for (int j = 0; j < kScores / 2; ++j) {
              const int i = j / 2 * 4 + r * 2 + j % 2;
              // S and dP are undefined where a key is hidden.
              float probability = sums.probability(s[m][i], p.scale);
              if (!(seen >> (j / 2 * 8 + j % 2) & 1)) probability = 0.f;
              s[m][i] = probability;
              dp[m][i] = probability == 0.f ? 0.f : probability * (dp[m][i] - sums.delta);
            }
          }
          const int row = score_row() + 16 * m;
          store_fragment<kType, kStep, kScores>(p_tile, row, score_key(),
                                                [&](int i) { return s[m][i]; });
          store_fragment<kType, kStep, kScores>(ds_tile, row, score_key(),
                                                [&](int i) { return dp[m][i]; });
        }
        __syncthreads();
        multiply_tiles<kType, kStep / 16>(
            dv, Operand<Side::kA, true, kStep, 32>(p_tile, 0, own_key()),
            Operand<Side::kB, true, kStep, Tr::kSlice>(dout_tile, 0, own_column()));
        multiply_tiles<kType, kStep / 16>(
            dk, Operand<Side::kA, true, kStep, 32>(ds_tile, 0, own_key()),
            Operand<Side::kB, true, kStep, Tr::kSlice>(q_tile, 0, own_column()));
        __syncthreads();
        if (begin + step_entries < item.entries) load_step(begin + step_entries);
      }

      if (item.part > 0 && half == 0) {
        if (lane() == 0) counter_wait<false>(item.parts_added + warp(), item.part);
        __syncwarp();
      }
      const int64_t row = (item.batch * p.keys + first_key + own_key()) * p.groups + item.group;
      const auto store = [&](const auto& sum, float factor, float* out, int dim) {
        store_sums<Tr::kSlice>(sum, factor, out + row * dim, int64_t{p.groups} * dim,
                               keys_left - own_key(), own_column(), dim, item.part > 0);
      };
      store(dk, p.scale, p.dk, p.dim);
      store(dv, 1.f, p.dv, p.value_dim);
    }
    if (item.several) {
      __syncwarp();
      if (lane() == 0) counter_add<false>(item.parts_added + warp());
    }
  }
}

}  // namespace jax_dsa::sparse_attention
