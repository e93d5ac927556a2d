// Test problems for the FP8 matmul, with results in float64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "fp8/matmul.h"

namespace fp8_matmul_problem {

using jax_dsa::DType;
using jax_dsa::Fp8MatmulParams;

struct Case {
  const char* name;
  int64_t batch, m, n, k;
  DType dtype = DType::kBF16;
};

inline double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = (code & 127) == 127 ? NAN
                      : exponent          ? std::ldexp(8. + mantissa, exponent - 10)
                                          : std::ldexp(double(mantissa), -9);
  return code & 128 ? -size : size;
}

// The dot product of one K block.
struct BlockProduct {
  double sum = 0;
  double size = 0;  // sum of the magnitudes of the terms
  double bit = 0;   // sum of the values of the last bit that the tensor core keeps in each step

  // A tensor core adds 32 products at a time to the accumulator. It aligns them to the largest
  // exponent (the exponent of a product is the sum of its factors' exponents) and truncates them
  // towards zero 13 bits below it. The results of an H200 agree exactly with this model.
  BlockProduct(const uint8_t* a, const uint8_t* b, int64_t count) {
    static const auto value = [] {
      std::array<double, 256> all;
      for (int i = 0; i < 256; ++i) all[i] = e4m3_value(static_cast<uint8_t>(i));
      return all;
    }();
    const auto exponent = [](uint8_t code) { return std::max(code >> 3 & 15, 1) - 7; };
    for (int64_t first = 0; first < count; first += 32) {
      int largest = sum == 0 ? -64 : std::ilogb(sum);
      for (int64_t k = first; k < std::min(first + 32, count); ++k) {
        const double term = value[a[k]] * value[b[k]];
        sum += term, size += std::fabs(term);
        if (term != 0) largest = std::max(largest, exponent(a[k]) + exponent(b[k]));
      }
      bit += std::ldexp(1., largest - 13);
    }
  }
};

// Guard bytes after the output, which a kernel must not overwrite.
inline constexpr int kGuard = 64;
inline constexpr uint8_t kPoison = 0xa5;

struct Problem {
  Case c;
  int64_t k_blocks;
  int64_t b_scale_rows;  // rows of b's scales per batch entry
  std::vector<uint8_t> a, b;
  std::vector<float> a_scale, b_scale;
  std::vector<double> expected, size, bit;  // scaled sums over all K blocks

  int64_t outputs() const { return c.batch * c.m * c.n; }
  int64_t out_bytes() const { return outputs() * (c.dtype == DType::kF32 ? 4 : 2); }

  // Codes have all magnitudes. Some rows and blocks contain NaN, which must only reach their own
  // results.
  // NaN also follows the end of each array.
  Problem(const Case& c, uint64_t seed) : c(c) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    k_blocks = (c.k + 127) / 128, b_scale_rows = (c.n + 127) / 128;
    const auto code = [&] {
      const auto x = static_cast<uint8_t>(random());
      return (x & 127) == 127 ? uint8_t{0} : x;
    };
    for (int64_t i = 0; i < c.batch * c.m * c.k; ++i) a.push_back(code());
    for (int64_t i = 0; i < c.batch * c.n * c.k; ++i) b.push_back(code());
    for (int64_t i = 0; i < c.batch * c.m * k_blocks; ++i) {
      a_scale.push_back(std::exp(normal(random)) * 1e-3f);
    }
    for (int64_t i = 0; i < c.batch * b_scale_rows * k_blocks; ++i) {
      b_scale.push_back(std::exp(normal(random)) * 1e-3f);
    }
    if (c.m > 4 && c.k > 0) {
      a[3 * c.k + c.k / 2] = 0x7f;
      a_scale[4 * k_blocks + k_blocks / 2] = NAN;
    }
    if (c.n > 4 && c.k > 0) b[2 * c.k + c.k - 1] = 0xff;
    if (b_scale_rows > 1 && c.k > 0) b_scale[b_scale_rows * k_blocks - 1] = NAN;
    compute_expected();
    a.resize(a.size() + kGuard, 0x7f), b.resize(b.size() + kGuard, 0x7f);
    a_scale.resize(a_scale.size() + kGuard, NAN), b_scale.resize(b_scale.size() + kGuard, NAN);
  }

  void compute_expected() {
    for (int64_t row = 0; row < c.batch * c.m; ++row) {
      for (int64_t n = 0; n < c.n; ++n) {
        const int64_t b_row = row / c.m * c.n + n;
        const int64_t scale_row = row / c.m * b_scale_rows + n / 128;
        double sum = 0, magnitude = 0, last = 0;
        for (int64_t j = 0; j < k_blocks; ++j) {
          const BlockProduct block(&a[row * c.k + 128 * j], &b[b_row * c.k + 128 * j],
                                   std::min(c.k - 128 * j, int64_t{128}));
          const double scale =
              double{a_scale[row * k_blocks + j]} * double{b_scale[scale_row * k_blocks + j]};
          sum += scale * block.sum, magnitude += scale * block.size, last += scale * block.bit;
        }
        expected.push_back(sum), size.push_back(magnitude), bit.push_back(last);
      }
    }
  }

  double value(const uint8_t* out, int64_t i) const {
    if (c.dtype == DType::kF32) {
      float x;
      std::memcpy(&x, out + 4 * i, 4);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, out + 2 * i, 2);
    if (c.dtype == DType::kBF16) {
      const uint32_t wide = uint32_t{bits} << 16;
      float x;
      std::memcpy(&x, &wide, 4);
      return x;
    }
    __half x;
    std::memcpy(&x, &bits, 2);
    return __half2float(x);
  }

  // Returns the largest error, relative to the allowed one: `bits` times the last bit of the tensor
  // core's sums, a float32 sum, and one rounding. `out` ends with kGuard bytes, which must still
  // hold kPoison.
  double error(const std::vector<uint8_t>& out, double bits) const {
    const double round = c.dtype == DType::kF32   ? 1e-7
                         : c.dtype == DType::kF16 ? std::ldexp(1., -11)
                                                  : std::ldexp(1., -8);
    double worst = 0;
    for (int64_t i = 0; i < outputs(); ++i) {
      const double got = value(out.data(), i);
      if (std::isnan(expected[i]) && std::isnan(got)) continue;
      const double allowed = bits * bit[i] + 1e-6 * size[i] + round * std::fabs(expected[i]) + 1e-7;
      const double e = std::fabs(got - expected[i]) / allowed;
      worst = std::fmax(worst, std::isnan(e) ? INFINITY : e);
    }
    for (int64_t i = out_bytes(); i < static_cast<int64_t>(out.size()); ++i) {
      if (out[i] != kPoison) worst = INFINITY;
    }
    return worst;
  }

  Fp8MatmulParams params(const uint8_t* a, const float* a_scale, const uint8_t* b,
                         const float* b_scale, void* out) const {
    return {a, a_scale, b, b_scale, out, c.batch, c.m, c.n, c.k, c.dtype};
  }
};

}  // namespace fp8_matmul_problem
