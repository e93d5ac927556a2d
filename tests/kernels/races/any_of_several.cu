// Two warps write different numbers to the same words. Whichever remains, all warps read it after a
// barrier.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o any_of_several tests/kernels/races/any_of_several.cu
// The two writes race on purpose. Each covers the whole word, so one value remains intact.
// __syncthreads orders both writes before the reads, so that exactly one warp finds its own number.
// The indexer's backward pass does this when a query selects a key in several slots and one of
// these slots is entered in a table. With -DRACE the table's earlier content may be written last,
// which is wrong.
#include "races/pattern.cuh"

struct Shared {
  int table[32];
};

__global__ void pattern(const int* from, int* to) {
  auto& [table] = dynamic_shared<Shared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int round = 0; round < kRounds; ++round) {
    if (warp == 0) {
      if (kRace) dawdle();
      table[lane] = -1;
    }
    if (!kRace) __syncthreads();
    if (warp > 0) store_any(table[lane], warp);
    __syncthreads();
    if (table[lane] == warp) to[round * 32 + lane] = from[round * 32 + lane];
    __syncthreads();
  }
}

int main() { return run_pattern<Shared>(pattern, 96, 32); }
