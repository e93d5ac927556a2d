// Tests the sparse attention forward kernels on the emulator against float64.
#include "sparse_attention/fwd.cu"
#include "sparse_attention/lists.cu"
#include "sparse_attention_checks.h"

int main(int argc, char** argv) {
  using namespace jax_dsa;
  const auto cases =
      emulator::cases(argc, argv, kSparseAttentionCases,
                      {"16 heads, blocks of 64", "1 head, blocks of 16, causal",
                       "12 heads, blocks of 4, tail, 256 dims", "32 heads, blocks of 1",
                       "1 head, blocks of 1, two tables", "long lists, forced blocks, packed",
                       "forced blocks and tail", "packed", "duplicates", "invalid indices",
                       "topk_length, forced blocks", "sinks, f16"});
  for (const SparseAttentionCase& c : cases) {
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    check(c, emulator::schedules(argc, argv, &c - kSparseAttentionCases),
          hopper::launch_sparse_attention_fwd);
  }
  check(kNanBesideSinks, emulator::schedules(argc, argv, 0), hopper::launch_sparse_attention_fwd);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
