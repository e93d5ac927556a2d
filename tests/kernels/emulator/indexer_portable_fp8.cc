// Runs the indexer's portable forward kernel on the emulator as it is on GPUs that multiply e4m3.
#define EMULATOR_E4M3_MMA
#include "indexer/portable_fwd.cu"
//
#include "indexer/portable_fp8.cu"
#include "indexer_portable_checks.h"

int main(int argc, char** argv) {
  run_on_gpus(argc, argv, [&](const emulator::Options& options) {
    run_fp8(!emulator::small(argc, argv), options);
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
