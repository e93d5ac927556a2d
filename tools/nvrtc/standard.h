// The parts of the C++ standard library that the kernels use. NVRTC has no standard library; see
// tools/oldest_cuda.py.
#pragma once

#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>

namespace std {
using namespace cuda::std;

template <typename T>
struct type_identity {
  using type = T;
};
template <typename T>
using type_identity_t = typename type_identity<T>::type;

template <typename T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <typename T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <typename T>
constexpr const T& clamp(const T& x, const T& low, const T& high) {
  return min(max(x, low), high);
}
}  // namespace std

using cuda::std::int16_t, cuda::std::int32_t, cuda::std::int64_t, cuda::std::int8_t;
using cuda::std::size_t, cuda::std::uintptr_t;
using cuda::std::uint16_t, cuda::std::uint32_t, cuda::std::uint64_t, cuda::std::uint8_t;

#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#undef offsetof
#define offsetof(type, member) 0  // NVRTC has no constant offsetof, and nothing is run
