// The attention: one softmax over all candidates that a query did not select, in all layers.
//
//   S = scale * Q K^T        P = exp(S - m) / l        O = sum over layers of P V
//
// CTA, producer and pipeline: see walk.cuh. An MMA warp has one head tile of one query. Its
// query fragments and outputs stay in registers, as in FlashAttention-2: the accumulator
// fragments of S, packed, are the A operand of P V. The running max is rescaled lazily: it
// follows the true maximum only when that exceeds it by a margin.
//
// Masked candidates have the score -inf. In a query's last block the rows past the query may
// hold anything, even NaN, so their values are replaced by zeros in registers.
#pragma once

#include <type_traits>

#include "common/softmax.cuh"
#include "htree/walk.cuh"

namespace jax_dsa::htree {

inline constexpr float kLazyMargin = 8.f * kLn2;

template <typename S, int kD, int kR>
struct alignas(1024) AttendShared {
  using BlockRing =
      typename S::template BlockRing<kR, kNodeBytes<kD, kR>, kRingBytes, AttendShared>;
  BlockRing ring;
  uint8_t rotations[S::kWarps][RotationMatrices<kD>::kBytes];
  uint8_t zeros[RotationMatrices<kD>::kBytes];
};

// The online softmax of a lane's two heads, lane / 4 and lane / 4 + 8.
struct Softmax {
  float running_max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // over this lane's probabilities only

  // Turns scores into probabilities. If a score of the warp's exceeds its running max by more
  // than the margin, raises the running max and rescales the outputs.
  template <int kTiles, int kOut>
  __device__ __forceinline__ void apply(float (&s)[kTiles][4], float (&o)[kOut][4]) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) top[j / 2] = fmaxf(top[j / 2], s[i][j]);
    }
    if (__any_sync(
            ~0u, top[0] > running_max[0] + kLazyMargin || top[1] > running_max[1] + kLazyMargin)) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        const float to = top[r] > running_max[r] + kLazyMargin ? top[r] : running_max[r];
        factor[r] = exp2_approx((running_max[r] - finite_max(to)) * kLog2E);
        sum[r] *= factor[r];
        running_max[r] = to;
      }
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][j] *= factor[j / 2];
      }
    }
    float shift[2] = {finite_max(running_max[0]) * kLog2E, finite_max(running_max[1]) * kLog2E};
    if (__any_sync(~0u, fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kExactBaseLimit)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] -= finite_max(running_max[j / 2]);
      }
      shift[0] = shift[1] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = exp2_approx(fmaf(s[i][j], kLog2E, -shift[j / 2]));
        sum[j / 2] += s[i][j];
      }
    }
  }
};

// o [16 heads, D] += P [16, r] V for a block's values. If kPartial, rows from `rows` on count as
// zeros.
template <int kD, int kR, bool kPartial>
__device__ __forceinline__ void multiply_values(float (&o)[kD / 8][4], const float (&s)[kR / 8][4],
                                                uint32_t values, int rows) {
  constexpr int kSteps = ceil_div(kR, 16);
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4] = {}, mask[2];
#pragma unroll
    for (int i = 0; i < (kR == 8 ? 1 : 2); ++i) {
      a[2 * i] = pack_bf16(s[2 * step + i][0], s[2 * step + i][1]);
      a[2 * i + 1] = pack_bf16(s[2 * step + i][2], s[2 * step + i][3]);
      const int key = step * 16 + i * 8 + lane % 4 * 2;
      mask[i] = (key < rows ? 0xffffu : 0) | (key + 1 < rows ? 0xffff0000u : 0);
    }
    const auto clean = [&](uint32_t& x, int half) {
      if constexpr (kPartial) x &= mask[half];
    };
    if constexpr (kR == 8) {
      const uint32_t from = values + swizzled<kD>(row, matrix);
#pragma unroll
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t b[4];  // 8 dimensions each
        load_matrix_x4_transposed(offset_chunks(from, i * 4), b);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          clean(b[j], 0);
          mma_16<DType::kBF16>(o[i * 4 + j], a, b[j], 0);
        }
      }
    } else {
      const uint32_t from = values + swizzled<kD>(step * 16 + matrix % 2 * 8 + row, matrix / 2);
#pragma unroll
      for (int i = 0; i < kD / 16; ++i) {
        uint32_t b[4];  // keys 0-7 and 8-15 of 8 dimensions, then of the next 8
        load_matrix_x4_transposed(offset_chunks(from, i * 2), b);
#pragma unroll
        for (int j = 0; j < 4; ++j) clean(b[j], j % 2);
        mma_16<DType::kBF16>(o[i * 2], a, b[0], b[1]);
        mma_16<DType::kBF16>(o[i * 2 + 1], a, b[2], b[3]);
      }
    }
  }
}

// The MMA warp's head tile. Like QueryTile, it is recomputed where it is needed.
struct HeadTile {
  int query, position, heads;  // heads: number of valid heads of the 16
  int64_t row;                 // within the chunk
  int64_t head;                // index of the first head in [B, T, N]

  // The CTA has the heads of its group from `first_head` on.
  __device__ HeadTile(const Plan& plan, int first_head) {
    const QueryTile tile(plan);
    const int warp = thread_index() / 32;
    const int first = first_head + warp % plan.head_tiles * kTileHeads;
    query = warp / plan.head_tiles;
    position = tile.position(plan, query);
    const bool there = query < tile.queries;
    heads = there ? plan.group_heads - first : 0;
    row = tile.row + (there ? query : 0);
    head = (there ? tile.token(plan, query) : 0) * plan.p.heads + tile.group * plan.group_heads +
           first;
  }
};

