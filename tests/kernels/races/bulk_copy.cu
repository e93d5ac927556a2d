// One lane writes a note, arrives at the mbarrier on which its bulk copies complete, and starts the
// copies. Four warps read the note and the copies, and one lane of each of them arrives for its
// warp.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o bulk_copy \
//       tests/kernels/races/bulk_copy.cu
// This is correct: the arrival releases the note, as in elected_writer.cu. A phase completes when
// all of its bytes have been written, and a thread that has waited for it sees them. The readers
// report back as in elected_arrival.cu, after which the next copies may write. Kernels whose
// producer is a single lane use this for work tiles, tiles, and the blocks or rows of numbers that
// come with them.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[2][128];
  int note[2];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, note, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialize(full[i], 1, free[i], 4);
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
