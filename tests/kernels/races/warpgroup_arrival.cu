// One thread of a warpgroup writes, the warpgroup meets at a named barrier, and its first thread
// arrives at an mbarrier, at which the reader waits.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o warpgroup_arrival tests/kernels/races/warpgroup_arrival.cu
// Right: bar.sync orders the write before the arrival, which releases; the wait at the other end
// acquires; and both orders are one, since causality order is transitive. So does the producer of
// mqa_decode come by its block's share of the work, which those that multiply find.
#include "races/pattern.cuh"

struct Shared {
  int share[4];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kSumsHere = 6;
  auto& [share, full, free] = dynamic_shared<Shared>();
  initialise(full, 1, free, 1);
  const auto meet = [] { named_barrier_sync<128>(kSumsHere); };
  const auto arrive = [&] {
    if (threadIdx.x == 0) mbarrier_arrive(&full);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 128) {
      mbarrier_wait(&free, round % 2 ^ 1);
      meet();
      if (kRace) arrive(), dawdle();
      if (threadIdx.x == round + 1) {
        for (int i = 0; i < 4; ++i) share[i] = from[round * 4 + i];
      }
      meet();
      if (!kRace) arrive();
    } else if (threadIdx.x == 128) {
      mbarrier_wait(&full, round % 2);
      for (int i = 0; i < 4; ++i) to[round * 4 + i] = share[i];
      mbarrier_arrive(&free);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 160, 4); }
