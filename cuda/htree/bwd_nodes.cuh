// The gradients of nodes: for a block of the tree, over the queries that meet it,
//
//     dK += sum over 16 heads of dS q, dV += sum of P dout
//
// with the keys as rows of all products. A warp has 16 rows of a block, a unit, and their gradients
// in registers; it gathers the queries' records, two at a time, with their rotations. Warps know
// nothing of each other: each takes the next item when it is done, and adds what it has to the
// tree's gradients after the segments before.
#pragma once

#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

inline constexpr int kNodeWarps = 8;

template <int kD, int kR>
struct alignas(128) NodesWarp {
  struct alignas(128) Buffer {
    uint8_t record[Record<kD>::kBytes];
    uint8_t turn[Turns<kD>::kBytes];
  };
  static constexpr int kUnitBytes = kUnitRows<kR> * kD * 2;
  Buffer buffers[2];
  uint8_t keys[kUnitBytes], values[kUnitBytes];
  uint64_t full[2], unit_full;
};
template <int kD, int kR>
struct alignas(1024) NodesShared {
  NodesWarp<kD, kR> warps[kNodeWarps];
};

template <int kD, int kR>
__global__ void __launch_bounds__(kNodeWarps * 32, 1)
    nodes_kernel(const __grid_constant__ BwdPass x) {
  using R = Record<kD>;
  using Buffer = typename NodesWarp<kD, kR>::Buffer;
  constexpr int kRows = kUnitRows<kR>;
  const Pass& pass = x.pass;
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  auto& shared = dynamic_shared<NodesShared<kD, kR>>().warps[threadIdx.x / 32];
  if (lane == 0) {
    for (auto& barrier : shared.full) mbarrier_init(&barrier, 1);
    mbarrier_init(&shared.unit_full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  const float scale_log2 = pass.p.scale * kLog2E;
  const uint64_t keep = l2_policy_evict_last();
  const uint32_t own = place<kD>(lane % 16, lane / 16);
  const uint32_t own_key = place<kD>(lane % kRows, lane / 16);
  const uint32_t across = place<kD>(matrix % 2 * 8 + lane % 8, matrix / 2);
  RingPlace<2> at;
  uint32_t unit_parity = 0;
  for (;;) {
    uint32_t taken = 0;
    if (lane == 0) taken = atomicAdd(x.next, 1u);
    taken = __shfl_sync(~0u, taken, 0);
    if (taken >= __ldg(x.next + 1) * kUnits<kR>) break;
    const Item item = x.items[taken / kUnits<kR>];
    const int unit = taken % kUnits<kR>;
    const int64_t bg = item.list / pass.layers.blocks;
    const int64_t first = int64_t{x.starts[item.list]} * pass.parts + item.segment * kSegment;
    const int count = min(x.counts[item.list] * pass.parts - item.segment * kSegment, kSegment);
    const Meeting* const meetings = x.meetings + first;
    const uint8_t* const records = x.records + bg * pass.chunk.queries * pass.parts * R::kBytes;
    // Of the tree, whose batch entries are not the chunk's.
    const int64_t block = pass.chunk.first_batch * pass.p.groups * pass.layers.blocks + item.list;

    const auto load = [&](uint32_t row_turn, RingPlace<2> to) {
      Buffer& buffer = shared.buffers[to.index];
      mbarrier_arrive_expect(&shared.full[to.index], R::kBytes + sizeof(buffer.turn));
      bulk_load(buffer.record, records + int64_t{row_turn & 0xffff} * R::kBytes, R::kBytes,
                &shared.full[to.index], keep);
      bulk_load(buffer.turn,
                reinterpret_cast<const uint8_t*>(pass.p.rotations) +
                    int64_t{row_turn >> 16} * sizeof(buffer.turn),
                sizeof(buffer.turn), &shared.full[to.index], keep);
    };
    if (lane == 0) {
      const uint8_t* const from = static_cast<const uint8_t*>(pass.p.tree) +
                                  block * kNodeBytes<kD, kR> + unit * sizeof(shared.keys);
      mbarrier_arrive_expect(&shared.unit_full, 2 * sizeof(shared.keys));
      bulk_load(shared.keys, from, sizeof(shared.keys), &shared.unit_full, keep);
      bulk_load(shared.values, from + kNodeBytes<kD, kR> / 2, sizeof(shared.keys),
                &shared.unit_full, keep);
      load(__ldg(&meetings[0].row_turn), at);
      if (count > 1) load(__ldg(&meetings[1].row_turn), at + 1);
    }
    mbarrier_wait(&shared.unit_full, unit_parity);
    unit_parity ^= 1;

    float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
    uint32_t upcoming = __ldg(&meetings[0].hides);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint32_t hides = upcoming >> unit * kRows;
      const auto fetch = [&](const uint32_t& from, int ahead) {
        return static_cast<uint32_t>(
            load_now(reinterpret_cast<const int*>(&from), i + ahead < count, 0));
      };
      upcoming = fetch(meetings[i + 1].hides, 1);
      const uint32_t next_record = fetch(meetings[i + 2].row_turn, 2);
      Buffer& buffer = shared.buffers[at.index];
      const uint32_t q = smem_address(buffer.record), dout = q + R::kRows;
      const uint32_t turn = smem_address(buffer.turn);
      const uint32_t keys = smem_address(shared.keys) + own_key;
      const uint32_t values = smem_address(shared.values) + own_key;
      mbarrier_wait(&shared.full[at.index], at.parity);

      float s[2][4] = {}, dp[2][4] = {};  // of 8 heads each
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        uint32_t low[4], high[4], a[4], b[4];
        load_matrix_x4(further(q + own, j * 2), low);
        load_matrix_x4(further(q + own, (j + kD / 32) * 2), high);
        rotate<kD>(low, high, turn, j);
        store_matrix_x4(further(q + own, j * 2), low[0], low[1], low[2], low[3]);
        store_matrix_x4(further(q + own, (j + kD / 32) * 2), high[0], high[1], high[2], high[3]);
        load_matrix_x4(further(keys, j * 2), a);
        mma_16<DType::kBF16>(s[0], a, low[0], low[2]);
        mma_16<DType::kBF16>(s[1], a, low[1], low[3]);
        load_matrix_x4(further(keys, (j + kD / 32) * 2), a);
        mma_16<DType::kBF16>(s[0], a, high[0], high[2]);
        mma_16<DType::kBF16>(s[1], a, high[1], high[3]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          load_matrix_x4(further(values, (j + half * kD / 32) * 2), a);
          load_matrix_x4(further(dout + own, (j + half * kD / 32) * 2), b);
          mma_16<DType::kBF16>(dp[0], a, b[0], b[2]);
          mma_16<DType::kBF16>(dp[1], a, b[1], b[3]);
        }
      }

      uint32_t p[4], ds[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = half * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(buffer.record + R::kLse + head * 4);
        const float2 delta = *reinterpret_cast<const float2*>(buffer.record + R::kDelta + head * 4);
        float y[4], z[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float own_lse = j % 2 ? lse.y : lse.x;
          const bool counts = !(hides >> (lane / 4 + j / 2 * 8) & 1) && own_lse < INFINITY;
          y[j] = counts ? exp2_approx(s[half][j] * scale_log2 - own_lse) : 0.f;
          z[j] = counts ? y[j] * (dp[half][j] - (j % 2 ? delta.y : delta.x)) : 0.f;
        }
        p[half * 2] = pack_bf16(y[0], y[1]), p[half * 2 + 1] = pack_bf16(y[2], y[3]);
        ds[half * 2] = pack_bf16(z[0], z[1]), ds[half * 2 + 1] = pack_bf16(z[2], z[3]);
      }
      __syncwarp();  // rotated queries are stored
#pragma unroll
      for (int j = 0; j < kD / 16; ++j) {
        uint32_t b[4];
        load_matrix_x4_transposed(further(dout + across, j * 2), b);
        mma_16<DType::kBF16>(dv[2 * j], p, b[0], b[1]);
        mma_16<DType::kBF16>(dv[2 * j + 1], p, b[2], b[3]);
        load_matrix_x4_transposed(further(q + across, j * 2), b);
        mma_16<DType::kBF16>(dk[2 * j], ds, b[0], b[1]);
        mma_16<DType::kBF16>(dk[2 * j + 1], ds, b[2], b[3]);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0 && i + 2 < count) load(next_record, at);
      at.advance();
    }

    uint32_t* const done = x.done + item.list * int64_t{kUnits<kR>} + unit;
    if (lane == 0 && item.segment > 0) counter_wait(done, item.segment);
    __syncwarp();
    float* const to = x.gradients + (block * 2 * kR + unit * kRows + lane / 4) * kD + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
      for (int half = 0; half < kRows / 8; ++half) {
        const auto add = [&](float* place, float a, float b) {
          auto* const pair = reinterpret_cast<float2*>(place);
          const float2 old = __ldcg(pair);
          __stcg(pair, make_float2(old.x + a, old.y + b));
        };
        float* const at_row = to + half * 8 * kD + j * 8;
        add(at_row, dk[j][2 * half], dk[j][2 * half + 1]);
        add(at_row + kR * kD, dv[j][2 * half], dv[j][2 * half + 1]);
      }
    }
    __syncwarp();
    if (lane == 0) counter_add(done);
  }
}

}  // namespace jax_dsa::htree
