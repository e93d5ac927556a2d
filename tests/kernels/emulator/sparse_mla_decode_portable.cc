// Runs the portable sparse MLA kernel over caches on the emulator and compares it with float64
// results, with the shared memory of every GPU.
#include "launch_on_device.h"
#include "sparse_mla/combine.cu"
#include "sparse_mla/portable_fwd.cu"
#include "sparse_mla_decode_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const DecodeLaunch launch = launch_on_device<portable::launch_sparse_mla_decode>;
  const auto name_of = [](const DecodeCase& c) { return c.c.name; };
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"whole", "adversarial", "D 512, groups, sharp", "pages", "records", "records in pages",
       "an infinity", "an infinity, 3 splits", "infinite key alone",
       "infinite key alone in a split", "a NaN query", "two caches", "two caches of page records"},
      name_of);
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const DecodeCase& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      run(c, options, launch);
    }
  });
  for (const char* name :
       {"adversarial", "pages", "pools of records", "records", "two caches of page records"}) {
    run(emulator::named(kCases, name, name_of), {}, launch, true);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
