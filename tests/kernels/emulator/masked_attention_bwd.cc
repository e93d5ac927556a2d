// Tests the masked attention backward kernels on the emulator against float64.
#include "masked_attention/bwd.cu"
#include "masked_attention_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  return run_attention_cases(
      argc, argv,
      {"dense", "causal", "200 dims, segments, softcap", "segments and ranges", "bias",
       "bias, 256 dims", "keys of -1e9", "saturated softcap, 192 and 128"},
      {&emulator::kHopperGpu, 1},
      [](const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
        check_backward(c, schedules, hopper::launch_masked_attention_bwd,
                       hopper::masked_attention_bwd_workspace_bytes);
      });
}
