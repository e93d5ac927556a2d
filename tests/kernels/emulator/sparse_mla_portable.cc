// Runs the portable sparse MLA kernels on the emulator and compares them with float64 results, with
// the shared memory of every GPU.
#include "launch_on_device.h"
#include "sparse_mla/combine.cu"
#include "sparse_mla/portable_bwd.cu"
#include "sparse_mla/portable_fwd.cu"
#include "sparse_mla/sum_rows.cu"
#include "sparse_mla_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const ForwardLaunch launch = launch_on_device<portable::launch_sparse_mla_fwd>;
  const auto none = [](const SparseMlaBwdParams&) { return int64_t{0}; };
  const auto every = [](const SparseMlaBwdParams&) { return INT_MAX; };
  const Backward tested = {launch_on_device<portable::launch_sparse_mla_bwd>, none, none, none,
                           every};
  const auto cases = emulator::cases(argc, argv, kCases,
                                     {"one tile", "D 512, odd tiles", "adversarial", "groups",
                                      "8 heads, repeated keys", "32 heads, sharp", "huge scores"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const Case& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      forward(c, options, launch);
      backward(c, options, tested);
    }
  });
  for (const Case& c : kForwardCases) forward(c, {}, launch);
  for (const char* name : {"adversarial", "groups", "32 heads, sharp"}) {
    const Case& c = emulator::named(kCases, name);
    forward(c, {}, launch, emulator::far_rows(int64_t{c.groups} * c.dim * 2));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
