// Two warps exchange data by bar.arrive and bar.sync; that it was read, the writer learns from a
// third warp, which waits for the reader at one mbarrier and releases the writer by another.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o through_producer tests/kernels/races/through_producer.cu
// Right: causality order is transitive, from the reader's read over __syncwarp, lane 0's arrival,
// the third warp's wait and arrival, to the writer's wait and its next write. So the even warpgroup
// of the sparse MLA forward and decode kernels may write new references once keys for its next tile
// are here: the odd one has freed the tile before, having followed its references.
#include "races/pattern.cuh"

struct Shared {
  int reference[32];
  uint64_t key_full, key_free;
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kReady = 1;
  auto& [reference, key_full, key_free] = dynamic_shared<Shared>();
  initialise(key_full, 1, key_free, 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (warp == 0) {
      mbarrier_wait(&key_full, round % 2);
      reference[31 - lane] = from[round * 32 + 31 - lane];
      named_barrier_arrive<64>(kReady);
    } else if (warp == 1) {
      named_barrier_sync<64>(kReady);
      if (kRace) arrive(key_free), dawdle();
      to[round * 32 + lane] = reference[lane];
      if (!kRace) arrive(key_free);
    } else {
      mbarrier_wait(&key_free, round % 2 ^ 1);
      arrive(key_full);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 32); }
