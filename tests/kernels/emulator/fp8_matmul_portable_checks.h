// Cases of the portable FP8 matmul.
#pragma once

#include "fp8_matmul_checks.h"
#include "launch_on_device.h"

inline int run_portable(int argc, char** argv) {
  using enum DType;
  const bool all = !emulator::small(argc, argv);
  size_t number = 0;
  for (const emulator::Gpu& gpu : emulator::kPortableGpus) {
    emulator::machine.gpu = gpu;
    printf("%s:\n", gpu.name);
    const auto check = [&](const Case& c, auto launch) {
      for (const auto& options : emulator::schedules(argc, argv, number++)) run(c, options, launch);
    };
    const auto many = launch_portable<PortableMany>, few = launch_portable<PortableFew>;
    const auto planned =
        jax_dsa::launch_on_device<jax_dsa::portable::launch_fp8_matmul, jax_dsa::Fp8MatmulParams>;
    check({"many rows", 1, 140, 264, 656}, many);
    check({"many rows, two entries", 2, 129, 131, 272, kF32}, many);
    check({"few rows", 1, 33, 200, 1040, kF16}, few);
    check({"few rows, two entries", 2, 7, 200, 400}, few);
    check({"one row", 1, 1, 1, 16, kF32}, planned);
    check({"no K", 1, 5, 7, 0}, planned);
    if (!all) break;
    check({"many tiles, one K block", 1, 1100, 272, 128}, many);  // 9 rows of tiles
    check({"many rows, f16", 1, 257, 137, 1040, kF16}, many);
    check({"few rows, long K", 1, 20, 65, 2704, kF32}, few);
    check({"many tiles, few rows", 1, 300, 130, 144}, few);
    check({"planned, few rows", 2, 9, 130, 528, kF16}, planned);
    check({"planned, too few tiles", 1, 40, 129, 384}, planned);
    check({"planned, many rows", 1, 140, 1153, 256}, planned);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
