// The producer warpgroup of the sparse MLA decode kernel: finds and gathers Q and the selected
// keys, from a flat or paged cache of bf16 or of FP8 records. See decode.cuh.
#pragma once

#include "common/ptx.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"

namespace jax_dsa::sparse_mla {

// A part's share of one row of indices, and the rows of the cache that they stand for. Finding a
// row takes two loads, one after the other: those of the tiles to come travel beside this one's
// keys.
struct Selected {
  Slots slots;           // from the part's first tile on
  const int32_t* table;  // of the request, or null

  struct Place {
    int page, offset;
  };

  __device__ Selected(const Decode& p, const Item& item, int split)
      : slots(p, item.token, item.group),
        table(p.page_table ? p.page_table + int64_t{item.batch} * p.page_slots : nullptr) {
    slots.row += split * kTile;
    slots.length = max(slots.length, 0) - split * kTile;
  }

  // The index in row `row` of the part's tile that starts at slot `first` of its own.
  __device__ int index(const Decode& p, int first, int row) const {
    return slots.index(first * p.splits + row);
  }
  // The part's tiles up to the last one with a slot that counts.
  __device__ int tiles(const Decode& p, int lane) const {
    const int own = ceil_div(max(slots.length, 0), kTile * p.splits) * kTile;
    return tiles_that_count(slots, own, lane,
                            [&](int first, int row) { return index(p, first, row); });
  }

  __device__ Place place(const Decode& p, int index) const {
    const bool counts = slots.counts(index);
    if (!table) return {counts ? 0 : -1, index};
    const int page =
        static_cast<int>(uint64_t{static_cast<uint32_t>(index)} * p.page_factor >> p.page_shift);
    return {load_now(table + page, counts, -1), index - page * p.page_size};
  }
  // The cache's row, -1 if there is none. A flat cache is one page.
  __device__ int find(const Decode& p, Place at) const {
    const int pages = table ? p.pages : 1;
    return at.page >= 0 && at.page < pages ? at.page * p.page_size + at.offset : -1;
  }
};

// What a thread has of a tile of records on its way: of one row, 16 of the values of each scale,
// and one of the scales; or of two rows, 8 of the last 64 values.
struct Unpacking {
  uint32_t values[4][4];
  int scale;
};

// The steps of a tile of records: for each half of its rows, values of the thread's two (see
// Gather) and the last 64 values of both. As many as take turns in two buffers.
inline constexpr int kSteps = 6;
__host__ __device__ constexpr bool step_is_last(int step) { return step % 3 == 2; }
__host__ __device__ constexpr int step_row(int step) { return step / 3 * 2 + step % 3 % 2; }

// `row` is the cache's of row threadIdx.x % 4 (see Gather) of this thread's eight lanes, -1 if
// there is none.
template <int kStep>
__device__ __forceinline__ void load_step(const char* kv, uint32_t stride, int row, Unpacking& x) {
  const uint32_t chunk = threadIdx.x % 8;
  if constexpr (step_is_last(kStep)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int its = __shfl_sync(~0u, row, step_row(kStep) + i, 8);
      const uint64_t offset = uint64_t{static_cast<uint32_t>(its)} * stride;
      load_16_now<528>(kv + offset + chunk * 16, its >= 0, x.values[i]);
    }
  } else {
    const int its = __shfl_sync(~0u, row, step_row(kStep), 8);
    const char* record = kv + uint64_t{static_cast<uint32_t>(its)} * stride;
    const char* from = record + chunk * 16;
    load_16_now<0>(from, its >= 0, x.values[0]);
    load_16_now<128>(from, its >= 0, x.values[1]);
    load_16_now<256>(from, its >= 0, x.values[2]);
    load_16_now<384>(from, its >= 0, x.values[3]);
    // The first four lanes have the scales.
    x.scale = load_now(reinterpret_cast<const int*>(record + 512) + chunk, its >= 0, 0);
  }
}

// Where a thread puts what it unpacked of its even and odd rows, in shared memory: the addresses
// for the even tile of keys.
struct Unpacked {
  uint32_t values[2][2];  // in the first block of the thread's values: either of its chunks
  uint32_t last[2];       // in the ninth block

  // 16 values are two chunks. Lanes 4..7 of a row store the second one first: the first ones fall
  // on the banks of lanes 0..3.
  __device__ explicit Unpacked(uint32_t keys) {
    const int warp = threadIdx.x / 32 % 4, sub = threadIdx.x / 8 % 4, chunk = threadIdx.x % 8;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int r = odd * 4 + sub;
      const uint32_t row = keys + (warp * 8 + r) * 128;
      const int first = chunk % 4 * 2 + chunk / 4;
      values[odd][0] = row + chunk / 4 * kBlockBytes + (first ^ r) * 16;
      values[odd][1] = row + chunk / 4 * kBlockBytes + (first ^ 1 ^ r) * 16;
      last[odd] = row + 8 * kBlockBytes + (chunk ^ r) * 16;
    }
  }
};

// The same as bf16, `tile` bytes on.
template <int kStep>
__device__ __forceinline__ void store_step(const Unpacked& to, uint32_t tile, const Unpacking& x) {
  constexpr int i = step_row(kStep), kHalf = i / 2 * 4096;
  if constexpr (step_is_last(kStep)) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      store_shared_16(to.last[odd] + tile + kHalf, x.values[odd]);
    }
  } else {
    const bool second_first = threadIdx.x % 8 >= 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scale = __int_as_float(__shfl_sync(~0u, x.scale, j, 8));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t y[4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float v[4];
          unpack_e4m3(second_first ? x.values[j][2 - 2 * k + m] : x.values[j][2 * k + m], v);
          y[2 * m] = pack_bf16(v[0] * scale, v[1] * scale);
          y[2 * m + 1] = pack_bf16(v[2] * scale, v[3] * scale);
        }
        store_shared_16(to.values[i % 2][k] + tile + kHalf + 2 * j * kBlockBytes, y);
      }
    }
  }
}

