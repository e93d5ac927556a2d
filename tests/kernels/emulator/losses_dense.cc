// The indexer's warm-up loss with all its kernels on the emulator, against float64.
#include "indexer/launch.cuh"
#include "problems/dense_loss_problem.h"

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
#include "problems/dense_loss_problem.h"

cudaError_t jax_dsa::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  return hopper::launch_indexer_fwd(p, stream);
}
cudaError_t jax_dsa::launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  return hopper::launch_teacher(p, stream);
}
cudaError_t jax_dsa::launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return hopper::launch_index_products(p, stream);
}

using namespace dense_loss_problem;

int main(int argc, char** argv) {
  int failures = 0;
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"96 heads, ranges", "four queries per work tile", "two groups", "multi-head, groups"});
  for (const Case& c : cases) {
    const auto schedules = emulator::schedules(argc, argv, &c - kCases);
    const Problem x = make(c, schedules[0].seed);
    const Loss want = loss(x);
    // All queries at once, one batch entry at a time, and chunks of an entry.
    const int64_t all = jax_dsa::dense_loss_bytes(c.batch, c.queries, c.keys, c.channels, c.heads);
    const int64_t entry = jax_dsa::dense_loss_bytes(1, c.queries, c.keys, c.channels, c.heads);
    const int64_t chunk =
        jax_dsa::dense_loss_bytes(1, (c.queries + 2) / 3, c.keys, c.channels, c.heads);
    for (const int64_t capacity : {all, entry, chunk}) {
      emulator::machine.options = schedules[0], emulator::machine.num_sms = 2;
      Results got(x);
      std::vector<char> memory(capacity + 256, 0x7f);
      const uintptr_t workspace = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
      jax_dsa::DenseLossParams p = params(x, got);
      p.workspace = reinterpret_cast<void*>(workspace), p.capacity = capacity;
      emulator::require(launch_dense_loss(p, nullptr));
      const bool good = report(c.name, x, want, got);
      failures += !good;
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
