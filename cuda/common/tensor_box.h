// A tensor for TMA: its layout in memory and the size of the boxes that are copied.
#pragma once

#include <cstdint>

namespace jax_dsa {

inline constexpr int kMaxTensorRank = 4;

struct TensorBox {
  const void* base;
  uint64_t extents[kMaxTensorRank];
  uint64_t strides[kMaxTensorRank];  // bytes between neighbors along dimension i + 1
  uint32_t box[kMaxTensorRank];
  int rank, element_bytes;
  int row_bytes;  // bytes of a box row, which is the swizzle width: 32, 64 or 128
};

// Describes a dense tensor. Dimensions are listed innermost first. The base address and the
// innermost extent must be multiples of 16 bytes.
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
