// cuda/common/tma.cuh for the emulator.
#pragma once

#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace jax_dsa {

inline void tma_prefetch_map(const CUtensorMap*) {}

namespace detail {
// Calls element(byte of the box, byte of the tensor or -1 outside it) for each byte of the box.
template <typename Element>
uint32_t each_byte(const TensorBox& tensor, int x, int y, int z, int w, const Element& element) {
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
        for (int i = 0; i < tensor.row_bytes; ++i, ++bytes) {
          const bool inside = there && x + i / tensor.element_bytes < int64_t(tensor.extents[0]);
          element(bytes, inside ? int64_t(from + i) : -1);
        }
      }
    }
  }
  return bytes;
}
inline int swizzle_mode(const TensorBox& tensor) {
  return tensor.row_bytes == 128 ? 1 : tensor.row_bytes == 64 ? 2 : 3;
}
// Copies the box to `start` of a block's shared memory; returns its bytes.
inline uint32_t copy_box(uint8_t* shared, uint32_t start, const TensorBox& tensor, int x, int y,
                         int z, int w) {
  const auto* base = static_cast<const uint8_t*>(tensor.base);
  return each_byte(tensor, x, y, z, w, [&](uint32_t to, int64_t from) {
    shared[emulator::swizzled(start + to, swizzle_mode(tensor))] = from < 0 ? 0 : base[from];
  });
}
// The map's tensor, of which a box begins at `start` of shared memory.
inline TensorBox tensor_of(const CUtensorMap* map, uint32_t start) {
  TensorBox tensor;
  memcpy(&tensor, map, sizeof tensor);
  const int row = tensor.row_bytes;
  if (row != 128 && row != 64 && row != 32) emulator::fail("a TMA box of a wrong width");
  if (start % (8 * row)) emulator::fail("a misaligned TMA copy");
  for (int i = 1; i < tensor.rank; ++i) {
    if (tensor.strides[i - 1] % 16) emulator::fail("a TMA stride that is no multiple of 16");
  }
  if (reinterpret_cast<uintptr_t>(tensor.base) % 16) emulator::fail("a misaligned TMA tensor");
  return tensor;
}

// To `shared` of some block.
inline void load(uint8_t* shared, void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                 int z, int w) {
  const uint32_t start = emulator::shared_offset(to), signal = emulator::shared_offset(barrier);
  const TensorBox tensor = tensor_of(map, start);
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
inline void tma_store(const CUtensorMap* map, const void* from, int x, int y, int z) {
  uint8_t* const shared = emulator::self().block->shared;
  const uint32_t start = emulator::shared_offset(from);
  const TensorBox tensor = detail::tensor_of(map, start);
  detail::stores().open.push_back([=] {
    auto* base = static_cast<uint8_t*>(const_cast<void*>(tensor.base));
    detail::each_byte(tensor, x, y, z, 0, [&](uint32_t at, int64_t to) {
      if (to >= 0) base[to] = shared[emulator::swizzled(start + at, detail::swizzle_mode(tensor))];
    });
  });
}
inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     uint64_t) {
  tma_load(to, map, barrier, x, y, z);
}

}  // namespace jax_dsa
