// dQ tiles of the sparse MLA backward kernel. For 64 heads of one query, over its key tiles (64
// slots each):
//
//   P  = exp2(log2(e) * ((scale * q . k - max_logit) - log_sum))     delta = sum(out * dout) - dlse
//   dS = scale * P * (dout . v - delta)              dq   += dS k
//
// P and dS are also written to global memory, as P and dS tiles for the dKV tiles (bwd_dkv.cuh).
//
// Key tiles. There is one buffer, which is emptied and refilled in blocks of 64 columns. The dq MMA
// frees blocks in the order in which the next key tile's scores and dP need them, so the gather
// overlaps the MMAs. Before the first key tile, `out` goes through this buffer.
//
// Operand layout. The rows of scores and dP are slots. Then q and dout of 64 heads are the 128
// columns of one MMA, and each thread holds P and dS of the same elements. dS, stored with slots as
// rows and heads as columns, is an operand of dq (transposed) as well as of the dKV tiles.
//
// Warpgroups.
//   0     MMA: scores and dP, P and dS, and dq from column 384 on
//   1     MMA: dq up to column 384, which fills its registers; it waits for dS
//   2     producer: gathers q, dout, out and the keys
//
// See bwd.cuh.
#pragma once

#include "common/wgmma.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// Gathers q, dout, out and the keys. Until `wait_for_previous_tile` returns, which only one thread
// calls, the previous work tile may still be finishing.
template <int kD, bool kPacked, typename F>
__device__ void produce_dq(const SparseMlaBwdParams& p, const BwdWork& work,
                           const BwdWorkTile& work_tile, BwdShared<kD>& shared, uint32_t& parity,
                           F wait_for_previous_tile) {
  constexpr int kBlocks = kD / 64;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // this lane reads its index
  auto& to = shared.dq;
  Gather gather(warp, sub, chunk);
  const HeadTile heads(p, work, work_tile.step, work_tile.within_step);
  const Slots slots = heads.slots(p);
  const int tiles = heads.tiles(p, lane);
  int index = slots.index(slot);

  const auto rows_of = [&](const void* from, int blocks) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Gather::row(warp, i, sub);
      gather.valid[i] = row < heads.heads;
      gather.from[i] = static_cast<const char*>(from) +
                       (heads.first + (gather.valid[i] ? row : 0)) * blocks * 128 + chunk * 16;
    }
  };
  const auto copy_rows = [&](const void* from, int blocks, void* block) {
    rows_of(from, blocks);
    for (int i = 0; i < blocks; ++i) {  // operand blocks alternate between q and dout
      gather.copy_block(smem_address(block) + i * kBlockBytes, i, drop);
    }
  };
  if (tiles > 0) {
    copy_rows(p.q, kBlocks, to.operand[0]);
    copy_rows(p.dout, 8, to.operand[1]);
  }
  cp_async_arrive(&shared.rows_full);

  // `out` passes through the blocks of the key tile first.
  const auto fill = [&](uint32_t bits, int head_mask, int blocks, uint64_t policy) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = block_order(i);
      mbarrier_wait(&shared.block_free[block], parity ^ 1);
      if (i == 0) {
        if constexpr (kPacked) {
          if (lane < 16) to.head_mask[slot] = head_mask;
          __syncwarp();
        }
        if (lane == 0) {
          shared.valid.set(warp, bits);
          mbarrier_arrive(&shared.block_full[block]);
        }
      }
      if (block < blocks) gather.copy_block(smem_address(to.keys), block, policy);
      cp_async_arrive(&shared.block_full[block]);
    }
    parity ^= 1;
  };
  if (tiles > 0) {
    rows_of(p.out, 8);
    fill(0, 0, 8, drop);
  }
  if (thread % 128 == 0) {
    // The dKV tiles of the step whose space in the ring this step reuses must have read it.
    if (work_tile.step >= work.ring) {
      counter_wait(&bwd_counters(p)[work_tile.step - work.ring].read, work.dkv_tiles_per_step());
    }
    wait_for_previous_tile();
    shared.tiles = tiles;
    mbarrier_arrive(&shared.rows_full);
  }
  __syncwarp();

  const int64_t stride = int64_t{p.groups} * kD * 2;
  const char* kv = static_cast<const char*>(p.kv) + heads.batch(p) * p.keys * stride +
                   heads.group * (kD * 2) + chunk * 16;
  for (int tile = 0; tile < tiles; ++tile) {
    const int key = index >> (kPacked ? kHeadMaskBits : 0), head_mask = index;
    const uint32_t bits = gather.set_rows(kv, stride, sub, key, slots.is_valid(index));
    if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);
    fill(bits, head_mask, kBlocks, keep);
  }
}

