// tests/kernels/races/pattern.cuh for the emulator.
#pragma once

#include "common/ptx.cuh"

using namespace jax_dsa;

#ifdef RACE
inline constexpr bool kRace = true;
#else
inline constexpr bool kRace = false;
#endif
inline constexpr int kRounds = 64;

inline void initialize(uint64_t& a, int arrivals_a, uint64_t& b, int arrivals_b) {
  if (threadIdx.x == 0) {
    mbarrier_init(&a, arrivals_a);
    mbarrier_init(&b, arrivals_b);
  }
  __syncthreads();
}

inline void dawdle() {
  for (int i = 0; i < 60; ++i) {
    ++emulator::machine.progress;
    emulator::yield();
  }
}

template <typename Shared>
int run_pattern(void (*pattern)(const int*, int*), int threads, int words) {
  const size_t count = kRounds * words;
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::vector<int4> from(count / 4), to(count / 4);
    auto *in = reinterpret_cast<int*>(from.data()), *out = reinterpret_cast<int*>(to.data());
    for (size_t i = 0; i < count; ++i) in[i] = static_cast<int>(i) + 1;
    emulator::machine.options = {.late_copies = seed % 2 == 0, .seed = seed};
    emulator::launch(1, threads, sizeof(Shared), [&] { pattern(in, out); });
    for (size_t i = 0; i < count; ++i) wrong += out[i] != in[i];
  }
  printf("%d of %zu values wrong\n", wrong, 8 * count);
  return !kRace && wrong > 0;
}
