// Runs the attn_dist kernel on the emulator and compares it with float64 results.
#include "attn_dist/fwd.cu"
#include "attn_dist_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"one tile, one query", "adversarial, two sums", "96 heads joined",
                       "groups, small sums", "one head per sum", "huge scores"});
  for (const Case& c : cases)
    check(c, hopper::launch_attn_dist_fwd, emulator::schedules(argc, argv, &c - kCases));
  for (const char* name : {"adversarial, two sums", "groups, small sums"}) {
    check_far(emulator::named(kCases, name), hopper::launch_attn_dist_fwd);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
