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
#include "common/wgmma.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kFewThreads = 256;  // two warpgroups
inline constexpr int kFewBlocks = 2;     // of a SM
inline constexpr int kFewConsumers = 1;  // named barrier of warpgroup 0

// kN heads; values are the first kE of a key's kD dimensions, or if they lie apart, rows of kE.
template <int kD_, int kN_, int kE_ = kSparseMlaValueDim, bool kApart_ = false>
struct FewTraits {
  static constexpr int kD = kD_, kN = kN_, kE = kE_;
  static constexpr bool kApart = kApart_;
  static constexpr int kScored = kD / 64;  // blocks of a tile that the scores use, its first ones
  static constexpr int kValues = kE / 64;  // ... that hold values, its last ones
  static constexpr int kLead = kApart ? kScored : kScored - kValues;  // ... before the values
  static constexpr int kBlocks = kLead + kValues;
  // As many as two blocks of a SM have room for, beside Q, P and 1 KiB.
  static constexpr int kRoom = ((kMaxSharedBytes + kReservedSharedBytes) / kFewBlocks -
                                kReservedSharedBytes - 1024 - (kScored + 1) * kN * 128) /
                               kBlockBytes;
  static constexpr int kRing = kRoom < 12 ? kRoom : 12;
  // Tiles whose bits are kept: when a tile's first block comes to the ring, a value block of the
  // tile so many before has been used.
  static constexpr int kBits = ceil_div(kRing + kLead, kBlocks);

  // The columns of a tile's i-th scored block.
  __host__ __device__ static constexpr int columns(int i) {
    return kApart ? i : (i + kValues) % kScored;
  }
};

template <typename Tr, typename Notes = Tiles>
struct alignas(1024) FewShared {
  uint8_t q[Tr::kScored][Tr::kN * 128];
  uint8_t ring[Tr::kRing][kBlockBytes];
  uint8_t probabilities[Tr::kN * 128];
  float exchange[4][Tr::kN];  // between the warps that multiply
  ValidRows valid[Tr::kBits];
  Notes notes;
  uint64_t q_full, q_free;
  uint64_t valid_full[Tr::kBits];
  uint64_t full[Tr::kRing], free[Tr::kRing];
};

// State of a thread's heads: columns c and c + 1 of every eight, c = lane % 4 * 2.
template <int kN>
struct Columns {
  static constexpr int kHeadsOfThread = kN / 4;
  float reference[kHeadsOfThread];  // log2 units; -inf before the first valid score
  float sum[kHeadsOfThread];        // of this thread's probabilities

  // Whose an accumulator's element is, and that head's number in the item.
  __device__ static constexpr int of(int element) { return element / 4 * 2 + element % 2; }
  __device__ static int head(int i) {
    return i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }
};

// Which of this thread's rows of a tile count.
struct CountingRows {
  bool counts[2];

  __device__ CountingRows(const ValidRows& valid, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) counts[r] = valid.bytes[warp * 2 + r] >> (lane / 4) & 1;
  }
};

// Combines x of each head over the four warps' lanes.
template <int kN, typename Combine>
__device__ __forceinline__ void over_rows(float (&x)[kN / 4], float (&exchange)[4][kN],
                                          Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x[i] = combine(x[i], __shfl_xor_sync(~0u, x[i], d));
    if (lane < 4) exchange[warp][Columns<kN>::head(i)] = x[i];
  }
  named_barrier_sync<128>(kFewConsumers);
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    const int head = Columns<kN>::head(i);
    x[i] = combine(combine(exchange[0][head], exchange[1][head]),
                   combine(exchange[2][head], exchange[3][head]));
  }
}

// Stores the warp's 16 rows of an accumulator, two columns packed, as rows of the transposed
// block: 32 bytes in each. `to` is the row and chunk of lane: see `transposed_place`.
template <int kN>
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&packed)[kN / 4]) {
#pragma unroll
  for (int i = 0; i < kN / 4; i += 4) {
    store_matrix_x4_transposed(to + i / 4 * (16 * 128), packed[i], packed[i + 1], packed[i + 2],
                               packed[i + 3]);
  }
}
__device__ __forceinline__ uint32_t transposed_place(uint32_t block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  return block + row * 128 + (chunk ^ row % 8) * 16;
}

template <typename Shared>
__device__ __forceinline__ CountingRows counting_rows(const SparseMlaFwdParams&,
                                                      const Shared& shared, int slot, int warp,
                                                      int lane) {
  return CountingRows(shared.valid[slot], warp, lane);
}
// Scores in log2 units, -inf for those that do not count.
template <int kN>
__device__ __forceinline__ void hide_scores(const SparseMlaFwdParams&, const CountingRows& rows,
                                            float scale_log2, float (&s)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) s[i] = rows.counts[i / 2 % 2] ? s[i] * scale_log2 : -INFINITY;
}

