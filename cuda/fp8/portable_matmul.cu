#include "common/launch.cuh"
#include "fp8/portable_matmul.cuh"

namespace jax_dsa {

namespace fp8 {
namespace {

template <typename Tr>
cudaError_t launch_portable(const Fp8MatmulParams& p, cudaStream_t stream) {
  using Shared = PortableShared<Tr>;
  static_assert(Tr::kCtasPerSm * (sizeof(Shared) + kReservedSharedBytes) <=
                kMinSharedBytes + kReservedSharedBytes);
  const auto kernel = portable_matmul_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_persistent<Shared, Tr::kCtasPerSm>(kernel, Tiles<Tr>(p).all, Tr::kThreads, stream,
                                                   p);
}

}  // namespace
}  // namespace fp8

cudaError_t portable::launch_fp8_matmul(const Fp8MatmulParams& p, const Device& device,
                                        cudaStream_t stream) {
  const bool few = p.m <= 32 || 4 * fp8::Tiles<fp8::PortableMany>(p).all <= device.num_sms;
  return few ? fp8::launch_portable<fp8::PortableFew>(p, stream)
             : fp8::launch_portable<fp8::PortableMany>(p, stream);
}

}  // namespace jax_dsa
