// The MMA warpgroup of attention over keys for up to 32 heads (columns) at a time. The few-heads
// kernels of sparse MLA's forward pass and of mqa_decode use it. consumer.cuh has heads as the rows
// of its products, 64 of them. Here keys and dimensions are the rows and heads the columns, so only
// 16 or 32 heads are multiplied:
//
//     scores^T [64 keys, heads] = keys [64, D] q^T        output^T [512, heads] = values^T P^T
//
// The limits are shared-memory bandwidth (every tile is written once and read twice) and, about
// equally, the gather from the L2.
//
// Two CTAs share an SM, so one computes while the other is in its softmax or ends a work tile.
// Warpgroup 0 multiplies. Warpgroup 1 is the producer: it copies Q and the keys.
//
// Shared memory (see consumer.cuh for the layout of blocks):
//   q              D/64 blocks of as many rows as there are heads
//   ring           blocks of keys, filled and freed one by one. A tile's first block holds the last
//                  64 columns if D is 576, which only the scores use. The values follow in order.
//   probabilities  a block of P^T with one row per head. A warp writes 32 bytes of each row, those
//                  of its 16 keys. At the end of a work tile it stages its outputs there.
// P is relative to a lazily rescaled running maximum of its head, as in consumer.cuh. All four
// warps must agree on the maximum. They do so where they wait for each other's P anyway.
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "mla/plan.cuh"
#include "mla/rows.cuh"

namespace jax_dsa::mla {

inline constexpr int kFewThreads = 256;   // two warpgroups
inline constexpr int kFewCtasPerSm = 2;   // per SM
inline constexpr int kFewMmaBarrier = 1;  // named barrier of warpgroup 0

// Sizes for kN heads. Values are the first kE of a key's kD dimensions, or rows of kE elements in
// an array of their own.
template <int kD_, int kN_, int kE_ = kMlaValueDim, bool kSeparateValues_ = false>
struct FewTraits {
  static constexpr int kD = kD_, kN = kN_, kE = kE_;
  static constexpr bool kSeparateValues = kSeparateValues_;
  static constexpr int kScoreBlocks = kD / 64;  // a tile's first blocks, which the scores use
  static constexpr int kValueBlocks = kE / 64;  // a tile's last blocks, which hold values
  static constexpr int kLeadingBlocks =
      kSeparateValues ? kScoreBlocks : kScoreBlocks - kValueBlocks;  // blocks before the values
  static constexpr int kTileBlocks = kLeadingBlocks + kValueBlocks;
  // The ring takes what two CTAs per SM leave beside Q, P and 1 KiB.
  static constexpr int kBlocksThatFit =
      ((kMaxSharedBytes + kReservedSharedBytes) / kFewCtasPerSm - kReservedSharedBytes - 1024 -
       (kScoreBlocks + 1) * kN * 128) /
      kBlockBytes;
  static constexpr int kRingBlocks = kBlocksThatFit < 12 ? kBlocksThatFit : 12;
  // The number of key tiles whose validity bits are kept. When a tile's first block enters the
  // ring, a value block of the tile this many before has been used.
  static constexpr int kValidStages = ceil_div(kRingBlocks + kLeadingBlocks, kTileBlocks);

  // Returns which 64 columns of the keys the i-th score block of a tile holds.
  __host__ __device__ static constexpr int column_block(int i) {
    return kSeparateValues ? i : (i + kValueBlocks) % kScoreBlocks;
  }
};

template <typename Tr, typename Notes = ProducerNotes>
struct alignas(1024) FewShared {
  uint8_t q[Tr::kScoreBlocks][Tr::kN * 128];
  uint8_t ring[Tr::kRingBlocks][kBlockBytes];
  uint8_t probabilities[Tr::kN * 128];
  float exchange[4][Tr::kN];  // for reductions across the MMA warps
  ValidRows valid[Tr::kValidStages];
  Notes notes;
  uint64_t q_full, q_free;
  uint64_t valid_full[Tr::kValidStages];
  uint64_t full[Tr::kRingBlocks], free[Tr::kRingBlocks];
};

// The softmax state of a thread's heads: columns c and c + 1 of every eight, where c = lane % 4 *
// 2.
template <int kN>
struct HeadColumns {
  static constexpr int kHeadsPerThread = kN / 4;
  float running_max[kHeadsPerThread];  // -inf before the first valid score
  float sum[kHeadsPerThread];          // of this thread's probabilities; starts at kNoSum

  // local_head returns to which of the thread's heads an accumulator element belongs; head returns
  // that head's index in the work tile.
  __device__ static constexpr int local_head(int element) { return element / 4 * 2 + element % 2; }
  __device__ static int head(int i) {
    return i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }
};

// Whether this thread's two key rows of a tile are valid.
struct ValidKeyRows {
  bool valid[2];

