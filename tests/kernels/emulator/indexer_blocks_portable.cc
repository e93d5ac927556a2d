// The portable kernels of the indexer's selection of blocks on the emulator, with the shared memory
// of every GPU.
#include "indexer/block_topk.cu"
#include "indexer/portable_fwd.cu"
//
#include "indexer/portable_fp8.cu"
#include "launch_on_device.h"
#include "memory.h"
#include "problems/indexer_blocks_problem.h"

cudaError_t jax_dsa::launch_block_max(const indexer::BlockMaxParams& p, cudaStream_t stream) {
  return launch_on_device<portable::launch_block_max>(p, stream);
}
cudaError_t jax_dsa::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  return launch_on_device<portable::launch_indexer_fwd>(p, stream);
}

int main(int argc, char** argv) {
  using namespace indexer_blocks_problem;
  int failures = 0;
  const auto chosen = emulator::cases(argc, argv, kCases,
                                      {"bf16 C128", "e4m3 C64, blocks of 64, scales, specials",
                                       "any starts", "pages", "heads together, scales, specials"});
  emulator::on_gpus(argc, argv, chosen, emulator::kPortableGpus, [&](const Case& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      emulator::machine.options = options;
      Memory memory;
      failures += !run(c, options.seed, memory);
    }
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
