// The walk with instructions of sm_80: the producer warp fills the ring with cp.async. walk.cuh has
// the walk itself.
//
// All lanes of the producer copy 16 bytes each at a time. A stage is full when the copies of every
// lane have landed, which their mbarrier arrivals announce, and when lane 0 has announced `takes`.
// The number of stages depends on the GPU's shared memory, so the blocks follow the kernel's
// struct.
#pragma once

#include <algorithm>

#include "htree/walk.cuh"

namespace jax_dsa::htree {

// A plan with the number of the ring's stages. A query may have more head tiles than a CTA has
// warps. Then a launch processes some of them, from head `first_head` of a group on.
template <typename P>
struct PortableCall : P {
  int stages, first_head;
};

template <typename S, int kR, int kBytes_, typename Shared>
struct PortableRing;

// The shape of a CTA: number of MMA warps, and rows of blocks per pipeline stage. The producer is
// one more warp, and all warps have the same number of registers.
template <int kWarps_, int kStageRows_>
struct PortableShape {
  static constexpr bool kHopper = false;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = (kWarps + 1) * 32;
  static constexpr int kStageRows = kStageRows_;

  // The ring must be the first member of `Shared`.
  template <int kR, int kBytes, int, typename Shared>
  using BlockRing = PortableRing<PortableShape, kR, kBytes, Shared>;
  template <typename P>
  using Call = PortableCall<P>;

  template <typename P>
  static __device__ __forceinline__ int first_head(const PortableCall<P>& call) {
    return call.first_head;
  }
  // Like CtaShape::prepare.
  template <typename Shared, typename P>
  static Prepared<Call<P>> prepare(const P& plan, int shared_bytes, int first_head) {
    using R = typename Shared::BlockRing;
    constexpr int kShared = sizeof(Shared);
    static_assert(kShared + 2 * R::kStageBytes <= kMinSharedBytes);
    const int stages = std::min((shared_bytes - kShared) / R::kStageBytes, R::kMaxStages);
    return {{plan, stages, first_head}, kShared + stages * R::kStageBytes};
  }

  static __device__ __forceinline__ void start_producer() {}
  static __device__ __forceinline__ void start_mma() {}
};
// The warps of a CTA are on four SM partitions with 16 Ki registers each. Hence 12 warps in all
// have 168 registers per thread, and 8 have 255. Scores need all head tiles of a query in one CTA,
// up to 12, and get by with the 128 registers of 13 warps.
using PortableScoresShape = PortableShape<12, 48>;
using PortableAttendShape = PortableShape<11, 48>;
using PortableBwdShape = PortableShape<7, 32>;

// Like RingPlace, with a number of stages that is known at run time.
struct PortablePlace {
  int stages;
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

template <typename S, int kR, int kBytes_, typename Shared>
struct alignas(128) PortableRing {
  static constexpr bool kBulk = false;
  static constexpr int kBytes = kBytes_;
  static constexpr int kBlocks = S::kStageRows / kR;  // per stage
  static constexpr int kStageBytes = kBlocks * kBytes;
  static constexpr int kMaxStages = 8;
  static constexpr int kLookahead = 32;
  static_assert(kBlocks > 0 && kBytes % 512 == 0);
  using Place = PortablePlace;
  uint32_t takes[kMaxStages][32];  // as in Ring
  int lookahead[kLookahead][32];   // as in Ring
  uint64_t full[kMaxStages], free[kMaxStages];

  __device__ void init() {
    for (int i = 0; i < kMaxStages; ++i) {
      mbarrier_init(&full[i], 32 + 1);
      mbarrier_init(&free[i], S::kWarps);
    }
  }
  template <typename Call>
  static __device__ __forceinline__ Place begin(const Call& call) {
    return {call.stages};
  }
  __device__ __forceinline__ uint8_t* block(int stage, int i) {
    return reinterpret_cast<uint8_t*>(this) + sizeof(Shared) + (stage * kBlocks + i) * kBytes;
  }

  // Waits for the block numbers that the coming stage may read. A stage reads up to kBlocks of
  // them, and those that are requested while it is filled are kLookahead - 2 kBlocks or more ahead.
  // The groups of later requests stay open; they include the copies of later stages.
  static __device__ __forceinline__ void await_requests() {
    constexpr int kOpen = ceil_div(kLookahead, kBlocks) - 3;
    static_assert(kOpen >= 1);
    cp_async_wait_group < kOpen<kMaxStages ? kOpen : kMaxStages>();
  }
  static __device__ __forceinline__ void end_requests() { cp_async_commit(); }
  // Fills a stage, after all lanes have written `takes`, with the blocks numbered least[0] to
  // least[count - 1]. `tree` is block 0.
  __device__ __forceinline__ void fill(int stage, const uint8_t* tree, int64_t node_bytes,
                                       const int (&least)[kBlocks], int count, uint64_t policy) {
    const int lane = threadIdx.x % 32;
    const uint32_t to = whole_sum(smem_address(block(stage, 0)), lane * 16);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i < count) {
        const uint8_t* const from = tree + least[i] * node_bytes + lane * 16;
#pragma unroll
        for (int at = 0; at < kBytes; at += 512) {
          cp_async_16(to + i * kBytes + at, from + at, true, policy);
        }
      }
    }
    cp_async_arrive(&full[stage]);
    if (lane == 0) mbarrier_arrive(&full[stage]);
  }
};

}  // namespace jax_dsa::htree
