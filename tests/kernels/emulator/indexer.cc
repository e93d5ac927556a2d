// Runs the indexer's forward kernels on the emulator and compares them with a float64 reference.
#include "indexer/launch.cuh"
#include "indexer_checks.h"

namespace {

template <IndexerDType kDType, int kChannels, int kHeads, bool kPaged = false>
void run_fwd(const Case& c, const emulator::Options& options) {
  using Tr = indexer::Traits<kDType, kChannels, kHeads, kPaged>;
  run<kDType, kChannels>(indexer::launch_fwd<Tr>, c, options);
}

template <IndexerDType kDType, int kChannels>
void run_decode(const Case& c, const emulator::Options& options) {
  run<kDType, kChannels>(indexer::launch_few_queries<kDType, kChannels>, c, options);
}

}  // namespace

int main(int argc, char** argv) {
  using enum IndexerDType;
  const bool all = !emulator::small(argc, argv);
  for (const auto& options : emulator::schedules(argc, argv, 0)) {
    run_fwd<kBF16, 128, 64>({"bf16 J64 C128", 2, 21, 450, 64}, options);
    if (all) run_fwd<kE4M3, 128, 64>({"e4m3 J40 C128", 1, 19, 700, 40, true}, options);
    run_fwd<kE4M3, 64, 32>({"e4m3 J32 C64", 1, 35, 150, 32, true, false}, options);
    run_fwd<kE4M3, 32, 16>({"e4m3 J9 C32", 1, 70, 130, 9}, options);
    run_fwd<kBF16, 32, 16>({"bf16 J16 C32", 1, 40, 100, 16, false, false}, options);
    run_fwd<kBF16, 32, 16>({"bf16 one query", 7, 1, 129, 16}, options);
    run_fwd<kE4M3, 128, 64, true>({"e4m3 J64 paged", 2, 3, 256, 64, true, true, 1}, options);
    run_fwd<kBF16, 64, 32, true>({"bf16 J32 paged", 3, 5, 192, 32, false, true, 1}, options);
    run_fwd<kE4M3, 64, 32, true>({"e4m3 J32 pools", 2, 3, 384, 32, true, true, 2, true}, options);
    run_fwd<kE4M3, 64, 32, true>({"ranges only", 2, 9, 384, 32, true, true, 2, false, false},
                                 options);
    run_decode<kE4M3, 64>({"decode, ranges", 4, 2, 768, 32, true, true, 1, false, false}, options);
    if (all) run_decode<kE4M3, 128>({"decode T1 J64", 5, 1, 1300, 64, true}, options);
    run_decode<kBF16, 128>({"decode bf16 J50", 3, 1, 700, 50, false, false}, options);
    run_decode<kE4M3, 128>({"decode T2 paged", 4, 2, 512, 64, true, true, 2}, options);
    if (all)
      run_decode<kE4M3, 128>({"decode T3 pools", 2, 3, 768, 40, true, false, 1, true}, options);
    run_decode<kBF16, 128>({"decode T4 paged", 3, 4, 384, 64, true, true, 1}, options);
    run_decode<kE4M3, 64>({"decode T4 J32", 3, 4, 450, 32, true}, options);
    run_decode<kBF16, 64>({"decode T1 J20", 9, 1, 129, 20}, options);
    run_decode<kE4M3, 32>({"decode T3 J9", 40, 3, 70, 9, true}, options);
    run_decode<kBF16, 32>({"decode T1 J16", 2, 1, 1001, 16, true, false}, options);
    run_decode<kE4M3, 32>({"decode one key", 3, 1, 1, 1}, options);
  }
  run_fwd<kBF16, 64, 32, true>({"bf16 far pages", 3, 5, 192, 32, true, true, 1, false, true, true},
                               {});
  run_fwd<kE4M3, 64, 32, true>({"e4m3 far pools", 2, 3, 384, 32, true, true, 2, true, true, true},
                               {});
  run_decode<kE4M3, 128>({"decode far pages", 4, 2, 512, 64, true, true, 2, false, true, true}, {});
  run_decode<kBF16, 128>({"decode far pools", 2, 3, 768, 40, true, false, 1, true, true, true}, {});
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