// Returns the diagonal element of a 64 x 64 accumulator in row `warp * 16 + lane / 4 + kRow`. The
// result is right in the lanes with lane % 4 == lane / 8, which hold that column.
template <int kRow>
__device__ __forceinline__ float diagonal(const float* x) {
  float mine = 0.f;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const int at = (warp * 2 + kRow / 8) * 4 + kRow / 4;
    if (warp == threadIdx.x / 32 % 4) mine = threadIdx.x / 4 % 2 == 0 ? x[at] : x[at + 1];
  }
  return mine;
}

// What both consumer warpgroups of a dQ tile use.
template <int kD>
struct DqConsumer {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int row = warp * 16 + lane / 4;  // of an accumulator; this thread also has row + 8
  BwdShared<kD>& shared;

  __device__ explicit DqConsumer(BwdShared<kD>& shared) : shared(shared) {}

  __device__ void free_block(int block) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.block_free[block]);
  }
  // Adds dS k to `dq`, which holds the columns of block `block` and the following blocks.
  template <int kN>
  __device__ void multiply(float (&dq)[kN], int block) const {
    const uint64_t ds = mn_major_descriptor(smem_address(shared.dq.ds), kBlockBytes);
    const uint64_t keys = mn_major_descriptor(smem_address(shared.dq.keys[block]), kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t step = k * (16 * 128 / 16);
      wgmma_bf16<kMNMajor, kMNMajor>(dq, ds + step, keys + step, true);
    }
    wgmma_commit();
  }
  template <int kN>
  __device__ void store(const SparseMlaBwdParams& p, const HeadTile& heads, const float (&dq)[kN],
                        const uint8_t* staging, int block) const {
    const float one[2] = {1.f, 1.f};
    auto* const out = static_cast<__nv_bfloat16*>(p.dq) + (heads.first + row) * kD;
    mla::store_rows<kD>(dq, one, smem_address(staging) + warp * 2048, out + block * 64,
                        heads.heads - row);
  }
};

