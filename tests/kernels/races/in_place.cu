// A warp reads into registers what another warp's cp.async has copied, and overwrites it. One of
// its lanes then arrives for the warp, and the next copies write to the same place.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels -o in_place \
//       tests/kernels/races/in_place.cu
// This is correct: the mbarrier on which the copies complete orders them before the reads.
// __syncwarp orders the reads of all lanes before their stores. __syncwarp and lane 0's arrival
// order the stores before the next copies. The consumer warpgroups that use FP8 records do this
// when they convert the records to bf16 in place.
#include "races/pattern.cuh"

struct Shared {
  alignas(16) uint32_t box[128];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  auto& [box, full, free] = dynamic_shared<Shared>();
  initialize(full, 32, free, 1);
  const int lane = threadIdx.x % 32;
  const uint32_t own = lane * 16, other = (lane ^ 1) * 16, at = smem_address(box);
  const uint64_t policy = l2_policy_evict_first();
  const auto arrive = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&free);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      mbarrier_wait(&free, round % 2 ^ 1);
      cp_async_16_alone(whole_sum(at, own), from + round * 128 + lane * 4, true, policy);
      cp_async_arrive(&full);
    } else {
      mbarrier_wait(&full, round % 2);
      if (kRace) arrive(), dawdle();
      uint32_t x[4];
      load_shared_16(at + other, x);
      __syncwarp();
      store_shared_16(at + other, {~x[0], ~x[1], ~x[2], ~x[3]});
      __syncwarp();
      load_shared_16(at + own, x);
      for (int i = 0; i < 4; ++i) to[round * 128 + lane * 4 + i] = static_cast<int>(~x[i]);
      if (!kRace) arrive();
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 64, 128); }
