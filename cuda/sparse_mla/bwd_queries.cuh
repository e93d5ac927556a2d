// Items of the queries' kind of the sparse MLA backward kernel: for 64 heads of one query, over the
// tiles of 64 of its slots,
//
//     P = exp2(log2(e) (scale q . k - lse))    dS = scale P (dout . v - delta)    dq += dS k
//     delta = sum(out * dout) - dlse
//
// and P and dS to global memory, as images of shared-memory blocks. See bwd.cuh.
//
// A key tile has one buffer, which empties and fills by blocks of 64 columns: dq frees them in the
// order in which the next tile's scores and dP take them, so the gather runs beside the products.
// out comes first, in the place of a key tile.
//
// The rows of scores and dP are slots, so that q and dout of 64 heads are the 128 columns of one
// product and a thread has P and dS side by side. One warpgroup makes them; the other one, whose
// registers are full of dq, only waits for dS. What lies by slots and heads is both an operand of
// the keys' kind and, its rows contracted, of dq.
#pragma once

#include "common/wgmma.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// Gathers q, dout, out and the keys. The item before may still be at its end until `wait_for_last`
// returns, which one thread calls.
template <int kD, bool kPacked, typename F>
__device__ void produce_queries(const SparseMlaBwdParams& p, const BwdWork& work,
                                const BwdItem& item, BwdShared<kD>& shared, uint32_t& parity,
                                F wait_for_last) {
  constexpr int kBlocks = kD / 64;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // whose index this lane reads
  auto& to = shared.queries;
  Gather gather(warp, sub, chunk);
  const HeadTile heads(p, work, item.step, item.part);
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
    for (int i = 0; i < blocks; ++i) {  // every second block
      gather.copy_block(smem_address(block) + i * kBlockBytes, i, drop);
    }
  };
  if (tiles > 0) {
    copy_rows(p.q, kBlocks, to.operand[0]);
    copy_rows(p.dout, 8, to.operand[1]);
  }
  cp_async_arrive(&shared.rows_full);

  // out has its turn in the key tile's blocks first.
  const auto fill = [&](uint32_t bits, int members, int blocks, uint64_t policy) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = block_order(i);
      mbarrier_wait(&shared.block_free[block], parity ^ 1);
      if (i == 0) {
        if constexpr (kPacked) {
          if (lane < 16) to.members[slot] = members;
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
    // Whose place in the ring this step takes must have been read.
    if (item.step >= work.ring) {
      counter_wait(&bwd_counters(p)[item.step - work.ring].read, work.keys_items());
    }
    wait_for_last();
    shared.tiles = tiles;
    mbarrier_arrive(&shared.rows_full);
  }
  __syncwarp();

  const int64_t stride = int64_t{p.groups} * kD * 2;
  const char* kv = static_cast<const char*>(p.kv) + heads.batch(p) * p.keys * stride +
                   heads.group * (kD * 2) + chunk * 16;
  for (int tile = 0; tile < tiles; ++tile) {
    const int key = index >> (kPacked ? kMemberBits : 0), members = index;
    const uint32_t bits = gather.set_rows(kv, stride, sub, key, slots.is_valid(index));
    if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);
    fill(bits, members, kBlocks, keep);
  }
}

// Of a 64 x 64 accumulator, the diagonal's element in the warp's row lane / 4 + kRow: right in the
// lanes whose lane % 4 is lane / 8, which have its column.
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

// What the parts of the two multiplying warpgroups share.
template <int kD>
struct QueriesPart {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int row = warp * 16 + lane / 4;  // of an accumulator; this thread has row + 8, too
  BwdShared<kD>& shared;

  __device__ explicit QueriesPart(BwdShared<kD>& shared) : shared(shared) {}

