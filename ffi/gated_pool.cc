// Handlers of the pooling of blocks of tokens.

#include "gated_pool/gated_pool.h"

#include <limits>

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

using F32 = ffi::Buffer<ffi::F32>;

// values and gates [B, S, H, D], bias [B, R, H, D], starts [B, S]?
ffi::Error read_operands(const char* op, const ffi::AnyBuffer& values, const ffi::AnyBuffer& gates,
                         const F32& bias, const ffi::AnyBuffer& starts, GatedPoolParams* p) {
  const auto dims = values.dimensions(), of_bias = bias.dimensions();
  if (dims.size() != 4) return invalid_argument(op, "values is not of rank 4");
  if (of_bias.size() != 4) return invalid_argument(op, "bias is not of rank 4");
  const int64_t batch = dims[0], tokens = dims[1], halves = dims[2], dim = dims[3];
  const int64_t ratio = of_bias[1];
  if (halves < 1 || halves > 2) return invalid_argument(op, "H is not 1 or 2");
  if (ratio < 1 || ratio * halves > kMostPooled) return invalid_argument(op, "R H is too large");
  if (dim % 4 != 0 || dim > std::numeric_limits<int32_t>::max() / (2 * kMostPooled)) {
    return invalid_argument(op, "D is no multiple of 4, or too large");
  }
  const auto dtype = kernel_dtype(values.element_type());
  if (!dtype || gates.element_type() != values.element_type()) {
    return invalid_argument(op, "values and gates are not both bf16, f16 or f32");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "gates", gates.dimensions(), dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "bias", of_bias, {}, {batch, ratio, halves, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "starts", starts, ffi::DataType::S32, {batch, tokens}, &p->starts));
  p->values = values.untyped_data();
  p->gates = gates.untyped_data();
  p->bias = bias.typed_data();
  p->batch = batch, p->tokens = tokens;
  p->ratio = static_cast<int>(ratio);
  p->halves = static_cast<int>(halves);
  p->dim = static_cast<int>(dim);
  p->dtype = *dtype;
  return ffi::Error::Success();
}

ffi::Error check_keys(const char* op, const char* name, const ffi::AnyBuffer& x,
                      const ffi::AnyBuffer& values, const GatedPoolParams& p) {
  if (x.element_type() != values.element_type()) {
    return invalid_argument(op, std::string(name) + " has a wrong dtype");
  }
  return check_shape(op, name, x.dimensions(), {}, {p.batch, p.tokens / p.ratio, p.dim});
}

// -> keys [B, S / R, D]
ffi::Error gated_pool_fwd(cudaStream_t stream, ffi::AnyBuffer values, ffi::AnyBuffer gates,
                          F32 bias, ffi::AnyBuffer starts, ffi::Result<ffi::AnyBuffer> keys) {
  constexpr const char* kOp = "gated_pool_fwd";
  GatedPoolFwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, values, gates, bias, starts, &params.in));
  DSA_FFI_RETURN_IF_ERROR(check_keys(kOp, "keys", *keys, values, params.in));
  params.out = keys->untyped_data();
  return launch_status(kOp, launch_gated_pool_fwd(params, stream));
}

// The operands, and the keys' cotangent -> cotangents of values and gates, and parts of the sum
// [B, P, R, H, D] that the bias's is
ffi::Error gated_pool_bwd(cudaStream_t stream, ffi::AnyBuffer values, ffi::AnyBuffer gates,
                          F32 bias, ffi::AnyBuffer starts, ffi::AnyBuffer dkeys,
                          ffi::Result<ffi::AnyBuffer> dvalues, ffi::Result<ffi::AnyBuffer> dgates,
                          ffi::Result<F32> dbias) {
  constexpr const char* kOp = "gated_pool_bwd";
  GatedPoolBwdParams params = {};
  GatedPoolParams& p = params.in;
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, values, gates, bias, starts, &p));
  DSA_FFI_RETURN_IF_ERROR(check_keys(kOp, "dkeys", dkeys, values, p));
  for (const ffi::AnyBuffer* x : {&*dvalues, &*dgates}) {
    if (x->element_type() != values.element_type()) {
      return invalid_argument(kOp, "a gradient has a wrong dtype");
    }
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "a gradient", x->dimensions(), values.dimensions(), {}));
  }
  if (dbias->dimensions().size() != 5) return invalid_argument(kOp, "dbias is not of rank 5");
  params.parts = dbias->dimensions()[1];
  if (params.parts < 1 || params.parts > std::numeric_limits<int16_t>::max()) {
    return invalid_argument(kOp, "dbias has no parts, or too many");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dbias", dbias->dimensions(), {},
                                      {p.batch, params.parts, p.ratio, p.halves, p.dim}));
  params.dout = dkeys.untyped_data();
  params.dvalues = dvalues->untyped_data();
  params.dgates = dgates->untyped_data();
  params.dbias = dbias->typed_data();
  return launch_status(kOp, launch_gated_pool_bwd(params, stream));
}

auto operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<F32>()
      .Arg<ffi::AnyBuffer>();
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatedPoolFwd, jax_dsa::gated_pool_fwd,
                              jax_dsa::operands().Ret<xla::ffi::AnyBuffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatedPoolBwd, jax_dsa::gated_pool_bwd,
                              jax_dsa::operands()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<jax_dsa::F32>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
