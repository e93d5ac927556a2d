// Tests the portable sparse attention forward kernel on the emulator against float64, with the
// shared memory of every GPU.
#include "launch_on_device.h"
#include "sparse_attention/lists.cu"
#include "sparse_attention/portable_fwd.cu"
#include "sparse_attention_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const Launch launch =
      launch_on_device<portable::launch_sparse_attention_fwd, SparseAttentionFwdParams>;
  const auto cases =
      emulator::cases(argc, argv, kSparseAttentionCases,
                      {"16 heads, blocks of 64", "1 head, blocks of 16, causal",
                       "12 heads, blocks of 4, tail, 256 dims", "forced blocks and tail", "packed",
                       "duplicates", "invalid indices", "sinks, f16"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const SparseAttentionCase& c) {
    check(c, emulator::schedules(argc, argv, &c - kSparseAttentionCases), launch);
  });
  check(kNanBesideSinks, emulator::schedules(argc, argv, 0), launch);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
