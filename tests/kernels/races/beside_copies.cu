// One lane of each warp writes a note and arrives at the mbarrier on which the cp.async of all
// lanes complete. Four warps read all notes, and one lane of each of them arrives for its warp.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o beside_copies tests/kernels/races/beside_copies.cu
// This is correct for the reason given in elected_writer.cu. The phase also waits for the arrivals
// of copies, which can only complete it later. The kernels that gather rows use this for what
// belongs to a tile or a work tile besides the rows: which rows are valid, how many tiles follow,
// the list of tiles.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[2][512];
  int notes[2][4];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, notes, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialize(full[i], 128 + 4, free[i], 4);
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % 2, parity = round / 2 % 2;
    if (threadIdx.x < 128) {
      mbarrier_wait(&free[stage], parity ^ 1);
      if (lane == 0) {
        if (!kRace) notes[stage][warp] = round;
        mbarrier_arrive(&full[stage]);
      }
      cp_async_16(whole_sum(smem_address(box[stage]), thread * 16), from + round * 512 + thread * 4,
                  true, policy);
      cp_async_arrive(&full[stage]);
      if (kRace) dawdle();
      if (kRace && lane == 0) notes[stage][warp] = round;
    } else {
      mbarrier_wait(&full[stage], parity);
      for (int i = 0; i < 4; ++i) {
        const int at = i * 128 + thread;
        to[round * 512 + at] = notes[stage][i] == round ? box[stage][at] : -1;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&free[stage]);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 512); }
