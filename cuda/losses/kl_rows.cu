// Launchers of the kernels that process rows of logits.

#include "common/launch.cuh"
#include "losses/kl_rows.cuh"
#include "losses/losses.h"

namespace jax_dsa {
namespace {

constexpr int kScaleThreads = 128;

bool aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <losses::Mask kMask, int kThreads, int kPerThread, int kWidth, bool kResident>
cudaError_t launch(const KlRowsParams& p, cudaStream_t stream) {
  return launch_blocks(losses::kl_rows_kernel<kMask, kThreads, kPerThread, kWidth, kResident>,
                       p.rows, kThreads, sizeof(losses::KlShared<kThreads>), stream, p);
}

template <losses::Mask kMask, int kWidth>
cudaError_t launch_length(const KlRowsParams& p, cudaStream_t stream) {
  if (p.slots <= 128 * 16) return launch<kMask, 128, 16, kWidth, true>(p, stream);
  if (p.slots <= 512 * 16) return launch<kMask, 512, 16, kWidth, true>(p, stream);
  return launch<kMask, 512, 8, kWidth, false>(p, stream);
}

template <int kWidth>
cudaError_t launch_mask(const KlRowsParams& p, cudaStream_t stream) {
  using losses::Mask;
  return p.starts  ? launch_length<Mask::kRanges, kWidth>(p, stream)
         : p.valid ? launch_length<Mask::kValid, kWidth>(p, stream)
                   : launch_length<Mask::kLogits, kWidth>(p, stream);
}

}  // namespace

cudaError_t launch_kl_rows(const KlRowsParams& p, cudaStream_t stream) {
  if ((p.starts == nullptr) != (p.ends == nullptr) || (p.valid != nullptr && p.starts != nullptr) ||
      p.rows > INT32_MAX || p.slots > INT32_MAX - 8192) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool vector = p.slots % 4 == 0 && aligned(p.logits, 16) && aligned(p.teacher, 16) &&
                      aligned(p.grad, 16) && aligned(p.valid, 4);
  return vector ? launch_mask<4>(p, stream) : launch_mask<1>(p, stream);
}

cudaError_t launch_sum_kl(const SumKlParams& p, cudaStream_t stream) {
  constexpr int kThreads = 256;
  if (p.batch == 0) return cudaSuccess;
  return launch_blocks(losses::sum_kl_kernel<kThreads>, p.batch, kThreads,
                       sizeof(losses::SumShared<kThreads>), stream, p);
}

cudaError_t launch_scale_rows(const ScaleRowsParams& p, cudaStream_t stream) {
  if (p.rows > INT32_MAX) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.slots == 0) return cudaSuccess;
  const bool vector = p.slots % 4 == 0 && aligned(p.x, 16) && aligned(p.out, 16);
  return vector ? launch_blocks(losses::scale_rows_kernel<kScaleThreads, 4>, p.rows, kScaleThreads,
                                0, stream, p)
                : launch_blocks(losses::scale_rows_kernel<kScaleThreads, 1>, p.rows, kScaleThreads,
                                0, stream, p);
}

}  // namespace jax_dsa
