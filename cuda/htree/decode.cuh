// Hierarchical tree attention for decode: few queries over an HTreeCache, whose nodes are stored as
// they were pooled, [B, nodes, G, D], with keys that are not rotated.
//
// Launches. There is one launch per layer, from the top layer down to the tokens, and a combine.
// A launch above the tokens scores its layer's candidates and leaves their importances in global
// memory. The next launch selects from them: every CTA selects for itself, which is cheaper than a
// launch of its own. The launch for the tokens attends, through all layers. The combine adds up the
// splits.
//
// Tiling. `splits` CTAs share a row (request, KV head group, query). A key tile is a block of r
// siblings, or 8 rows of one (see below). Key tiles are dealt out to the workers of all splits in
// turn. When scoring, a worker is one warp, which loops over all head tiles of 16 query heads. When
// attending, a worker has one warp per head tile.
//
// Few key tiles. If a warp gets only a few key tiles, its steps are a chain of waits. Then a tile
// has 8 rows, and CTAs use so few registers and so little shared memory that those of the next
// launch fit on the SM beside them. They prepare their tables and score tiles that do not depend on
// a selection while the previous launch runs (programmatic dependent launch). If there are many key
// tiles, a warp has all registers and loads the next tile while it works on the current one.
//
// Rotation. A key is rotated by its ordinal minus the query's ordinal, n - 1, in one step, so
// queries are not rotated at all. Only queries and rotations go through shared memory; keys and
// values are loaded to registers directly (decode_tiles.cuh).
#pragma once

#include <cfloat>

#include "htree/decode_combine.cuh"
#include "htree/decode_plan.cuh"
#include "htree/decode_select.cuh"
#include "htree/decode_tiles.cuh"
#include "htree/scores.cuh"

