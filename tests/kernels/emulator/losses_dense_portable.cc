// The indexer's warm-up loss with all its portable kernels on the emulator, against float64. The
// cases take the shared memory of the GPUs in turn.
#include "indexer/portable_fwd.cu"
//
#include "indexer/portable_fp8.cu"
#include "launch_on_device.h"
#include "losses/dense_loss.cu"
#include "losses/index_grads.cu"
#include "losses/kl_rows.cu"
#include "losses/portable_teacher.cu"
//
#include "losses/portable_index_grads.cu"
#include "losses_dense_checks.h"

cudaError_t jax_dsa::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0) return cudaSuccess;  // as in tiers.cc
  return launch_on_device<portable::launch_indexer_fwd>(p, stream);
}
cudaError_t jax_dsa::launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  return launch_on_device<portable::launch_teacher>(p, stream);
}
cudaError_t jax_dsa::launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return portable::launch_index_products(p, stream);
}

int main(int argc, char** argv) {
  int failures = 0;
  const auto cases =
      emulator::cases(argc, argv, kCases, {"four queries per work tile", "multi-head, groups"});
  for (size_t i = 0; i < cases.size(); ++i) {  // the programs of each kernel take every GPU
    const Case& c = cases[i];
    emulator::machine.gpu = emulator::kPortableGpus[i % std::size(emulator::kPortableGpus)];
    printf("%s:\n", emulator::machine.gpu.name);
    failures += check(c, emulator::schedules(argc, argv, &c - kCases)[0]);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
