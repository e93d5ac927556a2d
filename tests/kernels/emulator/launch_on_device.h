// Launches portable kernels on the emulated GPUs.
#pragma once

#include <functional>
#include <span>

#include "common/device.h"
#include "emulator.h"

namespace jax_dsa {

// Calls a portable launcher with the emulated device.
template <auto kLaunch, typename Params>
cudaError_t launch_on_device(const Params& p, cudaStream_t stream) {
  Device device;
  emulator::require(current_device(&device));
  return kLaunch(p, device, stream);
}

}  // namespace jax_dsa

namespace emulator {

// Runs check(c) for every case on each of these GPUs. Small cases take the GPUs in turn.
template <typename Case, typename Check>
void on_gpus(int argc, char** argv, const std::vector<std::reference_wrapper<const Case>>& cases,
             std::span<const Gpu> gpus, Check check) {
  for (size_t i = 0; i < cases.size(); ++i) {
    for (size_t j = 0; j < gpus.size(); ++j) {
      if (small(argc, argv) && j != i % gpus.size()) continue;
      machine.gpu = gpus[j];
      printf("%s:\n", gpus[j].name);
      check(cases[i].get());
    }
  }
}

}  // namespace emulator
