// The teacher's kernels of the indexer's warm-up loss on the emulator, against float64.
#include "losses/teacher.cu"
#include "problems/dense_loss_problem.h"

using namespace dense_loss_problem;

int main(int argc, char** argv) {
  int failures = 0;
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"96 heads, ranges", "four queries per work tile", "two groups",
                       "multi-head, groups", "huge scores", "multi-head, huge scores"});
  for (const Case& c : cases) {
    const auto schedules = emulator::schedules(argc, argv, &c - kCases);
    const Problem x = make(c, schedules[0].seed);
    const std::vector<double> want = teacher(x);
    std::vector<float> first;
    for (size_t i = 0; i < schedules.size(); ++i) {
      emulator::machine.options = schedules[i], emulator::machine.num_sms = 2 + i % 2;
      std::vector<float> got(want.size(), NAN);
      std::vector<float2> pairs(x.tokens() * c.heads, make_float2(NAN, NAN));
      emulator::require(jax_dsa::launch_teacher(
          {x.q.data(), x.kv.data(), x.starts.data(), x.ends.data(), got.data(), pairs.data(),
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
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