  __device__ void free_block(int block) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.block_free[block]);
  }
  // dq += dS k, in the columns of `dq` from `block` on.
  template <int kN>
  __device__ void multiply(float (&dq)[kN], int block) const {
    const uint64_t ds = mn_major_descriptor(smem_address(shared.queries.ds), kBlockBytes);
    const uint64_t keys =
        mn_major_descriptor(smem_address(shared.queries.keys[block]), kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t step = k * (16 * 128 / 16);
      wgmma_bf16<kMNMajor, kMNMajor>(dq, ds + step, keys + step, true);
    }
    wgmma_commit();
  }
  template <int kN>
  __device__ void store(const SparseMlaBwdParams& p, const HeadTile& heads, const float (&dq)[kN],
                        const uint8_t* image, int block) const {
    const float one[2] = {1.f, 1.f};
    auto* const out = static_cast<__nv_bfloat16*>(p.dq) + (heads.first + row) * kD;
    mla::store_rows<kD>(dq, one, smem_address(image) + warp * 2048, out + block * 64,
                        heads.heads - row);
  }
};

// The first warpgroup: P and dS, and dq from column 384 on.
template <int kD, bool kPacked>
__device__ void make_gradients(const SparseMlaBwdParams& p, const BwdWork& work,
                               const BwdItem& item, BwdShared<kD>& shared, uint32_t& item_parity,
                               uint32_t& parity) {
  constexpr int kBlocks = kD / 64;
  const QueriesPart<kD> part(shared);
  const int lane = part.lane, warp = part.warp, row = part.row;
  auto& at = shared.queries;
  const uint64_t keys = k_major_descriptor(smem_address(at.keys));
  const uint64_t operand = k_major_descriptor(smem_address(at.operand));
  // Where this lane stores its row of an 8x8 matrix, without the swizzled chunk.
  const uint32_t matrix = (warp * 16 + lane % 16) * 128;
  const uint32_t p_matrix = smem_address(at.p) + matrix, ds_matrix = smem_address(at.ds) + matrix;
  // This warp's slots of the images in global memory.
  char* to = image(p, work, item.step, item.part) + warp * 2048;

  const HeadTile heads(p, work, item.step, item.part);
  float row_lse[2], row_dlse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + r * 8 < heads.heads;
    const int64_t head = heads.first + (exists ? row + r * 8 : 0);
    const float x = exists ? __ldg(p.lse + head) : INFINITY;
    row_lse[r] = x == -INFINITY ? INFINITY : x * kLog2E;  // no valid slot: P = 0
    row_dlse[r] = exists && x != -INFINITY ? __ldg(p.dlse + head) : 0.f;
  }

  mbarrier_wait(&shared.rows_full, item_parity);
  item_parity ^= 1;
  const int tiles = shared.tiles;
  // Rows of a tile, of keys or out, with q and dout: 64 columns of each.
  const auto multiply = [&](float (&s)[64], bool ninth, auto block_here, auto before_wait) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = block_order(i);
      mbarrier_wait(&shared.block_full[block], parity);
      if (i == 0) block_here();
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
    // delta = sum(out * dout) - dlse is the diagonal of out dout^T, by the instructions that make
    // dP: of a query's only slot, dP - delta is zero.
    float s[64];
    multiply(s, false, [] {}, [] {});
    parity ^= 1;
    for (int i = 0; i < kBlocks; ++i) part.free_block(block_order(i));
    if (lane % 4 == lane / 8) {
      at.of_head[row] = {row_lse[0], diagonal<0>(s + 32) - row_dlse[0]};
      at.of_head[row + 8] = {row_lse[1], diagonal<8>(s + 32) - row_dlse[1]};
    }
    __syncwarp();
    named_barrier_sync<128>(kHeadsReady);
  }
  if (tiles == 0 && lane == 0) mbarrier_arrive(&shared.operand_free);
  float dq[64] = {}, ninth[kBlocks > 8 ? 32 : 4] = {};
  const float scale_log2 = p.scale * kLog2E;
  for (int tile = 0; tile < tiles; ++tile, parity ^= 1) {
    uint64_t valid = 0;
    uint32_t members[2];   // of this thread's slots
    float s[64];           // scores, dP
    float2 of_head[2][4];  // of this thread's columns among 16, in turns
    const auto load_heads = [&](int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_head[k % 2][i] = at.of_head[k * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2];
      }
    };
    multiply(
        s, true,
        [&] {
          valid = shared.valid.all();
          for (int r = 0; kPacked && r < 2; ++r) members[r] = at.members[row + r * 8];
        },
        [&] { load_heads(0); });

    // Both images have left from here the tile before.
    if (lane == 0) {
      if (tile + 1 == tiles) mbarrier_arrive(&shared.operand_free);
      bulk_wait_read();
    }
    __syncwarp();
    if (valid != ~uint64_t{0}) {
      const bool counts[2] = {(valid >> row & 1) != 0, (valid >> (row + 8) & 1) != 0};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!counts[i / 2 % 2]) s[i] = -INFINITY;
      }
    }
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {  // of heads i / 4 * 8 and the next seven
        if (!(members[i / 2 % 2] >> (i / 4) & 1)) s[i] = -INFINITY;
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
          const float2 lse_delta = of_head[k % 2][i / 2 * 2 + j];
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
    named_barrier_arrive<256>(kGradientsReady);
    // What the next scores wait for first is multiplied first. The second warpgroup arrives after
    // it has passed kGradientsReady, so all gradients are stored, too.
    named_barrier_sync<256>(kFirstBlocksFree);
    wgmma_fence();
    part.multiply(dq, 6);
    if constexpr (kBlocks > 8) part.multiply(ninth, 8);
    if (lane == 0) {
      const uint64_t drop = l2_policy_evict_first();
      bulk_store(to, at.p + warp * 2048, 2048, drop);
      bulk_store(to + kBlockBytes, at.ds + warp * 2048, 2048, drop);
      bulk_commit();
    }
    to += kTileImages * kBlockBytes;
    wgmma_wait<(kBlocks > 8)>();
    part.free_block(6);
    part.free_block(7);
    wgmma_wait<0>();
    wgmma_pin(dq);
    wgmma_pin(ninth);
    if (kBlocks > 8) part.free_block(8);
  }

  if (lane == 0) {
    bulk_wait();
    counter_add(&bwd_counters(p)[item.step].written);
  }
  __syncwarp();
  named_barrier_arrive<256>(kGradientsRead);
  // The gradients leave through the place of P.
  part.store(p, heads, dq, at.p, 6);
  if constexpr (kBlocks > 8) part.store(p, heads, ninth, at.p, 8);
}

