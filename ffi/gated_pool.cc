// Handlers of pooling, which turns each block of tokens into one key.

#include "gated_pool/gated_pool.h"

#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {
namespace {

// Reads values and gates [B, S, H, D], bias [B, R, H, D], starts [B, S]?, scale [B, D]?.
ffi::Error read_operands(const char* op, const AnyBuffer& values, const AnyBuffer& gates,
                         const F32& bias, const AnyBuffer& starts, const AnyBuffer& scale,
                         GatedPoolParams* p) {
  namespace limits = ::jax_dsa::limits::gated_pool;
  const Dims dims = values.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "values", dims, {"B", "S", "H", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "bias", bias.dimensions(), {"B", "R", "H", "D"}));
  const int64_t batch = dims[0], tokens = dims[1], halves = dims[2], dim = dims[3];
  const int64_t ratio = bias.dimensions()[1];
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "H", halves, {1, 2}));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "R * H", ratio * halves, halves, limits::kMaxPooled));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "D", dim, 0, limits::kMaxDim));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "D", dim, limits::kDimMultiple));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "S", tokens, 0, limits::kMaxTokens));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(op, "B * ceil(S / R)", batch * ceil_div(tokens, ratio), 0, limits::kMaxBlocks));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, "values", values.element_type(), &p->dtype));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "gates", gates.element_type(), {values.element_type()}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "gates", gates.dimensions(), dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "bias", bias.dimensions(), {batch, ratio, halves, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "starts", starts, DataType::S32, {batch, tokens}, &p->starts));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "scale", scale, DataType::F32, {batch, dim}, &p->scale));
  p->values = values.untyped_data();
  p->gates = gates.untyped_data();
  p->bias = bias.typed_data();
  p->batch = batch, p->tokens = tokens;
  p->ratio = static_cast<int>(ratio);
  p->halves = static_cast<int>(halves);
  p->dim = static_cast<int>(dim);
  return ffi::Error::Success();
}

// Checks the pooled keys or their gradient.
ffi::Error check_keys(const char* op, const char* name, const AnyBuffer& x, const AnyBuffer& values,
                      const GatedPoolParams& p) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, name, x.element_type(), {values.element_type()}));
  return check_shape(op, name, x.dimensions(), {p.batch, p.tokens / p.ratio, p.dim});
}

// Checks the gradient of values or gates.
ffi::Error check_gradient(const char* op, const char* name, const AnyBuffer& x,
                          const AnyBuffer& values) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, name, x.element_type(), {values.element_type()}));
  return check_shape(op, name, x.dimensions(), values.dimensions(), {});
}

// The operands -> keys [B, S / R, D], and if there is a scale squares [B, P, S / R], partial sums
// of each key's squared elements
ffi::Error gated_pool_fwd(cudaStream_t stream, AnyBuffer values, AnyBuffer gates, F32 bias,
                          AnyBuffer starts, AnyBuffer scale, Result<AnyBuffer> keys,
                          Result<F32> squares) {
  constexpr const char* kOp = "gated_pool_fwd";
  GatedPoolFwdParams params = {};
  const GatedPoolParams& p = params.in;
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, values, gates, bias, starts, scale, &params.in));
  DSA_FFI_RETURN_IF_ERROR(check_keys(kOp, "keys", *keys, values, p));
  params.out = keys->untyped_data();
  if (present(scale)) {
    const int64_t tiles = gated_pool_tiles(p.ratio, p.halves, p.dim);
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "squares", squares->dimensions(), {p.batch, tiles, p.tokens / p.ratio}));
    params.squares = squares->typed_data();
  }
  return launch_status(kOp, launch_gated_pool_fwd(params, stream));
}

