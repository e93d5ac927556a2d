// Tests the portable masked attention forward kernel on the emulator against float64, with the
// shared memory of every GPU.
#include "masked_attention/portable_fwd.cu"
#include "masked_attention_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  check_forward(kNanBesideSinks, emulator::schedules(argc, argv, 0),
                launch_on_device<portable::launch_masked_attention_fwd>,
                portable::masked_attention_fwd_workspace_bytes);
  return run_attention_cases(
      argc, argv,
      {"dense", "causal", "200 dims, segments, softcap", "segments and ranges", "bias",
       "bias, 256 dims", "keys of -1e9", "sinks"},
      emulator::kPortableGpus,
      [](const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
        check_forward(c, schedules, launch_on_device<portable::launch_masked_attention_fwd>,
                      portable::masked_attention_fwd_workspace_bytes);
      });
}
