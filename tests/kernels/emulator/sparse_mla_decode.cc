// Runs the sparse MLA decode kernels on the emulator and compares them with float64 results.
#include "problems/record_values.h"
#include "sparse_mla/combine.cu"
#include "sparse_mla/decode.cu"
#include "sparse_mla_decode_checks.h"

namespace {

using namespace jax_dsa;

void run_values() {
  int wrong = 0;
  const auto code_groups = record_values::code_groups();
  for (const auto& group : code_groups) {
    uint32_t values[16];
    mla::unpack_values(group.codes, group.scale,
                       [&](int i, const uint32_t (&y)[4]) { std::copy_n(y, 4, values + 4 * i); });
    wrong += record_values::wrong(group, reinterpret_cast<const uint16_t*>(values));
  }
  printf("%-4s values of records: %d of %zu wrong\n", wrong ? "BAD" : "ok", wrong,
         32 * code_groups.size());
  failures += wrong > 0;
}

// Checks all scales of page records, and the factors of those that have one.
void run_page_record_scales() {
  int wrong = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const float want = byte == 255 ? NAN : std::ldexp(1.f, byte - 127);
    const float scale = mla::page_record_scale(byte);
    wrong += std::isnan(want) ? !std::isnan(scale) : scale != want;
    if (!mla::is_fast_page_record_scale(byte)) continue;
    wrong += !mla::is_power_of_two_scale(want) ||
             mla::page_record_factor(byte) != mla::scale_factor(want);
  }
  printf("%-4s scales of page records: %d of 256 wrong\n", wrong ? "BAD" : "ok", wrong);
  failures += wrong > 0;
}

}  // namespace

int main(int argc, char** argv) {
  run_values();
  run_page_record_scales();
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"whole", "adversarial", "D 512, groups, sharp", "pages", "records", "records in pages",
       "an infinity", "an infinity, 3 splits", "infinite key alone",
       "infinite key alone in a split", "a NaN query", "two caches", "two caches of page records"},
      [](const DecodeCase& c) { return c.c.name; });
  for (const DecodeCase& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases))
      run(c, options, hopper::launch_sparse_mla_decode);
  }
  for (const char* name :
       {"adversarial", "D 512, groups, sharp", "pages", "pools of records", "records",
        "records in pages", "pools of page records", "two caches", "two caches of page records"}) {
    const DecodeCase& c =
        emulator::named(kCases, name, [](const DecodeCase& c) { return c.c.name; });
    run(c, {}, hopper::launch_sparse_mla_decode, true);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
