// ldmatrix of what cp.async brought, and cp.async into what ldmatrix has read.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Ibenchmarks/micro \
//       -o load_matrix benchmarks/micro/racecheck/load_matrix.cu
// Right: the copies complete on `full`, as in copy_on_mbarrier.cu; lane 0 frees the matrices for
// its warp, as in elected_arrival.cu, when ldmatrix, which is synchronous, has given the values. So
// do attn_dist and the indexer's backward pass with the heads that they keep in registers.
#include "racecheck/pattern.cuh"

struct Shared {
  alignas(16) int matrices[128];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  auto& [matrices, full, free] = dynamic_shared<Shared>();
  initialise(full, 32, free, 1);
  const int lane = threadIdx.x % 32;
  const uint64_t policy = l2_policy_evict_first();
  const uint32_t row = smem_address(&matrices[lane * 4]);
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      mbarrier_wait(&free, round % 2 ^ 1);
      cp_async_16(row, from + round * 128 + lane * 4, true, policy);
      cp_async_arrive(&full);
    } else {
      mbarrier_wait(&full, round % 2);
      if (kRace) arrive(free), dawdle();
      uint32_t x[4];  // of a row of each matrix, by 4 lanes
      load_matrix_x4(row, x);
      if (!kRace) arrive(free);
      for (int i = 0; i < 4; ++i) to[round * 128 + i * 32 + lane] = static_cast<int>(x[i]);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 64, 128); }
