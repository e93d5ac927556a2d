// Test problems for FP8 quantisation and dequantisation, with the exact results. The emulator's and
// the GPU's tests use them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "fp8/dequantize.h"
#include "fp8/quantize.h"
#include "fp8/quantize_tiles.h"
#include "problems/elements.h"

namespace fp8_problem {

using jax_dsa::DType;

enum Kind { kRows, kTiles, kTilesTranspose, kTranspose, kColumns, kDequantize, kDequantizeTiles };

struct Case {
  const char* name;
  int64_t rows, cols;
  DType dtype;
  bool power_of_two;
  int offset = 0;  // of the first element from an aligned address, in elements
  Kind kind = kRows;
  int64_t batch = 1;
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
    {"tiles, bf16", 256, 256, DType::kBF16, false, 0, kTiles},
    {"tiles, bf16, many", 300, 904, DType::kBF16, true, 0, kTiles, 2},
    {"tiles, f16, short", 130, 200, DType::kF16, true, 0, kTiles, 2},
    {"tiles, f32, short", 300, 136, DType::kF32, false, 0, kTiles},
    {"tiles, bf16, odd columns", 77, 131, DType::kBF16, true, 0, kTiles, 3},
    {"tiles, f32, misaligned", 5, 128, DType::kF32, false, 1, kTiles},
    {"tiles, no columns", 5, 0, DType::kF32, false, 0, kTiles},
    {"tiles and transpose, bf16, many", 264, 904, DType::kBF16, false, 0, kTilesTranspose},
    {"tiles and transpose, bf16", 256, 384, DType::kBF16, false, 0, kTilesTranspose},
    {"tiles and transpose, f32, short", 136, 200, DType::kF32, true, 0, kTilesTranspose, 2},
    {"tiles and transpose, bf16, odd rows", 77, 136, DType::kBF16, false, 0, kTilesTranspose, 2},
    {"tiles and transpose, f16, odd columns", 136, 131, DType::kF16, false, 0, kTilesTranspose},
    {"transpose, bf16", 256, 256, DType::kBF16, false, 0, kTranspose},
    {"transpose, bf16, many tiles", 264, 904, DType::kBF16, false, 0, kTranspose, 2},
    {"transpose, f32, many tiles", 136, 1160, DType::kF32, true, 0, kTranspose},
    {"transpose, f16, short", 136, 200, DType::kF16, true, 0, kTranspose, 2},
    {"transpose, f32, short", 296, 136, DType::kF32, false, 0, kTranspose},
    {"transpose, bf16, odd rows", 77, 136, DType::kBF16, true, 0, kTranspose, 2},
    {"transpose, f16, odd columns", 136, 131, DType::kF16, false, 0, kTranspose},
    {"transpose, bf16, misaligned", 128, 128, DType::kBF16, false, 5, kTranspose},
    {"transpose, one element", 1, 1, DType::kF32, false, 0, kTranspose},
    {"transpose, no rows", 0, 5, DType::kF32, false, 0, kTranspose},
    {"columns, bf16", 400, 520, DType::kBF16, false, 0, kColumns},
    {"columns, f16, odd columns", 136, 131, DType::kF16, true, 0, kColumns, 2},
    {"dequantise, bf16", 9, 640, DType::kBF16, false, 0, kDequantize},
    {"dequantise, f16, short", 21, 200, DType::kF16, true, 0, kDequantize},
    {"dequantise, f32, odd columns", 13, 333, DType::kF32, false, 0, kDequantize},
    {"dequantise, f32, misaligned", 5, 256, DType::kF32, false, 3, kDequantize},
    {"dequantise tiles, bf16", 300, 264, DType::kBF16, false, 0, kDequantizeTiles, 2},
    {"dequantise tiles, f32, odd", 131, 77, DType::kF32, false, 0, kDequantizeTiles, 3},
    {"dequantise tiles, no rows", 0, 77, DType::kF32, false, 0, kDequantizeTiles},
};

struct Problem {
  // The values of x: the input of quantisation, or the result of dequantisation.
  std::vector<float> x;
  std::vector<uint8_t> bytes;  // of x, in its dtype
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  // Codes and scales of the transpose.
  std::vector<uint8_t> codes_transposed;
  std::vector<float> scales_transposed;
};

// Returns the code nearest to x, with ties to even. Magnitudes above 448 become 448.
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

inline float block_scale(float amax, bool power_of_two) {
  float scale = amax / 448.f;
  if (power_of_two && !std::isnan(scale)) {
    int exponent;
    const float fraction = std::frexp(scale, &exponent);
    scale = std::ldexp(1.f, fraction == 0.5f ? exponent - 1 : exponent);
  }
  return scale;
}

// Quantises x [batch, rows, cols] in blocks of `height` rows and 128 columns.
inline void quantize(const std::vector<float>& x, int64_t batch, int64_t rows, int64_t cols,
                     int64_t height, bool power_of_two, float min_amax, std::vector<uint8_t>& codes,
                     std::vector<float>& scales) {
  codes.resize(x.size());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < rows; row += height) {
      for (int64_t col = 0; col < cols; col += 128) {
        const auto for_each = [&](auto visit) {
          for (int64_t r = row; r < std::min(row + height, rows); ++r) {
            for (int64_t c = col; c < std::min(col + 128, cols); ++c) {
              visit((b * rows + r) * cols + c);
            }
          }
        };
        float amax = min_amax;
        for_each([&](int64_t i) {
          if (std::isnan(x[i]) || std::fabs(x[i]) > amax) amax = std::fabs(x[i]);
        });
        for_each([&](int64_t i) {
          if (std::isnan(x[i])) amax = NAN;
        });
        const float scale = block_scale(amax, power_of_two);
        scales.push_back(scale);
        for_each([&](int64_t i) { codes[i] = e4m3(x[i] / scale); });
      }
    }
  }
}

inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = (code & 127) == 127 ? NAN
                     : exponent          ? std::ldexp(8.f + mantissa, exponent - 10)
                                         : std::ldexp(float(mantissa), -9);
  return code & 128 ? -size : size;
}

// Makes a problem whose rows have very different magnitudes, with zeros, denormals and NaN.
inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p;
  for (int64_t row = 0; row < c.batch * c.rows; ++row) {
    const float size = row % 7 == 3 ? 1e-6f : row % 7 == 5 ? 0.f : std::exp(2 * normal(random));
    for (int64_t col = 0; col < c.cols; ++col) {
      const bool nan = row % 11 == 6 && random() % 200 == 0;
      const bool power = row % 7 == 1 && col % 128 == 0;  // so that the scale is a power of two
      const float small = row % 7 == 1 ? 1.f : size;
      const float x = nan ? NAN : power ? 448.f : std::fmin(normal(random) * small, 6e4f);
      p.x.push_back(append(p.bytes, c.dtype, x));
    }
  }
  const bool tiles = c.kind == kTiles || c.kind == kTilesTranspose || c.kind == kDequantizeTiles;
  const int64_t height = tiles ? 128 : 1;
  const bool backward = c.kind == kTranspose || c.kind == kColumns;
  const float min_amax = backward ? 1e-20f : 1e-4f;
  quantize(p.x, c.batch, c.rows, c.cols, height, c.power_of_two, min_amax, p.codes, p.scales);
  std::vector<float> transposed;
  for (int64_t i = 0; i < static_cast<int64_t>(p.x.size()); ++i) {
    const int64_t column_index = i / c.rows, b = column_index / c.cols;
    const int64_t from = (b * c.rows + i % c.rows) * c.cols + column_index % c.cols;
    transposed.push_back(p.x[from]);
    if (c.kind == kTilesTranspose) p.codes_transposed.push_back(p.codes[from]);
  }
  if (backward) {
    const int64_t columns = c.kind == kTranspose ? 128 : 1;
    quantize(transposed, c.batch, c.cols, c.rows, columns, c.power_of_two, min_amax,
             p.codes_transposed, p.scales_transposed);
  }
  if (c.kind == kDequantize || c.kind == kDequantizeTiles) {
    p.bytes.clear();
    const int64_t blocks_across = (c.cols + 127) / 128,
                  blocks_down = (c.rows + height - 1) / height;
    for (int64_t i = 0; i < static_cast<int64_t>(p.x.size()); ++i) {
      const int64_t row = i / c.cols, b = row / c.rows;
      const int64_t block =
          (b * blocks_down + row % c.rows / height) * blocks_across + i % c.cols / 128;
      p.x[i] = append(p.bytes, c.dtype, e4m3_value(p.codes[i]) * p.scales[block]);
    }
  }
  return p;
}

