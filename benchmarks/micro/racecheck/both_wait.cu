// One thread writes, then its warpgroup and the one that reads wait at the same named barrier.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Ibenchmarks/micro \
//       -o both_wait benchmarks/micro/racecheck/both_wait.cu
// Right: bar.sync orders the accesses of all its threads before it before those after it. So do the
// warpgroups of mqa_decode with a block's share of the work: those that multiply find it, the one
// that copies begins with it.
#include "racecheck/pattern.cuh"

struct Shared {
  int share[kRounds][4];
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kShareHere = 7;
  auto& [share] = dynamic_shared<Shared>();
  const int thread = threadIdx.x % 128;
  const auto wait = [] { named_barrier_sync<256>(kShareHere); };
  for (int round = 0; round < kRounds; ++round) {
    const auto write = [&] {
      if (thread != round) return;
      for (int i = 0; i < 4; ++i) share[round][i] = from[round * 4 + i];
    };
    if (threadIdx.x < 128) {
      if (!kRace) write();
      wait();
      if (kRace) dawdle(), write();
    } else {
      wait();
      if (thread < 4) to[round * 4 + thread] = share[round][thread];
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 4); }
