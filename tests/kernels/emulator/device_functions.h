// The variables and functions that CUDA declares in device code, for the emulator.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "emulator.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

namespace emulator {
struct ThreadIndex {
  struct X {
    operator unsigned() const { return self().thread; }
  } x;
};
struct BlockIndex {
  struct X {
    operator unsigned() const { return self().block->index; }
  } x;
};
struct GridSize {
  struct X {
    operator unsigned() const { return machine.blocks; }
  } x;
};
struct BlockSize {
  struct X {
    operator unsigned() const { return machine.threads; }
  } x;
};
}  // namespace emulator

inline const emulator::ThreadIndex threadIdx;
inline const emulator::BlockIndex blockIdx;
inline const emulator::GridSize gridDim;
inline const emulator::BlockSize blockDim;

inline void __syncthreads(const std::source_location& place = std::source_location::current()) {
  emulator::sync_warps(emulator::self().block->everyone, emulator::machine.threads, "__syncthreads",
                       0, place);
}
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0, true); }
inline void __threadfence() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulator::exchange(bits)[emulator::self().thread % 32 ^ mask];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const int first = emulator::self().thread % 32 / width * width;
  bits = emulator::exchange(bits)[first + lane % width];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const int lane = static_cast<int>(emulator::self().thread % 32);
  return __shfl_sync(~0u, value, lane < lanes ? lane : lane - lanes);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int lanes) {
  const int lane = static_cast<int>(emulator::self().thread % 32);
  return __shfl_sync(~0u, value, lane + lanes < 32 ? lane + lanes : lane);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* all = emulator::exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(static_cast<int>(all[i]) == value) << i;
  return bits;
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  static_assert(sizeof(T) == 4);
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  T least = value;
  for (int i = 0; i < 32; ++i) least = std::min(least, static_cast<T>(all[i]));
  return least;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  static_assert(sizeof(T) == 4);
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  T most = value;
  for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<T>(all[i]));
  return most;
}
inline int __reduce_add_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
  return static_cast<int>(sum);
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint64_t* all = emulator::exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]);
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
template <typename T>
void __stcs(T* p, T x) {
  *p = x;
}
using std::isnan;
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}
// Byte i of the result is the byte of {high, low} that digit i of `selector` selects.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned x = 0;
  for (int i = 0; i < 4; ++i) {
    if (selector >> (4 * i) & 8) emulator::fail("__byte_perm: sign replication is not emulated");
    x |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return x;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

template <typename T>
T atomicAdd(T* p, T x) {
  const emulator::races::Pause pause;
  const T old = *p;
  *p += x;
  ++emulator::machine.progress;
  return old;
}

template <typename T>
T atomicOr(T* p, T x) {
  const emulator::races::Pause pause;
  const T old = *p;
  *p |= x;
  return old;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T x) {
  *p = x;
}

template <typename A, typename B>
constexpr auto min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return a > b ? a : b;
}
