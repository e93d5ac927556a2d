// cuda/common/tma.cuh for the emulator: a tensor map is what it was encoded from.
#pragma once

#include "common/ptx.cuh"

namespace jax_dsa {

struct CUtensorMap {
  const uint8_t* base;
  int64_t dims[4];
  int box[4];
  int element_bytes;
};

// Dimensions beyond the tensor's are 1.
inline CUtensorMap tensor_map(int element_bytes, const void* base, const int64_t (&dims)[4],
                              const int (&box)[4]) {
  CUtensorMap map = {static_cast<const uint8_t*>(base), {}, {}, element_bytes};
  for (int i = 0; i < 4; ++i) map.dims[i] = dims[i], map.box[i] = box[i];
  return map;
}

inline void tma_prefetch_map(const CUtensorMap*) {}

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                     int w = 0) {
  const uint32_t start = emulator::shared_offset(to);
  uint8_t* shared = emulator::self().block->shared;
  const int row = map->box[0] * map->element_bytes;
  const int mode = row == 128 ? 1 : row == 64 ? 2 : 3;
  if (start % (8 * row)) emulator::fail("a misaligned TMA copy");
  emulator::later([=, map = *map] {
    uint32_t bytes = 0;
    for (int d = 0; d < map.box[3]; ++d) {
      for (int c = 0; c < map.box[2]; ++c) {
        for (int b = 0; b < map.box[1]; ++b) {
          const bool there = y + b < map.dims[1] && z + c < map.dims[2] && w + d < map.dims[3];
          const int64_t from =
              (((w + d) * map.dims[2] + z + c) * map.dims[1] + y + b) * map.dims[0] + x;
          for (int i = 0; i < row; ++i, ++bytes) {
            const bool inside = there && x + i / map.element_bytes < map.dims[0];
            shared[emulator::swizzled(start + bytes, mode)] =
                inside ? map.base[from * map.element_bytes + i] : 0;
          }
        }
      }
    }
    emulator::mbarrier(barrier).bytes -= bytes;
    emulator::mbarrier(barrier).settle();
  });
}

}  // namespace jax_dsa
