// cuda/common/cluster.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace jax_dsa {

inline int cluster_rank() { return emulator::self().block->index % emulator::machine.ranks; }
inline int cluster_size() { return emulator::machine.ranks; }

inline void cluster_sync(const std::source_location& place = std::source_location::current()) {
  emulator::sync_warps(emulator::machine.cluster,
                       emulator::machine.ranks * emulator::machine.threads, "cluster", 0, place);
}
inline void cluster_join(const std::source_location& place = std::source_location::current()) {
  cluster_sync(place);
}

template <typename T>
T* cluster_peer(T* p, int rank) {
  const uint32_t offset = emulator::shared_offset(p);
  return reinterpret_cast<T*>(emulator::machine.resident[rank]->shared + offset);
}

}  // namespace jax_dsa
