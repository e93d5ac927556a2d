// The gradients of queries: dQ = scale * sum over the layers of dS K, in the walk of the
// attention.
//
// A warp has one head tile of one query. It rotates the keys of a block back to the query's
// position, so that the gradients of all blocks add up, and keeps the rotated keys in shared
// memory for the second product. With prefix blocks it rotates the query and its gradient
// instead.
#pragma once

#include <type_traits>

#include "htree/attend.cuh"
#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

template <typename S, int kD, int kR>
struct alignas(1024) QueriesShared {
  using BlockRing =
      typename S::template BlockRing<kR, kNodeBytes<kD, kR>, 128 * 1024, QueriesShared>;
  static constexpr int kPartRows = S::kHopper ? kR : kR < 16 ? kR : 16;
  BlockRing ring;
  uint8_t keys[S::kWarps][(kPartRows < 16 ? 16 : kPartRows) * kD * 2];  // rotated keys of a part
  uint8_t rotations[S::kWarps][RotationLoader<kD>::kBytes];
  float2 base[S::kWarps][32];  // of the lane's two heads
  int exact[S::kWarps][32];    // see Record
};

// Rotates x [16 heads, D] in place; with kBack by the inverse.
template <int kD, bool kBack>
__device__ __forceinline__ void rotate_sums(float (&x)[kD / 8][4], uint32_t rotation) {
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    uint32_t bits[4];  // cos, sin, cos, sin
    load_shared_16(rotation + (i * 8 + threadIdx.x % 4 * 2) * 8, bits);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float cos = __uint_as_float(bits[j % 2 * 2]);
      const float sin =
          kBack ? -__uint_as_float(bits[j % 2 * 2 + 1]) : __uint_as_float(bits[j % 2 * 2 + 1]);
      const float low = x[i][j], high = x[i + kD / 16][j];
      x[i][j] = low * cos - high * sin;
      x[i + kD / 16][j] = high * cos + low * sin;
    }
  }
}

