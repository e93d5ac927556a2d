// The arrays of a test problem, on the emulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "emulator.h"

struct Memory {
  static constexpr uint8_t kPoison = 0xff;  // bytes that are NaN in every float type
  std::deque<std::vector<uint4>> all;

  // Returns memory filled with kPoison, `offset` bytes after an aligned address.
  template <typename T = uint8_t>
  T* room(size_t n, int offset = 0) {
    all.emplace_back((n * sizeof(T) + offset) / 16 + 1);
    memset(all.back().data(), kPoison, all.back().size() * 16);
    return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(all.back().data()) + offset);
  }
  template <typename T>
  const T* put(const std::vector<T>& x, int offset = 0) {
    T* const to = room<T>(x.size(), offset);
    std::copy(x.begin(), x.end(), to);
    return to;
  }
  template <typename T>
  std::vector<T> get(const T* from, size_t n) {
    return {from, from + n};
  }
  void require(cudaError_t status) { emulator::require(status); }
};
