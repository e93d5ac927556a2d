// Runs the indexer's portable forward kernel on the emulator and compares it with a float64
// reference, with the shared memory of every GPU.
#include "indexer/portable_fwd.cu"
//
#include "indexer/portable_fp8.cu"
#include "indexer_portable_checks.h"

int main(int argc, char** argv) {
  const bool all = !emulator::small(argc, argv);
  using enum IndexerDType;
  run_on_gpus(argc, argv, [&](const emulator::Options& options) {
    run_portable<kBF16, 128>({"bf16 J64 C128", 2, 11, 450, 64}, options);
    run_portable<kBF16, 32>({"bf16 J16 C32", 1, 40, 100, 16, false, false}, options);
    run_portable<kBF16, 64>({"bf16 J32 paged", 3, 5, 192, 32, false, true, 1}, options);
    run_portable<kBF16, 64>({"bf16 J48, ranges", 2, 9, 300, 48, true, true, 0, false, false},
                            options);
    if (all) {
      run_portable<kBF16, 32>({"bf16 one query", 7, 1, 129, 16}, options);
      run_portable<kBF16, 32>({"bf16 many queries", 1, 300, 290, 5, true}, options);
      run_portable<kBF16, 128>({"bf16 T4 paged", 3, 4, 384, 64, true, true, 1}, options);
    }
    run_fp8(all, options);
  });
  run_portable<kBF16, 64>({"bf16 far pages", 3, 5, 192, 32, true, true, 1, false, true, true}, {});
  run_portable<kE4M3, 64>({"e4m3 far pools", 2, 3, 384, 32, true, true, 2, true, true, true}, {});
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
