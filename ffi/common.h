// Checks that all handlers share. Each handler checks every attribute, shape and dtype before it
// launches anything, so that a wrong call is an XLA error with a message and not a crash.
//
// Messages begin with the operator's name (`op`) and say what came and what is expected.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/types.h"
#include "ffi/handler.h"

namespace jax_dsa {

using Dims = ffi::Span<const int64_t>;
using DataType = ffi::DataType;

// Returns from the handler if `expr` is an error.
#define DSA_FFI_RETURN_IF_ERROR(expr)                 \
  do {                                                \
    if (ffi::Error error = (expr); error.failure()) { \
      return error;                                   \
    }                                                 \
  } while (false)

// `dims` as "(2, 3)".
std::string shape_string(Dims dims);

ffi::Error invalid_argument(const char* op, const std::string& what);

// Fails unless `dims` is `leading` followed by `trailing`.
ffi::Error check_shape(const char* op, const char* name, Dims dims, Dims leading,
                       std::initializer_list<int64_t> trailing);
ffi::Error check_shape(const char* op, const char* name, Dims dims,
                       std::initializer_list<int64_t> expected);

// Fails unless there is one dimension for each of the axes, which the message names.
ffi::Error check_rank(const char* op, const char* name, Dims dims,
                      std::initializer_list<const char*> axes);

ffi::Error check_dtype(const char* op, const char* name, DataType dtype,
                       std::initializer_list<DataType> expected);

// Checks that `dtype` is bfloat16, float16 or float32, and returns it as the kernels' type.
ffi::Error read_dtype(const char* op, const char* name, DataType dtype, DType* result);

// Fails unless least <= value <= most. `what` names the value: "top_k", "C", "the rank of 'x'".
ffi::Error check_range(const char* op, const char* what, int64_t value, int64_t least,
                       int64_t most);

// Fails unless `value` is among `expected`.
ffi::Error check_one_of(const char* op, const char* what, int64_t value, Dims expected);
ffi::Error check_one_of(const char* op, const char* what, int64_t value,
                        std::initializer_list<int64_t> expected);
template <size_t kCount>
ffi::Error check_one_of(const char* op, const char* what, int64_t value,
                        const int64_t (&expected)[kCount]) {
  return check_one_of(op, what, value, Dims(expected, kCount));
}

ffi::Error check_multiple(const char* op, const char* what, int64_t value, int64_t factor);

// Fails unless N heads are shared equally by G >= 1 groups.
ffi::Error check_groups(const char* op, int64_t heads, int64_t groups);

// Fails unless the workspace has at least `expected` bytes.
ffi::Error check_workspace(const char* op, const char* name, int64_t bytes, int64_t expected);

// Whether an optional operand or result is there: an absent one is an empty array of rank 1.
template <typename Buffer>
bool present(const Buffer& x) {
  return x.dimensions().size() > 1;
}

// Checks an optional operand and returns its data, or null if it is absent.
template <typename T>
ffi::Error optional_data(const char* op, const char* name, const AnyBuffer& x, DataType dtype,
                         std::initializer_list<int64_t> dims, const T** data) {
  *data = nullptr;
  if (!present(x)) return ffi::Error::Success();
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, name, x.element_type(), {dtype}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, name, x.dimensions(), dims));
  *data = static_cast<const T*>(x.untyped_data());
  return ffi::Error::Success();
}

// The status of a launch as an XLA error.
ffi::Error launch_status(const char* op, cudaError_t status);

}  // namespace jax_dsa
