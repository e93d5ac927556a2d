// q = e4m3(x / scale), scale = max(amax, 1e-4) / 448, for every 1x128 block of a row; a row's last
// block may be shorter.
//
// Bound by memory: a bf16 element costs 2 bytes read and 1 + 4/128 written, so everything serves
// bytes in flight. Sixteen lanes own a block, 8 elements a lane (16-byte loads, an 8-byte store); a
// lane loads its part of kUnroll consecutive blocks before it uses the first. No shared memory.
// Rows that do not start at 16-byte boundaries take element-wise loads and stores, lane-strided so
// that they still coalesce.
//
// Both divisions are correctly rounded, as the XLA implementation's are, so that the codes agree
// bit for bit.

#include "common/launch.cuh"
#include "fp8/quantize.cuh"

namespace jax_dsa {
namespace {

using namespace fp8;

// Five blocks an SM leave 48 registers a thread: with fewer the compiler sinks three of the four
// loads below the first use.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 5 : 1)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const int lane = threadIdx.x % kLanes;
  const Places at(p.rows, p.cols);
  Chunk<T> chunk[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    chunk[u] =
        load<kVector>(static_cast<const T*>(p.x) + at.start + at.offset[u], lane, at.width[u]);
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float2 v[kPerLane / 2];
    float amax = kMinAmax;
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) {
      v[i] = pair(chunk[u], i);
      amax = max_magnitude(amax, v[i]);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
    }
    const Scale scale(amax, p.power_of_two_scale);
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) v[i] = scale.divided(v[i]);
    const uint2 codes = {to_e4m3(v[0], v[1]), to_e4m3(v[2], v[3])};
    store<kVector>(p.q + at.start + at.offset[u], lane, at.width[u], codes);
    if (lane == 0 && u < at.count) p.scale[at.first + u] = scale.scale;
  }
}

template <typename T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.q);
  const bool vector = p.cols % kPerLane == 0 && address % 16 == 0;
  return launch_blocks(vector ? quantize_kernel<T, true> : quantize_kernel<T, false>,
                       place_ctas(p.rows, p.cols), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  return with_element_type(p.dtype, [&]<typename T>() { return launch<T>(p, stream); });
}

}  // namespace jax_dsa
