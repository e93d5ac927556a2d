// cuda/common/copy.cuh for the emulator.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/address.cuh"
#include "common/barrier.cuh"
#include "emulator.h"

namespace jax_dsa {

inline uint64_t l2_policy_evict_first() { return 0; }

inline uint64_t l2_policy_evict_last() { return 0; }

// ---- cp.async -----------------------------------------------------------------------------------

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

inline void cp_async_16(uint32_t to, const void* from, bool valid) {
  detail::cp_async<16>(to, from, valid);
}

inline void cp_async_8(uint32_t to, const void* from, bool valid) {
  detail::cp_async<8>(to, from, valid);
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

inline void cp_async_commit() {
  emulator::self().copy_groups.push_back(std::move(emulator::self().copies));
  emulator::self().copies.clear();
}

template <int kGroups>
void cp_async_wait_group() {
  auto& groups = emulator::self().copy_groups;
  for (; groups.size() > kGroups; groups.pop_front()) {
    for (const auto& copy : groups.front()) copy();
  }
}

// Copies whose arrival has been announced may still be on their way.
inline void cp_async_wait() {
  cp_async_commit();
  cp_async_wait_group<0>();
}

// ---- bulk copies --------------------------------------------------------------------------------

inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (emulator::shared_offset(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
    emulator::fail("a misaligned bulk copy");
  }
  emulator::later([=] {
    emulator::races::writes(to, bytes);
    memcpy(to, from, bytes);
    emulator::mbarrier(barrier).arrive(bytes);
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

inline void bulk_add(float* to, const void* from, uint32_t bytes) {
  if (emulator::shared_offset(from) % 16 || reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) {
    emulator::fail("a misaligned bulk addition");
  }
  emulator::self().stores.open.push_back([=] {
    emulator::races::reads(from, bytes);
    const auto* const x = static_cast<const float*>(from);
    for (uint32_t i = 0; i < bytes / 4; ++i) to[i] += x[i];
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

inline void prefetch_l2(const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("a misaligned prefetch");
}

inline void prefetch_line_l2(const void*) {}
inline bool prefetches_block_l2() { return true; }
inline void prefetch_block_l2(const void* from, uint32_t bytes) { prefetch_l2(from, bytes); }

// ---- predicated loads and stores ----------------------------------------------------------------

inline int load_now(const int* from, bool valid, int otherwise) {
  return valid ? *from : otherwise;
}

inline float load_now(const float* from, bool valid, float otherwise) {
  return valid ? *from : otherwise;
}

inline void load_8_now(const void* from, bool valid, uint32_t (&x)[2]) {
  if (valid && reinterpret_cast<uintptr_t>(from) % 8) emulator::fail("a misaligned load");
  memset(x, 0, 8);
  if (valid) memcpy(x, from, 8);
}

template <int kOffset>
void load_16_now(const void* from, bool valid, uint32_t (&x)[4]) {
  if (valid && (reinterpret_cast<uintptr_t>(from) + kOffset) % 16) {
    emulator::fail("a misaligned load");
  }
  memset(x, 0, 16);
  if (valid) memcpy(x, static_cast<const char*>(from) + kOffset, 16);
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

inline uint32_t load_shared_byte(uint32_t from) { return *emulator::shared_at(from); }

template <typename T>
void load_shared_16(uint32_t from, T (&x)[4]) {
  memcpy(x, emulator::shared_at(from), 16);
}

inline void store_shared_16(uint32_t to, const uint32_t (&x)[4]) {
  if (to % 16) emulator::fail("a misaligned store");
  memcpy(emulator::shared_at(to), x, 16);
}

inline void store_shared_4(uint32_t to, uint32_t x) {
  if (to % 4) emulator::fail("a misaligned store");
  memcpy(emulator::shared_at(to), &x, 4);
}

inline void store_shared_8(uint32_t to, uint32_t x, uint32_t y) {
  if (to % 8) emulator::fail("a misaligned store");
  store_shared_4(to, x);
  store_shared_4(to + 4, y);
}

template <typename T>
void store_any(T& to, T x) {
  const emulator::races::AnyOf several;
  to = x;
}

// ---- reductions ---------------------------------------------------------------------------------

inline void count_if(int* counter, bool is) {
  if (is) atomicAdd(counter, 1);
}

inline void red_add(float* to, float x, float y, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(to) % 8) emulator::fail("a misaligned reduction");
  if (valid) to[0] += x, to[1] += y;
}

inline void red_add(float* to, float x, float y, float z, float w, bool valid) {
  if (valid) to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}

inline void red_add(float* to, float x, float y, float z, float w) {
  red_add(to, x, y, z, w, true);
}

// ---- 8x8 matrices of 16-bit elements ------------------------------------------------------------

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
