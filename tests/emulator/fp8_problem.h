// Problems of the FP8 quantiser, and what must come of them bit for bit; also used by
// benchmarks/micro.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "fp8/quantize.h"

namespace fp8_problem {

using jax_dsa::DType;

struct Case {
  const char* name;
  int64_t rows, cols;
  DType dtype;
  bool power_of_two;
  int offset = 0;  // of the first element, from an aligned address
};

inline const Case kCases[] = {
    {"bf16", 9, 640, DType::kBF16, false},
    {"bf16, powers of two", 37, 384, DType::kBF16, true},
    {"bf16, misaligned", 5, 256, DType::kBF16, false, 3},
    {"f16, short blocks", 21, 200, DType::kF16, false},
    {"f16, odd columns", 13, 333, DType::kF16, true},
    {"f32", 7, 1024, DType::kF32, false},
    {"f32, one column", 300, 1, DType::kF32, true},
    {"f32, many rows", 513, 136, DType::kF32, false},
    {"no rows", 0, 128, DType::kF32, false},
};

struct Problem {
  std::vector<float> x;  // exactly as `bytes`
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// The code nearest to x, of two the even one; those beyond 448 become 448.
inline uint8_t e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  int best = 0;
  double least = INFINITY;
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const double value =
        exponent ? std::ldexp(8. + mantissa, exponent - 10) : std::ldexp(double(mantissa), -9);
    const double distance = std::fabs(std::fabs(double(x)) - value);
    if (distance < least || (distance == least && code % 2 == 0)) best = code, least = distance;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// Rows of very different sizes, with zeros, denormals and NaN.
inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p;
  const int64_t blocks = (c.cols + 127) / 128;
  for (int64_t row = 0; row < c.rows; ++row) {
    const float size = row % 7 == 3 ? 1e-6f : row % 7 == 5 ? 0.f : std::exp(2 * normal(random));
    for (int64_t col = 0; col < c.cols; ++col) {
      const bool nan = row % 11 == 6 && random() % 200 == 0;
      const bool power = row % 7 == 1 && col % 128 == 0;  // so that the scale is a power of two
      const float small = row % 7 == 1 ? 1.f : size;
      const float x = nan ? NAN : power ? 448.f : std::fmin(normal(random) * small, 6e4f);
      const __half half = __float2half(x);
      const __nv_bfloat16 bf16 = __float2bfloat16(x);
      p.x.push_back(c.dtype == DType::kF32   ? x
                    : c.dtype == DType::kF16 ? __half2float(half)
                                             : __bfloat162float(bf16));
      const void* from = c.dtype == DType::kF32   ? static_cast<const void*>(&x)
                         : c.dtype == DType::kF16 ? static_cast<const void*>(&half)
                                                  : &bf16;
      const auto* first = static_cast<const uint8_t*>(from);
      p.bytes.insert(p.bytes.end(), first, first + (c.dtype == DType::kF32 ? 4 : 2));
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = row * c.cols + block * 128;
      const int64_t last = row * c.cols + std::min(block * 128 + 128, c.cols);
      float amax = 1e-4f;
      for (int64_t i = first; i < last; ++i) {
        if (std::isnan(p.x[i]) || std::fabs(p.x[i]) > amax) amax = std::fabs(p.x[i]);
        if (std::isnan(amax)) break;
      }
      float scale = amax / 448.f;
      if (c.power_of_two && !std::isnan(scale)) {
        int exponent;
        const float fraction = std::frexp(scale, &exponent);
        scale = std::ldexp(1.f, fraction == 0.5f ? exponent - 1 : exponent);
      }
      p.scales.push_back(scale);
      for (int64_t i = first; i < last; ++i) p.codes.push_back(e4m3(p.x[i] / scale));
    }
  }
  return p;
}

// Whether codes and scales are right; a NaN's sign does not matter.
inline bool good(const Problem& p, const std::vector<uint8_t>& codes,
                 const std::vector<float>& scales) {
  for (size_t i = 0; i < p.codes.size(); ++i) {
    const bool nan = (p.codes[i] & 0x7f) == 0x7f && (codes[i] & 0x7f) == 0x7f;
    if (!nan && codes[i] != p.codes[i]) return false;
  }
  for (size_t i = 0; i < p.scales.size(); ++i) {
    const bool nan = std::isnan(p.scales[i]) && std::isnan(scales[i]);
    if (!nan && scales[i] != p.scales[i]) return false;
  }
  return true;
}

}  // namespace fp8_problem
