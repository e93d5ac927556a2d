// The teacher of the warm-up loss for the latent form, with instructions of sm_80. teacher.cuh has
// the mathematics and the rows of a work tile.
//
// Tiling. A CTA takes one work tile: 128 rows of heads. Each of its eight warps holds 16 rows in
// registers and multiplies them with every key tile of 32 keys, as in attn_dist/portable_fwd.cuh.
// The key tiles are streamed twice, in one loop: first for the largest scores and the sums, then
// for the probabilities. The rows go through the slots of the key tiles, which are free at that
// time. Thus shared memory only holds keys, and the kernel is the same on every GPU but for the
// number of slots.
//
// Sums. Each warp sums its 16 rows by exchanges between lanes (attn_dist/heads.cuh). The sums of a
// tile are added across warps and stored beside the next tile's product, so one barrier per tile
// suffices. Nothing depends on the order in which warps run.
#pragma once

#include "attn_dist/heads.cuh"
#include "losses/powers.cuh"
#include "losses/ranges.cuh"
#include "losses/teacher_layout.cuh"
#include "mla/portable.cuh"

namespace jax_dsa::teacher {

// kSlots: key tiles in shared memory.
template <int kD_, int kSlots_>
struct PortableTraits {
  static constexpr int kD = kD_, kSlots = kSlots_, kKeys = 32, kBlocks = kD / 64;
  static constexpr int kWarps = 2 * kRows / 16, kThreads = kWarps * 32;
};

template <typename Tr>
struct alignas(128) PortableShared {
  uint8_t tiles[Tr::kSlots][Tr::kBlocks][Tr::kKeys * 128];
  float sums[2][Tr::kWarps][Tr::kKeys];  // of each warp's 16 rows, by parity of the step
};

// Returns this warp's 16 rows of a row pass in `q`. `from` is the first head of the first query.
template <typename Tr>
__device__ __forceinline__ void load_rows(const TeacherParams& p, const Layout& layout,
                                          const char* from, int queries, int row_pass,
                                          PortableShared<Tr>& shared,
                                          uint32_t (&q)[1][Tr::kD / 16][4]) {
  constexpr int kPerTile = Tr::kKeys, kStaged = Tr::kSlots < 4 ? Tr::kSlots : 4;
  static_assert(2 * kRows % (kStaged * kPerTile) == 0);
  const int warp = uniform(threadIdx.x / 32);
  const uint64_t drop = l2_policy_evict_first();
#pragma unroll 1
  for (int first = 0; first < 2 * kRows / kPerTile; first += kStaged) {
#pragma unroll 1
    for (int i = 0; i < kStaged; ++i) {
      mla::for_each_row<kPerTile, Tr::kThreads>([&](int, int row) {
        const int r = (first + i) * kPerTile + row;
        const int query = layout.query(r), head = layout.head(r, row_pass);
        const bool exists = head < layout.heads && query < queries;
        const int64_t at = exists ? int64_t{query} * p.heads + head : 0;
        mla::gather_row<kPerTile, Tr::kBlocks>(smem_address(shared.tiles[i]), row,
                                               from + at * (Tr::kD * 2), exists, drop);
      });
    }
    cp_async_commit();
    cp_async_wait_group<0>();
    __syncthreads();
    const int staged = warp * 16 / kPerTile - first;
    if (staged >= 0 && staged < kStaged) {
      const Operand<Side::kA, false, kPerTile> rows(smem_address(shared.tiles[staged]),
                                                    warp * 16 % kPerTile, 0);
#pragma unroll
      for (int k = 0; k < Tr::kD / 16; ++k) rows.load(0, k, q[0][k]);
    }
    __syncthreads();
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    portable_teacher_kernel(const __grid_constant__ TeacherParams p) {
  constexpr int kKeys = Tr::kKeys, kRowBytes = Tr::kD * 2;
  auto& shared = dynamic_shared<PortableShared<Tr>>();
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const Layout layout(p);
  QueryWorkTiles work_tile;
  if (!work_tile.next(p, layout.queries)) return;
  const Tiles seen_by_any = work_tile.tiles;
  const int first = seen_by_any.low / kKeys, tiles = ceil_div(seen_by_any.high, kKeys) - first;
  const int64_t token = work_tile.batch * p.queries + work_tile.query;
  const int queries = static_cast<int>(min(p.queries - work_tile.query, int64_t{layout.queries}));
  const Range seen =
      range_of(p, work_tile.batch, work_tile.query + int64_t{layout.query(warp * 16)});
  const int warps = layout.rows / 16;  // warps whose sums add up to a query's
  const int64_t stride = int64_t{p.groups} * kRowBytes;

  for (int row_pass = 0; row_pass < p.groups * layout.row_passes; ++row_pass) {
    const int group = row_pass / layout.row_passes, own_pass = row_pass % layout.row_passes;
    const char* const kv =
        static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride + group * kRowBytes;
    uint32_t q[1][Tr::kD / 16][4];
    load_rows<Tr>(
        p, layout,
        static_cast<const char*>(p.q) + (token * p.heads + group * layout.heads) * kRowBytes,
        queries, own_pass, shared, q);

    // ---- copies of keys. Step i of the loop below takes tile i % tiles.
    int next = 0;
    const auto load = [&] {
      if (next < 2 * tiles) {
        const uint64_t keep = l2_policy_evict_last();
        const int key = (first + (next < tiles ? next : next - tiles)) * kKeys;
        const uint32_t to = smem_address(shared.tiles[next % Tr::kSlots]);
        mla::for_each_row<kKeys, Tr::kThreads>([&](int, int row) {
          const bool valid = key + row >= seen_by_any.low && key + row < seen_by_any.high;
          mla::gather_row<kKeys, Tr::kBlocks>(to, row, kv + (valid ? key + row : 0) * stride, valid,
                                              keep);
        });
        ++next;
      }
      cp_async_commit();
    };

    // Stores the sums of a step of the second half.
    const auto write_sums = [&](int step) {
      const int key = (first + step - tiles) * kKeys + lane, query = work_tile.query + warp;
      if (warp >= queries || !range_of(p, work_tile.batch, query).has(key)) return;
      float total = shared.sums[step % 2][warp * warps][lane];
      for (int i = 1; i < warps; ++i) total += shared.sums[step % 2][warp * warps + i][lane];
      float* const to = p.out + (token + warp) * p.keys + key;
      *to = row_pass > 0 ? *to + total : total;
    };

    Powers rows[2];
    float offset[2], largest[2];
    bool exact = false;
#pragma unroll 1
    for (int i = 0; i < Tr::kSlots - 1; ++i) load();
#pragma unroll 1
    for (int step = 0; step < 2 * tiles; ++step) {
      cp_async_wait_group<Tr::kSlots - 2>();
      __syncthreads();
      load();
      if (step > tiles) write_sums(step - 1);
      float s[1][kKeys / 2];
      clear_fragments(s);
      multiply_tiles<DType::kBF16, Tr::kD / 16>(
          s, RegisterOperand<1, Tr::kD / 16>{q},
          Operand<Side::kB, false, kKeys>(smem_address(shared.tiles[step % Tr::kSlots]), 0, 0));
      if (step < tiles) {
        const int key = (first + step) * kKeys;
        const bool whole = seen.low <= key && key + kKeys <= seen.high;
        add_scores(s[0], p.scale, key + lane % 4 * 2, whole, rows,
                   [&](int, int k) { return seen.has(k); });
        if (step + 1 < tiles) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          rows[r].combine(1);
          rows[r].combine(2);
          const int head = layout.head(warp * 16 + lane / 4 + 8 * r, own_pass);
          const float2 pair = head < layout.heads ? rows[r].pair() : make_float2(0.f, -INFINITY);
          largest[r] = pair.x, offset[r] = pair.y;
        }
        exact =
            __any_sync(~0u, fmaxf(fabsf(largest[0]), fabsf(largest[1])) * kLog2E > kExactBaseLimit);
#pragma unroll
        for (int r = 0; r < 2; ++r) offset[r] -= exact ? 0.f : largest[r] * kLog2E;
      } else {
        float factor_log2 = p.scale * kLog2E;
        if (exact) {
          subtract_largest(s[0], p.scale, make_float2(largest[0], largest[1]));
          factor_log2 = kLog2E;
        }
        float sums[kKeys / 4];
        attn_dist::sum_rows(s[0], factor_log2, offset, sums);
        shared.sums[step % 2][warp][attn_dist::half_column(lane)] = sums[0];
      }
    }
    __syncthreads();
    write_sums(2 * tiles - 1);
  }
}

}  // namespace jax_dsa::teacher
