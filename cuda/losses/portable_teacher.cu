// Launcher of the portable kernels of the warm-up loss's teacher.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/losses.h"
#include "losses/portable_teacher.cuh"
#include "losses/portable_teacher_heads.cuh"

namespace jax_dsa::portable {
namespace {

template <typename Tr>
cudaError_t launch_slots(const TeacherParams& p, cudaStream_t stream) {
  const int64_t work_tiles = p.batch * ceil_div(p.queries, int64_t{teacher::Layout(p).queries});
  if (work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = teacher::portable_teacher_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, work_tiles, Tr::kThreads, sizeof(teacher::PortableShared<Tr>),
                       stream, p);
}

// Launches the kernel of the latent form with as many slots as there is room for.
template <int kD>
cudaError_t launch_latent(const TeacherParams& p, const Device& device, cudaStream_t stream) {
  using Many = teacher::PortableTraits<kD, 4>;
  using Few = teacher::PortableTraits<kD, 2>;
  static_assert(sizeof(teacher::PortableShared<Few>) <= kMinSharedBytes);
  const bool fits =
      sizeof(teacher::PortableShared<Many>) <= static_cast<size_t>(device.shared_bytes);
  return fits ? launch_slots<Many>(p, stream) : launch_slots<Few>(p, stream);
}

template <teacher_heads::Pass kPass>
cudaError_t launch_pass(const TeacherParams& p, cudaStream_t stream) {
  using namespace teacher_heads;
  static_assert(sizeof(PortableShared) <= kMinSharedBytes);
  const int64_t work_tiles = work_tile_count<kPortableKeys>(p, kPass);
  if (work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(portable_teacher_heads_kernel<kPass>, work_tiles, kPortableThreads,
                       sizeof(PortableShared), stream, p);
}

}  // namespace

cudaError_t launch_teacher(const TeacherParams& p, const Device& device, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0 || p.heads == 0) return cudaSuccess;
  if (!teacher::is_valid(p)) return cudaErrorInvalidValue;
  if (p.dim == 576) return launch_latent<576>(p, device, stream);
  if (p.dim == 512) return launch_latent<512>(p, device, stream);
  DSA_RETURN_IF_CUDA_ERROR(launch_pass<teacher_heads::Pass::kLogSumExp>(p, stream));
  return launch_pass<teacher_heads::Pass::kSums>(p, stream);
}

}  // namespace jax_dsa::portable