// Runs in the first warpgroup: computes P and dS, and dq from column 384 on.
template <int kD, bool kPacked>
__device__ void compute_p_ds(const SparseMlaBwdParams& p, const BwdWork& work,
                             const BwdWorkTile& work_tile, BwdShared<kD>& shared,
                             uint32_t& rows_parity, uint32_t& parity) {
  constexpr int kBlocks = kD / 64;
  const DqConsumer<kD> consumer(shared);
  const int lane = consumer.lane, warp = consumer.warp, row = consumer.row;
  auto& at = shared.dq;
  const uint64_t keys = k_major_descriptor(smem_address(at.keys));
  const uint64_t operand = k_major_descriptor(smem_address(at.operand));
  // The address of this lane's row of an 8x8 matrix, without the swizzled chunk.
  const uint32_t matrix = (warp * 16 + lane % 16) * 128;
  const uint32_t p_matrix = smem_address(at.p) + matrix, ds_matrix = smem_address(at.ds) + matrix;
  // This warp's rows of the P and dS tiles in global memory.
  char* to = p_ds_tiles(p, work, work_tile.step, work_tile.within_step) + warp * 2048;

  const HeadTile heads(p, work, work_tile.step, work_tile.within_step);
  float row_max[2], row_log_sum[2], row_dlse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + r * 8 < heads.heads;
    const int64_t head = heads.first + (exists ? row + r * 8 : 0);
    const float max_logit = exists ? __ldg(p.max_logit + head) : -INFINITY;
    const bool has = max_logit != -INFINITY;
    row_max[r] = has ? max_logit : 0.f;
    row_log_sum[r] = has ? __ldg(p.log_sum + head) * kLog2E : INFINITY;  // no valid slot: P = 0
    row_dlse[r] = has ? __ldg(p.dlse + head) : 0.f;
  }

  mbarrier_wait(&shared.rows_full, rows_parity);
  rows_parity ^= 1;
  const int tiles = shared.tiles;
  // Multiplies the rows in the key tile (keys or `out`) with q and dout, 64 columns each.
  const auto multiply = [&](float (&s)[64], bool ninth, auto on_first_block, auto before_wait) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = block_order(i);
      mbarrier_wait(&shared.block_full[block], parity);
      if (i == 0) on_first_block();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t a = keys + block * (kBlockBytes / 16) + k * 2;
        const uint64_t b = operand + 2 * block * (kBlockBytes / 16) + k * 2;
        if (block < 8) {
          wgmma_bf16<kKMajor, kKMajor>(s, a, b, i > 0 || k > 0);
        } else if (ninth) {
          wgmma_bf16<kKMajor, kKMajor>(reinterpret_cast<float (&)[32]>(s), a, b, true);
        }
      }
    }
    wgmma_commit();
    before_wait();
    wgmma_wait<0>();
    wgmma_pin(s);
  };
  if (tiles > 0) {
    // delta = sum(out * dout) - dlse, of which the sum is the diagonal of out dout^T. It is
    // computed by the same instructions as dP, so that dP - delta is exactly zero for a query with
    // a single slot.
    float s[64];
    multiply(s, false, [] {}, [] {});
    parity ^= 1;
    for (int i = 0; i < kBlocks; ++i) consumer.free_block(block_order(i));
    const bool exact = named_barrier_any<128>(
        kHeadStatsReady, fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) * kLog2E > kExactBaseLimit);
    if (consumer.thread % 128 == 0) at.exact = exact;
    if (lane % 4 == lane / 8) {
      const float base[2] = {exact ? 0.f : row_max[0], exact ? 0.f : row_max[1]};
      at.head_stats[row] = {fmaf(base[0], kLog2E, row_log_sum[0]),
                            diagonal<0>(s + 32) - row_dlse[0]};
      at.head_stats[row + 8] = {fmaf(base[1], kLog2E, row_log_sum[1]),
                                diagonal<8>(s + 32) - row_dlse[1]};
      at.max_logit[row] = row_max[0];
      at.max_logit[row + 8] = row_max[1];
    }
    __syncwarp();
    named_barrier_sync<128>(kHeadStatsReady);
  }
  if (tiles == 0 && lane == 0) mbarrier_arrive(&shared.operand_free);
  float dq[64] = {}, ninth[kBlocks > 8 ? 32 : 4] = {};
  const float scale_log2 = p.scale * kLog2E;
  for (int tile = 0; tile < tiles; ++tile, parity ^= 1) {
    uint64_t valid = 0;
    uint32_t head_mask[2];    // of this thread's slots
    float s[64];              // 32 scores, then 32 dP
    float2 head_stats[2][4];  // of this thread's columns among 16; double-buffered
    const auto load_heads = [&](int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        head_stats[k % 2][i] = at.head_stats[k * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2];
      }
    };
    multiply(
        s, true,
        [&] {
          valid = shared.valid.all();
          for (int r = 0; kPacked && r < 2; ++r) head_mask[r] = at.head_mask[row + r * 8];
        },
        [&] { load_heads(0); });

    // The stores of the previous key tile must have read P and dS in shared memory.
    if (lane == 0) {
      if (tile + 1 == tiles) mbarrier_arrive(&shared.operand_free);
      bulk_wait_read();
    }
    __syncwarp();
    if (valid != ~uint64_t{0}) {
      const bool rows_valid[2] = {(valid >> row & 1) != 0, (valid >> (row + 8) & 1) != 0};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!rows_valid[i / 2 % 2]) s[i] = -INFINITY;
      }
    }
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {  // heads i / 4 * 8 to i / 4 * 8 + 7 share a bit
        if (!(head_mask[i / 2 % 2] >> (i / 4) & 1)) s[i] = -INFINITY;
      }
    }
    if (at.exact) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float max_logit = at.max_logit[i / 4 * 8 + lane % 4 * 2 + i % 2];
        s[i] = (__fmul_rn(s[i], p.scale) - max_logit) / p.scale;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < 3) load_heads(k + 1);
      uint32_t probabilities[4], gradients[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[2], y[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int here = k * 8 + i * 2 + j;
          const float2 lse_delta = head_stats[k % 2][i / 2 * 2 + j];
          x[j] = exp2_approx(fmaf(s[here], scale_log2, -lse_delta.x));
          y[j] = x[j] * ((s[32 + here] - lse_delta.y) * p.scale);
        }
        probabilities[i] = pack_bf16(x[0], x[1]);
        gradients[i] = pack_bf16(y[0], y[1]);
      }
      const uint32_t chunk = ((2 * k + lane / 16) ^ (lane % 8)) * 16;
      store_matrix_x4(p_matrix + chunk, probabilities[0], probabilities[1], probabilities[2],
                      probabilities[3]);
      store_matrix_x4(ds_matrix + chunk, gradients[0], gradients[1], gradients[2], gradients[3]);
    }
    fence_async_proxy();
    named_barrier_arrive<256>(kDsReady);
    // Multiply first what the next scores wait for first. The second warpgroup arrives at
    // kFirstBlocksFree after it has passed kDsReady, so all of dS is stored, too.
    named_barrier_sync<256>(kFirstBlocksFree);
    wgmma_fence();
    consumer.multiply(dq, 6);
    if constexpr (kBlocks > 8) consumer.multiply(ninth, 8);
    if (lane == 0) {
      const uint64_t drop = l2_policy_evict_first();
      bulk_store(to, at.p + warp * 2048, 2048, drop);
      bulk_store(to + kBlockBytes, at.ds + warp * 2048, 2048, drop);
      bulk_commit();
    }
    to += kPdsBlocks * kBlockBytes;
    wgmma_wait<(kBlocks > 8)>();
    consumer.free_block(6);
    consumer.free_block(7);
    wgmma_wait<0>();
    wgmma_pin(dq);
    wgmma_pin(ninth);
    if (kBlocks > 8) consumer.free_block(8);
  }

  if (lane == 0) {
    bulk_wait();
    counter_add(&bwd_counters(p)[work_tile.step].written);
  }
  __syncwarp();
  named_barrier_arrive<256>(kDsRead);
  // dq is stored through the memory of P.
  consumer.store(p, heads, dq, at.p, 6);
  if constexpr (kBlocks > 8) consumer.store(p, heads, ninth, at.p, 8);
}

