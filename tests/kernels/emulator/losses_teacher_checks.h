// Checks of the teacher's kernels of the indexer's warm-up loss on the emulator, against float64.
#pragma once

#include <cstring>
#include <functional>

#include "emulator.h"
#include "problems/dense_loss_problem.h"

using namespace dense_loss_problem;

using TeacherLaunch = std::function<cudaError_t(const jax_dsa::TeacherParams&, cudaStream_t)>;

inline int failures = 0;

// Compares the results of all schedules with the expected ones and with each other.
inline void check(const Case& c, const std::vector<emulator::Options>& schedules,
                  const TeacherLaunch& launch) {
  const Problem x = make(c, schedules[0].seed);
  const std::vector<double> want = teacher(x);
  std::vector<float> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    emulator::machine.options = schedules[i], emulator::machine.num_sms = 2 + i % 2;
    std::vector<float> got(want.size(), NAN);
    std::vector<float2> pairs(x.tokens() * c.heads, make_float2(NAN, NAN));
    emulator::require(
        launch({x.q.data(), x.kv.data(), x.starts.data(), x.ends.data(), got.data(), pairs.data(),
                c.batch, c.queries, c.keys, c.heads, c.groups, c.dim, x.scale},
               nullptr));
    double worst = 0;
    for (size_t k = 0; k < want.size(); ++k) {
      const int64_t token = k / c.keys;
      const int key = k % c.keys;
      if (key < x.low(token) || key >= x.high(token)) {
        if (!std::isnan(got[k])) worst = INFINITY;  // must not be written
        got[k] = 0;
      }
      const double error = std::fabs(got[k] - want[k]) / (want[k] + 1e-3);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    if (i == 0) first = got;
    const bool same = memcmp(first.data(), got.data(), got.size() * sizeof(float)) == 0;
    const bool good = worst < 1e-4 && same;
    printf("%-4s %-24s relative %.1e%s\n", good ? "ok" : "BAD", c.name, worst,
           same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}