template <typename Tr, typename Notes>
__device__ void write_few(const SparseMlaFwdParams& p, int number, int tiles,
                          const float (&o)[Tr::kValues][Tr::kN / 2], Columns<Tr::kN>& columns,
                          FewShared<Tr, Notes>& shared) {
  constexpr int kN = Tr::kN;
  constexpr int kMine = Columns<kN>::kHeadsOfThread;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const Item item(p, number);
  const int64_t first = item.token * p.heads + item.head;
  // Between two exchanges there must be another barrier, which only tiles have.
  if (tiles > 0) {
    over_rows<kN>(columns.sum, shared.exchange, [](float a, float b) { return a + b; });
  }
  float factor[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int head = Columns<kN>::head(i);
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
  const uint32_t to = transposed_place(block);
  const int row = lane % 16, half = lane / 16;
  const uint32_t from = block + row * 128 + ((warp * 2 + half) ^ (row % 8)) * 16;
  auto* out = static_cast<__nv_bfloat16*>(p.out) + (first + row) * kSparseMlaValueDim + warp * 16 +
              half * 8;
#pragma unroll
  for (int m = 0; m < Tr::kValues; ++m) {
    uint32_t packed[kN / 4];
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const float a = factor[Columns<kN>::of(i)], b = factor[Columns<kN>::of(i + 1)];
      packed[i / 2] = pack_bf16(a == 0.f ? 0.f : o[m][i] * a, b == 0.f ? 0.f : o[m][i + 1] * b);
    }
    store_transposed<kN>(to, packed);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kN; i += 16) {
      uint32_t x[4];
      load_shared_16(from + i * 128, x);
      store_16(out + i * kSparseMlaValueDim + m * 64, x, i + row < item.heads);
    }
    __syncwarp();
  }
}

// Calls free(pair) when the products of that pair of blocks are done, of the last kPending + 1.
template <int kPending, int kPairs, typename F>
__device__ __forceinline__ void free_in_turn(F free) {
  wgmma_wait<kPending>();
  free(kPairs - 1 - kPending);
  if constexpr (kPending > 0) free_in_turn<kPending - 1, kPairs>(free);
}