// Runs in the second warpgroup: accumulates dq up to column 384.
template <int kD>
__device__ void accumulate_dq(const SparseMlaBwdParams& p, const BwdWork& work,
                              const BwdWorkTile& work_tile, BwdShared<kD>& shared,
                              uint32_t& rows_parity) {
  const DqConsumer<kD> consumer(shared);
  mbarrier_wait(&shared.rows_full, rows_parity);
  rows_parity ^= 1;
  const int tiles = shared.tiles;
  float first[2][32] = {}, dq[2][64] = {};
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    named_barrier_sync<256>(kDsReady);
    wgmma_fence();
    // The next key tile needs these blocks first.
    consumer.multiply(first[0], 0);
    consumer.multiply(first[1], 1);
    wgmma_wait<1>();
    consumer.free_block(0);
    consumer.multiply(dq[0], 2);
    wgmma_wait<1>();
    consumer.free_block(1);
    named_barrier_arrive<256>(kFirstBlocksFree);
    consumer.multiply(dq[1], 4);
    wgmma_wait<1>();
    consumer.free_block(2);
    consumer.free_block(3);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      wgmma_pin(first[i]);
      wgmma_pin(dq[i]);
    }
    consumer.free_block(4);
    consumer.free_block(5);
  }
  // dq is stored through the memory of dS, which both warpgroups must have read.
  named_barrier_sync<256>(kDsRead);
  const HeadTile heads(p, work, work_tile.step, work_tile.within_step);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    consumer.store(p, heads, first[i], shared.dq.ds, i);
    consumer.store(p, heads, dq[i], shared.dq.ds, 2 + 2 * i);
  }
}

}  // namespace jax_dsa::sparse_mla