  __device__ ValidKeyRows(const ValidRows& tile, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) valid[r] = tile.bytes[warp * 2 + r] >> (lane / 4) & 1;
  }
};

// Whether the key rows of a tile come with factors of their values.
template <typename Rows>
inline constexpr bool kHasValueFactor = requires(Rows rows) { rows.value_factor; };

// Reduces x of each head over the lanes and warps that hold its keys.
template <int kN, typename Combine>
__device__ __forceinline__ void reduce_over_keys(float (&x)[kN / 4], float (&exchange)[4][kN],
                                                 Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x[i] = combine(x[i], __shfl_xor_sync(~0u, x[i], d));
    if (lane < 4) exchange[warp][HeadColumns<kN>::head(i)] = x[i];
  }
  named_barrier_sync<128>(kFewMmaBarrier);
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    const int head = HeadColumns<kN>::head(i);
    x[i] = combine(combine(exchange[0][head], exchange[1][head]),
                   combine(exchange[2][head], exchange[3][head]));
  }
}

// Stores the warp's 16 rows of an accumulator, packed in pairs of columns, as 32 bytes in each row
// of the transposed block. `to` is the lane's row and chunk, see `transposed_address`.
template <int kN>
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&packed)[kN / 4]) {
#pragma unroll
  for (int i = 0; i < kN / 4; i += 4) {
    store_matrix_x4_transposed(to + i / 4 * (16 * 128), packed[i], packed[i + 1], packed[i + 2],
                               packed[i + 3]);
  }
}
__device__ __forceinline__ uint32_t transposed_address(uint32_t block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  return block + row * 128 + (chunk ^ row % 8) * 16;
}

// Calls free(pair) as the products of each pair of blocks complete, for the last kPending + 1
// pairs.
template <int kPending, int kPairs, typename F>
__device__ __forceinline__ void free_as_completed(F free) {
  wgmma_wait<kPending>();
  free(kPairs - 1 - kPending);
  if constexpr (kPending > 0) free_as_completed<kPending - 1, kPairs>(free);
}

// Runs the MMA warpgroup over the CTA's work tiles. As for `consume` in consumer.cuh, functions in
// the namespace of `Work` say which work tiles there are and what becomes of scores and results:
//   work_tile_count(work), first_work_tile(work), work_tile_step(work), lazy_margin(work)
//   valid_key_rows(work, shared, valid_stage, warp, lane)    which of the thread's keys are valid;
//                  with a member value_factor[2], the factors of their values
//   mask_scores(work, rows, scale_log2, s)
//   write_few_results(work, work_index, tiles, o, columns, shared)
template <typename Tr, typename Work, typename Notes>
__device__ void consume_few(const Work& work, FewShared<Tr, Notes>& shared) {
  constexpr int kN = Tr::kN, kValueBlocks = Tr::kValueBlocks, kLeadingBlocks = Tr::kLeadingBlocks,
                kTileBlocks = Tr::kTileBlocks;
  constexpr int kThreadHeads = HeadColumns<kN>::kHeadsPerThread;
  using Place = RingPlace<Tr::kRingBlocks>;
  using KeyRows = decltype(valid_key_rows(work, shared, 0, 0, 0));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int work_tiles = work_tile_count(work);
  const uint64_t q = k_major_descriptor(smem_address(shared.q));
  const uint64_t probabilities = k_major_descriptor(smem_address(shared.probabilities));
  const uint64_t keys = k_major_descriptor(smem_address(shared.ring));
  const uint64_t values = mn_major_descriptor(smem_address(shared.ring), kBlockBytes);
  const uint32_t own_probabilities = transposed_address(smem_address(shared.probabilities));

  float o[kValueBlocks][kN / 2] = {};
  float s[kN / 2];
  HeadColumns<kN> columns;
  Place at;                               // the next tile's first block
  Place last = {Tr::kRingBlocks - 1, 1};  // the last tile's last block
  uint32_t q_parity = 0, tile_count = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Stores P^T relative to the running maxima in shared memory and waits for the P^T of the other
  // warps. Returns whether any warp has a score that exceeds its running maximum by too much. The
  // maximum is subtracted before the product with log2(e), see kExactBaseLimit.
  const auto store_probabilities = [&](const KeyRows& rows, float (&sum)[kThreadHeads]) {
    uint32_t packed[kThreadHeads];
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kThreadHeads; ++i) sum[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = HeadColumns<kN>::local_head(i + j);
        exceeds |= s[i + j] > columns.running_max[head] + lazy_margin(work);
        x[j] = exp2_approx((s[i + j] - finite_max(columns.running_max[head])) * kLog2E);
        sum[head] += x[j];
        if constexpr (kHasValueFactor<KeyRows>) x[j] *= rows.value_factor[i / 2 % 2];
      }
      packed[i / 2] = pack_bf16(x[0], x[1]);
    }
    store_transposed<kN>(own_probabilities, packed);
    fence_async_proxy();
    return uniform(int{named_barrier_any<128>(kFewMmaBarrier, exceeds)}) != 0;
  };
  const auto raise_running_max = [&] {
    float top[kThreadHeads];
#pragma unroll
    for (int i = 0; i < kThreadHeads; ++i) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int head = HeadColumns<kN>::local_head(i);
      top[head] = fmaxf(top[head], s[i]);
    }
    reduce_over_keys<kN>(top, shared.exchange, [](float a, float b) { return fmaxf(a, b); });
    float factor[kThreadHeads];
