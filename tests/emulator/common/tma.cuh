// cuda/common/tma.cuh for the emulator.
#pragma once

#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace jax_dsa {

inline void tma_prefetch_map(const CUtensorMap*) {}

namespace detail {
// Copies the box to `start` of a block's shared memory; returns its bytes.
inline uint32_t copy_box(uint8_t* shared, uint32_t start, const TensorBox& tensor, int x, int y,
                         int z, int w) {
  const int row = tensor.row_bytes, mode = row == 128 ? 1 : row == 64 ? 2 : 3;
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
  return bytes;
}

// To `shared` of some block.
inline void load(uint8_t* shared, void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                 int z, int w) {
  const uint32_t start = emulator::shared_offset(to), signal = emulator::shared_offset(barrier);
  TensorBox tensor;
  memcpy(&tensor, map, sizeof tensor);
  const int row = tensor.row_bytes;
  if (row != 128 && row != 64 && row != 32) emulator::fail("a TMA box of a wrong width");
  if (start % (8 * row)) emulator::fail("a misaligned TMA copy");
  for (int i = 1; i < tensor.rank; ++i) {
    if (tensor.strides[i - 1] % 16) emulator::fail("a TMA stride that is no multiple of 16");
  }
  if (reinterpret_cast<uintptr_t>(tensor.base) % 16) emulator::fail("a misaligned TMA tensor");
  emulator::later([=] {
    auto& full = emulator::mbarrier(reinterpret_cast<uint64_t*>(shared + signal));
    full.bytes -= copy_box(shared, start, tensor, x, y, z, w);
    full.settle();
  });
}
}  // namespace detail

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     int w = 0) {
  detail::load(emulator::self().block->shared, to, map, barrier, x, y, z, w);
}
// Each block may get it at another time.
inline void tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, uint16_t ranks,
                               int x, int y, int z) {
  for (unsigned rank = 0; rank < emulator::machine.ranks; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    detail::load(emulator::machine.resident[rank]->shared, to, map, barrier, x, y, z, 0);
  }
}
inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     uint64_t) {
  tma_load(to, map, barrier, x, y, z);
}

}  // namespace jax_dsa
