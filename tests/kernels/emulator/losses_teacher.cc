// The teacher's kernels of the indexer's warm-up loss on the emulator, against float64.
#include "losses/teacher.cu"
#include "losses_teacher_checks.h"

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"96 heads, ranges", "four queries per work tile", "two groups",
                       "multi-head, groups", "huge scores", "multi-head, huge scores"});
  for (const Case& c : cases) {
    check(c, emulator::schedules(argc, argv, &c - kCases), jax_dsa::hopper::launch_teacher);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