#pragma unroll
    for (int i = 0; i < kThreadHeads; ++i) {
      const float from = columns.running_max[i];
      const float to = top[i] > from + lazy_margin(work) ? top[i] : from;
      factor[i] = exp2_approx((from - finite_max(to)) * kLog2E);
      columns.sum[i] *= factor[i];
      columns.running_max[i] = to;
    }
#pragma unroll
    for (int m = 0; m < kValueBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) o[m][i] *= factor[HeadColumns<kN>::local_head(i)];
    }
  };

  for (int work_index = first_work_tile(work); work_index < work_tiles;
       work_index += work_tile_step(work)) {
    mbarrier_wait(&shared.q_full, q_parity);
    q_parity ^= 1;
    const int tiles = shared.notes.tiles;
    if (tiles == 0) arrive(&shared.q_free);
#pragma unroll
    for (int i = 0; i < kThreadHeads; ++i)
      columns.running_max[i] = -INFINITY, columns.sum[i] = kNoSum;

    for (int tile = 0; tile < tiles; ++tile, ++tile_count) {
      const uint32_t valid_stage = tile_count % Tr::kValidStages;
      mbarrier_wait(&shared.valid_full[valid_stage], tile_count / Tr::kValidStages % 2);
      const KeyRows rows = valid_key_rows(work, shared, valid_stage, warp, lane);
#pragma unroll
      for (int i = 0; i < Tr::kScoreBlocks; ++i) {
        const Place place = at + i;
        mbarrier_wait(&shared.full[place.index], place.parity);
        wgmma_fence();
        const uint64_t a = keys + place.index * (kBlockBytes / 16);
        const uint64_t b = q + Tr::column_block(i) * (kN * 128 / 16);
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
      for (int i = 0; i < kLeadingBlocks; ++i) arrive(&shared.free[(at + i).index]);

      mask_scores(work, rows, s);
      // Wait until all four warps have multiplied with the last tile's P.
      mbarrier_wait(&shared.free[last.index], last.parity);
      float sum[kThreadHeads];
      if (store_probabilities(rows, sum)) {
        raise_running_max();
        store_probabilities(rows, sum);
      }
#pragma unroll
      for (int i = 0; i < kThreadHeads; ++i) columns.sum[i] += sum[i];

      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kValueBlocks; ++m) {
        const Place place = at + (kLeadingBlocks + m);
        if constexpr (Tr::kSeparateValues) {  // otherwise the scores have waited
          mbarrier_wait(&shared.full[place.index], place.parity);
          wgmma_fence();
        }
        const uint64_t v = values + place.index * (kBlockBytes / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma_bf16<kMNMajor, kKMajor>(o[m], v + k * (16 * 128 / 16), probabilities + k * 2,
                                        tile > 0 || k > 0);
        }
        if (m % 2 == 1 || m + 1 == kValueBlocks) wgmma_commit();
      }
      constexpr int kPairs = ceil_div(kValueBlocks, 2);
      free_as_completed<kPairs - 1, kPairs>([&](int pair) {
        if (pair == kPairs - 1) {
#pragma unroll
          for (int m = 0; m < kValueBlocks; ++m) wgmma_pin(o[m]);
        }
        arrive(&shared.free[(at + (kLeadingBlocks + pair * 2)).index]);
        if (pair * 2 + 1 < kValueBlocks)
          arrive(&shared.free[(at + (kLeadingBlocks + pair * 2 + 1)).index]);
      });
      last = at + (kTileBlocks - 1);
      at = at + kTileBlocks;
    }
    mbarrier_wait(&shared.free[last.index], last.parity);
    write_few_results(work, work_index, tiles, o, columns, shared);
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
