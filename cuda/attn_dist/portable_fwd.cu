// Launcher of the portable attn_dist forward kernel.

#include <algorithm>

#include "attn_dist/attn_dist.h"
#include "attn_dist/portable_fwd.cuh"
#include "common/launch.cuh"

namespace jax_dsa::portable {
namespace {

using namespace attn_dist;

template <typename Tr>
cudaError_t launch_portable(const AttnDistFwdParams& p, const Device& device, cudaStream_t stream) {
  // Give every SM work, but at least 256 slots per CTA, since each loads Q.
  const int64_t work_tiles = work_tile_count(p);
  const int64_t wanted = ceil_div(int64_t{2} * device.num_sms, work_tiles);
  const int splits = static_cast<int>(std::min(wanted, int64_t{ceil_div(p.slots, 256)}));
  if (work_tiles * splits > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_fwd_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, work_tiles * splits, Tr::kThreads, sizeof(PortableShared<Tr>),
                       stream, p, splits);
}

// Launches kSlots slots if kCtas CTAs with them fit in an SM, else two.
template <int kD, int kTiles, int kSlots, int kCtas>
cudaError_t launch_slots(const AttnDistFwdParams& p, const Device& device, cudaStream_t stream) {
  using Tr = PortableTraits<kD, kTiles, kSlots, kCtas>;
  using Few = PortableTraits<kD, kTiles, 2, kCtas>;
  static_assert(sizeof(PortableShared<Few>) <= kMinSharedBytes);
  const int64_t needed = kCtas * (sizeof(PortableShared<Tr>) + kReservedSharedBytes);
  return needed <= device.shared_bytes + kReservedSharedBytes
             ? launch_portable<Tr>(p, device, stream)
             : launch_portable<Few>(p, device, stream);
}

template <int kD>
cudaError_t launch_tiles(const AttnDistFwdParams& p, const Device& device, cudaStream_t stream) {
  return Layout(p).head_tiles == 1 ? launch_slots<kD, 1, 3, 2>(p, device, stream)
                                   : launch_slots<kD, 2, 4, 1>(p, device, stream);
}

// Launches the kernel for the dims of grouped-query attention, whose key tiles fit in the shared
// memory of every GPU. kKeyWarps and kSlots are for few heads.
template <int kD, int kKeyWarps = 4, int kSlots = 3>
cudaError_t launch_small_dims(const AttnDistFwdParams& p, const Device& device,
                              cudaStream_t stream) {
  const bool few_heads = p.heads == p.groups * p.head_group && p.head_group <= 16;
  using Few = PortableTraits<kD, 1, kSlots, 2, kKeyWarps>;
  using Many = PortableTraits<kD, 1, 3, 2>;
  static_assert(std::max(sizeof(PortableShared<Few>), sizeof(PortableShared<Many>)) <=
                kMinSharedBytes);
  return few_heads ? launch_portable<Few>(p, device, stream)
                   : launch_portable<Many>(p, device, stream);
}

}  // namespace

cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& p, const Device& device,
                                 cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0 || p.slots == 0) return cudaSuccess;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  switch (p.dim) {
    case 576:
      return launch_tiles<576>(p, device, stream);
    case 512:
      return launch_tiles<512>(p, device, stream);
    case 256:
      return launch_small_dims<256, 2>(p, device, stream);
    case 192:
      return launch_small_dims<192, 4, 2>(p, device, stream);
    case 128:
      return launch_small_dims<128>(p, device, stream);
    default:
      return launch_small_dims<64>(p, device, stream);
  }
}

}  // namespace jax_dsa::portable
