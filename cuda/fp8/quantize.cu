// Quantisation to e4m3 with a scale for each 1x128 block of a row:
//
//   scale = max(amax, 1e-4) / 448       q = e4m3(x / scale)
//
// The last block of a row may be shorter. Both divisions are correctly rounded, as in the XLA
// implementation, so the codes agree bit for bit.
//
// The kernel is bound by memory: a bf16 element costs 2 bytes read and 1 + 4/128 bytes written. So
// the design keeps many bytes in flight. Sixteen lanes process a block, with 8 elements per lane
// (16-byte loads, one 8-byte store). A lane loads its elements of kBlocksPerThread consecutive
// blocks before it uses the first. The kernel needs no shared memory. If rows do not start at
// 16-byte boundaries, loads and stores are element-wise and strided by lane, so that they still
// coalesce.

#include "common/launch.cuh"
#include "fp8/quantize.cuh"

namespace jax_dsa {
namespace {

using namespace fp8;

// Five CTAs per SM leave 48 registers per thread. With fewer registers, the compiler moves three of
// the four loads below the first use.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 5 : 1)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const int lane = threadIdx.x % kLanes;
  const BlockRange range(p.rows, p.cols);
  Chunk<T> chunk[kBlocksPerThread];
#pragma unroll
  for (int u = 0; u < kBlocksPerThread; ++u) {
    chunk[u] = load<kVector>(static_cast<const T*>(p.x) + range.start + range.offset[u], lane,
                             range.width[u]);
  }

#pragma unroll
  for (int u = 0; u < kBlocksPerThread; ++u) {
    float2 v[kElementsPerLane / 2];
    float amax = kMinAmax;
#pragma unroll
    for (int i = 0; i < kElementsPerLane / 2; ++i) {
      v[i] = pair(chunk[u], i);
      amax = max_magnitude(amax, v[i]);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
    }
    const Scale scale(amax, p.power_of_two_scale);
#pragma unroll
    for (int i = 0; i < kElementsPerLane / 2; ++i) v[i] = scale.divided(v[i]);
    const uint2 codes = {to_e4m3(v[0], v[1]), to_e4m3(v[2], v[3])};
    store<kVector>(p.q + range.start + range.offset[u], lane, range.width[u], codes);
    if (lane == 0 && u < range.count) p.scale[range.first + u] = scale.scale;
  }
}

template <typename T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.q);
  const bool vector = p.cols % kElementsPerLane == 0 && address % 16 == 0;
  return launch_blocks(vector ? quantize_kernel<T, true> : quantize_kernel<T, false>,
                       num_ctas(p.rows, p.cols), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  return dispatch_dtype(p.dtype, [&]<typename T>() { return launch<T>(p, stream); });
}

}  // namespace jax_dsa
