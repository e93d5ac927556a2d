// The producer warpgroup of the sparse MLA forward kernel: it gathers Q and the selected keys. See
// fwd.cuh.
#pragma once

#include "common/gather.cuh"
#include "common/ptx.cuh"
#include "mla/producer.cuh"
#include "sparse_mla/fwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// Copies the work tile's Q. Rows beyond its heads become zeros.
template <int kD, typename Notes>
__device__ void gather_queries(const SparseMlaFwdParams& p, const WorkTile& work_tile,
                               Gather& gather, int sub, int chunk, mla::Shared<kD, Notes>& shared,
                               uint64_t policy) {
  const char* q =
      static_cast<const char*>(p.q) + (work_tile.token * p.heads + work_tile.head) * kD * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = Gather::row(threadIdx.x / 32 % 4, i, sub);
    gather.valid[i] = row < work_tile.heads;
    gather.from[i] = q + (gather.valid[i] ? row * (kD * 2) : 0) + chunk * 16;
  }
  gather.template copy<0, kD / 64, 0>(smem_address(shared.q), policy);
  gather.template copy<0, kD / 64, 1>(smem_address(shared.q), policy);
}

template <int kD>
__device__ void produce(const SparseMlaFwdParams& p, mla::Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const int work_tiles = work_tile_count(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // the row of a tile whose index
                                                                // this lane reads
  Gather gather(warp, sub, chunk);
  uint32_t q_parity = 0, parity[2] = {0, 0};

  for (int work_index = blockIdx.x; work_index < work_tiles;
       work_index += gridDim.x, q_parity ^= 1) {
    const WorkTile work_tile(p, work_index);
    const Slots slots(p, work_tile.token, work_tile.group);
    const int tiles = count_tiles(slots, lane);
    int index = slots.index(slot);

    mla::begin_work_tile(shared, q_parity, tiles,
                         [&] { gather_queries(p, work_tile, gather, sub, chunk, shared, drop); });

    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* kv = static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride +
                     work_tile.group * (kD * 2) + chunk * 16;
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t bits = gather.set_rows(kv, stride, sub, index, slots.is_valid(index));
      if (tile + 1 < tiles) index = slots.index((tile + 1) * kTile + slot);

      auto fill = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        const uint32_t to = smem_address(shared.keys[kParity]);
        mbarrier_wait(&shared.key_free[kParity][0], parity[kParity] ^ 1);
        if (lane == 0) {
          shared.valid[kParity].set(warp, bits);
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