// See `consume` in fwd.cuh; here `counting_rows`, `hide_scores` and `write_few` say what becomes of
// scores and results.
template <typename Tr, typename Params, typename Notes>
__device__ void consume_few(const Params& p, FewShared<Tr, Notes>& shared) {
  constexpr int kN = Tr::kN, kValues = Tr::kValues, kLead = Tr::kLead, kBlocks = Tr::kBlocks;
  constexpr int kMine = Columns<kN>::kHeadsOfThread;
  using Place = RingPlace<Tr::kRing>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float scale_log2 = p.scale * kLog2E;
  const int items = item_count(p);
  const uint64_t q = k_major_descriptor(smem_address(shared.q));
  const uint64_t probabilities = k_major_descriptor(smem_address(shared.probabilities));
  const uint64_t keys = k_major_descriptor(smem_address(shared.ring));
  const uint64_t values = mn_major_descriptor(smem_address(shared.ring), kBlockBytes);
  const uint32_t own_part = transposed_place(smem_address(shared.probabilities));

  float o[kValues][kN / 2] = {};
  float s[kN / 2];
  Columns<kN> columns;
  Place at;                         // of the next tile's first block
  Place last = {Tr::kRing - 1, 1};  // of the last one's last
  uint32_t item_parity = 0, tile_number = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Puts P^T, relative to the references, into shared memory and waits for that of the other warps.
  // Returns whether some warp has a score for which the references are too low.
  const auto store_probabilities = [&](float (&sum)[kMine]) {
    uint32_t packed[kMine];
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kMine; ++i) sum[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int mine = Columns<kN>::of(i + j);
        exceeds |= s[i + j] > columns.reference[mine] + lazy_margin(p);
        x[j] = exp2_approx(s[i + j] - Rows::finite(columns.reference[mine]));
        sum[mine] += x[j];
      }
      packed[i / 2] = pack_bf16(x[0], x[1]);
    }
    store_transposed<kN>(own_part, packed);
    fence_async_proxy();
    return uniform(int{named_barrier_any<128>(kFewConsumers, exceeds)}) != 0;
  };
  const auto move_references = [&] {
    float top[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int mine = Columns<kN>::of(i);
      top[mine] = fmaxf(top[mine], s[i]);
    }
    over_rows<kN>(top, shared.exchange, [](float a, float b) { return fmaxf(a, b); });
    float factor[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const float from = columns.reference[i];
      const float to = top[i] > from + lazy_margin(p) ? top[i] : from;
      factor[i] = exp2_approx(from - Rows::finite(to));
      columns.sum[i] *= factor[i];
      columns.reference[i] = to;
    }
#pragma unroll
    for (int m = 0; m < kValues; ++m) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) o[m][i] *= factor[Columns<kN>::of(i)];
    }
  };

  for (int number = first_item(p); number < items; number += item_step(p)) {
    mbarrier_wait(&shared.q_full, item_parity);
    item_parity ^= 1;
    const int tiles = shared.notes.tiles;
    if (tiles == 0) arrive(&shared.q_free);
#pragma unroll
    for (int i = 0; i < kMine; ++i) columns.reference[i] = -INFINITY, columns.sum[i] = 0.f;

    for (int tile = 0; tile < tiles; ++tile, ++tile_number) {
      const uint32_t slot = tile_number % Tr::kBits;
      mbarrier_wait(&shared.valid_full[slot], tile_number / Tr::kBits % 2);
      const auto rows = counting_rows(p, shared, slot, warp, lane);
#pragma unroll
      for (int i = 0; i < Tr::kScored; ++i) {
        const Place place = at + i;
        mbarrier_wait(&shared.full[place.index], place.parity);
        wgmma_fence();
        const uint64_t a = keys + place.index * (kBlockBytes / 16);
        const uint64_t b = q + Tr::columns(i) * (kN * 128 / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma_bf16<kKMajor, kKMajor>(s, a + k * 2, b + k * 2, i > 0 || k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(s);
      if (tile + 1 == tiles) arrive(&shared.q_free);
#pragma unroll
      for (int i = 0; i < kLead; ++i) arrive(&shared.free[(at + i).index]);

      hide_scores(p, rows, scale_log2, s);
      // All four warps have multiplied with the last tile's P.
      mbarrier_wait(&shared.free[last.index], last.parity);
      float sum[kMine];
      if (store_probabilities(sum)) {
        move_references();
        store_probabilities(sum);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) columns.sum[i] += sum[i];

      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kValues; ++m) {
        const Place place = at + (kLead + m);
        if constexpr (Tr::kApart) {  // else the scores have waited
          mbarrier_wait(&shared.full[place.index], place.parity);
          wgmma_fence();
        }
        const uint64_t v = values + place.index * (kBlockBytes / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma_bf16<kMNMajor, kKMajor>(o[m], v + k * (16 * 128 / 16), probabilities + k * 2,
                                        tile > 0 || k > 0);
        }
        if (m % 2 == 1 || m + 1 == kValues) wgmma_commit();
      }
      constexpr int kPairs = ceil_div(kValues, 2);
      free_in_turn<kPairs - 1, kPairs>([&](int pair) {
        if (pair == kPairs - 1) {
#pragma unroll
          for (int m = 0; m < kValues; ++m) wgmma_pin(o[m]);
        }
        arrive(&shared.free[(at + (kLead + pair * 2)).index]);
        if (pair * 2 + 1 < kValues) arrive(&shared.free[(at + (kLead + pair * 2 + 1)).index]);
      });
      last = at + (kBlocks - 1);
      at = at + kBlocks;
    }
    mbarrier_wait(&shared.free[last.index], last.parity);
    write_few(p, number, tiles, o, columns, shared);
  }
}

template <typename Tr>
__device__ void produce_few(const SparseMlaFwdParams& p, FewShared<Tr>& shared) {
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

    begin_item(shared, item_parity, tiles, [&] {  // with zeros for heads that the item has not
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

template <typename Tr, typename Notes>
__device__ void initialise(FewShared<Tr, Notes>& shared) {
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.q_full, 128 + 1);
    mbarrier_init(&shared.q_free, 4);
    for (auto& barrier : shared.valid_full) mbarrier_init(&barrier, 4);
    for (auto& barrier : shared.full) mbarrier_init(&barrier, 128);
    for (auto& barrier : shared.free) mbarrier_init(&barrier, 4);
    mbarrier_init_fence();
  }
  __syncthreads();
}

template <int kD, int kN>
__global__ void __launch_bounds__(kFewThreads, kFewBlocks)
    fwd_few_kernel(const __grid_constant__ SparseMlaFwdParams p) {
  constexpr int kConsumer = 192, kProducer = 64;
  static_assert(registers_fit(kFewBlocks, 1, kConsumer, kProducer));
  auto& shared = dynamic_shared<FewShared<FewTraits<kD, kN>>>();
  initialise(shared);
  if (threadIdx.x / 128 == 0) {
    raise_registers<kConsumer>();
    consume_few(p, shared);
  } else {
    lower_registers<kProducer>();
    produce_few(p, shared);
  }
}

}  // namespace jax_dsa::sparse_mla
