// One thread of a warpgroup writes, the warpgroup synchronizes at a named barrier, and its first
// thread arrives at an mbarrier on which the reader waits.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o warpgroup_arrival tests/kernels/races/warpgroup_arrival.cu
// This is correct: bar.sync orders the write before the arrival, which has release semantics, and
// the reader's wait has acquire semantics. Causality order is transitive, so the two orders
// combine. The producer of mqa_decode receives its CTA's work range in this way from the threads
// that compute it.
#include "races/pattern.cuh"

struct Shared {
  int work_range[4];
  uint64_t full, free;
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kSumsReady = 6;
  auto& [work_range, full, free] = dynamic_shared<Shared>();
  initialize(full, 1, free, 1);
  const auto meet = [] { named_barrier_sync<128>(kSumsReady); };
  const auto arrive = [&] {
    if (threadIdx.x == 0) mbarrier_arrive(&full);
  };
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 128) {
      mbarrier_wait(&free, round % 2 ^ 1);
      meet();
      if (kRace) arrive(), dawdle();
      if (threadIdx.x == round + 1) {
        for (int i = 0; i < 4; ++i) work_range[i] = from[round * 4 + i];
      }
      meet();
      if (!kRace) arrive();
    } else if (threadIdx.x == 128) {
      mbarrier_wait(&full, round % 2);
      for (int i = 0; i < 4; ++i) to[round * 4 + i] = work_range[i];
      mbarrier_arrive(&free);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 160, 4); }
