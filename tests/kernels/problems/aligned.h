// Memory for copies of 16 bytes, NaN at first.
#pragma once

#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

template <typename T>
struct Aligned {
  std::vector<float4> store;
  int64_t size;
  explicit Aligned(int64_t n) : store(n * sizeof(T) / 16 + 1, {NAN, NAN, NAN, NAN}), size(n) {}
  explicit Aligned(const std::vector<T>& x) : Aligned(x.size()) {
    std::copy(x.begin(), x.end(), get());
  }
  T* get() { return reinterpret_cast<T*>(store.data()); }
};