namespace jax_dsa::htree {

// What a launch does: score the top layer; select in the layer above and score; select in layer 1,
// if there is one, and attend.
enum class DecodeStep { kTop, kMiddle, kAttend };

// Rows of a key tile.
template <int kR, bool kFewTiles>
inline constexpr int kDecodeTileRows = kFewTiles ? 8 : kR;

// The compiler limits registers as if a CTA had this many threads. If there are few key tiles, the
// CTAs of a launch and of the next one together fit into an SM's registers.
template <DecodeStep kStep, bool kFewTiles>
inline constexpr int kRegisterThreads = !kFewTiles                     ? kDecodeThreads
                                        : kStep == DecodeStep::kAttend ? 384
                                                                       : 704;

// Writes the rotations of a tile's rows, by 0 to kRows - 1 positions, to shared memory.
template <int kD, int kRows, typename Shared>
__device__ __forceinline__ void prepare_rotations(const DecodePlan& x, Shared& shared) {
  const int pair = threadIdx.x % (kD / 2);
  const double frequency = x.frequencies.revolutions[pair];
  if (threadIdx.x < kD / 2) shared.frequencies[pair] = frequency;
  for (int slot = threadIdx.x / (kD / 2); slot < kRows; slot += kDecodeThreads / (kD / 2)) {
    double revolutions = slot * frequency;
    revolutions -= rint(revolutions);
    shared.slots[slot][pair_slot(pair)] = cosine_and_sine(static_cast<float>(revolutions));
  }
}

template <int kD, int kR, DecodeStep kStep, bool kFewTiles>
__global__ void __launch_bounds__(kRegisterThreads<kStep, kFewTiles>, 1)
    decode_kernel(const __grid_constant__ DecodePlan x, int layer) {
  constexpr int kRows = kDecodeTileRows<kR, kFewTiles>;
  using Shared = DecodeShared<kD, kR, kRows>;
  auto& shared = dynamic_shared<Shared>();
  const Plan& plan = x.plan;
  const HTreeFwdParams& p = plan.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = plan.group_heads, head_tiles = plan.head_tiles, last = plan.layers.count - 1;
  const DecodeRow row(x);
  launch_dependents();

  const int64_t stride = p.groups * kD * 2;
  const int64_t first_node = (row.batch * x.nodes * p.groups + row.group) * kD * 2;
  prepare_rotations<kD, kRows>(x, shared);
  const bool selects = kStep != DecodeStep::kTop && layer < last;
  if (selects) {
    auto& selection = shared.selection(head_tiles);
    for (int i = threadIdx.x; i < kBins; i += kDecodeThreads) selection.bins[i] = 0;
    if (threadIdx.x < kSamples) selection.samples[threadIdx.x] = -INFINITY;
    if (threadIdx.x == 0) selection.boundary_count = 0;
  }
  // When attending, each head tile has a warp, and these warps form a worker. When scoring, one
  // warp loops over all head tiles and is a worker by itself.
  const int workers = kStep == DecodeStep::kAttend ? kDecodeWarps / head_tiles : kDecodeWarps;
  const int worker = kStep == DecodeStep::kAttend ? warp / head_tiles : warp;
  const int step = x.splits * workers, start = worker * x.splits + row.split;
  // Prefetches a tile's rows to the L2.
  const auto prefetch = [&](const uint8_t* array, int64_t from) {
    constexpr int kLines = kD * 2 / 128;
    if (from < 0) return;
#pragma unroll
    for (int i = lane; i < kRows * kLines; i += 32) {
      prefetch_line_l2(array + from + i / kLines * stride + i % kLines * 128);
    }
  };
  // If the warp's first key tile is one of the top layer, it does not depend on other launches.
  KeyTile<kD, kRows> keys;
  constexpr bool kPreloads =
      kStep == DecodeStep::kTop || (kStep == DecodeStep::kAttend && kFewTiles);
  bool preloaded = false;
  if constexpr (kPreloads) {
    const int n = candidates<kR>(plan, row.position, last);
    preloaded = last > 0 && worker < workers && start * kRows < n - 1;
    if (preloaded) {
      const int64_t from = first_node + (x.first_node[last] + int64_t{start} * kRows) * stride;
      keys.load(x.k + from, stride);
      if (kStep == DecodeStep::kAttend) prefetch(x.v, from);
    }
  }
  // Copy the row's queries to shared memory, with zeros for heads that pad the last head tile.
  const int64_t query = row.token * p.heads + row.group * heads;
  for (int i = threadIdx.x; i < head_tiles * kTileHeads * (kD / 8); i += kDecodeThreads) {
    const int chunk = i % (kD / 8), head = i / (kD / 8);
    uint32_t y[4];
    load_16_now<0>(
        static_cast<const char*>(p.q) + (query + (head < heads ? head : 0)) * kD * 2 + chunk * 16,
        head < heads, y);
    const uint32_t tile = smem_address(shared.queries(head / kTileHeads));
    store_shared_16(tile + swizzled<kD>(head % kTileHeads, chunk), y);
  }
  __syncthreads();
  const uint32_t queries = smem_address(shared.queries(warp % head_tiles));
  float first_scores[kRows / 8][4];
  if (kPreloads && kStep == DecodeStep::kAttend && preloaded) {
    const int n = candidates<kR>(plan, row.position, last);
    keys.rotate(start * kRows - (n - 1), shared);
    keys.multiply(queries, first_scores);
  }
  const int choices = selects ? candidates<kR>(plan, row.position, layer + 1) : 0;
  grid_dependency_wait();
  if (selects) {
    select<kR>(x, row, layer + 1, choices, shared);
    __syncthreads();
  }

  const float scale_log2 = p.scale * kLog2E;
  // Walks over the layer's key tiles `first`, `first` + `step`, ... and calls take(byte offset of
  // the tile, that of the next one or -1, ordinal of the tile's first candidate, n).
  const auto walk = [&](int at, int first, auto take) {
    constexpr int kTilesPerBlock = kR / kRows;
    const int n = candidates<kR>(plan, row.position, at), count = ceil_div(n, kRows);
    const int32_t* const list = at == last    ? nullptr
                                : at == layer ? nullptr
                                              : x.lists + row.list(x, at + 1);
    const auto offset_of = [&](int tile) {
      if (tile >= count) return int64_t{-1};
      const int block = tile / kTilesPerBlock;
      const int parent = at == last ? block : at == layer ? shared.list[block] : list[block];
      const int64_t node = x.first_node[at] + int64_t{parent} * kR + tile % kTilesPerBlock * kRows;
      return parent < 0 ? -1 : first_node + node * stride;
    };
    int64_t from = offset_of(first);
#pragma unroll 1
    for (int i = first; from >= 0; i += step) {
      const int64_t next = offset_of(i + step);
      take(from, next, i * kRows, n);
      from = next;
    }
  };
  if constexpr (kStep != DecodeStep::kAttend) {
    float* const importance = row.importance(x, layer);
    walk(layer, start, [&](int64_t from, int64_t next, int first, int n) {
      if (!preloaded) keys.load(x.k + from, stride);
      preloaded = !kFewTiles;
      KeyTile<kD, kRows> ahead;
      if (!kFewTiles && next >= 0) ahead.load(x.k + next, stride);
      keys.rotate(first - (n - 1), shared);
      constexpr int kColumns = kRows / 4;
      Sum sums[kColumns];
#pragma unroll 1
      for (int head_tile = 0; head_tile < head_tiles; ++head_tile) {
        float s[kRows / 8][4];
        keys.multiply(smem_address(shared.queries(head_tile)), s);
        const int head = head_tile * kTileHeads + lane / 4;
        const float absent[2] = {head < heads ? 0.f : -INFINITY,
                                 head + 8 < heads ? 0.f : -INFINITY};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          sums[i] = sums[i] + Sum::of(s[i / 2][i % 2] * scale_log2 + absent[0],
                                      s[i / 2][i % 2 + 2] * scale_log2 + absent[1]);
        }
      }
      reduce_columns<kColumns, 16>(sums);
      const Column<kRows> mine(lane);
      if (mine.first && first + mine.column < n - 1) {
        importance[first + mine.column] = fmaxf(sums[0].log2(), -FLT_MAX);  // as in scores.cuh
      }
      if (!kFewTiles) keys = ahead;
    });
  } else {
    float o[kD / 8][4] = {};
    Softmax softmax;
    // Bit i of a mask says that row i of a tile is masked.
    constexpr uint32_t kAll = ~0u >> (32 - kRows);
    const auto masked_rows = [&](int at, int first, int rows) {
      uint32_t masked = rows < kRows ? ~0u << max(rows, 0) : 0;
      if (at > 0) {
        const uint32_t* const bits = at == 1 ? shared.bits : x.bits + row.bits(x, at);
        masked |= bits[first / 32] >> first % 32;
      }
      return masked & kAll;
    };
    const auto attend = [&](float (&s)[kRows / 8][4], const ValueTile<kD, kRows>& values,
                            uint32_t masked) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = i * 8 + lane % 4 * 2 + j % 2;
          s[i][j] = masked >> key & 1 ? -INFINITY : __fmul_rn(s[i][j], p.scale);
        }
      }
      softmax.apply(s, o);
      values.multiply(o, s);
    };
    // The tile that was scored before the wait. Its values are loaded and multiplied together with
    // the walk's first tile.
    ValueTile<kD, kRows> first_values;
    const auto load_first = [&] {
      if (!kPreloads || !preloaded) return;
      const int n = candidates<kR>(plan, row.position, last);
      const int64_t from = first_node + (x.first_node[last] + int64_t{start} * kRows) * stride;
      first_values.load(x.v + from, stride, min(n - 1 - start * kRows, kRows));
    };
    const auto attend_first = [&] {
      if (!kPreloads || !preloaded) return;
      preloaded = false;
      const int n = candidates<kR>(plan, row.position, last);
      const uint32_t masked = masked_rows(last, start * kRows, min(n - 1 - start * kRows, kRows));
      if (masked != kAll) attend(first_scores, first_values, masked);
    };
    if (worker < workers) {
      int next_start = start, skipped = preloaded ? step : 0;
      for (int at = last; at >= 0; --at) {
        walk(at, next_start + skipped, [&](int64_t from, int64_t next, int first, int n) {
          const int rows = min(n - first - (at > 0), kRows);
          const uint32_t masked = masked_rows(at, first, rows);
          if (masked == kAll) return;
          ValueTile<kD, kRows> values;
          load_first();
          keys.load(x.k + from, stride);
          values.load(x.v + from, stride, rows);
          if (!kFewTiles) prefetch(x.k, next), prefetch(x.v, next);
          attend_first();  // while the loads are in flight
          keys.rotate(first - (n - 1), shared);
          float s[kRows / 8][4];
          keys.multiply(queries, s);
          attend(s, values, masked);
        });
        // The next layer continues with the worker after the one that took this layer's last tile.
        const int count = ceil_div(candidates<kR>(plan, row.position, at), kRows);
        next_start = (next_start + step - count % step) % step, skipped = 0;
      }
      load_first();
      attend_first();
    }
    constexpr int kStride = Shared::kOutputStride;
    // [warps, heads, kStride], columns in the order of ValueTile::multiply.
    float* const outputs = shared.outputs(head_tiles, x.overlaps);
    if (x.overlaps) __syncthreads();  // all warps have attended
    const int padded = head_tiles * kTileHeads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = softmax.sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int head = lane / 4 + r * 8;
      if (lane % 4 == 0)
        shared.max_and_sum[warp][head] = make_float2(softmax.running_max[r], total);
      float* const to = outputs + (warp * kTileHeads + head) * kStride + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kD / 8; ++i) {
        *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[i][2 * r], o[i][2 * r + 1]);
      }
    }
    __syncthreads();
    const int64_t to = (row.row * x.splits + row.split) * padded;
    for (int i = threadIdx.x; i < padded * (kD / 4); i += kDecodeThreads) {
      const int column = i % (kD / 4) * 4, head = i / (kD / 4) % kTileHeads,
                head_tile = i / (kD / 4) / kTileHeads;
      float top = -INFINITY, total = 0.f;
      for (int j = head_tile; j < workers * head_tiles; j += head_tiles) {
        top = fmaxf(top, shared.max_and_sum[j][head].x);
      }
      float4 sum = {};
      for (int j = head_tile; j < workers * head_tiles; j += head_tiles) {
        const float2 max_and_sum = shared.max_and_sum[j][head];
        const float weight = exp2_approx((max_and_sum.x - finite_max(top)) * kLog2E);
        const float4 y =
            *reinterpret_cast<const float4*>(&outputs[(j * kTileHeads + head) * kStride + column]);
        total += weight * max_and_sum.y;
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
      }
      reinterpret_cast<float4*>(x.outputs + to * kD)[i] = sum;
      if (column == 0) x.max_and_sum[to + i / (kD / 4)] = make_float2(top, total);
    }
  }
}

}  // namespace jax_dsa::htree
