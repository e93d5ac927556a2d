// Runs cases of the FP8 matmul's kernels and compares with float64.
#pragma once

#include "emulator.h"
#include "problems/fp8_matmul_problem.h"

using namespace fp8_matmul_problem;
using namespace jax_dsa::fp8;

inline int failures = 0;

template <typename Launch>
void run(const Case& c, const emulator::Options& options, Launch launch) {
  const Problem x(c, options.seed);
  std::vector<uint8_t> out(x.out_bytes() + kGuard, kPoison);
  emulator::machine.options = options;
  emulator::require(launch(
      x.params(x.a.data(), x.a_scale.data(), x.b.data(), x.b_scale.data(), out.data()), nullptr));
  const double error = x.error(out, 0);  // the emulator's products are exact
  printf("%-4s %-24s %s %s seed %llu  %.2f of the allowed error\n", error <= 1 ? "ok" : "BAD",
         c.name, options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
         error);
  fflush(stdout);
  failures += !(error <= 1);
}
