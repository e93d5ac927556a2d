// Handlers of sparse MLA.

#include "sparse_mla/sparse_mla.h"

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?, sinks
// [B, N]?
// -> out [B, T, N, 512], lse [B, T, N]
ffi::Error sparse_mla_fwd(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> kv,
                          ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                          ffi::AnyBuffer topk_length, ffi::AnyBuffer sinks,
                          ffi::Result<ffi::Buffer<ffi::BF16>> out,
                          ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale) {
  constexpr const char* kOp = "sparse_mla_fwd";
  SparseMlaFwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, kv, indices, ends, topk_length, &params));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, out, lse, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  return launch_status(kOp, launch_sparse_mla_fwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseMlaFwd, jax_dsa::sparse_mla_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