// The second warpgroup: dq up to column 384.
template <int kD>
__device__ void sum_gradients(const SparseMlaBwdParams& p, const BwdWork& work, const BwdItem& item,
                              BwdShared<kD>& shared, uint32_t& item_parity) {
  const QueriesPart<kD> part(shared);
  mbarrier_wait(&shared.rows_full, item_parity);
  item_parity ^= 1;
  const int tiles = shared.tiles;
  float first[2][32] = {}, dq[2][64] = {};
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    named_barrier_sync<256>(kGradientsReady);
    wgmma_fence();
    // The next tile's first blocks are waited for first of all.
    part.multiply(first[0], 0);
    part.multiply(first[1], 1);
    wgmma_wait<1>();
    part.free_block(0);
    part.multiply(dq[0], 2);
    wgmma_wait<1>();
    part.free_block(1);
    named_barrier_arrive<256>(kFirstBlocksFree);
    part.multiply(dq[1], 4);
    wgmma_wait<1>();
    part.free_block(2);
    part.free_block(3);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      wgmma_pin(first[i]);
      wgmma_pin(dq[i]);
    }
    part.free_block(4);
    part.free_block(5);
  }
  // The gradients leave through the place of dS, which both warpgroups must have read.
  named_barrier_sync<256>(kGradientsRead);
  const HeadTile heads(p, work, item.step, item.part);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    part.store(p, heads, first[i], shared.queries.ds, i);
    part.store(p, heads, dq[i], shared.queries.ds, 2 + 2 * i);
  }
}

}  // namespace jax_dsa::sparse_mla
