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
// out comes first, in the place of a key tile. The warps of the two warpgroups work in pairs, on
// the same 16 heads.
#pragma once

#include "common/wgmma.cuh"
#include "sparse_mla/bwd_plan.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::sparse_mla {

// Gathers q, dout, out and the keys.
template <int kD>
__device__ void produce_queries(const SparseMlaBwdParams& p, const BwdWork& work,
                                const BwdItem& item, BwdShared<kD>& shared, uint32_t& parity) {
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
    for (int i = 0; i < blocks; ++i) gather.copy_block(smem_address(block), i, drop);
  };
  if (tiles > 0) {
    copy_rows(p.q, kBlocks, to.q);
    copy_rows(p.dout, 8, to.dout);
  }
  cp_async_arrive(&shared.rows_full);
  if (thread % 128 == 0) {
    // Whose place in the ring this step takes must have been read.
    if (item.step >= work.ring) {
      counter_wait(&bwd_counters(p)[item.step - work.ring].read, work.keys_items());
    }
    shared.tiles = tiles;
    mbarrier_arrive(&shared.rows_full);
  }

  // out has its turn in the key tile's blocks first.
  const auto fill = [&](uint32_t bits, int blocks, uint64_t policy) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = block_order(i);
      mbarrier_wait(&shared.block_free[block], parity ^ 1);
      if (i == 0 && lane == 0) {
        shared.valid[warp] = bits;
        shared.valid[warp + 4] = bits >> 8;
        mbarrier_arrive(&shared.block_full[block]);
      }
      if (block < blocks) gather.copy_block(smem_address(to.keys), block, policy);
      cp_async_arrive(&shared.block_full[block]);
    }
    parity ^= 1;
  };
  if (tiles > 0) {
    rows_of(p.out, 8);
    fill(0, 8, drop);
  }

  const int64_t stride = int64_t{p.groups} * kD * 2;
  const char* kv = static_cast<const char*>(p.kv) + heads.batch(p) * p.keys * stride +
                   heads.group * (kD * 2) + chunk * 16;
  for (int tile = 0; tile < tiles; ++tile) {
    const bool counts = slots.counts(index);
    const uint32_t bits = __ballot_sync(~0u, counts) & 0xffff;
    const int safe = counts ? index : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gather.valid[i] = bits >> (i * 4 + sub) & 1;
      gather.from[i] = kv + __shfl_sync(~0u, safe, i * 4 + sub) * stride;
    }
    if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);
    fill(bits, kBlocks, keep);
  }
}

// Zeroes the entries of slots that do not count, of one half of the slots.
__device__ __forceinline__ void mask_slots(float (&x)[32], uint64_t valid, int half) {
  const uint32_t bits = static_cast<uint32_t>(valid >> (half * 32)) >> threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (!(bits >> (i / 4 * 8 + i % 2) & 1)) x[half * 16 + i] = 0.f;
  }
}

// Of a 64 x 64 accumulator, the elements of the diagonal in this thread's rows.
__device__ __forceinline__ void diagonal(const float (&x)[32], float (&of_row)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float mine = 0.f;  // which is right in the lane of the row that has the column
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = (w * 2 + r) * 4 + r * 2;
      if (w == warp) mine = row % 2 == 0 ? x[at] : x[at + 1];
    }
    of_row[r] = __shfl_sync(~0u, mine, row * 4 + row / 2);
  }
}

