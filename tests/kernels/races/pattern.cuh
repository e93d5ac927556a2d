// What the programs beside this file share. Each is one pattern of synchronisation that the kernels
// use, right by the PTX memory model, in few lines: what racecheck says of it, it says of the
// kernels. With -DRACE a barrier comes before the access that it is for, or is left out, or a place
// is used again too early, which is a race.
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

// Two mbarriers, with so many arrivals each.
__device__ inline void initialise(uint64_t& a, int arrivals_a, uint64_t& b, int arrivals_b) {
  if (threadIdx.x == 0) {
    mbarrier_init(&a, arrivals_a);
    mbarrier_init(&b, arrivals_b);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Time in which others do what they may.
__device__ inline void dawdle() { __nanosleep(5000); }

// Runs the pattern, which copies `words` numbers a round, and compares.
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
