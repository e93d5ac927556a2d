// Test problems of the KL of rows with their expected results in float64, for the emulator and for
// tests/kernels/gpu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "losses/losses.h"

namespace kl_rows_problem {

enum Mask { kLogits, kValid, kRanges };

inline constexpr float kRowWeight = 1.f / 49;  // weight of a row in the loss

struct Case {
  const char* name;
  int64_t rows, slots;
  Mask mask = kLogits;
  bool in_place = false;
  bool nans = false;  // some rows have a NaN in the teacher, some in the logits
  float size = 2.f;   // standard deviation of the logits
  int offset = 0;     // elements between an aligned address and the first element
};

inline const Case kCases[] = {
    {"2048 slots", 5, 2048},
    {"2048 slots, valid", 4, 2048, kValid},
    {"large logits", 4, 500, kValid, false, false, 60.f},
    {"three slots", 9, 3},
    {"one slot", 9, 1, kValid},
    {"odd slots", 7, 1021, kValid},
    {"misaligned", 3, 256, kLogits, false, false, 2.f, 1},
    {"NaN", 12, 200, kValid, false, true},
    {"ranges", 12, 333, kRanges},
    {"ranges in place", 12, 2048, kRanges, true},
    {"ranges in place, NaN", 12, 1000, kRanges, true, true},
    {"wide rows", 3, 5000, kLogits},
    {"long rows", 4, 20000, kRanges, true},
    {"long odd rows", 3, 9001, kValid},
    {"no slots", 3, 0},
    {"no rows", 0, 64},
};

struct Problem {
  Case c;
  std::vector<float> logits, teacher;
  std::vector<uint8_t> valid;
  std::vector<int32_t> starts, ends;

  bool used(int64_t row, int64_t slot) const {
    if (c.mask == kRanges) return slot >= starts[row] && slot < ends[row];
    const int64_t at = row * c.slots + slot;
    return c.mask == kValid ? valid[at] != 0 : logits[at] > -INFINITY;
  }
};

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t n = c.rows * c.slots;
  for (int64_t row = 0; row < c.rows; ++row) {
    const int slots = static_cast<int>(c.slots);
    p.starts.push_back(row % 4 == 1 ? INT32_MIN : static_cast<int>(random() % (slots + 9)) - 4);
    p.ends.push_back(row % 4 == 1   ? INT32_MAX
                     : row % 4 == 2 ? p.starts.back() - 1
                                    : static_cast<int>(random() % (slots + 9)) - 2);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = i / c.slots;
    p.valid.push_back(row % 5 == 4 ? 0 : random() % 3 != 0);
    p.teacher.push_back(row % 6 == 5 || random() % 9 == 0 ? 0.f : std::exp(2 * normal(random)));
    // The logits of row 1 nearly equal the teacher's logarithms, so that its KL is a difference of
    // nearly equal numbers.
    p.logits.push_back(row == 1 && p.teacher[i] > 0 ? std::log(p.teacher[i])
                                                    : c.size * normal(random));
    if (c.mask == kLogits && random() % 7 == 0) p.logits[i] = -INFINITY;
    if (c.mask != kLogits && random() % 31 == 0) p.teacher[i] = 0.f, p.logits[i] = -INFINITY;
    if (c.mask != kLogits && row % 7 == 6 && random() % 31 == 0) p.logits[i] = -INFINITY;
    if (c.nans && row % 3 == 0 && i % c.slots == row) p.teacher[i] = NAN;
    if (c.nans && row % 3 == 2 && i % c.slots == row) p.logits[i] = NAN;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (!p.used(i / c.slots, i % c.slots)) {
      p.teacher[i] = NAN;
      if (c.mask != kLogits) p.logits[i] = NAN;
    }
  }
  return p;
}

struct Wanted {
  std::vector<double> kl, grad;
  std::vector<uint8_t> counts;
};

inline Wanted expected(const Problem& p) {
  const Case& c = p.c;
  Wanted w;
  w.grad.assign(c.rows * c.slots, 0.);
  for (int64_t row = 0; row < c.rows; ++row) {
    const float* x = p.logits.data() + row * c.slots;
    const float* t = p.teacher.data() + row * c.slots;
    double largest = -INFINITY, sum = 0, mass = 0, kl = 0;
    for (int64_t i = 0; i < c.slots; ++i) {
      if (p.used(row, i)) largest = std::fmax(largest, x[i]), mass += t[i];
    }
    const double base = largest == -INFINITY ? 0 : largest;
    for (int64_t i = 0; i < c.slots; ++i) {
      if (p.used(row, i)) sum += std::exp(x[i] - base);
    }
    const bool counts = !(mass <= 0);
    const double total = sum == 0 ? 1 : sum;
    for (int64_t i = 0; counts && i < c.slots; ++i) {
      if (!p.used(row, i)) continue;
      const double target = t[i] / mass, log_q = x[i] - base - std::log(total);
      if (!(target <= 0)) kl += target * (std::log(target) - log_q);
      w.grad[row * c.slots + i] = kRowWeight * (std::exp(log_q) - target);
    }
    w.kl.push_back(kl);
    w.counts.push_back(counts);
  }
  return w;
}

// Returns the largest error of the KL, relative to the size of its terms, and of the gradient,
// relative to the row weight. It is infinite if NaN, infinities or counts differ.
inline double worst_error(const Problem& p, const Wanted& w, const std::vector<float>& kl,
                          const std::vector<uint8_t>& counts, const std::vector<float>& grad) {
  double worst = 0;
  const auto compare = [&](double got, double want, double size) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    const double error = std::fabs(got - want) / size;
    worst = std::fmax(worst, std::isnan(error) ? INFINITY : error);
  };
  for (int64_t row = 0; row < p.c.rows; ++row) {
    if (counts[row] != w.counts[row]) worst = INFINITY;
    compare(kl[row], w.kl[row], 1 + p.c.size);
    for (int64_t i = row * p.c.slots; i < (row + 1) * p.c.slots; ++i) {
      const int64_t slot = i - row * p.c.slots;
      if (p.c.mask == kRanges && !p.used(row, slot)) {
        const bool beside = slot > p.starts[row] - 4 && slot < int64_t{p.ends[row]} + 3;
        if (!std::isnan(grad[i]) && !(beside && grad[i] == 0)) worst = INFINITY;
      } else {
        compare(grad[i], w.grad[i], kRowWeight);
      }
    }
  }
  return worst;
}

// Returns the gradients of the rows' KL. In every third row it is the row weight, so that the row's
// gradient is already right.
inline std::vector<float> factors(int64_t rows) {
  std::vector<float> all;
  for (int64_t row = 0; row < rows; ++row) all.push_back(row % 3 ? .25f * row : kRowWeight);
  return all;
}

// Returns whether `scaled` is the gradient times its row's factor, divided by the row weight.
inline bool good_scaled(const Case& c, const std::vector<float>& grad,
                        const std::vector<float>& factor, const std::vector<float>& scaled) {
  for (int64_t i = 0; i < c.rows * c.slots; ++i) {
    const float want = grad[i] * (factor[i / c.slots] / kRowWeight);
    if (scaled[i] != want && !(std::isnan(want) && std::isnan(scaled[i]))) return false;
  }
  return true;
}

}  // namespace kl_rows_problem