// The operands, dkeys [B, S / R, D], and if there is a scale dsquares [B, S / R], the gradient of
// the sums of squares
// -> dvalues, dgates, and sums [B, P, R * H, D], partial sums of the gradient of the bias; if there
//    is a scale, a further row holds those of its gradient
ffi::Error gated_pool_bwd(cudaStream_t stream, AnyBuffer values, AnyBuffer gates, F32 bias,
                          AnyBuffer starts, AnyBuffer scale, AnyBuffer dkeys, AnyBuffer dsquares,
                          Result<AnyBuffer> dvalues, Result<AnyBuffer> dgates, Result<F32> sums) {
  constexpr const char* kOp = "gated_pool_bwd";
  GatedPoolBwdParams params = {};
  GatedPoolParams& p = params.in;
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, values, gates, bias, starts, scale, &p));
  DSA_FFI_RETURN_IF_ERROR(check_keys(kOp, "dkeys", dkeys, values, p));
  DSA_FFI_RETURN_IF_ERROR(check_gradient(kOp, "dvalues", *dvalues, values));
  DSA_FFI_RETURN_IF_ERROR(check_gradient(kOp, "dgates", *dgates, values));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "sums", sums->dimensions(), {"B", "P", "rows", "D"}));
  params.splits = sums->dimensions()[1];
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "P", params.splits, 1, INT16_MAX));
  const int64_t rows = int64_t{p.ratio} * p.halves + present(scale);
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "sums", sums->dimensions(), {p.batch, params.splits, rows, p.dim}));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "dsquares", dsquares, DataType::F32,
                                        {p.batch, p.tokens / p.ratio}, &params.dsquares));
  if (present(scale) != present(dsquares)) {
    return invalid_argument(kOp, "'scale' and 'dsquares' must be given together");
  }
  params.dout = dkeys.untyped_data();
  params.dvalues = dvalues->untyped_data();
  params.dgates = dgates->untyped_data();
  params.sums = sums->typed_data();
  return launch_status(kOp, launch_gated_pool_bwd(params, stream));
}

// Reads values [B, S, 1, D], or their gradient, starts [B, S]?, and keys [B, S / R, D], or their
// gradient, which is called `keys_name`.
ffi::Error read_mean(const char* op, const AnyBuffer& values, const AnyBuffer& starts,
                     const char* keys_name, const AnyBuffer& keys, int64_t ratio,
                     MeanPoolParams* p) {
  namespace limits = ::jax_dsa::limits::gated_pool;
  const Dims dims = values.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "values", dims, {"B", "S", "H", "D"}));
  const int64_t batch = dims[0], tokens = dims[1], dim = dims[3];
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "H", dims[2], {1}));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "R", ratio, 1, limits::kMaxPooled));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "D", dim, 0, limits::kMaxDim));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "D", dim, limits::kDimMultiple));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "S", tokens, 0, limits::kMaxTokens));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(op, "B * ceil(S / R)", batch * ceil_div(tokens, ratio), 0, limits::kMaxBlocks));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, "values", values.element_type(), &p->dtype));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, keys_name, keys.element_type(), {values.element_type()}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, keys_name, keys.dimensions(), {batch, tokens / ratio, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "starts", starts, DataType::S32, {batch, tokens}, &p->starts));
  p->batch = batch, p->tokens = tokens;
  p->ratio = static_cast<int>(ratio);
  p->factor = 1.f / static_cast<float>(ratio);
  p->dim = static_cast<int>(dim);
  return ffi::Error::Success();
}

// values [B, S, 1, D], starts [B, S]? -> keys [B, S / R, D]
ffi::Error mean_pool_fwd(cudaStream_t stream, AnyBuffer values, AnyBuffer starts,
                         Result<AnyBuffer> keys, Attr<int64_t, "ratio"> ratio) {
  constexpr const char* kOp = "mean_pool_fwd";
  MeanPoolParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_mean(kOp, values, starts, "keys", *keys, ratio, &params));
  params.from = values.untyped_data(), params.to = keys->untyped_data();
  return launch_status(kOp, launch_mean_pool_fwd(params, stream));
}

// starts [B, S]?, dkeys [B, S / R, D] -> dvalues [B, S, 1, D]
ffi::Error mean_pool_bwd(cudaStream_t stream, AnyBuffer starts, AnyBuffer dkeys,
                         Result<AnyBuffer> dvalues, Attr<int64_t, "ratio"> ratio) {
  constexpr const char* kOp = "mean_pool_bwd";
  MeanPoolParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_mean(kOp, *dvalues, starts, "dkeys", dkeys, ratio, &params));
  params.from = dkeys.untyped_data(), params.to = dvalues->untyped_data();
  return launch_status(kOp, launch_mean_pool_bwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.gated_pool_bwd.v1", gated_pool_bwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.gated_pool_fwd.v1", gated_pool_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.mean_pool_bwd.v1", mean_pool_bwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.mean_pool_fwd.v1", mean_pool_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
