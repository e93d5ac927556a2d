// Values of 16 bits on the host, and the errors of results of attention.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/types.h"

namespace jax_dsa {

inline uint16_t to_16(DType dtype, float x) {
  uint16_t bits;
  if (dtype == DType::kF16) {
    const _Float16 y = static_cast<_Float16>(x);
    memcpy(&bits, &y, 2);
  } else {
    const __nv_bfloat16 y = __float2bfloat16(x);
    memcpy(&bits, &y, 2);
  }
  return bits;
}
inline float from_16(DType dtype, uint16_t bits) {
  if (dtype == DType::kF16) {
    _Float16 y;
    memcpy(&y, &bits, 2);
    return static_cast<float>(y);
  }
  __nv_bfloat16 y;
  memcpy(&y, &bits, 2);
  return __bfloat162float(y);
}

// Returns the largest error, relative to 1 + |expected|.
inline double difference(DType dtype, const std::vector<uint16_t>& got,
                         const std::vector<double>& expected) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = from_16(dtype, got[i]);
    if (std::isnan(value) && std::isnan(expected[i])) continue;
    const double error = std::fabs(value - expected[i]) / (1 + std::fabs(expected[i]));
    worst = std::max(worst, std::isnan(error) ? INFINITY : error);
  }
  return worst;
}

// Returns the largest error of max_logit or log_sum, relative for values above 1000.
inline double row_difference(const std::vector<float>& got, const std::vector<double>& expected) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    const double error =
        std::fabs(got[i] - expected[i]) / std::max(1., 1e-3 * std::fabs(expected[i]));
    worst = std::max(worst, std::isnan(error) ? INFINITY : error);
  }
  return worst;
}

}  // namespace jax_dsa
