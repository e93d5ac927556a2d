// ldmatrix reads what cp.async has copied, and cp.async overwrites what ldmatrix has read.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o load_matrix tests/kernels/races/load_matrix.cu
// This is correct: the copies complete on `full`, as in copy_on_mbarrier.cu. ldmatrix is
// synchronous, so lane 0 may free the matrices for its warp, as in elected_arrival.cu, once
// ldmatrix has returned the values. attn_dist and the indexer's backward pass do this for the heads
// that they keep in registers.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int matrices[2][512];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [matrices, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialize(full[i], 128, free[i], 4);
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const uint64_t policy = l2_policy_evict_first();
  const auto arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barrier);
  };
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % 2, parity = round / 2 % 2;
    const uint32_t row = whole_sum(smem_address(matrices[stage]), thread * 16);
    if (threadIdx.x < 128) {
      mbarrier_wait(&free[stage], parity ^ 1);
      cp_async_16(row, from + round * 512 + thread * 4, true, policy);
      cp_async_arrive(&full[stage]);
    } else {
      mbarrier_wait(&full[stage], parity);
      if (kRace) arrive(free[stage]), dawdle();
      uint32_t x[4];  // four lanes hold a row of each of the warp's matrices
      load_matrix_x4(row, x);
      if (!kRace) arrive(free[stage]);
      int* const own = to + round * 512 + warp * 128 + lane;
      for (int i = 0; i < 4; ++i) own[i * 32] = static_cast<int>(x[i]);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 512); }
