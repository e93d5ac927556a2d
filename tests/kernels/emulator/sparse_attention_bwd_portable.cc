// Tests the portable sparse attention backward kernels on the emulator against float64, with the
// shared memory of every GPU.
#include "launch_on_device.h"
#include "sparse_attention/bwd_lists.cu"
#include "sparse_attention/lists.cu"
#include "sparse_attention/portable_bwd.cu"
#include "sparse_attention_bwd_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const Launch launch =
      launch_on_device<portable::launch_sparse_attention_bwd, SparseAttentionBwdParams>;
  const auto cases =
      emulator::cases(argc, argv, kSparseAttentionCases,
                      {"12 heads, blocks of 4, tail, 256 dims", "16 heads, blocks of 64",
                       "1 head, blocks of 16, causal", "several ranges of queries", "packed",
                       "duplicates", "sinks, f16", "many queries, one tile of keys"});
  emulator::on_gpus(argc, argv, cases, emulator::kPortableGpus, [&](const SparseAttentionCase& c) {
    check(c, emulator::schedules(argc, argv, &c - kSparseAttentionCases), launch);
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
