// Rows that are hard for top-k, and a CPU reference whose results must be matched bit for bit. The
// emulator program and the check program on the GPU use them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

namespace topk_problem {

enum class Kind {
  kNormal,
  kRelu,
  kPlateau,
  kEqual,
  kOneBin,
  kSpecial,
  kAscending,
  kDescending,
  kDigits,
  kOutlier,
  kComb,
  kEdge,
  kMixed,
  kMinusInf,
  kCount
};
inline const char* const kNames[] = {"normal",  "relu",      "plateau",    "equal",  "one bin",
                                     "special", "ascending", "descending", "digits", "outlier",
                                     "comb",    "edge",      "mixed",      "-inf"};

__host__ __device__ inline uint32_t hash(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

__host__ __device__ inline float sample(Kind kind, uint64_t seed, int64_t row, int64_t i,
                                        int64_t size, int64_t k) {
  const uint64_t id = seed * 0x9e3779b97f4a7c15ull + row * size + i;
  const float u = (hash(2 * id) + 1.f) / 4294967808.f, v = hash(2 * id + 1) / 4294967296.f;
  const float normal = std::sqrt(-2 * std::log(u)) * std::cos(6.2831853f * v);
  switch (kind) {
    case Kind::kNormal:
      return normal;
    case Kind::kRelu:
      return normal > 0.f ? normal : 0.f;
    case Kind::kPlateau:  // k / 2 values are positive, the rest is 0 or -0.
      return u < .5f * k / size ? 1 + v : (v < .5f ? 0.f : -0.f);
    case Kind::kEqual:
      return -3.25f;
    case Kind::kOneBin:
      return 1 + .25f * v;
    case Kind::kSpecial: {
      const int which = hash(3 * id) % 12;
      const float specials[] = {INFINITY, -INFINITY, NAN,   -NAN,   0.f,    -0.f,
                                1e-45f,   -1e-45f,   3e38f, -3e38f, 1e-39f, normal};
      return specials[which];
    }
    case Kind::kAscending:
      return -1e3f + .01f * i;
    case Kind::kDescending:
      return -.01f * i;
    case Kind::kDigits:
      return std::floor(5 * v) - 2;
    case Kind::kOutlier:
      return i == size / 2 ? 1e30f : 1 + .25f * v;
    case Kind::kComb:  // The values have a period that the sample of a row may have, too.
      return i / 4 % 16 == row % 16 ? normal + 4 : normal;
    case Kind::kEdge: {
      // The k-th largest value is just above the edge of a bin, and many values are just below it.
      // The sample of a short row has too many large values, so the estimated bracket begins at
      // this bin.
      const float more = (6 * std::sqrt(k / 8.f) + 8) / (size / 8.f), fraction = float(k) / size;
      const bool sampled = i % 4 == 0 && i / 128 % 2 == 0;
      const float large = sampled ? fraction + more : fraction - more / 7 - 14.f / size;
      if (u < large) return 1.1f + .3f * v;
      if (u < large + 20.f / size) return 1 + 1e-6f * v;
      return u < large + .1f ? 1 - 1e-5f * (v + .01f) : .5f * v;
    }
    case Kind::kMixed: {  // Each row has random tails, steps, trends and ties of its own.
      const uint64_t recipe = hash(seed * 0x51ed270b0a1f39c1ull + row);
      const auto pick = [&](int n, int which) {
        return static_cast<int>(hash(recipe * 7 + which) % n);
      };
      const int period = 1 << (1 + pick(12, 0)), phase = static_cast<int>(i % period);
      const float scales[] = {1e-30f, 1e-3f, .1f, 1.f, 3.f, 30.f};
      const float wide = scales[pick(6, 1)];
      float x = pick(3, 2) == 0 ? normal : pick(2, 3) ? std::exp(wide * normal) : wide * normal;
      if (pick(2, 4)) x += scales[1 + pick(4, 5)] * (2 * phase < period);
      if (pick(3, 6) == 0) x *= std::exp(-wide * phase / period);
      if (pick(3, 7) == 0) x = std::floor(x * 16) / 16;
      if (pick(4, 8) == 0) x = x > 0.f ? x : 0.f;
      if (pick(4, 9) == 0) x = -x;
      return x;
    }
    default:
      return -INFINITY;
  }
}

// Returns starts and ends of the candidates of each row. Some ranges are empty, and some bounds are
// far outside the row.
inline std::pair<std::vector<int>, std::vector<int>> random_ranges(int64_t rows, int64_t size,
                                                                   uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int> starts, ends;
  for (int64_t r = 0; r < rows; ++r) {
    const auto draw = [&] { return static_cast<int>(random() % (size + 1)); };
    const int a = draw(), b = draw();
    starts.push_back(r % 5 == 0 ? -7 : r % 7 == 0 ? INT_MIN : std::min(a, b));
    ends.push_back(r % 6 == 1 ? INT_MAX : r % 11 == 3 ? starts[r] - 1 : std::max(a, b));
  }
  return {starts, ends};
}

// Returns the indices of the k largest values of a row in ascending order, then -1. Ties go to the
// lower index.
inline std::vector<int> reference(const std::vector<float>& x, int64_t k, int start, int end) {
  std::vector<int> order;
  const int size = static_cast<int>(x.size());
  for (int i = std::clamp(start, 0, size); i < std::clamp(end, 0, size); ++i) {
    if (x[i] > -INFINITY) order.push_back(i);
  }
  const auto better = [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (static_cast<int64_t>(order.size()) > k) {
    std::nth_element(order.begin(), order.begin() + k, order.end(), better);
    order.resize(k);
  }
  std::sort(order.begin(), order.end());
  order.resize(k, -1);
  return order;
}

// Returns whether `indices` and `values` are the expected ones, bit for bit.
inline bool matches(const std::vector<float>& row, const std::vector<int>& expected,
                    const int* indices, const float* values) {
  for (size_t j = 0; j < expected.size(); ++j) {
    const float value = expected[j] < 0 ? -INFINITY : row[expected[j]];
    if (indices[j] != expected[j] || std::memcmp(&value, &values[j], 4) != 0) return false;
  }
  return true;
}

}  // namespace topk_problem
