#include "ffi/common.h"

#include <algorithm>
#include <vector>

namespace jax_dsa {

std::optional<DType> kernel_dtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::F32:
      return DType::kF32;
    default:
      return std::nullopt;
  }
}

std::string shape_string(ffi::Span<const int64_t> dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return out + "]";
}

ffi::Error invalid_argument(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what);
}

ffi::Error check_shape(const char* op, const char* name, ffi::Span<const int64_t> dims,
                       ffi::Span<const int64_t> leading, std::initializer_list<int64_t> trailing) {
  std::vector<int64_t> want(leading.begin(), leading.end());
  want.insert(want.end(), trailing);
  if (std::equal(dims.begin(), dims.end(), want.begin(), want.end())) {
    return ffi::Error::Success();
  }
  return invalid_argument(op, std::string(name) + " has shape " + shape_string(dims) + ", want " +
                                  shape_string({want.data(), want.size()}));
}

ffi::Error launch_status(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  if (status == cudaErrorNoKernelImageForDevice) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      std::string(op) +
                          ": the CUDA kernels are compiled for Hopper (sm_90a), which this GPU is "
                          "not; use implementation='xla'");
  }
  return ffi::Error::Internal(std::string(op) + ": " + cudaGetErrorString(status));
}

}  // namespace jax_dsa
