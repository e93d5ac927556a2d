// cuda/common/ptx.cuh for the emulator.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/types.h"
#include "emulator.h"

namespace jax_dsa {

inline uint32_t smem_address(const void* p) { return emulator::shared_offset(p); }
inline uint32_t whole_sum(uint32_t to, uint32_t offset) { return to + offset; }

template <typename T>
T uniform(T x) {
  const T first = __shfl_sync(~0u, x, 0);
  if (first != x) emulator::fail("a uniform value differs between lanes");
  return first;
}

inline uint32_t opaque(uint32_t x) { return x; }
inline uint32_t opaque_one() { return 1; }

template <typename Int>
Int inclusive_scan(Int x) {
  const uint64_t* all = emulator::exchange(static_cast<uint64_t>(x));
  Int sum = 0;
  for (unsigned i = 0; i <= emulator::self().thread % 32; ++i) sum += static_cast<Int>(all[i]);
  return sum;
}

template <typename T>
T& dynamic_shared() {
  static_assert(sizeof(T) <= emulator::kSharedBytes);
  return *reinterpret_cast<T*>(emulator::self().block->shared);
}

inline int thread_index() { return static_cast<int>(emulator::self().thread); }

// ---- mbarrier ----------------------------------------------------------------------------------

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
  to.settle();
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

// ---- copies ------------------------------------------------------------------------------------

namespace detail {
template <int kBytes>
void cp_async(uint32_t to, const void* from, bool valid) {
  uint8_t* target = emulator::shared_at(to);
  if (to % kBytes || reinterpret_cast<uintptr_t>(from) % kBytes) {
    emulator::fail("a misaligned cp.async");
  }
  const auto copy = [=] {
    emulator::races::writes(target, kBytes);
    if (valid) {
      memcpy(target, from, kBytes);
    } else {
      memset(target, 0, kBytes);
    }
  };
  if (emulator::machine.options.late_copies) {
    emulator::self().copies.push_back(copy);
  } else {
    copy();
  }
}
}  // namespace detail
inline void cp_async_16(uint32_t to, const void* from, bool valid, uint64_t) {
  detail::cp_async<16>(to, from, valid);
}
inline void cp_async_16_alone(uint32_t to, const void* from, bool valid, uint64_t) {
  detail::cp_async<16>(to, from, valid);
}
inline void cp_async_4(uint32_t to, const void* from, bool valid) {
  detail::cp_async<4>(to, from, valid);
}
inline void cp_async_arrive(uint64_t* barrier) {
  emulator::later([barrier, copies = std::move(emulator::self().copies)] {
    for (const auto& copy : copies) copy();
    mbarrier_arrive(barrier);
  });
  emulator::self().copies.clear();
}

// Those that have announced an arrival may still be on their way.
inline void cp_async_wait() {
  for (const auto& copy : emulator::self().copies) copy();
  emulator::self().copies.clear();
}

inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (emulator::shared_offset(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
    emulator::fail("a misaligned bulk copy");
  }
  emulator::later([=] {
    emulator::races::writes(to, bytes);
    memcpy(to, from, bytes);
    emulator::mbarrier(barrier).came(bytes);
  });
}

inline void bulk_store(void* to, const void* from, uint32_t bytes, uint64_t) {
  if (emulator::shared_offset(from) % 16 || reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) {
    emulator::fail("a misaligned bulk copy");
  }
  emulator::self().stores.open.push_back([=] {
    emulator::races::reads(from, bytes);
    memcpy(to, from, bytes);
  });
}
inline void bulk_commit() {
  auto* stores = &emulator::self().stores;
  const size_t group = stores->done.size();
  stores->done.push_back(false);
  stores->known.emplace_back();
  const auto work = [stores, group, open = std::move(stores->open)] {
    for (const auto& store : open) store();
    emulator::races::release(stores->known[group]);
    stores->done[group] = true;
  };
  emulator::later(work, true);
  stores->open.clear();
}
template <int kGroups = 0>
void bulk_wait_read() {
  auto* stores = &emulator::self().stores;
  emulator::wait_until("bulk stores", 0, [=] {
    for (size_t i = 0; i + kGroups < stores->done.size(); ++i) {
      if (!stores->done[i]) return false;
    }
    return true;
  });
  for (size_t i = 0; i + kGroups < stores->known.size(); ++i) {
    emulator::races::acquire(stores->known[i]);
  }
}
inline void bulk_wait() { bulk_wait_read(); }

// ---- between blocks ----------------------------------------------------------------------------

inline void counter_add(uint32_t* counter) {
  emulator::races::release(emulator::machine.counters[counter]);
  ++*counter;
  ++emulator::machine.progress;
}
inline void counter_wait(const uint32_t* counter, uint32_t count) {
  emulator::wait_until("counter", count, [=] { return *counter >= count; });
  emulator::races::acquire(emulator::machine.counters[counter]);
}

// A kernel begins when the one before has ended.
inline void launch_dependents() {}
inline void grid_dependency_wait() {}

inline void count_if(int* counter, bool is) {
  if (is) atomicAdd(counter, 1);
}

inline void prefetch_line_l2(const void*) {}
inline uint64_t l2_policy_evict_first() { return 0; }
inline uint64_t l2_policy_evict_last() { return 0; }
inline void prefetch_l2(const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("a misaligned prefetch");
}

template <typename T>
void store_any(T& to, T x) {
  const emulator::races::AnyOf several;
  to = x;
}

inline int load_now(const int* from, bool valid, int otherwise) {
  return valid ? *from : otherwise;
}
template <int kOffset>
void load_16_now(const void* from, bool valid, uint32_t (&x)[4]) {
  if (valid && (reinterpret_cast<uintptr_t>(from) + kOffset) % 16) {
    emulator::fail("a misaligned load");
  }
  memset(x, 0, 16);
  if (valid) memcpy(x, static_cast<const char*>(from) + kOffset, 16);
}
inline void load_8_now(const void* from, bool valid, uint32_t (&x)[2]) {
  if (valid && reinterpret_cast<uintptr_t>(from) % 8) emulator::fail("a misaligned load");
  memset(x, 0, 8);
  if (valid) memcpy(x, from, 8);
}
inline float load_now(const float* from, bool valid, float otherwise) {
  return valid ? *from : otherwise;
}
inline void store_16(void* to, const uint32_t (&x)[4], bool valid) {
  if (valid) memcpy(to, x, 16);
}
inline void store_pair(float* to, float a, float b, bool valid) {
  if (valid) to[0] = a, to[1] = b;
}
inline void store_pair(__nv_bfloat16* to, float a, float b, bool valid) {
  if (valid) to[0] = __float2bfloat16(a), to[1] = __float2bfloat16(b);
}

inline void store_4(float* to, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("a misaligned store");
  memcpy(to, x, 16);
}
template <typename T>
void load_shared_16(uint32_t from, T (&x)[4]) {
  memcpy(x, emulator::shared_at(from), 16);
}

inline void store_shared_16(uint32_t to, const uint32_t (&x)[4]) {
  if (to % 16) emulator::fail("a misaligned store");
  memcpy(emulator::shared_at(to), x, 16);
}

// ---- ordering ----------------------------------------------------------------------------------

inline void fence_async_proxy() {}

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

// ---- registers and arithmetic ------------------------------------------------------------------

template <int kRegisters>
void raise_registers() {}
template <int kRegisters>
void lower_registers() {}

inline float exp2_approx(float x) { return std::exp2(x); }

inline float log2_approx(float x) { return std::log2(x); }

inline float2 cosine_and_sine(float turn) {
  const float angle = turn * 6.2831853f;
  return {std::cos(angle), std::sin(angle)};
}

inline float reciprocal_approx(float x) { return 1.f / x; }

inline float max_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat16 x[2] = {__float2bfloat16(low), __float2bfloat16(high)};
  uint32_t packed;
  memcpy(&packed, x, 4);
  return packed;
}

