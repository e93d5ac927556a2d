// A thread writes work tiles to two slots alternately. Its own warp, another warp that copies, and
// one that uses the copies read them. The writer learns that a work tile was read while it holds
// the next.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o in_turns \
//       tests/kernels/races/in_turns.cu
// This is correct: lane 0 of the warp that uses the copies arrives at `done` for a work tile when
// the warp has read the previous one. The writer waits for it before it writes the following work
// tile. The warps that copy meet at a barrier when they have read a work tile. The sparse MLA
// backward kernel passes on its work tiles in this way. With -DRACE there is a single slot.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[256];
  int work_tile[2];
  uint64_t work_tile_full[2], full, done;
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, work_tile, work_tile_full, full, done] = dynamic_shared<Shared>();
  initialize(work_tile_full[0], 1, work_tile_full[1], 1);
  initialize(full, 64, done, 1);
  const int thread = threadIdx.x, lane = thread % 32;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    const int parity = round % 2, slot = kRace ? 0 : parity;
    if (thread < 64) {
      if (thread == 0) {
        work_tile[slot] = round;
        mbarrier_arrive(&work_tile_full[parity]);
      }
      __syncwarp();
      mbarrier_wait(&work_tile_full[parity], round / 2 % 2);
      const int* const own = from + work_tile[slot] * 256 + thread * 4;
      named_barrier_sync<64>(1);
      mbarrier_wait(&done, parity);
      cp_async_16(whole_sum(smem_address(box), thread * 16), own, true, policy);
      cp_async_arrive(&full);
    } else {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&done);
      mbarrier_wait(&work_tile_full[parity], round / 2 % 2);
      if (kRace) dawdle();
      int* const own = to + work_tile[slot] * 256;
      mbarrier_wait(&full, parity);
      for (int i = lane; i < 256; i += 32) own[i] = box[i];
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 256); }
