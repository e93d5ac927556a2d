// Runs the indexer's backward kernels on the emulator and compares them with float64 results.
#include "indexer/bwd.cu"
#include "indexer_bwd_checks.h"

int main(int argc, char** argv) {
  for (const Case& c : kCases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      check(c, options, c.channels == 128 ? launch_partitions<128> : launch_partitions<64>);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
