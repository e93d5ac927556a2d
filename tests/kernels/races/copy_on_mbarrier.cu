// The completion of cp.async is an arrival at an mbarrier. Ordinary loads follow a wait there.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o copy_on_mbarrier tests/kernels/races/copy_on_mbarrier.cu
// This is correct: cp.async.mbarrier.arrive.noinc arrives once all earlier cp.async of its thread
// have completed, and all 128 arrivals complete the phase. A thread that has waited for the phase
// sees what was copied. All kernels that gather rows fill their tiles in this way, with several
// tiles in flight.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) int box[2][512];
  uint64_t full[2], free[2];
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, full, free] = dynamic_shared<Shared>();
  for (int i = 0; i < 2; ++i) initialize(full[i], 128, free[i], 128);
  const int thread = threadIdx.x % 128;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % 2, parity = round / 2 % 2;
    if (threadIdx.x < 128) {
      mbarrier_wait(&free[stage], parity ^ 1);
      if (kRace) cp_async_arrive(&full[stage]), dawdle();
      cp_async_16(whole_sum(smem_address(box[stage]), thread * 16), from + round * 512 + thread * 4,
                  true, policy);
      if (!kRace) cp_async_arrive(&full[stage]);
    } else {
      mbarrier_wait(&full[stage], parity);
      for (int i = thread; i < 512; i += 128) to[round * 512 + i] = box[stage][i];
      mbarrier_arrive(&free[stage]);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 512); }