inline bool same(const std::vector<float>& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] != expected[i] && !(std::isnan(got[i]) && std::isnan(expected[i]))) return false;
  }
  return true;
}
// The sign of a NaN does not matter.
inline bool same(const std::vector<uint8_t>& got, const std::vector<uint8_t>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] != expected[i] && ((got[i] & 0x7f) != 0x7f || (expected[i] & 0x7f) != 0x7f))
      return false;
  }
  return true;
}
inline bool same_values(const std::vector<uint8_t>& got, const Problem& p, DType dtype) {
  const size_t size = bytes_of(dtype);
  for (size_t i = 0; i < p.x.size(); ++i) {
    if (std::isnan(p.x[i])) {
      uint32_t bits = 0;
      std::memcpy(&bits, got.data() + i * size, size);
      const uint32_t infinity = dtype == DType::kF32   ? 0x7f800000u
                                : dtype == DType::kF16 ? 0x7c00u
                                                       : 0x7f80u;
      if ((bits & (size == 4 ? 0x7fffffffu : 0x7fffu)) <= infinity) return false;
    } else if (std::memcmp(got.data() + i * size, p.bytes.data() + i * size, size) != 0) {
      return false;
    }
  }
  return true;
}

// Runs a case and returns whether the results are right. `Memory` has three methods. put(bytes,
// offset) makes an array with these contents that starts `offset` past an aligned address.
// room(bytes, offset) makes a poisoned array for results. get<T>(address, n) reads n elements.
template <typename Memory>
bool run(const Case& c, uint64_t seed, Memory& memory) {
  const Problem p = make(c, seed);
  const int element = bytes_of(c.dtype), offset = c.offset;
  const size_t n = p.codes.size();
  const auto scales_as_bytes = [](const std::vector<float>& x) {
    std::vector<uint8_t> bytes(x.size() * 4);
    std::memcpy(bytes.data(), x.data(), bytes.size());
    return bytes;
  };
  constexpr size_t kGuard = 16;
  bool good = true;
  const auto check_guard = [&](const uint8_t* end) {
    for (const uint8_t x : memory.template get<uint8_t>(end, kGuard)) good &= x == Memory::kPoison;
  };
  if (c.kind == kDequantize || c.kind == kDequantizeTiles) {
    const auto* codes = memory.put(p.codes, offset);
    const auto* scales = memory.put(scales_as_bytes(p.scales), 0);
    auto* x = memory.room(n * element + kGuard, offset * element);
    memory.require(
        jax_dsa::launch_dequantize({codes, reinterpret_cast<const float*>(scales), x, c.batch,
                                    c.rows, c.cols, c.kind == kDequantize ? 1 : 128, c.dtype},
                                   nullptr));
    good &= same_values(memory.template get<uint8_t>(x, n * element), p, c.dtype);
    check_guard(x + n * element);
    return good;
  }
  const auto* x = memory.put(p.bytes, offset * element);
  auto* codes = memory.room(n + kGuard, offset);
  auto* scales = memory.room(p.scales.size() * 4 + kGuard, 0);
  auto* to = reinterpret_cast<float*>(scales);
  if (c.kind == kRows) {
    memory.require(jax_dsa::launch_quantize(
        {x, codes, to, c.batch * c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
  } else if (c.kind == kTiles) {
    memory.require(jax_dsa::launch_quantize_tiles(
        {x, codes, nullptr, to, c.batch, c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
  } else if (c.kind == kTilesTranspose) {
    auto* codes_t = memory.room(n + kGuard, offset);
    memory.require(jax_dsa::launch_quantize_tiles(
        {x, codes, codes_t, to, c.batch, c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
    good &= same(memory.template get<uint8_t>(codes_t, n), p.codes_transposed);
    check_guard(codes_t + n);
  } else {
    auto* codes_t = memory.room(n + kGuard, offset);
    auto* scales_t = memory.room(p.scales_transposed.size() * 4 + kGuard, 0);
    auto* to_t = reinterpret_cast<float*>(scales_t);
    const bool both = c.kind == kTranspose;
    memory.require(
        both ? jax_dsa::launch_quantize_transpose(
                   {x, codes, to, codes_t, to_t, c.batch, c.rows, c.cols, c.dtype, c.power_of_two},
                   nullptr)
             : jax_dsa::launch_quantize_columns(
                   {x, codes_t, to_t, c.batch, c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
    good &= same(memory.template get<uint8_t>(codes_t, n), p.codes_transposed);
    good &= same(memory.template get<float>(to_t, p.scales_transposed.size()), p.scales_transposed);
    check_guard(codes_t + n);
    check_guard(scales_t + p.scales_transposed.size() * 4);
    if (!both) return good;
  }
  good &= same(memory.template get<uint8_t>(codes, n), p.codes);
  good &= same(memory.template get<float>(to, p.scales.size()), p.scales);
  check_guard(codes + n);
  check_guard(scales + p.scales.size() * 4);
  return good;
}

}  // namespace fp8_problem