// Warpgroup kSide: 0 makes P and the gradients of columns 0..255 and of the ninth block, 1 makes dS
// and the gradients of columns 256..511.
template <int kD, int kSide>
__device__ void consume_queries(const SparseMlaBwdParams& p, const BwdWork& work,
                                const BwdItem& item, BwdShared<kD>& shared, uint32_t& item_parity,
                                uint32_t& parity) {
  constexpr int kOwn = kSide == 0 ? kD / 64 - 4 : 4;  // blocks of dq
  constexpr int kUsed = kSide == 0 ? kD / 64 : 8;     // blocks contracted
  const auto own_block = [](int i) { return i < 4 ? kSide * 4 + i : 8; };
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int row = warp * 16 + lane / 4;
  auto& at = shared.queries;
  const uint64_t keys = k_major_descriptor(smem_address(at.keys));
  const uint64_t rows = k_major_descriptor(smem_address(kSide == 0 ? at.q : at.dout));
  // Where this lane stores or loads its row of an 8x8 matrix, without the swizzled chunk.
  const uint32_t matrix = (warp * 16 + lane % 16) * 128;
  const uint32_t p_matrix = smem_address(at.p) + matrix, ds_matrix = smem_address(at.ds) + matrix;
  const auto chunk = [&](int k) { return ((2 * k + lane / 16) ^ (lane % 8)) * 16; };
  // This warp's rows of the image, in shared and global memory.
  uint8_t* const stored = (kSide == 0 ? at.p : at.ds) + warp * 2048;
  char* to = image(p, work, item.step, item.part) + kSide * kBlockBytes + warp * 2048;

  const HeadTile heads(p, work, item.step, item.part);
  float of_row[2];  // lse in log2 units, or delta
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + r * 8 < heads.heads;
    const int64_t head = heads.first + (exists ? row + r * 8 : 0);
    if constexpr (kSide == 0) {
      const float lse = exists ? __ldg(p.lse + head) : INFINITY;
      of_row[r] = lse == -INFINITY ? INFINITY : lse * kLog2E;  // no valid slot: P = 0
    } else {
      of_row[r] = exists ? __ldg(p.dlse + head) : 0.f;
    }
  }

  mbarrier_wait(&shared.rows_full, item_parity);
  item_parity ^= 1;
  const int tiles = shared.tiles;
  const auto free_block = [&](int block) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.block_free[block]);
  };
  // Of this warpgroup's rows with those of a tile, of keys or out.
  const auto multiply = [&](float (&s)[32], auto block_here) {
#pragma unroll
    for (int i = 0; i < kD / 64; ++i) {
      const int block = block_order(i);
      if (block >= kUsed) continue;
      mbarrier_wait(&shared.block_full[block], parity);
      if (i == 0) block_here();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t offset = block * (kBlockBytes / 16) + k * 2;
        wgmma_bf16<kKMajor, kKMajor>(s, rows + offset, keys + offset, i > 0 || k > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
  };
  // delta = sum(out * dout) - dlse is the diagonal of dout out^T, by the instructions that make dP:
  // of a query's only slot, dP - delta is zero. The other warpgroup only sees that out was here, so
  // that no phase of the barriers passes it by.
  if (tiles > 0) {
    if constexpr (kSide == 0) {
#pragma unroll
      for (int i = 0; i < kD / 64; ++i) mbarrier_wait(&shared.block_full[block_order(i)], parity);
      named_barrier_arrive<64>(kHalfReady + warp);
    } else {
      float s[32];
      multiply(s, [] {});
      named_barrier_sync<64>(kHalfReady + warp);
      for (int i = 0; i < kD / 64; ++i) free_block(block_order(i));
      float products[2];
      diagonal(s, products);
#pragma unroll
      for (int r = 0; r < 2; ++r) of_row[r] = products[r] - of_row[r];
    }
    parity ^= 1;
  }
  float dq[kOwn][32] = {};
  const float scale_log2 = p.scale * kLog2E;
  for (int tile = 0; tile < tiles; ++tile, parity ^= 1) {
    uint64_t valid = 0;
    float s[32];  // scores, or dP
    multiply(s, [&] { valid = *reinterpret_cast<const uint64_t*>(shared.valid); });

    // Both images have left from here the tile before. What the other warpgroup waits for is stored
    // as soon as there is half of it, and copied to memory afterwards.
    if (lane == 0) bulk_wait_read();
    __syncwarp();
    uint32_t ds[4][4];
    const auto store = [&](int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[k][i] = pack_bf16(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
      store_matrix_x4((kSide == 0 ? p_matrix : ds_matrix) + chunk(k), ds[k][0], ds[k][1], ds[k][2],
                      ds[k][3]);
    };
    const auto store_image = [&] {
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        bulk_store(to, stored, 2048);
        bulk_commit();
      }
      to += kTileImages * kBlockBytes;
    };
    if constexpr (kSide == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = half * 16; i < half * 16 + 16; ++i) {
          s[i] = exp2_approx(fmaf(s[i], scale_log2, -of_row[i / 2 % 2]));
        }
        if (valid != ~uint64_t{0}) mask_slots(s, valid, half);
        store(half * 2);
        store(half * 2 + 1);
        named_barrier_arrive<64>((half == 0 ? kHalfReady : kProbabilitiesReady) + warp);
      }
      store_image();
      named_barrier_sync<64>(kGradientsReady + warp);
#pragma unroll
      for (int k = 0; k < 4; ++k) load_matrix_x4(ds_matrix + chunk(k), ds[k]);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = (s[i] - of_row[i / 2 % 2]) * p.scale;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k % 2 == 0) named_barrier_sync<64>((k == 0 ? kHalfReady : kProbabilitiesReady) + warp);
        uint32_t probabilities[4];
        load_matrix_x4(p_matrix + chunk(k), probabilities);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_bf16(probabilities[j]);
          s[k * 8 + j * 2] *= pair.x;
          s[k * 8 + j * 2 + 1] *= pair.y;
        }
        store(k);
      }
      named_barrier_arrive<64>(kGradientsReady + warp);
      store_image();
    }

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint64_t v = mn_major_descriptor(smem_address(at.keys[own_block(i)]), kBlockBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_bf16<kMNMajor>(dq[i], ds[k], v + k * (16 * 128 / 16), true);
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        free_block(own_block(i - 1));
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) wgmma_pin(dq[i]);
    free_block(own_block(kOwn - 1));
  }

  if (lane == 0) {
    bulk_wait();
    counter_add(&bwd_counters(p)[item.step].written);
  }
  // The gradients leave through this warp's rows of the image, which the other warp of the pair
  // must have loaded: P before the last barrier, dS now.
  if constexpr (kSide == 0) {
    named_barrier_arrive<64>(kProbabilitiesReady + warp);
  } else {
    named_barrier_sync<64>(kProbabilitiesReady + warp);
  }
  __syncwarp();
  const float one[2] = {1.f, 1.f};
  auto* out = static_cast<__nv_bfloat16*>(p.dq) + (heads.first + row) * kD;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    store_rows<kD>(dq[i], one, smem_address(stored), out + own_block(i) * 64, heads.heads - row);
  }
}

}  // namespace jax_dsa::sparse_mla
