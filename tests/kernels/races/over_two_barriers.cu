// A warp that has finished reading tells a second warp by bar.arrive. The second warp tells the
// writer by an mbarrier.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o over_two_barriers tests/kernels/races/over_two_barriers.cu
// This is correct because causality order is transitive: it leads from the first warp's read over
// its bar.arrive, the second warp's bar.sync and lane 0's arrival to the writer's wait and next
// write. The sparse MLA backward kernel does this for the validity of a tile's slots:
// make_gradients reads it, sum_gradients frees the tile's first blocks, and produce_queries writes
// the next.
#include "races/pattern.cuh"

struct Shared {
  int valid[32];
  uint64_t block_full, block_free;
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kGradientsReady = 1;
  auto& [valid, block_full, block_free] = dynamic_shared<Shared>();
  initialize(block_full, 1, block_free, 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (warp == 0) {
      mbarrier_wait(&block_full, round % 2);
      if (kRace) named_barrier_arrive<64>(kGradientsReady), dawdle();
      to[round * 32 + lane] = valid[lane];
      if (!kRace) named_barrier_arrive<64>(kGradientsReady);
    } else if (warp == 1) {
      named_barrier_sync<64>(kGradientsReady);
      arrive(block_free);
    } else {
      mbarrier_wait(&block_free, round % 2 ^ 1);
      valid[31 - lane] = from[round * 32 + 31 - lane];
      arrive(block_full);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 32); }
