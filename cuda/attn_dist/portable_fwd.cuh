// Attention distribution, forward pass, with instructions of sm_80. fwd.cuh has the mathematics and
// says how heads are divided into head tiles of 64 rows.
//
// Tiling. A work tile is that of fwd.cuh. A CTA takes some of its key tiles and processes one or
// two head tiles at a time. Each warp holds the Q of 16 heads in registers and multiplies it with
// 32 keys of every key tile. A head tile goes through the slots of the key tiles, which are free at
// that time. Thus shared memory only holds keys, and the kernel is the same on every GPU but for
// the number of slots.
//
// Few heads. If a KV head group has at most 16 heads in one sum, as in grouped-query attention, all
// warps hold the same heads and divide the keys. Otherwise all warps multiply the same keys.
//
// Sums. Each warp sums its 16 rows by exchanges between lanes (heads.cuh). The sums of a tile are
// added across warps and stored beside the next tile's product, so one barrier per tile suffices.
// Nothing depends on the order in which warps run, so results are bit-identical on every run.
#pragma once

#include "attn_dist/heads.cuh"
#include "attn_dist/offsets.cuh"
#include "mla/portable.cuh"

namespace jax_dsa::attn_dist {

// kTiles: head tiles at a time. kSlots: key tiles in shared memory. kCtas: CTAs per SM. kKeyWarps:
// warps that divide the keys of a tile. If there are several, they have the same 16 heads.
template <int kD_, int kTiles_, int kSlots_, int kCtas_, int kKeyWarps_ = 1>
struct PortableTraits {
  static constexpr int kD = kD_, kTiles = kTiles_, kSlots = kSlots_, kCtas = kCtas_;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr bool kFewHeads = kKeyWarps > 1;
  static constexpr int kHeadRows = kFewHeads ? 16 : kHeads;  // of a head tile
  static constexpr int kWarps = kTiles * (kHeadRows / 16) * kKeyWarps, kThreads = kWarps * 32;
  static constexpr int kWarpKeys = 32, kKeys = kWarpKeys * kKeyWarps, kBlocks = kD / 64;
  static constexpr int kHeadTileBytes = kBlocks * kHeadRows * 128;
  // Head tiles that fit into the slots at a time.
  static constexpr int kFit = kSlots * kKeys / kHeadRows, kStaged = kTiles < kFit ? kTiles : kFit;
  static_assert(kSlots >= 2 && kTiles % kStaged == 0 && (!kFewHeads || kTiles == 1));
};

template <typename Tr>
struct alignas(128) PortableShared {
  uint8_t keys[Tr::kSlots][Tr::kBlocks][Tr::kKeys * 128];
  float sums[2][Tr::kWarps][Tr::kWarpKeys];  // of each warp's 16 heads, by tile parity
  uint8_t valid[Tr::kSlots][Tr::kKeys];
};

// Loads the head tiles from `head_tile` on, and returns this warp's 16 rows in `q`.
template <typename Tr>
__device__ __forceinline__ void load_queries(const AttnDistFwdParams& p, const Layout& layout,
                                             const WorkTile& work_tile, int head_tile,
                                             PortableShared<Tr>& shared,
                                             uint32_t (&q)[1][Tr::kD / 16][4]) {
  const int warp = uniform(threadIdx.x / 32);
  const char* const from = static_cast<const char*>(p.q) + work_tile.token * p.heads * (Tr::kD * 2);
  const uint64_t drop = l2_policy_evict_first();
#pragma unroll 1
  for (int first = 0; first < Tr::kTiles; first += Tr::kStaged) {
#pragma unroll 1
    for (int i = 0; i < Tr::kStaged; ++i) {
      const HeadTile heads(p, layout, work_tile, head_tile + first + i);
      const uint32_t to = smem_address(shared.keys) + i * Tr::kHeadTileBytes;
      mla::for_each_row<Tr::kHeadRows, Tr::kThreads>([&](int, int row) {
        const int head = heads.head(p, layout, row);
        mla::gather_row<Tr::kHeadRows, Tr::kBlocks>(
            to, row, from + int64_t{max(head, 0)} * (Tr::kD * 2), head >= 0, drop);
      });
    }
    cp_async_commit();
    cp_async_wait_group<0>();
    __syncthreads();
    const int staged = (Tr::kFewHeads ? 0 : warp / 4) - first;
    if (staged >= 0 && staged < Tr::kStaged) {
      const Operand<Side::kA, false, Tr::kHeadRows> rows(
          smem_address(shared.keys) + staged * Tr::kHeadTileBytes,
          Tr::kFewHeads ? 0 : warp % 4 * 16, 0);
#pragma unroll
      for (int k = 0; k < Tr::kD / 16; ++k) rows.load(0, k, q[0][k]);
    }
    __syncthreads();
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_fwd_kernel(const __grid_constant__ AttnDistFwdParams p, int splits) {
  constexpr int kKeys = Tr::kKeys, kRowBytes = Tr::kD * 2;
  constexpr int kCopies = kKeys * 8 / Tr::kThreads;  // rows of a tile that a thread copies
  auto& shared = dynamic_shared<PortableShared<Tr>>();
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  // This warp's head tile, rows and keys.
  const int warp_tile = Tr::kFewHeads ? 0 : warp / 4;
  const int warp_row = Tr::kFewHeads ? 0 : warp % 4 * 16;
  const int warp_key = Tr::kFewHeads ? warp * Tr::kWarpKeys : 0;
  const Layout layout(p);
  const int work_index = blockIdx.x / splits, split = blockIdx.x - work_index * splits;
  const WorkTile work_tile(p, layout, work_index);
  const Slots slots(p, work_tile.token, work_tile.group);
  const int all = ceil_div(p.slots, kKeys);
  const int first = static_cast<int>(int64_t{all} * split / splits);
  const int end = static_cast<int>(int64_t{all} * (split + 1) / splits);
  const int last = min(end, ceil_div(count_tiles(slots, lane) * kTile, kKeys));
  const int64_t stride = int64_t{p.groups} * kRowBytes;
  const char* const kv = static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride +
                         work_tile.group * kRowBytes;

  for (int head_tile = 0; head_tile < layout.head_tiles; head_tile += Tr::kTiles) {
    uint32_t q[1][Tr::kD / 16][4];
    if (first < last) load_queries<Tr>(p, layout, work_tile, head_tile, shared, q);

    // ---- this warp's heads
    const HeadTile heads(p, layout, work_tile, head_tile + warp_tile);
    float base[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = score_base(p, work_tile, heads.head(p, layout, warp_row + lane / 4 + r * 8));
    }
    const bool exact =
        __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) * kLog2E > kExactBaseLimit);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = heads.head(p, layout, warp_row + lane / 4 + r * 8);
      offset[r] = score_offset(p, work_tile, head, exact);
    }
    // ---- the sum that this warp adds, and the warps that have its parts
    const bool joint = !Tr::kFewHeads && layout.joint;
    const int warps = Tr::kFewHeads ? 1 : joint ? Tr::kWarps : layout.rows_per_sum / 16;
    const int sum = Tr::kFewHeads || joint ? 0 : warp % 4;
    const int first_warp = Tr::kFewHeads ? warp : joint ? 0 : warp_tile * 4 + sum * warps;
    const bool writes = joint ? warp == 0 : sum < heads.sums;
    float* const out =
        p.out + ((work_tile.batch * int64_t{p.heads / p.head_group} + heads.sum + sum) * p.queries +
                 work_tile.query) *
                    p.slots;
    const auto write_sums = [&](int tile) {
      const int slot = tile * kKeys + warp_key + lane;
      if (!writes || slot >= p.slots) return;
      float total = shared.sums[tile % 2][first_warp][lane];
      for (int i = 1; i < warps; ++i) total += shared.sums[tile % 2][first_warp + i][lane];
      out[slot] = head_tile > 0 && joint ? out[slot] + total : total;
    };
    if (writes && (head_tile == 0 || !joint)) {
      for (int i = max(first, last) * kKeys + warp_key + lane; i < min(end * kKeys, p.slots);
           i += kKeys) {
        out[i] = 0.f;
      }
    }

    // ---- key tiles
    int next = first;  // the next tile to load
    int index[kCopies];
    mla::for_each_row<kKeys, Tr::kThreads>(
        [&](int i, int row) { index[i] = slots.index(first * kKeys + row); });
    const auto load = [&] {
      if (next < last) {
        const int slot = next % Tr::kSlots;
        const uint64_t keep = l2_policy_evict_last();
        mla::for_each_row<kKeys, Tr::kThreads>([&](int i, int row) {
          const bool valid = slots.is_valid(index[i]);
          mla::gather_row<kKeys, Tr::kBlocks>(smem_address(shared.keys[slot]), row,
                                              kv + (valid ? index[i] : 0) * stride, valid, keep);
          if (threadIdx.x % 8 == 0) shared.valid[slot][row] = valid;
          index[i] = slots.index((next + 1) * kKeys + row);
        });
        ++next;
      }
      cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < Tr::kSlots - 1; ++i) load();
#pragma unroll 1
    for (int tile = first; tile < last; ++tile) {
      cp_async_wait_group<Tr::kSlots - 2>();
      __syncthreads();
      load();
      if (tile > first) write_sums(tile - 1);
      const int slot = tile % Tr::kSlots;
      float s[1][Tr::kWarpKeys / 2];
      clear_fragments(s);
      multiply_tiles<DType::kBF16, Tr::kD / 16>(
          s, RegisterOperand<1, Tr::kD / 16>{q},
          Operand<Side::kB, false, kKeys>(smem_address(shared.keys[slot]), warp_key, 0));
      float factor_log2 = p.scale * kLog2E;
      if (exact) {
#pragma unroll
        for (int i = 0; i < Tr::kWarpKeys / 2; ++i) {
          s[0][i] = __fmul_rn(s[0][i], p.scale) - base[i / 2 % 2];
        }
        factor_log2 = kLog2E;
      }
      float sums[Tr::kWarpKeys / 4];
      sum_rows(s[0], factor_log2, offset, sums);
      const int column = half_column(lane);
      const bool valid = shared.valid[slot][warp_key + column];
      shared.sums[tile % 2][warp][column] = valid ? sums[0] : 0.f;
    }
    __syncthreads();
    if (first < last) write_sums(last - 1);
  }
}

}  // namespace jax_dsa::attn_dist
