// Runs the indexer's portable backward kernel on the emulator and compares it with float64 results,
// with the shared memory of every GPU.
#include "indexer/portable_bwd.cu"
#include "indexer_bwd_checks.h"
#include "launch_on_device.h"

int main(int argc, char** argv) {
  const auto cases = emulator::cases(argc, argv, kCases,
                                     {"one tile", "query tiles", "arbitrary slots", "no relu"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      check(c, options, portable::launch_indexer_bwd);
    }
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
