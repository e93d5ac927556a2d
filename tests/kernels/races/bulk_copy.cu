// One lane writes a note, arrives at the mbarrier on which its bulk copies complete, and starts
// them; four warps read note and copies, and one lane of each of these arrives for its warp.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o bulk_copy \
//       tests/kernels/races/bulk_copy.cu
// Right: the arrival releases the note, as in elected_writer.cu; a phase ends when all its bytes
// are there, and a wait for it sees them; the way back is that of elected_arrival.cu, after which
// the next copies may write. So do the kernels whose producer is one lane, with items, tiles and
// the blocks or rows of numbers that come with them.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[2][128];
  int note[2];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, note, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialise(full[i], 1, free[i], 4);
  const int lane = threadIdx.x % 32;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % 2, parity = round / 2 % 2;
    if (threadIdx.x >= 128) {
      mbarrier_wait(&free[stage], parity ^ 1);
      if (lane == 0) {
        if (!kRace) note[stage] = round;
        mbarrier_arrive_expect(&full[stage], sizeof(box[stage]));
        bulk_load(box[stage], from + round * 128, sizeof(box[stage]), &full[stage], policy);
        if (kRace) dawdle();
        if (kRace) note[stage] = round;
      }
      __syncwarp();
    } else {
      mbarrier_wait(&full[stage], parity);
      const int at = threadIdx.x;
      to[round * 128 + at] = note[stage] == round ? box[stage][at] : -1;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&free[stage]);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 160, 128); }
