// The indexer's selection of blocks on the emulator.
#include "indexer/block_launch.cuh"
#include "indexer/block_max.cu"
#include "indexer/block_topk.cu"
#include "indexer/launch.cuh"
#include "memory.h"
#include "problems/indexer_blocks_problem.h"

template cudaError_t jax_dsa::indexer::launch_block_channels<jax_dsa::IndexerDType::kBF16>(
    const BlockMaxParams&, bool, cudaStream_t);
template cudaError_t jax_dsa::indexer::launch_block_channels<jax_dsa::IndexerDType::kE4M3>(
    const BlockMaxParams&, bool, cudaStream_t);

cudaError_t jax_dsa::launch_block_max(const indexer::BlockMaxParams& p, cudaStream_t stream) {
  return hopper::launch_block_max(p, stream);
}

// tests/kernels/emulator/indexer.cc runs the other variants.
cudaError_t jax_dsa::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  using namespace indexer;
  constexpr auto kBF16 = IndexerDType::kBF16;
  return p.page_table ? launch_fwd<Traits<kBF16, 32, 16, true>>(p, stream)
                      : launch_fwd<Traits<kBF16, 32, 16, false>>(p, stream);
}

int main(int argc, char** argv) {
  using namespace indexer_blocks_problem;
  int failures = 0;
  size_t number = 0;
  const auto chosen = emulator::cases(argc, argv, kCases,
                                      {"bf16 C128", "e4m3 C64, blocks of 64, scales, specials",
                                       "any starts", "pages", "heads together, scales, specials"});
  for (const Case& c : chosen) {
    for (const auto& options : emulator::schedules(argc, argv, number++)) {
      emulator::machine.options = options;
      Memory memory;
      failures += !run(c, options.seed, memory);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
