// Launcher of the kernels that compute the teacher of the warm-up loss.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/losses.h"
#include "losses/teacher.cuh"
#include "losses/teacher_heads.cuh"

namespace jax_dsa::hopper {
namespace {

template <int kD>
cudaError_t launch(const TeacherParams& p, cudaStream_t stream) {
  const int64_t work_tiles = p.batch * ceil_div(p.queries, int64_t{teacher::Layout(p).queries});
  if (work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  return launch_persistent<teacher::Shared<kD>>(teacher::teacher_kernel<kD>, work_tiles,
                                                teacher::kThreads, stream, p);
}

// Launches the kernels of the multi-head form.
template <int kD>
cudaError_t launch_heads(const TeacherParams& p, cudaStream_t stream) {
  using namespace teacher_heads;
  const int64_t first = work_tile_count<kTile>(p, Pass::kLogSumExp),
                second = work_tile_count<kTile>(p, Pass::kSums);
  if (std::max(first, second) > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(launch_persistent<Shared<kD>>(teacher_heads_kernel<kD, Pass::kLogSumExp>,
                                                         first, kThreads, stream, p));
  return launch_persistent<Shared<kD>>(teacher_heads_kernel<kD, Pass::kSums>, second, kThreads,
                                       stream, p);
}

}  // namespace

cudaError_t launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0 || p.heads == 0) return cudaSuccess;
  if (!teacher::is_valid(p)) return cudaErrorInvalidValue;
  switch (p.dim) {
    case 576:
      return launch<576>(p, stream);
    case 512:
      return launch<512>(p, stream);
    case 256:
      return launch_heads<256>(p, stream);
    case 192:
      return launch_heads<192>(p, stream);
    case 128:
      return launch_heads<128>(p, stream);
    case 64:
      return launch_heads<64>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::hopper
