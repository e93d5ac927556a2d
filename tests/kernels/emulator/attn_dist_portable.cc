// Runs the portable attn_dist kernel on the emulator and compares it with float64 results, with the
// shared memory of every GPU.
#include "attn_dist/portable_fwd.cu"
#include "attn_dist_checks.h"
#include "launch_on_device.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const Launch launch = launch_on_device<portable::launch_attn_dist_fwd>;
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"one tile, one query", "adversarial, two sums", "96 heads joined",
                       "groups, small sums", "one head per sum", "huge scores"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
    check(c, launch, emulator::schedules(argc, argv, &c - kCases));
  });
  const auto small = emulator::cases(
      argc, argv, kSmallDims,
      {"D 128, 4 groups of 16", "D 256, 2 groups of 12", "D 64, sums of 8", "D 64, no keys"});
  emulator::on_gpus(argc, argv, small, emulator::kPortableGpus, [&](const Case& c) {
    check(c, launch, emulator::schedules(argc, argv, &c - kSmallDims));
  });
  for (const char* name : {"adversarial, two sums", "groups, small sums"}) {
    check_far(emulator::named(kCases, name), launch);
  }
  check_far(emulator::named(kSmallDims, "D 256, 2 groups of 12"), launch);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
