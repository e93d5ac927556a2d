// cp.async whose completion is an arrival at an mbarrier, and ordinary loads after a wait there.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Ibenchmarks/micro \
//       -o copy_on_mbarrier benchmarks/micro/racecheck/copy_on_mbarrier.cu
// Right: cp.async.mbarrier.arrive.noinc arrives once all cp.async of its thread so far have
// completed, all 32 arrivals end the phase, and who has waited for it sees what was copied. All
// kernels that gather rows fill their tiles so.
#include "racecheck/pattern.cuh"

struct Shared {
  alignas(16) int box[128];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, full, free] = dynamic_shared<Shared>();
  initialise(full, 32, free, 32);
  const int lane = threadIdx.x % 32;
  const uint64_t policy = l2_policy_evict_first();
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      mbarrier_wait(&free, round % 2 ^ 1);
      if (kRace) cp_async_arrive(&full), dawdle();
      cp_async_16(smem_address(&box[lane * 4]), from + round * 128 + lane * 4, true, policy);
      if (!kRace) cp_async_arrive(&full);
    } else {
      mbarrier_wait(&full, round % 2);
      for (int i = 0; i < 4; ++i) to[round * 128 + i * 32 + lane] = box[i * 32 + lane];
      mbarrier_arrive(&free);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 64, 128); }
