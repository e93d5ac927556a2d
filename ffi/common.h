// What the handlers share: attributes and shapes are checked here, so that a wrong call is an XLA
// error and not a crash.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/types.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa {

namespace ffi = xla::ffi;

// Returns from the handler if `expr` is an error.
#define DSA_FFI_RETURN_IF_ERROR(expr)                 \
  do {                                                \
    if (ffi::Error error = (expr); error.failure()) { \
      return error;                                   \
    }                                                 \
  } while (false)

// A dtype that kernels take as input, if `dtype` is one.
std::optional<DType> kernel_dtype(ffi::DataType dtype);

// `dims` as "[2, 3]".
std::string shape_string(ffi::Span<const int64_t> dims);

ffi::Error invalid_argument(const char* op, const std::string& what);

// Fails unless `dims` is `leading` followed by `trailing`.
ffi::Error check_shape(const char* op, const char* name, ffi::Span<const int64_t> dims,
                       ffi::Span<const int64_t> leading, std::initializer_list<int64_t> trailing);

// An absent operand arrives as an empty array of rank 1.
inline bool present(const ffi::AnyBuffer& x) { return x.dimensions().size() > 1; }

// Checks an optional operand and gives its data, null if absent.
template <typename T>
ffi::Error optional_data(const char* op, const char* name, const ffi::AnyBuffer& x,
                         ffi::DataType dtype, std::initializer_list<int64_t> dims, const T** data) {
  *data = nullptr;
  if (!present(x)) return ffi::Error::Success();
  if (x.element_type() != dtype)
    return invalid_argument(op, std::string(name) + " has a wrong dtype");
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, name, x.dimensions(), {}, dims));
  *data = static_cast<const T*>(x.untyped_data());
  return ffi::Error::Success();
}

// A launch's status as an XLA error.
ffi::Error launch_status(const char* op, cudaError_t status);

}  // namespace jax_dsa
