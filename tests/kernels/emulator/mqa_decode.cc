// Runs the mqa_decode kernels on the emulator and compares them with float64 results.
#include "mqa_decode/combine.cu"
#include "mqa_decode/fwd.cu"
#include "mqa_decode/plan.cu"
#include "mqa_decode_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const auto cases = emulator::cases(argc, argv, kCases,
                                     {"one request",
                                      "few requests",
                                      "many, whole",
                                      "queries",
                                      "pages of 7, sharp",
                                      "few, equally long, pages",
                                      "few, floats",
                                      "separate values 128",
                                      "separate values 128, whole, a NaN",
                                      "separate values 256, pages",
                                      "separate values 64",
                                      "records",
                                      "few, records",
                                      "huge scores",
                                      "few, huge scores",
                                      "static, one request",
                                      "static, few",
                                      "clusters, few",
                                      "plan",
                                      "few, plan of other lengths",
                                      "few, forged plan"},
                                     [](const DecodeCase& c) { return c.c.name; });
  for (const DecodeCase& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases))
      run(c, options, hopper::launch_mqa_decode, hopper::launch_mqa_decode_plan);
  }
  for (const char* name :
       {"queries", "pages of 7, sharp", "few, pools", "few, floats", "separate values 128",
        "separate values 256, pages", "records, queries, pages", "few, records"}) {
    const DecodeCase& c =
        emulator::named(kCases, name, [](const DecodeCase& c) { return c.c.name; });
    const int64_t row_bytes = c.c.with.records ? kMlaRecordBytes : c.c.dim * 2;
    run(c, {}, hopper::launch_mqa_decode, hopper::launch_mqa_decode_plan,
        emulator::far_rows(c.c.groups * row_bytes, std::max(c.c.with.page_size, 1)));
  }
  if (!emulator::small(argc, argv)) {
    // A GPU without room for the clusters of ten CTAs.
    emulator::machine.max_cluster_size = 8;
    const auto name = [](const DecodeCase& c) { return c.c.name; };
    run(emulator::named(kCases, "clusters, ten splits", name), {}, hopper::launch_mqa_decode,
        hopper::launch_mqa_decode_plan);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
