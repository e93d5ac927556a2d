// Cases of the indexer's portable forward kernel.
#pragma once

#include "indexer_checks.h"
#include "launch_on_device.h"

template <IndexerDType kDType, int kChannels>
void run_portable(const Case& c, const emulator::Options& options) {
  run<kDType, kChannels>(launch_on_device<portable::launch_indexer_fwd>, c, options);
}

inline void run_fp8(bool all, const emulator::Options& options) {
  using enum IndexerDType;
  run_portable<kE4M3, 64>({"e4m3 J32 C64", 1, 19, 150, 32, true, false}, options);
  run_portable<kE4M3, 32>({"e4m3 J9 C32", 1, 50, 130, 9}, options);
  run_portable<kE4M3, 128>({"e4m3 J64 paged", 2, 3, 256, 64, true, true, 1}, options);
  if (!all) return;
  run_portable<kE4M3, 128>({"e4m3 J40 C128", 1, 9, 700, 40, true}, options);
  run_portable<kE4M3, 64>({"e4m3 J32 pools", 2, 3, 384, 32, true, true, 2, true}, options);
  run_portable<kE4M3, 64>({"ranges only", 2, 9, 384, 32, true, true, 2, false, false}, options);
  run_portable<kE4M3, 32>({"one key", 3, 1, 1, 1}, options);
}

// Runs check(options) under several schedules on each portable GPU; small cases on one of them.
template <typename Check>
void run_on_gpus(int argc, char** argv, const Check& check) {
  size_t number = 0;
  for (const emulator::Gpu& gpu : emulator::kPortableGpus) {
    emulator::machine.gpu = gpu;
    printf("%s:\n", gpu.name);
    for (const auto& options : emulator::schedules(argc, argv, number++)) check(options);
    if (emulator::small(argc, argv)) break;
  }
}
