// The indexer's warm-up loss with all its kernels on the emulator, against float64.
#include "indexer/launch.cuh"

namespace jax_dsa::indexer {
template <>
cudaError_t launch_channels<IndexerDType::kE4M3>(const IndexerFwdParams&, bool, cudaStream_t) {
  return cudaErrorInvalidValue;  // not called, and slow to compile
}
}  // namespace jax_dsa::indexer

#include "indexer/dispatch.cu"
#include "indexer/fwd_bf16.cu"
#include "losses/dense_loss.cu"
#include "losses/index_grads.cu"
#include "losses/index_products.cu"
#include "losses/kl_rows.cu"
#include "losses/teacher.cu"
#include "losses_dense_checks.h"

cudaError_t jax_dsa::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0) return cudaSuccess;  // as in tiers.cc
  return hopper::launch_indexer_fwd(p, stream);
}
cudaError_t jax_dsa::launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  return hopper::launch_teacher(p, stream);
}
cudaError_t jax_dsa::launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return hopper::launch_index_products(p, stream);
}

int main(int argc, char** argv) {
  int failures = 0;
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"96 heads, ranges", "four queries per work tile", "two groups", "multi-head, groups"});
  for (const Case& c : cases) {
    failures += check(c, emulator::schedules(argc, argv, &c - kCases)[0]);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
