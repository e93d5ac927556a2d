// Tests the portable backward pass of hierarchical tree attention on the emulator, with the shared
// memory of every GPU.
#include "htree/portable_bwd.cu"
#include "htree/portable_fwd.cu"
#include "htree_bwd_checks.h"
#include "launch_on_device.h"

int main(int argc, char** argv) {
  const Launches launches = {launch_on_device<portable::launch_htree_fwd, HTreeFwdParams>,
                             launch_on_device<portable::launch_htree_bwd, HTreeBwdParams>};
  const auto on_gpus = [&](const auto& cases, const Case* first) {
    emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
      if (!has_gradients(c)) return;
      check(c, emulator::schedules(argc, argv, &c - first), launches);
    });
  };
  on_gpus(emulator::cases(argc, argv, kBwdCases, {}), kBwdCases);
  on_gpus(emulator::cases(argc, argv, kSmallCases,
                          {"tokens alone", "five layers, K 1", "blocks of 32", "huge scores"}),
          kSmallCases);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
