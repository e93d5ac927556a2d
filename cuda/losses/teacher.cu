// Launcher of the teacher's kernels.

#include "common/launch.cuh"
#include "losses/losses.h"
#include "losses/teacher.cuh"

namespace jax_dsa {
namespace {

template <int kD>
cudaError_t launch(const TeacherParams& p, cudaStream_t stream) {
  const int64_t items = p.batch * ceil_div(p.queries, int64_t{teacher::Layout(p).queries});
  if (items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  return launch_persistent<teacher::Shared<kD>>(teacher::teacher_kernel<kD>, items,
                                                teacher::kThreads, stream, p);
}

}  // namespace

cudaError_t launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.keys > INT32_MAX - 4096) {
    return cudaErrorInvalidValue;
  }
  switch (p.dim) {
    case 576:
      return launch<576>(p, stream);
    case 512:
      return launch<512>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