template <int kD, bool kRecords>
__device__ void produce(const Decode& p, Shared<kD>& shared) {
  constexpr int kRowBytes = kRecords ? kSparseMlaRecordBytes : kD * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  const int items = item_count(p);
  const int slot = Gather::row(warp, lane % 4, sub);  // whose index this lane reads
  const uint32_t stride = p.groups * kRowBytes;
  Gather gather(warp, sub, chunk);
  const Unpacked unpacked(smem_address(shared.keys));
  uint32_t item_parity = 0;
  uint32_t phases = 0;  // a bit for each parity

  for (int number = blockIdx.x; number < items; number += gridDim.x, item_parity ^= 1) {
    const Part part(p, number);
    const Item item(p, part.item);
    const Selected selected(p, item, part.split);
    const int first = selected.index(p, 0, slot), second = selected.index(p, kTile, slot);
    int index = selected.index(p, 2 * kTile, slot);
    const int tiles = selected.tiles(p, lane);
    Selected::Place place = selected.place(p, first);

    begin_item(shared, item_parity, tiles, [&] {
      gather_queries(p, item, gather, sub, chunk, shared, l2_policy_evict_first());
    });

    const char* kv = static_cast<const char*>(p.kv) + item.group * kRowBytes +
                     item.batch * p.batch_rows * stride;
    const auto offset = [&](int row) { return uint64_t{static_cast<uint32_t>(row)} * stride; };
    int row = -1;                        // in the cache, of this lane's slot of a tile
    int next = selected.find(p, place);  // of the tile after it; `place` and `index` are further on
    place = selected.place(p, second);
    const auto advance = [&](int tile) {
      row = next;
      next = selected.find(p, place);
      place = selected.place(p, index);
      index = selected.index(p, (tile + 3) * kTile, slot);
      // Registers wait for what they load, so let it be in the L2 by then.
      if (kRecords && chunk < 4 && next >= 0) prefetch_l2(kv + offset(next), kRowBytes);
    };
    const auto publish = [&](int parity) {
      // Bit r is that of row r % 8 of half r / 8 of the warp's.
      const uint32_t bits = __ballot_sync(~0u, __shfl_sync(~0u, row, lane % 4 * 8 + lane / 4) >= 0);
      if (lane == 0) {
        shared.valid[parity].set(warp, bits);
        mbarrier_arrive(&shared.key_full[parity][0]);
      }
    };
    Unpacking travelling[2];
    if (kRecords && tiles > 0) {
      advance(0);
      load_step<0>(kv, stride, row, travelling[0]);
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t free = ~phases >> tile % 2 & 1;
      auto fill = [&]<int kParity>() {
        constexpr int kOwn = kParity * 4, kOther = 4 - kOwn;
        const uint32_t to = smem_address(shared.keys[kParity]);
        advance(tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int its = __shfl_sync(~0u, row, i, 8);
          gather.valid[i] = its >= 0;
          gather.from[i] = kv + offset(max(its, 0)) + chunk * 16;
        }
        mbarrier_wait(&shared.key_free[kParity][0], free);
        publish(kParity);
        gather.template copy<0, 8, 0>(to, keep);
        mbarrier_wait(&shared.key_free[kParity][1], free);
        gather.template copy<kOwn, kOwn + 4, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][0]);
        gather.template copy<kOther, kOther + 4, 1>(to, keep);
        gather.template copy<8, kD / 64, 0>(to, keep);
        gather.template copy<8, kD / 64, 1>(to, keep);
        cp_async_arrive(&shared.key_full[kParity][1]);
      };
      // Each step's bytes are under way while those of the step before are unpacked.
      const auto unpack = [&](int parity) {
        mbarrier_wait(&shared.key_free[parity][0], free);
        publish(parity);
        const auto step = [&]<int kStep>() {
          if constexpr (kStep == 2) mbarrier_wait(&shared.key_free[parity][1], free);
          Unpacking& coming = travelling[(kStep + 1) % 2];
          if constexpr (kStep + 1 < kSteps) {
            load_step<kStep + 1>(kv, stride, row, coming);
          } else if (tile + 1 < tiles) {
            advance(tile + 1);
            load_step<0>(kv, stride, row, coming);
          }
          store_step<kStep>(unpacked, parity * (kKeyBlocks * kBlockBytes), travelling[kStep % 2]);
        };
        step.template operator()<0>();
        step.template operator()<1>();
        step.template operator()<2>();
        step.template operator()<3>();
        step.template operator()<4>();
        step.template operator()<5>();
        // Ordinary stores, which wgmma reads.
        fence_async_proxy();
        mbarrier_arrive(&shared.key_full[parity][0]);
        mbarrier_arrive(&shared.key_full[parity][1]);
      };
      if constexpr (kRecords) {
        unpack(tile % 2);
      } else if (tile % 2 == 0) {
        fill.template operator()<0>();
      } else {
        fill.template operator()<1>();
      }
      phases ^= 1 << tile % 2;
    }
  }
}

}  // namespace jax_dsa::sparse_mla
