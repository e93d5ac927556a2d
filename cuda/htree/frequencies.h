// RoPE's frequencies, as kernels take them.
#pragma once

#include <cmath>
#include <cstdint>

namespace jax_dsa::htree {

inline constexpr int kMaxHalf = 64;  // of D

struct Frequencies {
  double revolutions[kMaxHalf];  // of a pair, a place
};
inline Frequencies make_frequencies(int64_t dim, double base) {
  Frequencies x = {};
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double power = -static_cast<double>(i) / static_cast<double>(half);
    x.revolutions[i] = std::pow(base, power) / (2 * M_PI);
  }
  return x;
}

}  // namespace jax_dsa::htree
