// Tests the Hopper forward pass of hierarchical tree attention on the emulator.
#include "htree/fwd.cu"
#include "htree_checks.h"

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kSmallCases,
                      {"tokens alone", "two layers", "prefix of three layers", "five layers, K 1",
                       "blocks of 32", "192 heads", "ties, sharp"});
  for (const Case& c : cases) {
    check(c, emulator::schedules(argc, argv, &c - kSmallCases), hopper::launch_htree_fwd);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
