// The indexer inside candidate blocks on the emulator, against its kernels for all keys.
#include "indexer/candidate_logits.cu"
#include "indexer/candidates.cu"
#include "indexer/launch.cuh"
#include "memory.h"
#include "problems/indexer_candidates_problem.h"
#include "topk/cluster.cu"
#include "topk/dispatch.cu"

namespace {

using namespace jax_dsa;
using namespace indexer_candidates_problem;

template <IndexerDType kDType, int kChannels, int kHeads>
cudaError_t launch_logits_of(const IndexerFwdParams& p) {
  return p.page_table
             ? indexer::launch_fwd<indexer::Traits<kDType, kChannels, kHeads, true>>(p, 0)
             : indexer::launch_fwd<indexer::Traits<kDType, kChannels, kHeads, false>>(p, 0);
}

// Computes the logits of all keys for the dims of the cases.
cudaError_t launch_all_logits(const IndexerFwdParams& p) {
  const bool is_bf16 = p.dtype == kBF16;
  switch (p.channels) {
    case 32:
      return is_bf16 ? launch_logits_of<kBF16, 32, 16>(p) : launch_logits_of<kE4M3, 32, 16>(p);
    case 64:
      return is_bf16 ? launch_logits_of<kBF16, 64, 32>(p) : launch_logits_of<kE4M3, 64, 32>(p);
    default:
      return is_bf16 ? launch_logits_of<kBF16, 128, 64>(p) : launch_logits_of<kE4M3, 128, 64>(p);
  }
}

}  // namespace

cudaError_t jax_dsa::launch_candidate_logits(const IndexerFwdParams& p,
                                             const indexer::CandidateRows& x, cudaStream_t stream) {
  return hopper::launch_candidate_logits(p, x, stream);
}

int main(int argc, char** argv) {
  int failures = 0;
  size_t number = 0;
  for (const Case& c : emulator::cases(argc, argv, kCases,
                                       {"e4m3 J9 C32, blocks of 3", "bf16 J16 C32, blocks of 48",
                                        "bf16 C32, no keys", "bf16 J64 paged"})) {
    for (const auto& options : emulator::schedules(argc, argv, number++)) {
      emulator::machine.options = options;
      Memory memory;
      failures += !run(c, options.seed, memory, launch_all_logits);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
