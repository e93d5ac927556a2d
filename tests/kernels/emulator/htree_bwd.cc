// Tests the Hopper backward pass of hierarchical tree attention on the emulator.
#include "htree/bwd.cu"
#include "htree/fwd.cu"
#include "htree_bwd_checks.h"

int main(int argc, char** argv) {
  const Launches launches = {hopper::launch_htree_fwd, hopper::launch_htree_bwd};
  for (const Case& c : emulator::cases(argc, argv, kBwdCases, {})) {
    check(c, emulator::schedules(argc, argv, &c - kBwdCases), launches);
  }
  const auto cases = emulator::cases(argc, argv, kSmallCases,
                                     {"tokens alone", "two layers", "prefix of three layers",
                                      "five layers, K 1", "blocks of 32", "huge scores"});
  for (const Case& c : cases) {
    if (!has_gradients(c)) continue;
    check(c, emulator::schedules(argc, argv, &c - kSmallCases), launches);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
