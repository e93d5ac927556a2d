// cuda/common/barrier.cuh for the emulator.
#pragma once

#include <cstdint>

#include "common/address.cuh"
#include "emulator.h"

namespace jax_dsa {

// ---- mbarriers ----------------------------------------------------------------------------------

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  emulator::races::hide(barrier, 8);
  emulator::mbarrier(barrier) = {static_cast<uint16_t>(arrivals), static_cast<int16_t>(arrivals), 0,
                                 0};
}

inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  emulator::Mbarrier& to = emulator::mbarrier(barrier);
  emulator::races::release(to.known()[to.phase]);
  to.missing -= static_cast<int16_t>(arrivals);
  to.complete_phase();
}

inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive(barrier, 1); }

inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  emulator::mbarrier(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  mbarrier_arrive(reinterpret_cast<uint64_t*>(emulator::machine.resident[rank]->shared +
                                              emulator::shared_offset(barrier)));
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  emulator::wait_until("mbarrier at", emulator::shared_offset(barrier),
                       [=] { return emulator::mbarrier(barrier).phase != parity; });
  emulator::races::acquire(emulator::mbarrier(barrier).known()[parity]);
}

// ---- named barriers and fences ------------------------------------------------------------------

template <int kThreads>
void named_barrier_sync(int id,
                        const std::source_location& place = std::source_location::current()) {
  emulator::sync_warps(emulator::self().block->named[id], kThreads, "named barrier", id, place);
}

template <int kThreads>
bool named_barrier_any(int id, bool x,
                       const std::source_location& place = std::source_location::current()) {
  return emulator::any_of_warps(emulator::self().block->named[id], kThreads, x, id, place);
}

template <int kThreads>
void named_barrier_arrive(int id) {
  emulator::arrive(emulator::self().block->named[id], kThreads);
}

inline void fence_async_proxy() {}

// ---- counters in global memory ------------------------------------------------------------------

template <bool kBulk = true>
void counter_add(uint32_t* counter) {
  emulator::races::release(emulator::machine.counters[counter]);
  ++*counter;
  ++emulator::machine.progress;
}

template <bool kBulk = true>
void counter_wait(const uint32_t* counter, uint32_t count) {
  emulator::wait_until("counter", count, [=] { return *counter >= count; });
  emulator::races::acquire(emulator::machine.counters[counter]);
}

// ---- programmatic dependent launch; see launch_pdl in common/launch.cuh -------------------------

// On the emulator a kernel begins when its predecessor has ended.
inline void launch_dependents() {}

inline void grid_dependency_wait() {}

}  // namespace jax_dsa
