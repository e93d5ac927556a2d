// cuda/common/tma.cuh for the emulator.
#pragma once

#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace jax_dsa {

inline void tma_prefetch_map(const CUtensorMap*) {}

namespace detail {
// Calls visit(byte in shared memory, pointer to the byte in the tensor or null outside of it) for
// each byte of a box. The box starts at offset `start` of shared memory. Returns the number of
// bytes.
template <typename Visit>
uint32_t visit_box(uint8_t* shared, uint32_t start, const TensorBox& tensor, int x, int y, int z,
                   int w, Visit visit) {
  const int row = tensor.row_bytes, mode = row == 128 ? 1 : row == 64 ? 2 : 3;
  uint32_t bytes = 0;
  const uint64_t at[] = {0, uint64_t(y), uint64_t(z), uint64_t(w)};
  const auto size = [&](int i) { return i < tensor.rank ? tensor.box[i] : 1; };
  for (uint32_t d = 0; d < size(3); ++d) {
    for (uint32_t c = 0; c < size(2); ++c) {
      for (uint32_t b = 0; b < size(1); ++b) {
        const uint64_t place[] = {0, at[1] + b, at[2] + c, at[3] + d};
        bool there = true;
        uint64_t offset = uint64_t(x) * tensor.element_bytes;
        for (int i = 1; i < tensor.rank; ++i) {
          there &= place[i] < tensor.extents[i];
          offset += place[i] * tensor.strides[i - 1];
        }
        auto* const base = static_cast<uint8_t*>(const_cast<void*>(tensor.base)) + offset;
        for (int i = 0; i < row; ++i, ++bytes) {
          const bool inside = there && x + i / tensor.element_bytes < int64_t(tensor.extents[0]);
          visit(shared[emulator::swizzled(start + bytes, mode)], inside ? base + i : nullptr);
        }
      }
    }
  }
  return bytes;
}

// Returns the tensor that a map describes. Fails if the map or the box's address would fail on a
// GPU.
inline TensorBox tensor_of(const CUtensorMap* map, uint32_t start) {
  TensorBox tensor;
  memcpy(&tensor, map, sizeof tensor);
  const int row = tensor.row_bytes;
  if (row != 128 && row != 64 && row != 32) emulator::fail("a TMA box of a wrong width");
  if (start % 128) emulator::fail("a misaligned TMA copy");
  for (int i = 1; i < tensor.rank; ++i) {
    if (tensor.strides[i - 1] % 16) emulator::fail("a TMA stride that is no multiple of 16");
  }
  if (reinterpret_cast<uintptr_t>(tensor.base) % 16) emulator::fail("a misaligned TMA tensor");
  return tensor;
}

// Copies a box into `shared`, the shared memory of some CTA of the cluster.
inline void load(uint8_t* shared, void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                 int z, int w) {
  const uint32_t start = emulator::shared_offset(to), signal = emulator::shared_offset(barrier);
  const TensorBox tensor = tensor_of(map, start);
  emulator::later([=] {
    auto& full = emulator::mbarrier(reinterpret_cast<uint64_t*>(shared + signal));
    full.arrive(visit_box(shared, start, tensor, x, y, z, w,
                          [](uint8_t& to, const uint8_t* from) { to = from ? *from : 0; }));
  });
}
}  // namespace detail

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     int w = 0) {
  detail::load(emulator::self().block->shared, to, map, barrier, x, y, z, w);
}
inline void tma_store(const CUtensorMap* map, const void* from, int x, int y, int z, int w = 0) {
  uint8_t* const shared = emulator::self().block->shared;
  const uint32_t start = emulator::shared_offset(from);
  const TensorBox tensor = detail::tensor_of(map, start);
  emulator::self().stores.open.push_back([=] {
    detail::visit_box(shared, start, tensor, x, y, z, w, [](uint8_t from, uint8_t* to) {
      if (to) *to = from;
    });
  });
}
// Each CTA may receive the box at a different time.
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
