// One thread writes, then its warpgroup and the one that reads wait at the same named barrier; the
// writing warpgroup meets at a barrier of its own before and after.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Ibenchmarks/micro \
//       -o both_wait benchmarks/micro/racecheck/both_wait.cu
// Right: bar.sync orders the accesses of all its threads before it before those after it. So do the
// warpgroups of mqa_decode with a block's share of the work: those that multiply find it, the one
// that copies begins with it.
#include "racecheck/pattern.cuh"

struct Shared {
  int sums[4];
  int share[kRounds][4];
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kSumsHere = 6, kShareHere = 7;
  auto& [sums, share] = dynamic_shared<Shared>();
  const int thread = threadIdx.x % 128;
  const auto wait = [] { named_barrier_sync<256>(kShareHere); };
  const auto meet = [] { named_barrier_sync<128>(kSumsHere); };
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 128) {
      if (thread % 32 == 0) sums[thread / 32] = thread / 32 + round;
      meet();
      const int writer = sums[0] + sums[1] + sums[2] + sums[3] - 6 - 3 * round;  // the round
      const auto write = [&] {
        if (thread != writer) return;
        for (int i = 0; i < 4; ++i) share[round][i] = from[round * 4 + i];
      };
      if (!kRace) write();
      wait();
      if (kRace) dawdle(), write();
      meet();
    } else {
      wait();
      if (thread < 4) to[round * 4 + thread] = share[round][thread];
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 256, 4); }
