// The portable kernels of the warm-up loss's teacher on the emulator, against float64, with the
// shared memory of every GPU.
#include "launch_on_device.h"
#include "losses/portable_teacher.cu"
#include "losses_teacher_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const auto cases = emulator::cases(
      argc, argv, kCases, {"four queries per work tile", "two groups", "multi-head, groups"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
    check(c, emulator::schedules(argc, argv, &c - kCases),
          launch_on_device<portable::launch_teacher, TeacherParams>);
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
