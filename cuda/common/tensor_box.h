// A tensor as TMA sees it: how it lies in memory, and the boxes that are copied of it.
#pragma once

#include <cstdint>

namespace jax_dsa {

inline constexpr int kMaxTensorRank = 4;

struct TensorBox {
  const void* base;
  uint64_t extents[kMaxTensorRank];
  uint64_t strides[kMaxTensorRank];  // in bytes, from one index of dimension i + 1 to the next
  uint32_t box[kMaxTensorRank];
  int rank, element_bytes;
  int row_bytes;  // of a box, which is the swizzle's width: 32, 64 or 128
};

// Dense in memory, the innermost dimension first. The base and the innermost extent are multiples
// of 16 bytes.
template <int kRank>
TensorBox tensor_box(int element_bytes, const void* base, const int64_t (&dims)[kRank],
                     const int (&box)[kRank]) {
  static_assert(kRank <= kMaxTensorRank);
  TensorBox x = {.base = base,
                 .rank = kRank,
                 .element_bytes = element_bytes,
                 .row_bytes = box[0] * element_bytes};
  uint64_t stride = element_bytes;
  for (int i = 0; i < kRank; ++i) {
    x.extents[i] = dims[i];
    x.box[i] = box[i];
    stride *= dims[i];
    x.strides[i] = stride;
  }
  return x;
}

}  // namespace jax_dsa
