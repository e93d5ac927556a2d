// FEW
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "mla/plan.cuh"
#include "mla/rows.cuh"

namespace jax_dsa::mla {

inline constexpr int kFewThreads = 256;  // two warpgroups
inline constexpr int kFewBlocks = 2;     // of a SM
inline constexpr int kFewConsumers = 1;  // named barrier of warpgroup 0

// kN heads; values are the first kE of a key's kD dimensions, or if they lie apart, rows of kE.
template <int kD_, int kN_, int kE_ = kMlaValueDim, bool kApart_ = false>
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
        x[j] = exp2_approx(s[i + j] - finite_max(columns.reference[mine]));
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
      factor[i] = exp2_approx(from - finite_max(to));
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

}  // namespace jax_dsa::mla
