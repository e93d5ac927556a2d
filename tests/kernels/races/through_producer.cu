// Two warps exchange data by bar.arrive and bar.sync. The writer learns that the data was read from
// a third warp, which waits for the reader at one mbarrier and releases the writer by another.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o through_producer tests/kernels/races/through_producer.cu
// This is correct because causality order is transitive: it leads from the reader's read over
// __syncwarp, lane 0's arrival, and the third warp's wait and arrival to the writer's wait and next
// write. The even consumer warpgroup of the sparse MLA forward and decode kernels may therefore
// write new running maxima once keys for its next tile have arrived: the odd one has freed the
// previous tile after it read the running maxima.
#include "races/pattern.cuh"

struct Shared {
  int running_max[32];
  uint64_t key_full, key_free;
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kReady = 1;
  auto& [running_max, key_full, key_free] = dynamic_shared<Shared>();
  initialize(key_full, 1, key_free, 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (warp == 0) {
      mbarrier_wait(&key_full, round % 2);
      running_max[31 - lane] = from[round * 32 + 31 - lane];
      named_barrier_arrive<64>(kReady);
    } else if (warp == 1) {
      named_barrier_sync<64>(kReady);
      if (kRace) arrive(key_free), dawdle();
      to[round * 32 + lane] = running_max[lane];
      if (!kRace) arrive(key_free);
    } else {
      mbarrier_wait(&key_free, round % 2 ^ 1);
      arrive(key_full);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 32); }
