// Replaces cuda/topk/instructions.cuh on the emulator.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace jax_dsa::topk {

template <typename T>
T& shared_word(uint32_t at) {
  if (at % sizeof(T)) emulator::fail("a misaligned access to shared memory");
  return *reinterpret_cast<T*>(emulator::shared_at(at));
}

inline float4 load_aligned(const float* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a misaligned load");
  float4 x;
  memcpy(&x, from, 16);
  return x;
}

inline int4 load_entries(uint32_t from) { return shared_word<int4>(from); }
inline float load_value(uint32_t from) { return shared_word<float>(from); }
inline void increment(uint32_t at) {
  const emulator::races::Pause pause;
  ++shared_word<uint32_t>(at);
}
inline void increment_within(uint32_t bins, unsigned distance, unsigned range, int shift) {
  if (distance <= range) increment(bins + 4 * (distance >> shift));
}
inline void append_if(bool keep, uint32_t& to, float value, int index) {
  if (!keep) return;
  shared_word<float2>(to) = {value, __int_as_float(index)};
  to += 8;
}
inline void append_above(float cut, uint32_t& to, float value, int index) {
  append_if(value > cut, to, value, index);
}
inline void count_above(float cut, unsigned& sum, float value, unsigned step) {
  if (value > cut) sum += step;
}
inline void append_index_above(float cut, uint32_t& to, float value, int index) {
  if (!(value > cut)) return;
  shared_word<int>(to) = index;
  to += 4;
}

inline void store_value(uint32_t to, float x) { shared_word<float>(to) = x; }
inline float reload_value(uint32_t from) { return shared_word<float>(from); }
inline int load_int(uint32_t from) { return shared_word<int>(from); }
inline void store_by_first(int lane, uint32_t to, int x) {
  if (lane == 0) shared_word<int>(to) = x;
}

}  // namespace jax_dsa::topk