template <typename S, int kD, int kR>
__global__ void __launch_bounds__(S::kThreads, 1)
    queries_kernel(const __grid_constant__ typename S::template Call<BwdPlan> x) {
  using Shared = QueriesShared<S, kD, kR>;
  constexpr int kPartRows = Shared::kPartRows, kParts = kR / kPartRows;
  constexpr int kGroups = ceil_div(kPartRows, 16);  // groups of 16 keys
  auto& shared = dynamic_shared<Shared>();
  const Plan& plan = x.plan;
  const HTreeFwdParams& p = plan.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.ring.init();
  __syncthreads();

  auto at = shared.ring.begin(x);
  if (warp >= S::kWarps) {
    S::start_producer();
    if (warp > S::kWarps) return;
    produce_all_layers<kD, kR>(plan, shared.ring, at);
    return;
  }

  S::start_mma();
  const float scale_log2 = p.scale * kLog2E;
  const uint32_t rotated_keys = smem_address(shared.keys[warp]);

  uint32_t q[kD / 16][4], dout[kD / 16][4];
  float dq[kD / 8][4] = {}, lse[2], delta[2];
  {
    const HeadTile tile(plan, S::first_head(x));
    load_heads<kD>(x.dout, tile, dout);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) dout[i][j] = scaled_bf16(dout[i][j], x.first_factor);
    }
    int64_t record_index = tile.row * plan.head_tiles + warp % plan.head_tiles;
    if constexpr (!S::kHopper) {  // this launch may have some of the head tiles
      record_index = tile.row * ceil_div(plan.group_heads, kTileHeads) +
                     S::first_head(x) / kTileHeads + warp % plan.head_tiles;
    }
    const uint8_t* const record = x.records + record_index * Record<kD>::kBytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = lane / 4 + r * 8;
      lse[r] = reinterpret_cast<const float*>(record + Record<kD>::kLse)[head];
      delta[r] = reinterpret_cast<const float*>(record + Record<kD>::kDelta)[head];
    }
    // Shared memory spares registers.
    const auto* const base = reinterpret_cast<const float*>(record + Record<kD>::kBase);
    shared.base[warp][lane] = make_float2(base[lane / 4], base[lane / 4 + 8]);
    shared.exact[warp][lane] = *reinterpret_cast<const int*>(record + Record<kD>::kExact);
  }
  RotationLoader<kD> rotations(p.rotations, shared.rotations[warp]);
  for (int layer = plan.layers.count - 1; layer >= 0; --layer) {
    const HeadTile tile(plan, S::first_head(x));
    const int n = candidates<kR>(plan, tile.position, layer);
    int left = layer ? n - 1 : n;  // candidates from the next block on
    const int32_t* mask = nullptr;
    if (layer) {
      mask = reinterpret_cast<const int32_t*>(plan.chunk.masks) +
             ((layer - 1) * plan.chunk.rows + tile.row) * p.top_k;
    }
    // The mask of the next block is loaded one block ahead.
    const auto fetch = [&] {
      const bool has = layer && left >= 0;
      return static_cast<uint32_t>(load_now(mask, has, 0));
    };
    uint32_t selected = fetch();
    rotations.load(n - 1);
    const bool prefix = sees_prefix<kR>(plan, tile.position, layer);
    load_heads<kD>(p.q, tile, q);
    uint32_t prefix_rotation = 0;
    if (prefix) {
      prefix_rotation = rotations.next(-1);
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) rotate<kD>(q[j], q[j + kD / 32], prefix_rotation, j);
      rotate_sums<kD, false>(dq, prefix_rotation);
    }
    const auto walk = [&](auto rotates) {
      constexpr bool kRotates = decltype(rotates)::value;
      consume(shared.ring, at, tile.query, [&](uint32_t block) {
        const int rows = left;
        left -= kR;
        const uint32_t rotation = kRotates ? rotations.next(layer ? left : left - 1) : 0;
        uint32_t masked = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (kRotates && part > 0) __syncwarp();  // all lanes have read the part before
          const uint32_t part_keys = block + part * kPartRows * kD * 2;
          const uint32_t values = part_keys + kNodeBytes<kD, kR> / 2;
          float s[kGroups * 2][4] = {}, dp[kGroups * 2][4] = {};  // [8 keys]
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const uint32_t own =
                swizzled<kD>(group * 16 + lane % (kPartRows < 16 ? kPartRows : 16), lane / 16);
#pragma unroll
            for (int j = 0; j < kD / 32; ++j) {
              uint32_t low[4], high[4], b[4];
              load_matrix_x4(offset_chunks(part_keys + own, j * 2), low);
              load_matrix_x4(offset_chunks(part_keys + own, (j + kD / 32) * 2), high);
              if constexpr (kRotates) {
                rotate<kD, true>(low, high, rotation, j);
                const uint32_t to = rotated_keys + own;
                store_matrix_x4(offset_chunks(to, j * 2), low[0], low[1], low[2], low[3]);
                store_matrix_x4(offset_chunks(to, (j + kD / 32) * 2), high[0], high[1], high[2],
                                high[3]);
              }
              mma_16<DType::kBF16>(s[2 * group], q[j], low[0], low[2]);
              mma_16<DType::kBF16>(s[2 * group + 1], q[j], low[1], low[3]);
              mma_16<DType::kBF16>(s[2 * group], q[j + kD / 32], high[0], high[2]);
              mma_16<DType::kBF16>(s[2 * group + 1], q[j + kD / 32], high[1], high[3]);
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                load_matrix_x4(offset_chunks(values + own, (j + half * kD / 32) * 2), b);
                mma_16<DType::kBF16>(dp[2 * group], dout[j + half * kD / 32], b[0], b[2]);
                mma_16<DType::kBF16>(dp[2 * group + 1], dout[j + half * kD / 32], b[1], b[3]);
              }
            }
          }
          if (part == 0) {
            masked = selected | (rows < kR ? ~0u << max(rows, 0) : 0);
            ++mask;
            selected = fetch();
          }
          float factor_log2 = scale_log2;
          if (shared.exact[warp][lane]) {
            factor_log2 = kLog2E;
            const float2 base = shared.base[warp][lane];
#pragma unroll
            for (int i = 0; i < kPartRows / 8; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                s[i][j] = __fmul_rn(s[i][j], p.scale) - (j / 2 ? base.y : base.x);
              }
            }
          }
          float ds[kPartRows / 8][4];
#pragma unroll
          for (int i = 0; i < kPartRows / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int key = part * kPartRows + i * 8 + lane % 4 * 2 + j % 2;
              const bool counts = !(masked >> key & 1) && lse[j / 2] < INFINITY;
              const float prob = exp2_approx(fmaf(s[i][j], factor_log2, -lse[j / 2]));
              ds[i][j] = counts ? prob * (dp[i][j] - delta[j / 2]) : 0.f;
            }
          }
          __syncwarp();  // rotated keys are in shared memory
          const uint32_t keys = kRotates ? rotated_keys : part_keys;
          if (rows < kR) {
            multiply_values<kD, kPartRows, true>(dq, ds, keys, rows - part * kPartRows);
          } else {
            multiply_values<kD, kPartRows, false>(dq, ds, keys, kPartRows);
          }
        }
      });
    };
    if (prefix) {
      walk(std::false_type());
      rotate_sums<kD, true>(dq, prefix_rotation);
    } else {
      walk(std::true_type());
    }
  }

  const HeadTile tile(plan, S::first_head(x));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + r * 8;
    if (head >= tile.heads) continue;
    const bool live = lse[r] < INFINITY;  // otherwise NaN in the keys would reach dQ
    auto* const to = static_cast<uint32_t*>(x.dq) + ((tile.head + head) * kD + lane % 4 * 2) / 2;
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      to[i * 4] =
          live ? pack_bf16(dq[i][2 * r] * x.last_factor, dq[i][2 * r + 1] * x.last_factor) : 0;
    }
  }
}

}  // namespace jax_dsa::htree
