// Tests the portable forward pass of hierarchical tree attention on the emulator, with the shared
// memory of every GPU.
#include "htree/portable_fwd.cu"
#include "htree_checks.h"
#include "launch_on_device.h"

int main(int argc, char** argv) {
  const Launch launch = launch_on_device<portable::launch_htree_fwd, HTreeFwdParams>;
  const auto cases = emulator::cases(
      argc, argv, kSmallCases,
      {"two layers", "five layers, K 1", "blocks of 32", "192 heads", "blocks of 8, 20 heads"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
    check(c, emulator::schedules(argc, argv, &c - kSmallCases), launch);
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
