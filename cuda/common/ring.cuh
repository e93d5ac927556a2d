// Positions in a ring of shared-memory stages, each of which has a "full" and a "free" mbarrier.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

// Consumers start at {0, 0} and wait for "full" with `parity`. A producer waits for "free" with the
// other parity, since its first round need not wait; it may start at {0, 1} instead.
template <int kBuffers>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;  // parity of the mbarriers' phases in this round

  __device__ void advance() {
    if (++index == kBuffers) index = 0, parity ^= 1;
  }
  // Returns the position `buffers` further on, at most one round.
  __device__ RingPlace operator+(int buffers) const {
    const int next = index + buffers;
    return next < kBuffers ? RingPlace{next, parity} : RingPlace{next - kBuffers, parity ^ 1};
  }
};

}  // namespace jax_dsa
