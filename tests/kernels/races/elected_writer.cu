// One lane of each warp writes a note and arrives at an mbarrier. Four warps read all notes, and
// one lane of each of them arrives for its warp.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o elected_writer tests/kernels/races/elected_writer.cu
// This is correct: a lane's arrival releases what the lane itself wrote. The readers report back as
// in elected_arrival.cu. The producers of the sparse MLA forward kernel for few heads do this for
// the valid rows of a tile.
#include "races/pattern.cuh"

struct Shared {
  int notes[2][4];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [notes, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialize(full[i], 4, free[i], 4);
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % 2, parity = round / 2 % 2;
    if (threadIdx.x < 128) {
      mbarrier_wait(&free[stage], parity ^ 1);
      if (lane == 0) {
        if (kRace) mbarrier_arrive(&full[stage]), dawdle();
        notes[stage][warp] = from[round * 4 + warp];
        if (!kRace) mbarrier_arrive(&full[stage]);
      }
    } else {
      mbarrier_wait(&full[stage], parity);
      const int sum = notes[stage][0] + notes[stage][1] + notes[stage][2] + notes[stage][3];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&free[stage]);
      int others = 0;
      for (int i = 0; i < 4; ++i) others += i == warp ? 0 : from[round * 4 + i];
      if (lane == 31) to[round * 4 + warp] = sum - others;
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 4); }
