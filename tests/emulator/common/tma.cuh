// cuda/common/tma.cuh for the emulator.
#pragma once

#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace jax_dsa {

inline void tma_prefetch_map(const CUtensorMap*) {}

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     int w = 0) {
  const uint32_t start = emulator::shared_offset(to);
  uint8_t* shared = emulator::self().block->shared;
  TensorBox tensor;
  memcpy(&tensor, map, sizeof tensor);
  const int row = tensor.row_bytes, mode = row == 128 ? 1 : row == 64 ? 2 : 3;
  if (row != 128 && row != 64 && row != 32) emulator::fail("a TMA box of a wrong width");
  if (start % (8 * row)) emulator::fail("a misaligned TMA copy");
  emulator::later([=] {
    uint32_t bytes = 0;
    const uint64_t at[] = {0, uint64_t(y), uint64_t(z), uint64_t(w)};
    const auto size = [&](int i) { return i < tensor.rank ? tensor.box[i] : 1; };
    for (uint32_t d = 0; d < size(3); ++d) {
      for (uint32_t c = 0; c < size(2); ++c) {
        for (uint32_t b = 0; b < size(1); ++b) {
          const uint64_t place[] = {0, at[1] + b, at[2] + c, at[3] + d};
          bool there = true;
          uint64_t from = uint64_t(x) * tensor.element_bytes;
          for (int i = 1; i < tensor.rank; ++i) {
            there &= place[i] < tensor.extents[i];
            from += place[i] * tensor.strides[i - 1];
          }
          for (int i = 0; i < row; ++i, ++bytes) {
            const bool inside = there && x + i / tensor.element_bytes < int64_t(tensor.extents[0]);
            shared[emulator::swizzled(start + bytes, mode)] =
                inside ? static_cast<const uint8_t*>(tensor.base)[from + i] : 0;
          }
        }
      }
    }
    emulator::mbarrier(barrier).bytes -= bytes;
    emulator::mbarrier(barrier).settle();
  });
}

}  // namespace jax_dsa
