// Threads that write or have finished reading execute bar.arrive. Threads that wait for them
// execute bar.sync on the same barrier.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o arrive_and_sync tests/kernels/races/arrive_and_sync.cu
// This is correct: PTX orders a thread's accesses before its bar.arrive before the accesses of
// other threads after their bar.sync. Both count towards the barrier's 64 threads. The two consumer
// warpgroups of the sparse MLA forward kernel exchange P, running maxima and sums in this way.
#include "races/pattern.cuh"

struct Shared {
  int box[32];
};

__global__ void pattern(const int* from, int* to) {
  constexpr int kFull = 1, kFree = 2;
  auto& [box] = dynamic_shared<Shared>();
  const int lane = threadIdx.x % 32;
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      if (round > 0) named_barrier_sync<64>(kFree);
      if (kRace) named_barrier_arrive<64>(kFull), dawdle();
      box[31 - lane] = from[round * 32 + 31 - lane];
      if (!kRace) named_barrier_arrive<64>(kFull);
    } else {
      named_barrier_sync<64>(kFull);
      to[round * 32 + lane] = box[lane];
      if (round + 1 < kRounds) named_barrier_arrive<64>(kFree);
    }
  }
}

int main() { return run_pattern<Shared>(pattern, 64, 32); }
