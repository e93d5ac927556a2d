// Gated pooling on the emulator, against float64, and mean pooling, bit for bit.
#include "gated_pool/dispatch.cu"
#include "gated_pool/mean.cu"
#include "memory.h"
#include "problems/gated_pool_problem.h"

int main(int argc, char** argv) {
  emulator::machine.gpu = emulator::kPortableGpus[0];  // has the least shared memory
  int failures = 0;
  for (const gated_pool_problem::Case& c : gated_pool_problem::kCases) {
    for (const bool scaled : {false, true}) {
      emulator::machine.options = emulator::schedules(argc, argv, 0)[0];
      Memory memory;
      failures += !gated_pool_problem::run(c, scaled, 1, memory);
    }
    if (c.halves == 1) {
      Memory memory;
      failures += !gated_pool_problem::run_mean(c, 1, memory);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
