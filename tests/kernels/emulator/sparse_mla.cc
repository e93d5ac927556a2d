// Runs the sparse MLA kernels on the emulator and compares them with float64 results.
#include "sparse_mla/bwd.cu"
#include "sparse_mla/fwd.cu"
#include "sparse_mla/sum_rows.cu"
#include "sparse_mla_checks.h"

namespace {

using namespace jax_dsa;

int count_common_tiles(const SparseMlaBwdParams& p) {
  const SparseMlaBwdParams one = hopper::packed(p);
  const sparse_mla::BwdWork work(one);
  int tiles = 0;
  for (int i = 0; work.shares_sums(one) && i < work.steps; ++i) {
    tiles += sparse_mla::common_tiles(one, work)[i];
  }
  return tiles;
}

const Backward kBackward = {hopper::launch_sparse_mla_bwd, hopper::sparse_mla_bwd_counter_bytes,
                            hopper::sparse_mla_bwd_p_ds_bytes, hopper::sparse_mla_bwd_order_bytes,
                            count_common_tiles};

}  // namespace

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"one tile", "four tiles", "adversarial", "groups", "8 heads, repeated keys",
                       "32 heads, sharp", "huge scores", "16 heads, huge scores"});
  for (const Case& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      forward(c, options, hopper::launch_sparse_mla_fwd);
      backward(c, options, kBackward);
    }
  }
  for (const Case& c : kForwardCases) forward(c, {}, hopper::launch_sparse_mla_fwd);
  for (const char* name : {"adversarial", "groups", "32 heads, sharp"}) {
    const Case& c = emulator::named(kCases, name);
    forward(c, {}, hopper::launch_sparse_mla_fwd,
            emulator::far_rows(int64_t{c.groups} * c.dim * 2));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
