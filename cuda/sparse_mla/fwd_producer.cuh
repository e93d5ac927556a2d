// The producer warpgroup of the sparse MLA forward kernel: gathers Q and the selected keys. See
// fwd.cuh.
#pragma once

#include "common/ptx.cuh"
#include "sparse_mla/fwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// A lane copies one 16-byte chunk of two rows in each half of a tile, eight lanes a row.
struct Gather {
  uint32_t offset[2];  // within a block, for even and odd i
  const char* from[4];
  bool valid[4];

  __device__ Gather(int warp, int sub, int chunk) {
    offset[0] = (warp * 8 + sub) * 128 + (chunk ^ sub) * 16;
    offset[1] = (warp * 8 + 4 + sub) * 128 + (chunk ^ (sub + 4)) * 16;
  }

  __device__ static int row(int warp, int i, int sub) {
    return i / 2 * 32 + warp * 8 + i % 2 * 4 + sub;
  }

  // At the keys of a tile. Lanes 0..15 have the index of one of the warp's 16 slots each, in the
  // order of `row`, and whether it counts; returns these bits.
  __device__ __forceinline__ uint32_t aim(const char* kv, int64_t stride, int sub, int index,
                                          bool counts) {
    const uint32_t bits = __ballot_sync(~0u, counts) & 0xffff;
    const int safe = counts ? index : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      valid[i] = bits >> (i * 4 + sub) & 1;
      from[i] = kv + __shfl_sync(~0u, safe, i * 4 + sub) * stride;
    }
    return bits;
  }

  template <int kFirst, int kLast, int kHalf>
  __device__ void copy(uint32_t to, uint64_t policy) const {
#pragma unroll
    for (int block = kFirst; block < kLast; ++block) {
#pragma unroll
      for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
        cp_async_16(whole_sum(to, offset[i % 2]) + block * kBlockBytes + kHalf * 4096,
                    from[i] + block * 128, valid[i], policy);
      }
    }
  }

  // All rows of one block, to block `at`.
  __device__ void copy_block(uint32_t to, int at, int block, uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cp_async_16(whole_sum(to, offset[i % 2]) + at * kBlockBytes + i / 2 * 4096,
                  from[i] + block * 128, valid[i], policy);
    }
  }
  __device__ void copy_block(uint32_t to, int block, uint64_t policy) const {
    copy_block(to, block, block, policy);
  }
};

// One row of indices. (Of packed queries, indices shifted and members below them, see bwd_pack.cuh;
// the limit is shifted, too, so whether a slot counts is the same question.)
struct Slots {
  const int32_t* row;
  int length;
  int limit;  // keys below this count

  template <typename Params>
  __device__ Slots(const Params& p, int64_t token, int group)
      : row(p.indices + (token * p.groups + group) * p.slots),
        length(p.topk_length ? min(p.slots, __ldg(p.topk_length + token)) : p.slots),
        limit(static_cast<int>(min(p.keys, int64_t{INT32_MAX}))) {
    if (p.ends) limit = min(limit, __ldg(p.ends + token));
    if constexpr (requires { p.member_bits; }) limit <<= p.member_bits;
  }

  __device__ int index(int slot) const { return load_now(row + slot, slot < length, -1); }
  __device__ bool counts(int index) const { return index >= 0 && index < limit; }

  // Tiles up to the last slot that counts; searched from the end, where rows are usually full.
  __device__ int tiles(int lane) const {
    constexpr int kStep = 256;
    for (int base = (length - 1) / kStep * kStep; length > 0 && base >= 0; base -= kStep) {
      int found[kStep / 32], last = -1;
#pragma unroll
      for (int i = 0; i < kStep / 32; ++i) found[i] = index(base + 32 * i + lane);
#pragma unroll
      for (int i = 0; i < kStep / 32; ++i) {
        if (__any_sync(~0u, counts(found[i]))) last = i;
      }
      if (last >= 0) return (base + 32 * last) / kTile + 1;
    }
    return 0;
  }
};

// The item's Q, with zeros for heads that it has not.
template <int kD>
__device__ void gather_queries(const SparseMlaFwdParams& p, const Item& item, Gather& gather,
                               int sub, int chunk, Shared<kD>& shared, uint64_t policy) {
  const char* q = static_cast<const char*>(p.q) + (item.token * p.heads + item.head) * kD * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = Gather::row(threadIdx.x / 32 % 4, i, sub);
    gather.valid[i] = row < item.heads;
    gather.from[i] = q + (gather.valid[i] ? row * (kD * 2) : 0) + chunk * 16;
  }
  gather.template copy<0, kD / 64, 0>(smem_address(shared.q), policy);
  gather.template copy<0, kD / 64, 1>(smem_address(shared.q), policy);
}

template <int kD>
__device__ void produce(const SparseMlaFwdParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int items = item_count(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // whose index this lane reads
  Gather gather(warp, sub, chunk);
  uint32_t item_parity = 0, parity[2] = {0, 0};

  for (int number = blockIdx.x; number < items; number += gridDim.x, item_parity ^= 1) {
    const Item item(p, number);
    const Slots slots(p, item.token, item.group);
    const int tiles = slots.tiles(lane);
    int index = slots.index(slot);

    mbarrier_wait(&shared.q_free, item_parity ^ 1);
    if (threadIdx.x % 128 == 0) {
      shared.tiles = tiles;
      mbarrier_arrive(&shared.q_full);
    }
    if (tiles > 0) gather_queries(p, item, gather, sub, chunk, shared, drop);
    cp_async_arrive(&shared.q_full);

    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* kv = static_cast<const char*>(p.kv) + item.batch * p.keys * stride +
                     item.group * (kD * 2) + chunk * 16;
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t bits = gather.aim(kv, stride, sub, index, slots.counts(index));
      if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);

      auto fill = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        const uint32_t to = smem_address(shared.keys[kParity]);
        mbarrier_wait(&shared.key_free[kParity][0], parity[kParity] ^ 1);
        if (lane == 0) {
          shared.valid[kParity][warp] = bits;
          shared.valid[kParity][warp + 4] = bits >> 8;
          mbarrier_arrive(&shared.key_full[kParity][0]);
        }
        gather.template copy<0, 8, 0>(to, keep);
        mbarrier_wait(&shared.key_free[kParity][1], parity[kParity] ^ 1);
        gather.template copy<kOwn, kOwn + 4, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][0]);
        gather.template copy<kOther, kOther + 4, 1>(to, keep);
        gather.template copy<8, kD / 64, 0>(to, keep);
        gather.template copy<8, kD / 64, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][1]);
        parity[kParity] ^= 1;
      };
      if (tile % 2 == 0) {
        fill.template operator()<0>();
      } else {
        fill.template operator()<1>();
      }
    }
  }
}

}  // namespace jax_dsa::sparse_mla