// Loads the fragments of the warp's heads from the queries, or from another array [B, T, N, D].
// Heads that pad the tile become zeros.
template <int kD>
__device__ __forceinline__ void load_heads(const void* rows, const HeadTile& head_tile,
                                           uint32_t (&q)[kD / 16][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + r * 8;
    const bool valid = head < head_tile.heads;
    const int* const from =
        static_cast<const int*>(rows) + (head_tile.head + (valid ? head : 0)) * kD / 2 + lane % 4;
#pragma unroll
    for (int j = 0; j < kD / 16; ++j) {
      q[j][r] = static_cast<uint32_t>(load_now(from + j * 8, valid, 0));
      q[j][r + 2] = static_cast<uint32_t>(load_now(from + j * 8 + 4, valid, 0));
    }
  }
}

template <typename S, int kD, int kR>
__global__ void __launch_bounds__(S::kThreads, 1)
    attend_kernel(const __grid_constant__ typename S::template Call<Plan> plan) {
  auto& shared = dynamic_shared<AttendShared<S, kD, kR>>();
  const HTreeFwdParams& p = plan.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.ring.init();
  clear_zeros(shared.zeros);
  __syncthreads();

  auto at = shared.ring.begin(plan);
  if (warp >= S::kWarps) {
    S::start_producer();
    if (warp > S::kWarps) return;
    produce_all_layers<kD, kR>(plan, shared.ring, at);
    return;
  }

  S::start_mma();

  uint32_t q[kD / 16][4];
  float o[kD / 8][4] = {};
  Softmax softmax;
  RotationMatrices<kD> rotations(p.rotations, shared.rotations[warp], shared.zeros);
  // Attends to a layer. Above the tokens, selected nodes are masked: the last candidate is
  // always selected, the others as the masks say.
  const auto attend = [&]<typename Selects>(int layer, Selects of_layer) {
    bool selects;
    if constexpr (std::is_same_v<Selects, bool>) {
      selects = of_layer;
    } else {
      selects = Selects::value;
    }
    const HeadTile tile(plan, S::first_head(plan));
    const int n = candidates<kR>(plan, tile.position, layer);
    int left = n - selects;  // candidates from the next block on
    const int32_t* mask = nullptr;
    if (selects) {
      mask = reinterpret_cast<const int32_t*>(plan.chunk.masks) +
             ((layer - 1) * plan.chunk.rows + tile.row) * p.top_k;
    }
    // The mask of the next block is loaded one block ahead.
    const auto fetch = [&] {
      return selects ? static_cast<uint32_t>(load_now(mask, left >= 0, 0)) : 0;
    };
    uint32_t selected = fetch();
    rotations.load(n - 1);
    // All prefix blocks need the same rotation of the query; each of the other blocks needs
    // its own.
    const bool prefix = sees_prefix<kR>(plan, tile.position, layer);
    load_heads<kD>(p.q, tile, q);
    const uint32_t prefix_rotation = prefix ? rotations.next(-1) : 0;
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint32_t (&low)[4] = q[j], (&high)[4] = q[j + kD / 32];
      pair_up(low, high);
      if (prefix) rotate_pairs(low, high, prefix_rotation, j);
    }
    const auto walk = [&](auto rotates) {
      constexpr bool kRotates = decltype(rotates)::value;
      // The rotation for a block is prepared while the softmax of the block before runs.
      uint32_t rotation = 0;
      if constexpr (kRotates) rotation = rotations.next(n - 1 - kR);
      consume(shared.ring, at, tile.query, [&](uint32_t block) {
        const int rows = left;
        left -= kR;
        float s[kR / 8][4];
        multiply_keys<kD, kR>(s, block, [&](int j, uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) low[i] = q[j][i], high[i] = q[j + kD / 32][i];
          if constexpr (kRotates) rotate_pairs(low, high, rotation, j);
        });
        if constexpr (kRotates) rotation = rotations.next(left - !selects - kR);
        const uint32_t masked = selected | (rows < kR ? ~0u << max(rows, 0) : 0);
        const uint32_t lane_masked = masked >> lane % 4 * 2;  // bit 0: this lane's first key
        ++mask;
        selected = fetch();
#pragma unroll
        for (int i = 0; i < kR / 8; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const bool masked_key = lane_masked >> (i * 8 + j % 2) & 1;
            s[i][j] = masked_key ? -INFINITY : __fmul_rn(s[i][j], p.scale);
          }
        }
        softmax.apply(s, o);
        const uint32_t values = block + kNodeBytes<kD, kR> / 2;
        if (rows < kR) {
          multiply_values<kD, kR, true>(o, s, values, rows);
        } else {
          multiply_values<kD, kR, false>(o, s, values, kR);
        }
      });
    };
    if (prefix) {
      walk(std::false_type());
    } else {
      walk(std::true_type());
    }
  };
  if constexpr (S::kHopper) {
    for (int layer = plan.layers.count - 1; layer > 0; --layer) attend(layer, std::true_type());
    attend(0, std::false_type());
  } else {
    for (int layer = plan.layers.count - 1; layer >= 0; --layer) attend(layer, layer > 0);
  }

  const HeadTile tile(plan, S::first_head(plan));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = softmax.sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int head = lane / 4 + r * 8;
    if (head >= tile.heads) continue;
    const bool empty = total == 0.f;
    const float factor = empty ? 0.f : 1.f / total;
    auto* const out = static_cast<uint32_t*>(p.out) + ((tile.head + head) * kD + lane % 4 * 2) / 2;
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      out[i * 4] = pack_bf16(o[i][2 * r] * factor, o[i][2 * r + 1] * factor);
    }
    if (lane % 4 == 0) {
      p.max_logit[tile.head + head] = softmax.running_max[r];
      p.log_sum[tile.head + head] = log_of_sum(total);
    }
  }
}

}  // namespace jax_dsa::htree
