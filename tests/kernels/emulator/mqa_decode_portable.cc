// Runs the portable mqa_decode kernel on the emulator and compares it with float64 results, with
// the shared memory of every GPU.
#include "launch_on_device.h"
#include "mqa_decode/combine.cu"
#include "mqa_decode/portable_fwd.cu"
#include "mqa_decode/portable_values.cu"
#include "mqa_decode_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const Launch launch = [](const MqaDecodeParams& p, const mqa_decode::Tuning& tuning,
                           cudaStream_t stream) {
    Device device;
    emulator::require(current_device(&device));
    return portable::launch_mqa_decode(p, tuning, device, stream);
  };
  // Plans are for the other tier; here they are zeros.
  const LaunchPlan no_plan = [](const auto&, const auto&, MqaDecodeRange*, cudaStream_t) {
    return cudaSuccess;
  };
  const auto name_of = [](const DecodeCase& c) { return c.c.name; };
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"few requests", "queries", "pages of 7, sharp", "few, floats", "separate values 128",
       "separate values 128, whole, a NaN", "separate values 256, pages", "separate values 64",
       "few, records", "few, huge scores"},
      name_of);
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const DecodeCase& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      run(c, options, launch, no_plan);
    }
  });
  for (const char* name : {"few, pools", "separate values 128", "few, records"}) {
    const DecodeCase& c = emulator::named(kCases, name, name_of);
    const int64_t row_bytes = c.c.with.records ? kMlaRecordBytes : c.c.dim * 2;
    run(c, {}, launch, no_plan,
        emulator::far_rows(c.c.groups * row_bytes, std::max(c.c.with.page_size, 1)));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
