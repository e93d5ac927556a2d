#include "ffi/common.h"

#include <algorithm>
#include <vector>

#include "common/device.h"

namespace jax_dsa {
namespace {

ffi::Error unexpected(const char* op, const std::string& what, const std::string& got,
                      const std::string& expected) {
  return invalid_argument(op, what + " " + got + ", expected " + expected);
}

std::string quoted(const char* name) { return "'" + std::string(name) + "'"; }

// "1", "1 or 2", "1, 2 or 3"
std::string alternatives(const std::vector<std::string>& items) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    out += (i == 0 ? "" : i + 1 == items.size() ? " or " : ", ") + items[i];
  }
  return out;
}

// The dtype by JAX's name. Only those that some handler takes have one here.
std::string dtype_string(DataType dtype) {
  switch (dtype) {
    case DataType::PRED:
      return "bool";
    case DataType::U8:
      return "uint8";
    case DataType::U32:
      return "uint32";
    case DataType::S16:
      return "int16";
    case DataType::S32:
      return "int32";
    case DataType::F16:
      return "float16";
    case DataType::BF16:
      return "bfloat16";
    case DataType::F32:
      return "float32";
    case DataType::F8E4M3FN:
      return "float8_e4m3fn";
    default:
      return "XLA dtype " + std::to_string(static_cast<int>(dtype));
  }
}

// What a user can do if a program calls a kernel that the GPU cannot run. A program that is traced
// beside the GPU does not.
constexpr const char* kWayOut =
    "trace and compile the program on a machine with the same GPU, or use implementation='xla'";

}  // namespace

std::vector<Target>& registered_targets() {
  static std::vector<Target> targets;
  return targets;
}

ffi::Error check_gpu(std::string_view target, int portable_since) {
  // The target is "jax_dsa.OPERATOR.vVERSION".
  const std::string_view name = target.substr(target.find('.') + 1);
  const std::string op(name.substr(0, name.find('.')));
  Device device;
  if (const cudaError_t e = current_device(&device); e != cudaSuccess) {
    return launch_status(op.c_str(), e);
  }
  if (device.tier == Tier::kHopper) return ffi::Error::Success();
  // Kernels of both tiers are always compiled for Hopper.
  const bool built = kHasPortableTier || device.compute_capability == kHopper;
  if (built && device.compute_capability >= portable_since) return ffi::Error::Success();
  const int cc = device.compute_capability;
  std::string what = op + ": there is no kernel for this GPU of compute capability " +
                     std::to_string(cc / 10) + "." + std::to_string(cc % 10);
  if (cc == kHopper && portable_tier_forced()) what += " in the portable tier (JAX_DSA_TIER)";
  if (!kHasPortableTier) what += ", because the extension was built without the portable tier";
  return ffi::Error(ffi::ErrorCode::kUnimplemented, what + "; " + kWayOut);
}

std::string shape_string(Dims dims) {
  std::string out = "(";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return out + (dims.size() == 1 ? ",)" : ")");
}

ffi::Error invalid_argument(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what);
}

ffi::Error check_shape(const char* op, const char* name, Dims dims, Dims leading,
                       std::initializer_list<int64_t> trailing) {
  std::vector<int64_t> expected(leading.begin(), leading.end());
  expected.insert(expected.end(), trailing);
  if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end())) {
    return ffi::Error::Success();
  }
  return unexpected(op, quoted(name) + " has shape", shape_string(dims),
                    shape_string({expected.data(), expected.size()}));
}

ffi::Error check_shape(const char* op, const char* name, Dims dims,
                       std::initializer_list<int64_t> expected) {
  return check_shape(op, name, dims, {}, expected);
}

ffi::Error check_rank(const char* op, const char* name, Dims dims,
                      std::initializer_list<const char*> axes) {
  if (dims.size() == axes.size()) return ffi::Error::Success();
  std::string expected;
  for (const char* axis : axes) expected += (expected.empty() ? "" : ", ") + std::string(axis);
  return unexpected(op, quoted(name) + " has shape", shape_string(dims), "(" + expected + ")");
}

ffi::Error check_dtype(const char* op, const char* name, DataType dtype,
                       std::initializer_list<DataType> expected) {
  std::vector<std::string> names;
  for (const DataType x : expected) {
    if (x == dtype) return ffi::Error::Success();
    names.push_back(dtype_string(x));
  }
  return unexpected(op, quoted(name) + " has dtype", dtype_string(dtype), alternatives(names));
}

ffi::Error read_dtype(const char* op, const char* name, DataType dtype, DType* result) {
  DSA_FFI_RETURN_IF_ERROR(
      check_dtype(op, name, dtype, {DataType::BF16, DataType::F16, DataType::F32}));
  *result = dtype == DataType::BF16  ? DType::kBF16
            : dtype == DataType::F16 ? DType::kF16
                                     : DType::kF32;
  return ffi::Error::Success();
}

ffi::Error check_range(const char* op, const char* what, int64_t value, int64_t least,
                       int64_t most) {
  if (least <= value && value <= most) return ffi::Error::Success();
  return unexpected(op, std::string(what) + " is", std::to_string(value),
                    std::to_string(least) + " to " + std::to_string(most));
}

ffi::Error check_one_of(const char* op, const char* what, int64_t value, Dims expected) {
  std::vector<std::string> values;
  for (const int64_t x : expected) {
    if (x == value) return ffi::Error::Success();
    const std::string text = std::to_string(x);
    if (std::find(values.begin(), values.end(), text) == values.end()) values.push_back(text);
  }
  return unexpected(op, std::string(what) + " is", std::to_string(value), alternatives(values));
}

ffi::Error check_one_of(const char* op, const char* what, int64_t value,
                        std::initializer_list<int64_t> expected) {
  return check_one_of(op, what, value, Dims(expected.begin(), expected.size()));
}

ffi::Error check_multiple(const char* op, const char* what, int64_t value, int64_t factor) {
  if (value % factor == 0) return ffi::Error::Success();
  return unexpected(op, std::string(what) + " is", std::to_string(value),
                    "a multiple of " + std::to_string(factor));
}

ffi::Error check_groups(const char* op, int64_t heads, int64_t groups) {
  if (groups >= 1 && heads % groups == 0) return ffi::Error::Success();
  return unexpected(op, "there are",
                    std::to_string(heads) + " heads and " + std::to_string(groups) + " groups",
                    "a number of heads that is a multiple of the number of groups");
}

ffi::Error check_workspace(const char* op, const char* name, int64_t bytes, int64_t expected) {
  if (bytes >= expected) return ffi::Error::Success();
  return unexpected(op, "the workspace " + quoted(name) + " has", std::to_string(bytes) + " bytes",
                    "at least " + std::to_string(expected));
}

ffi::Error launch_status(const char* op, cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return ffi::Error::Success();
    case cudaErrorInvalidValue:
      // Handlers check what a launcher would refuse, except for products of sizes: a launcher
      // counts those in tiles of its own.
      return invalid_argument(
          op,
          "the kernel does not take these sizes (cudaErrorInvalidValue), probably because a "
          "product "
          "of them exceeds 2^31 - 1; split the batch or the queries into several calls, or use "
          "implementation='xla'");
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorNotSupported:
      return ffi::Error(ffi::ErrorCode::kUnimplemented,
                        std::string(op) + ": no kernel for this GPU covers the call; " + kWayOut);
    default:
      return ffi::Error::Internal(std::string(op) +
                                  ": the launch failed: " + cudaGetErrorString(status));
  }
}

}  // namespace jax_dsa
