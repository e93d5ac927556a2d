// Binding and registration of handlers, the functions that XLA calls.
//
//   // x [B, T, S] -> out [B, T]
//   ffi::Error sums(cudaStream_t stream, F32 x, Result<F32> out, Attr<float, "scale"> scale);
//   DSA_FFI_HANDLER("jax_dsa.sums.v1", sums, kEveryGpu);
//
// XLA's Ffi::BindTo reads the binding from the signature: the order of the parameters is the order
// of the operands and results, and an attribute's type holds its name. An operand or result that
// may be absent has the type AnyBuffer or F32 and arrives as an empty float32 array of rank 1;
// `present` asks for it. Change the target's version whenever the signature changes, because
// programs that jax.export has stored call a target by its name.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_dsa {

namespace ffi = xla::ffi;

using ffi::AnyBuffer;
using ffi::Result;

using BF16 = ffi::Buffer<ffi::BF16>;
using Bool = ffi::Buffer<ffi::PRED>;
using F32 = ffi::Buffer<ffi::F32>;
using S16 = ffi::Buffer<ffi::S16>;
using S32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using U32 = ffi::Buffer<ffi::U32>;

// A string literal as a template argument.
template <size_t kSize>
struct Name {
  constexpr Name(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }  // NOLINT
  char text[kSize];
};

// A parameter that receives the attribute `kName`. XLA's own ffi::Attr takes the name as a pointer,
// which would need a named array for every attribute.
template <typename T, Name kName>
struct Attr {
  Attr(T x) : value(x) {}               // NOLINT(google-explicit-constructor)
  operator T() const { return value; }  // NOLINT(google-explicit-constructor)
  T value;
};

// The GPUs that a handler has kernels for, beside Hopper: those whose compute capability, as
// 10 * major + minor, is at least this number. The handler fails on all others.
inline constexpr int kHopperOnly = std::numeric_limits<int>::max();
inline constexpr int kEveryGpu = 80;

// A handler under the name by which Python calls it.
struct Target {
  std::string_view name;
  XLA_FFI_Handler* handler;
  int portable_since;  // the least compute capability of its portable kernels, or kHopperOnly
};

// All handlers that are linked in, in no particular order.
std::vector<Target>& registered_targets();

struct Registration {
  Registration(std::string_view name, XLA_FFI_Handler* handler, int portable_since) {
    registered_targets().push_back({name, handler, portable_since});
  }
};

// Fails with a message that says what to do if the handler of `target` has no kernel for the
// current GPU.
ffi::Error check_gpu(std::string_view target, int portable_since);

// A handler's function, run only if there is a kernel for the current GPU.
template <Name kTarget, int kPortableSince, auto kFunction>
struct Guarded;

template <Name kTarget, int kPortableSince, typename... Args, ffi::Error (*kFunction)(Args...)>
struct Guarded<kTarget, kPortableSince, kFunction> {
  static ffi::Error call(Args... args) {
    if (ffi::Error error = check_gpu(kTarget.text, kPortableSince); error.failure()) return error;
    return kFunction(std::move(args)...);
  }
};

}  // namespace jax_dsa

namespace xla::ffi {

template <typename T, jax_dsa::Name kName>
struct AttrBinding<jax_dsa::Attr<T, kName>> {
  using Attr = T;
  static constexpr std::string_view name() { return kName.text; }
};

template <>
struct CtxBinding<cudaStream_t> {
  using Ctx = PlatformStream<cudaStream_t>;
};

}  // namespace xla::ffi

// Makes `function` the handler of `target`, which has portable kernels from the compute capability
// `portable_since` on. It may become a part of CUDA graphs (XLA's command buffers), because a
// handler does nothing but launch kernels on the stream. XLA's XLA_FFI_DEFINE_HANDLER cannot say
// that of a binding that is read from the signature.
#define DSA_FFI_HANDLER(target, function, portable_since)                                        \
  const ::jax_dsa::Registration function##_registration(                                         \
      target,                                                                                    \
      +[](XLA_FFI_CallFrame* frame) -> XLA_FFI_Error* {                                          \
        static auto* const handler =                                                             \
            ::xla::ffi::Ffi::BindTo(&::jax_dsa::Guarded<target, portable_since, function>::call, \
                                    {::xla::ffi::Traits::kCmdBufferCompatible})                  \
                .release();                                                                      \
        return handler->Call(frame);                                                             \
      },                                                                                         \
      portable_since)