inline uint32_t pack_f16(float low, float high) {
  const _Float16 x[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t packed;
  memcpy(&packed, x, 4);
  return packed;
}
template <DType kType>
uint32_t pack_16(float low, float high) {
  return kType == DType::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

inline float2 unpack_bf16(uint32_t packed) {
  return make_float2(emulator::bf16_of(packed, 0), emulator::bf16_of(packed, 1));
}

inline float2 unpack_f16(uint32_t packed) {
  return make_float2(emulator::f16_of(packed, 0), emulator::f16_of(packed, 1));
}
template <DType kType>
float2 unpack_16(uint32_t packed) {
  return kType == DType::kBF16 ? unpack_bf16(packed) : unpack_f16(packed);
}

inline void unpack_e4m3(uint32_t packed, float (&x)[4]) {
  for (int i = 0; i < 4; ++i) {
    const int bits = packed >> (8 * i) & 0xff, exponent = bits >> 3 & 15, mantissa = bits & 7;
    x[i] = (bits & 0x7f) == 0x7f ? NAN
           : exponent == 0       ? std::ldexp(float(mantissa), -9)
                                 : std::ldexp(float(8 + mantissa), exponent - 10);
    if (bits & 0x80) x[i] = -x[i];
  }
}

inline uint32_t positive_bf16(uint32_t packed) {
  const float2 x = unpack_bf16(packed);
  return (x.x > 0 ? 0xffffu : 0) | (x.y > 0 ? 0xffff0000u : 0);
}

template <int kHalf>
uint32_t sign_extended_bytes(uint32_t x) {
  const auto of = [&](int i) { return static_cast<uint16_t>(static_cast<int8_t>(x >> (8 * i))); };
  return of(2 * kHalf) | uint32_t{of(2 * kHalf + 1)} << 16;
}

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const float2 x = unpack_bf16(a), y = unpack_bf16(b);
  return pack_bf16(x.x * y.x, x.y * y.y);
}

template <int kHalf>
uint32_t spread_top_bits(uint32_t x) {
  const uint32_t low = x >> (16 * kHalf + 7) & 1, high = x >> (16 * kHalf + 15) & 1;
  return low * 0xffffu | high * 0xffff0000u;
}

inline void red_add(float* to, float x, float y, float z, float w, bool valid) {
  if (valid) to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}
inline void red_add(float* to, float x, float y, float z, float w) {
  red_add(to, x, y, z, w, true);
}

inline void store_matrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  const int lane = emulator::self().thread % 32;
  for (int i = 0; i < 4; ++i) {
    const uint64_t* rows = emulator::exchange(row);
    memcpy(emulator::shared_at(static_cast<uint32_t>(rows[i * 8 + lane / 4]) + lane % 4 * 4), &x[i],
           4);
  }
  emulator::exchange(0);
}
inline void store_matrix_x4_transposed(uint32_t column, uint32_t a, uint32_t b, uint32_t c,
                                       uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  const int lane = emulator::self().thread % 32;
  for (int i = 0; i < 4; ++i) {
    const uint64_t* columns = emulator::exchange(column);
    for (int j = 0; j < 2; ++j) {
      const auto to = static_cast<uint32_t>(columns[i * 8 + lane % 4 * 2 + j]) + lane / 4 * 2;
      memcpy(emulator::shared_at(to), reinterpret_cast<const char*>(&x[i]) + j * 2, 2);
    }
  }
  emulator::exchange(0);
}
inline void load_matrix_x4(uint32_t row, uint32_t (&x)[4]) {
  const int lane = emulator::self().thread % 32;
  for (int i = 0; i < 4; ++i) {
    const uint64_t* rows = emulator::exchange(row);
    memcpy(&x[i], emulator::shared_at(static_cast<uint32_t>(rows[i * 8 + lane / 4]) + lane % 4 * 4),
           4);
  }
}
inline void load_matrix_x4_transposed(uint32_t row, uint32_t (&r)[4]) {
  const int lane = emulator::self().thread % 32;
  for (int i = 0; i < 4; ++i) {
    const uint64_t* rows = emulator::exchange(row);
    for (int j = 0; j < 2; ++j) {
      const auto from = static_cast<uint32_t>(rows[i * 8 + lane % 4 * 2 + j]) + lane / 4 * 2;
      memcpy(reinterpret_cast<char*>(&r[i]) + j * 2, emulator::shared_at(from), 2);
    }
  }
}

}  // namespace jax_dsa
