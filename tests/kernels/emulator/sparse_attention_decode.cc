// Runs the kernel of sparse attention over caches on the emulator and compares it with float64.
#include "sparse_attention/decode.cu"
#include "sparse_attention_decode_checks.h"

int main(int argc, char** argv) {
  const Launch launch = hopper::launch_sparse_attention_decode;
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"blocks of 64, pages of 48", "blocks of 4, 256 dims", "blocks of 1, pools",
                       "80 heads", "invariant", "16 splits", "no slots", "no keys", "fp8",
                       "fp8, pages", "fp8, 256 dims, no factors"});
  for (const Case& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases))
      run(c, options, launch);
  }
  for (const char* name : {"blocks of 64, pages of 48", "blocks of 1, pools", "fp8, pages"}) {
    const Case& c = emulator::named(kCases, name, [](const Case& c) { return c.name; });
    run(c, {}, launch,
        emulator::far_rows(c.groups * c.dim * (c.with.fp8 ? 1 : 2), c.with.page_size));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
