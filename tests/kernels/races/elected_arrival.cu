// One lane arrives at an mbarrier for its whole warp, after __syncwarp.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o elected_arrival tests/kernels/races/elected_arrival.cu
// This is correct: __syncwarp orders the lanes' accesses before lane 0's arrival, which has release
// semantics, and the other warp's wait has acquire semantics. Causality order is transitive, so the
// two orders combine. The producers of the indexer's backward pass do this for g, and the consumers
// of all kernels do it for tiles.
#include "races/pattern.cuh"

struct Shared {
  int box[32];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, full, free] = dynamic_shared<Shared>();
  initialize(full, 1, free, 1);
  const int lane = threadIdx.x % 32;
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    const int at = round * 32 + 31 - lane;
    if (threadIdx.x < 32) {
      mbarrier_wait(&free, round % 2 ^ 1);
      if (kRace) arrive(full), dawdle();
      box[31 - lane] = from[at];
      if (!kRace) arrive(full);
    } else {
      mbarrier_wait(&full, round % 2);
      to[round * 32 + lane] = box[lane];
      arrive(free);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 64, 32); }
