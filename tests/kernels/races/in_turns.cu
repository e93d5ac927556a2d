// A thread writes items to two places in turns; its own warp, another warp that copies and one that
// uses the copies read them. That an item was read, the writer learns while it has the next one.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o in_turns \
//       tests/kernels/races/in_turns.cu
// Right: of the warp that uses the copies, lane 0 arrives at `done` for an item when the warp has
// read the one before, and the writer waits there before it takes the item after; the warps that
// copy meet at a barrier when they have read an item. So does the sparse MLA backward kernel with
// its work items. The race is a single place.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[256];
  int item[2];
  uint64_t item_full[2], full, done;
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, item, item_full, full, done] = dynamic_shared<Shared>();
  initialise(item_full[0], 1, item_full[1], 1);
  initialise(full, 64, done, 1);
  const int thread = threadIdx.x, lane = thread % 32;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    const int turn = round % 2, place = kRace ? 0 : turn;
    if (thread < 64) {
      if (thread == 0) {
        item[place] = round;
        mbarrier_arrive(&item_full[turn]);
      }
      __syncwarp();
      mbarrier_wait(&item_full[turn], round / 2 % 2);
      const int* const own = from + item[place] * 256 + thread * 4;
      named_barrier_sync<64>(1);
      mbarrier_wait(&done, turn);
      cp_async_16(whole_sum(smem_address(box), thread * 16), own, true, policy);
      cp_async_arrive(&full);
    } else {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&done);
      mbarrier_wait(&item_full[turn], round / 2 % 2);
      if (kRace) dawdle();
      int* const own = to + item[place] * 256;
      mbarrier_wait(&full, turn);
      for (int i = lane; i < 256; i += 32) own[i] = box[i];
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 256); }
