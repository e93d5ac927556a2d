// Handler of attn_dist.

#include "attn_dist/attn_dist.h"

#include "ffi/common.h"
#include "ffi/limits.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], lse [B, T, N], ends [B, T]?,
// topk_length [B, T]?, sinks [B, N]?, log_sum [B, T, N]?
// -> out [B, H, T, K], sums over N / H heads each; or [B, T, K], sums over all heads
ffi::Error attn_dist_fwd(cudaStream_t stream, BF16 q, BF16 kv, S32 indices, F32 lse, AnyBuffer ends,
                         AnyBuffer topk_length, AnyBuffer sinks, AnyBuffer log_sum, Result<F32> out,
                         Attr<float, "scale"> scale) {
  constexpr const char* kOp = "attn_dist_fwd";
  AttnDistFwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_operands(kOp, q, kv, indices, ends, topk_length, &params, {}, limits::attn_dist::kDims));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  const int64_t batch = params.batch, queries = params.queries, slots = params.slots;
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "lse", lse.dimensions(), {batch, queries, params.heads}));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "log_sum", log_sum, DataType::F32,
                                        {batch, queries, params.heads}, &params.log_sum));
  int64_t sums = 1;
  if (out->dimensions().size() == 4) {
    sums = out->dimensions()[1];
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "out", out->dimensions(), {batch, sums, queries, slots}));
  } else {
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), {batch, queries, slots}));
  }
  if (sums == 0 || sums % params.groups != 0 || params.heads % sums != 0) {
    return invalid_argument(kOp, "'out' has " + std::to_string(sums) +
                                     " sums for each slot, expected a multiple of G = " +
                                     std::to_string(params.groups) +
                                     " that divides N = " + std::to_string(params.heads));
  }
  params.lse = lse.typed_data();
  params.out = out->typed_data();
  params.head_group = static_cast<int>(params.heads / sums);
  params.scale = scale;
  return launch_status(kOp, launch_attn_dist_fwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.attn_dist_fwd.v2", attn_dist_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
