// What the kernels of pooling share: elements in memory, and the search for a slot's block.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "gated_pool/gated_pool.h"

namespace jax_dsa::gated_pool {

inline constexpr int kThreads = 128;
inline constexpr int kWidth = 4;  // channels per thread

template <DType kType>
using Element = std::conditional_t<kType == DType::kF32, float, uint16_t>;

// Four elements, packed as in memory.
template <DType kType>
using Packed4 = std::conditional_t<kType == DType::kF32, uint4, uint2>;

template <DType kType>
__device__ __forceinline__ void widen(const Packed4<kType>& x, float (&y)[kWidth]) {
  if constexpr (kType == DType::kF32) {
    y[0] = __uint_as_float(x.x), y[1] = __uint_as_float(x.y);
    y[2] = __uint_as_float(x.z), y[3] = __uint_as_float(x.w);
  } else {
    const float2 low = unpack_16<kType>(x.x), high = unpack_16<kType>(x.y);
    y[0] = low.x, y[1] = low.y, y[2] = high.x, y[3] = high.y;
  }
}

template <DType kType>
__device__ __forceinline__ Packed4<kType> narrow(const float (&x)[kWidth]) {
  if constexpr (kType == DType::kF32) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
            __float_as_uint(x[3])};
  } else {
    return {pack_16<kType>(x[0], x[1]), pack_16<kType>(x[2], x[3])};
  }
}

// Loads and stores with the streaming cache policy: this data is accessed only once.
template <DType kType>
__device__ __forceinline__ Packed4<kType> load(const Element<kType>* from) {
  return __ldcs(reinterpret_cast<const Packed4<kType>*>(from));
}
template <DType kType>
__device__ __forceinline__ void store(Element<kType>* to, const Packed4<kType>& x) {
  __stcs(reinterpret_cast<Packed4<kType>*>(to), x);
}

// Returns the last row of the block of a slot, or -1 if the slot has no block. `starts` has the
// first row of each token's document. Whole warps call it.
__device__ __forceinline__ int find_last_row(const int32_t* starts, int slot, int ratio,
                                             int tokens) {
  // The block ends d rows after `first`, where d is the document's first row modulo the ratio.
  const int first = (slot + 1) * ratio - 1;
  int found = -1;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < ratio && first + d < tokens; d += 32) {
    const int start = __ldg(starts + first + d);
    if (start >= 0 && start % ratio == d && start <= first + d - ratio + 1) found = first + d;
  }
  return __reduce_max_sync(~0u, found);
}

}  // namespace jax_dsa::gated_pool
