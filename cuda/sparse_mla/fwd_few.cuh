// Sparse MLA, forward, for up to 32 heads a group. The kernel of fwd.cuh has heads as the rows of
// its products, 64 of them; here keys and dimensions are the rows and heads the columns, so that
// 16 or 32 heads are all that is multiplied:
//
//     scores^T [64 keys, heads] = keys [64, D] q^T        output^T [512, heads] = values^T P^T
//
// What bounds it is shared memory (every tile is written once and read twice) about as much as the
// gather from the L2.
//
// Two blocks share a SM and hide each other's softmax and item ends. A block takes work
// items (query, group) in turn. Warpgroup 0 multiplies, warpgroup 1 gathers Q and the keys.
//
// Shared memory, see fwd.cuh for the layout of blocks:
//   q              D/64 blocks of as many rows as there are heads
//   ring           blocks of keys: of a tile first the last 64 columns if D is 576, which only
//                  the scores use, then the values in order; filled and freed one by one
//   probabilities  a block of P^T, a row a head; a warp writes 32 bytes of each row, those of its
//                  16 keys, and at an item's end passes its outputs through them
// P is relative to a reference of its head that follows the maximum lazily, as in fwd.cuh. All
// four warps must agree on it; they do so where they wait for each other's P anyway.
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/softmax.cuh"
#include "mla/few_heads.cuh"
#include "mla/producer.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

template <typename Shared>
__device__ __forceinline__ mla::CountingRows counting_rows(const SparseMlaFwdParams&,
                                                           const Shared& shared, int slot, int warp,
                                                           int lane) {
  return mla::CountingRows(shared.valid[slot], warp, lane);
}
// Scores in log2 units, -inf for those that do not count.
template <int kN>
__device__ __forceinline__ void hide_scores(const SparseMlaFwdParams&,
                                            const mla::CountingRows& rows, float scale_log2,
                                            float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) s[i] = rows.counts[i / 2 % 2] ? s[i] * scale_log2 : -INFINITY;
}

template <typename Tr, typename Notes>
__device__ void write_few(const SparseMlaFwdParams& p, int number, int tiles,
                          const float (&o)[Tr::kValues][Tr::kN / 2], mla::Columns<Tr::kN>& columns,
                          mla::FewShared<Tr, Notes>& shared) {
  constexpr int kN = Tr::kN;
  constexpr int kMine = mla::Columns<kN>::kHeadsOfThread;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const Item item(p, number);
  const int64_t first = item.token * p.heads + item.head;
  // Between two exchanges there must be another barrier, which only tiles have.
  if (tiles > 0) {
    mla::over_rows<kN>(columns.sum, shared.exchange, [](float a, float b) { return a + b; });
  }
  float factor[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int head = mla::Columns<kN>::head(i);
    const float total = columns.sum[i];
    const bool empty = total == 0.f;
    const float lse = empty ? -INFINITY : (columns.reference[i] + log2f(total)) * kLn2;
    factor[i] = empty ? 0.f : 1.f / total;
    if (head < item.heads) {
      if (p.sinks && !empty) {
        const float sink = p.sinks[int64_t{item.batch} * p.sinks_stride + item.head + head];
        factor[i] /= sink_divisor(sink, lse);
      }
      if (threadIdx.x < 4) p.lse[first + head] = lse;
    }
  }

  // Through the warp's own part of the probabilities; lanes 0..15 have the first 8 of its 16
  // dimensions.
  const uint32_t block = smem_address(shared.probabilities);
  const uint32_t to = mla::transposed_place(block);
  const int row = lane % 16, half = lane / 16;
  const uint32_t from = block + row * 128 + ((warp * 2 + half) ^ (row % 8)) * 16;
  auto* out =
      static_cast<__nv_bfloat16*>(p.out) + (first + row) * kMlaValueDim + warp * 16 + half * 8;
#pragma unroll
  for (int m = 0; m < Tr::kValues; ++m) {
    uint32_t packed[kN / 4];
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const float a = factor[mla::Columns<kN>::of(i)], b = factor[mla::Columns<kN>::of(i + 1)];
      packed[i / 2] = pack_bf16(a == 0.f ? 0.f : o[m][i] * a, b == 0.f ? 0.f : o[m][i + 1] * b);
    }
    mla::store_transposed<kN>(to, packed);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kN; i += 16) {
      uint32_t x[4];
      load_shared_16(from + i * 128, x);
      store_16(out + i * kMlaValueDim + m * 64, x, i + row < item.heads);
    }
    __syncwarp();
  }
}

template <typename Tr>
__device__ void produce_few(const SparseMlaFwdParams& p, mla::FewShared<Tr>& shared) {
  constexpr int kD = Tr::kD, kN = Tr::kN, kBlocks = Tr::kBlocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int items = item_count(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // whose index this lane reads
  const uint32_t ring = smem_address(shared.ring);
  Gather gather(warp, sub, chunk);
  RingPlace<Tr::kRing> at;
  uint32_t item_parity = 0, tile_number = 0;

  for (int number = blockIdx.x; number < items; number += gridDim.x, item_parity ^= 1) {
    const Item item(p, number);
    const Slots slots(p, item.token, item.group);
    const int tiles = tiles_that_count(slots, lane);
    int index = slots.index(slot);

    mla::begin_item(shared, item_parity, tiles, [&] {  // with zeros for heads that the item has not
      const char* q = static_cast<const char*>(p.q) +
                      (item.token * p.heads + item.head) * (kD * 2) + chunk * 16;
#pragma unroll
      for (int i = 0; i < kN; i += 16) {
        const int row = i + warp * 4 + sub;
        const bool has = row < item.heads;
        const char* from = q + (has ? row * (kD * 2) : 0);
        const uint32_t to = whole_sum(smem_address(shared.q), row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          cp_async_16(to + block * (kN * 128), from + block * 128, has, drop);
        }
      }
    });

    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* kv = static_cast<const char*>(p.kv) + item.batch * p.keys * stride +
                     item.group * (kD * 2) + chunk * 16;
    for (int tile = 0; tile < tiles; ++tile, ++tile_number) {
      const uint32_t bits = gather.aim(kv, stride, sub, index, slots.counts(index));
      if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        mbarrier_wait(&shared.free[at.index], at.parity ^ 1);
        if (i == 0 && lane == 0) {
          const uint32_t slot = tile_number % Tr::kBits;
          shared.valid[slot].set(warp, bits);
          mbarrier_arrive(&shared.valid_full[slot]);
        }
        gather.copy_block(ring + at.index * kBlockBytes, 0, Tr::columns(i), keep);
        cp_async_arrive(&shared.full[at.index]);
        at = at + 1;
      }
    }
  }
}

template <int kD, int kN>
__global__ void __launch_bounds__(mla::kFewThreads, mla::kFewBlocks)
    fwd_few_kernel(const __grid_constant__ Forward p) {
  constexpr int kConsumer = 192, kProducer = 64;
  static_assert(registers_fit(mla::kFewBlocks, 1, kConsumer, kProducer));
  auto& shared = dynamic_shared<mla::FewShared<mla::FewTraits<kD, kN>>>();
  mla::initialise(shared);
  if (threadIdx.x / 128 == 0) {
    raise_registers<kConsumer>();
    mla::consume_few(p, shared);
  } else {
    lower_registers<kProducer>();
    produce_few(p, shared);
  }
}

}  // namespace jax_dsa::sparse_mla
