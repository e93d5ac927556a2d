// Tests the portable backward pass of hierarchical tree attention on the emulator, with the shared
// memory of every GPU. The large cases have only the smallest.
#include "htree/portable_bwd.cu"
#include "htree/portable_fwd.cu"
#include "htree_bwd_checks.h"
#include "launch_on_device.h"

int main(int argc, char** argv) {
  const Launches launches = {launch_on_device<portable::launch_htree_fwd, HTreeFwdParams>,
                             launch_on_device<portable::launch_htree_bwd, HTreeBwdParams>};
  const auto run = [&](const auto& cases, std::span<const emulator::Gpu> gpus, const Case* first) {
    emulator::on_gpus(argc, argv, cases, gpus, [&](const Case& c) {
      if (has_gradients(c)) check(c, emulator::schedules(argc, argv, &c - first), launches);
    });
  };
  const std::span<const emulator::Gpu> gpus = emulator::kPortableGpus;
  run(emulator::cases(argc, argv, kBwdCases, {}), gpus.first(1), kBwdCases);
  run(emulator::cases(argc, argv, kSmallCases,
                      {"tokens alone", "five layers, K 1", "blocks of 32", "huge scores"}),
      gpus, kSmallCases);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
