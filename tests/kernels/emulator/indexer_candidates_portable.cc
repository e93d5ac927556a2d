// The portable kernels of the indexer inside candidate blocks on the emulator, against its portable
// kernel for all keys, with the shared memory of every GPU.
#include "indexer/candidates.cu"
#include "indexer/portable_fwd.cu"
//
#include "indexer/portable_fp8.cu"
#include "launch_on_device.h"
#include "memory.h"
#include "problems/indexer_candidates_problem.h"
#include "topk/cluster.cu"
#include "topk/dispatch.cu"

cudaError_t jax_dsa::launch_candidate_logits(const IndexerFwdParams& p,
                                             const indexer::CandidateRows& x, cudaStream_t stream) {
  Device device;
  emulator::require(current_device(&device));
  return portable::launch_candidate_logits(p, x, device, stream);
}

int main(int argc, char** argv) {
  using namespace indexer_candidates_problem;
  int failures = 0;
  const auto chosen = emulator::cases(argc, argv, kCases,
                                      {"e4m3 J9 C32, blocks of 3", "bf16 J16 C32, blocks of 48",
                                       "bf16 C32, no keys", "bf16 J64 paged"});
  emulator::on_gpus(argc, argv, chosen, emulator::kPortableGpus, [&](const Case& c) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      emulator::machine.options = options;
      Memory memory;
      failures += !run(c, options.seed, memory, [](const jax_dsa::IndexerFwdParams& p) {
        return jax_dsa::launch_on_device<jax_dsa::portable::launch_indexer_fwd>(p, nullptr);
      });
    }
  });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
