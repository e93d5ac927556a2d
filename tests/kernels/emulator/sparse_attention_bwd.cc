// Tests the sparse attention backward kernels on the emulator against float64.
#include "sparse_attention/bwd.cu"
#include "sparse_attention/bwd_lists.cu"
#include "sparse_attention/lists.cu"
#include "sparse_attention_bwd_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const auto cases = emulator::cases(
      argc, argv, kSparseAttentionCases,
      {"32 heads, blocks of 128, several parts", "16 heads, blocks of 64",
       "1 head, blocks of 16, causal", "12 heads, blocks of 4, tail, 256 dims",
       "32 heads, blocks of 1", "several ranges of queries", "packed", "duplicates",
       "topk_length, forced blocks", "sinks, f16", "many queries, one tile of keys"});
  for (const SparseAttentionCase& c : cases) {
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    check(c, emulator::schedules(argc, argv, &c - kSparseAttentionCases),
          hopper::launch_sparse_attention_bwd);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
