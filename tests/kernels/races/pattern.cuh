// Shared code of the programs in this folder. Each program shows in a few lines one pattern of
// synchronization that the kernels use. The pattern is correct under the PTX memory model. A report
// of racecheck about the program explains the same report about a kernel. With -DRACE the program
// has a race: a barrier comes before the access that it should order, or is missing, or memory is
// reused too early.
#pragma once

#include <cstring>

#include "common/ptx.cuh"
#include "gpu/check.cuh"

using namespace jax_dsa;

#ifdef RACE
inline constexpr bool kRace = true;
#else
inline constexpr bool kRace = false;
#endif
inline constexpr int kRounds = 64;

// Initializes two mbarriers that expect `arrivals_a` and `arrivals_b` arrivals.
__device__ inline void initialize(uint64_t& a, int arrivals_a, uint64_t& b, int arrivals_b) {
  if (threadIdx.x == 0) {
    mbarrier_init(&a, arrivals_a);
    mbarrier_init(&b, arrivals_b);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Waits, so that other threads can proceed as far as synchronization permits.
__device__ inline void dawdle() { __nanosleep(5000); }

// Runs the pattern, which copies `words` numbers per round, and compares the result. Returns the
// exit status.
template <typename Shared>
int run_pattern(void (*pattern)(const int*, int*), int threads, int words) {
  std::vector<int> from(kRounds * words);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int>(mix(i) >> 33);
  int *in = upload(from), *out = device<int>(from.size());
  CHECK(cudaMemset(out, 0xff, from.size() * sizeof(int)));
  pattern<<<1, threads, sizeof(Shared)>>>(in, out);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  const std::vector<int> got = download(out, from.size());
  int wrong = 0;
  for (size_t i = 0; i < from.size(); ++i) wrong += got[i] != from[i];
  printf("%d of %zu values wrong\n", wrong, from.size());
  CHECK(cudaFree(in));
  CHECK(cudaFree(out));
  return !kRace && wrong > 0;
}
