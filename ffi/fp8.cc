// Handlers of quantisation to FP8 and of its inverse.

#include "ffi/common.h"
#include "ffi/targets.h"
#include "fp8/dequantize.h"
#include "fp8/quantize.h"
#include "fp8/quantize_tiles.h"

namespace jax_dsa {
namespace {

constexpr int64_t kBlock = kQuantizeBlock;

int64_t product(ffi::Span<const int64_t> dims) {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

// An array of `rank` axes or more, as [batch, rows, cols].
struct Matrices {
  ffi::Span<const int64_t> dims, leading;
  int64_t batch, rows, cols;
};
ffi::Error read_matrices(const char* op, const ffi::AnyBuffer& x, size_t rank, Matrices* out) {
  const auto dims = x.dimensions();
  if (dims.size() < rank) return invalid_argument(op, "x has too few axes");
  const auto leading = dims.first(dims.size() - rank);
  *out = {dims, leading, product(leading), rank == 2 ? dims[dims.size() - 2] : 1, dims.back()};
  return ffi::Error::Success();
}

// Codes, and scales with their axes after the leading ones.
ffi::Error check_codes(const char* op, const ffi::AnyBuffer& q, ffi::Span<const int64_t> q_dims,
                       const ffi::Buffer<ffi::F32>& scale, ffi::Span<const int64_t> leading,
                       std::initializer_list<int64_t> blocks) {
  if (q.element_type() != ffi::DataType::F8E4M3FN) return invalid_argument(op, "q is not e4m3");
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "q", q.dimensions(), q_dims, {}));
  return check_shape(op, "scale", scale.dimensions(), leading, blocks);
}

ffi::Error read_dtype(const char* op, const ffi::AnyBuffer& x, DType* dtype) {
  const auto found = kernel_dtype(x.element_type());
  if (!found) return invalid_argument(op, "x is not bf16, f16 or f32");
  *dtype = *found;
  return ffi::Error::Success();
}

// x [..., C] -> q [..., C] e4m3, scale [..., ceil(C / 128)] f32
ffi::Error quantize_fp8(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> q,
                        ffi::Result<ffi::Buffer<ffi::F32>> scale, bool power_of_two_scale) {
  constexpr const char* kOp = "quantize_fp8";
  Matrices m;
  QuantizeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(kOp, x, 1, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(kOp, x, &params.dtype));
  DSA_FFI_RETURN_IF_ERROR(
      check_codes(kOp, *q, m.dims, *scale, m.leading, {ceil_div(m.cols, kBlock)}));
  params.x = x.untyped_data();
  params.q = static_cast<uint8_t*>(q->untyped_data());
  params.scale = scale->typed_data();
  params.rows = m.batch, params.cols = m.cols;
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(kOp, launch_quantize(params, stream));
}

ffi::Error check_transposed(const char* op, const ffi::AnyBuffer& q, const Matrices& m) {
  if (q.element_type() != ffi::DataType::F8E4M3FN) {
    return invalid_argument(op, "q_transposed is not e4m3");
  }
  return check_shape(op, "q_transposed", q.dimensions(), m.leading, {m.cols, m.rows});
}

// `q_transposed` may be null.
ffi::Error quantize_tiles(const char* op, cudaStream_t stream, const ffi::AnyBuffer& x,
                          ffi::AnyBuffer& q, ffi::AnyBuffer* q_transposed,
                          ffi::Buffer<ffi::F32>& scale, bool power_of_two_scale) {
  Matrices m;
  QuantizeTilesParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(op, x, 2, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, x, &params.dtype));
  DSA_FFI_RETURN_IF_ERROR(check_codes(op, q, m.dims, scale, m.leading,
                                      {ceil_div(m.rows, kBlock), ceil_div(m.cols, kBlock)}));
  if (q_transposed != nullptr) {
    DSA_FFI_RETURN_IF_ERROR(check_transposed(op, *q_transposed, m));
    params.q_transposed = static_cast<uint8_t*>(q_transposed->untyped_data());
  }
  params.x = x.untyped_data();
  params.q = static_cast<uint8_t*>(q.untyped_data());
  params.scale = scale.typed_data();
  params.batch = m.batch, params.rows = m.rows, params.cols = m.cols;
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(op, launch_quantize_tiles(params, stream));
}

// x [..., R, C] -> q [..., R, C] e4m3, scale [..., ceil(R / 128), ceil(C / 128)] f32
ffi::Error quantize_fp8_tiles(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> q,
                              ffi::Result<ffi::Buffer<ffi::F32>> scale, bool power_of_two_scale) {
  return quantize_tiles("quantize_fp8_tiles", stream, x, *q, nullptr, *scale, power_of_two_scale);
}

// The same, and before the scales the codes' transpose [..., C, R].
ffi::Error quantize_fp8_tiles_transpose(cudaStream_t stream, ffi::AnyBuffer x,
                                        ffi::Result<ffi::AnyBuffer> q,
                                        ffi::Result<ffi::AnyBuffer> q_transposed,
                                        ffi::Result<ffi::Buffer<ffi::F32>> scale,
                                        bool power_of_two_scale) {
  return quantize_tiles("quantize_fp8_tiles_transpose", stream, x, *q, &*q_transposed, *scale,
                        power_of_two_scale);
}

// `q` and `scale` may be null.
ffi::Error quantize_transpose(const char* op, cudaStream_t stream, const ffi::AnyBuffer& x,
                              ffi::AnyBuffer* q, ffi::Buffer<ffi::F32>* scale,
                              ffi::AnyBuffer& q_transposed, ffi::Buffer<ffi::F32>& scale_transposed,
                              bool power_of_two_scale) {
  Matrices m;
  QuantizeTransposeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(op, x, 2, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, x, &params.dtype));
  if (q != nullptr) {
    DSA_FFI_RETURN_IF_ERROR(
        check_codes(op, *q, m.dims, *scale, m.leading, {m.rows, ceil_div(m.cols, kBlock)}));
    params.q = static_cast<uint8_t*>(q->untyped_data());
    params.scale = scale->typed_data();
  }
  DSA_FFI_RETURN_IF_ERROR(check_transposed(op, q_transposed, m));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "scale_transposed", scale_transposed.dimensions(),
                                      m.leading, {m.cols, ceil_div(m.rows, kBlock)}));
  params.x = x.untyped_data();
  params.q_transposed = static_cast<uint8_t*>(q_transposed.untyped_data());
  params.scale_transposed = scale_transposed.typed_data();
  params.batch = m.batch, params.rows = m.rows, params.cols = m.cols;
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(op, launch_quantize_transpose(params, stream));
}

// x [..., R, C] -> q [..., R, C] e4m3, scale [..., R, ceil(C / 128)] f32, and of the transpose
// [..., C, R], [..., C, ceil(R / 128)]
ffi::Error quantize_fp8_transpose(cudaStream_t stream, ffi::AnyBuffer x,
                                  ffi::Result<ffi::AnyBuffer> q,
                                  ffi::Result<ffi::Buffer<ffi::F32>> scale,
                                  ffi::Result<ffi::AnyBuffer> q_transposed,
                                  ffi::Result<ffi::Buffer<ffi::F32>> scale_transposed,
                                  bool power_of_two_scale) {
  return quantize_transpose("quantize_fp8_transpose", stream, x, &*q, &*scale, *q_transposed,
                            *scale_transposed, power_of_two_scale);
}

// Those of the transpose alone.
ffi::Error quantize_fp8_columns(cudaStream_t stream, ffi::AnyBuffer x,
                                ffi::Result<ffi::AnyBuffer> q_transposed,
                                ffi::Result<ffi::Buffer<ffi::F32>> scale_transposed,
                                bool power_of_two_scale) {
  return quantize_transpose("quantize_fp8_columns", stream, x, nullptr, nullptr, *q_transposed,
                            *scale_transposed, power_of_two_scale);
}

// q [..., C] e4m3, scale [..., ceil(C / 128)] f32 -> x [..., C], bf16, f16 or f32; with `tiles`
// q [..., R, C] and scale [..., ceil(R / 128), ceil(C / 128)]
ffi::Error dequantize_fp8(cudaStream_t stream, ffi::AnyBuffer q, ffi::Buffer<ffi::F32> scale,
                          ffi::Result<ffi::AnyBuffer> x, bool tiles) {
  constexpr const char* kOp = "dequantize_fp8";
  Matrices m;
  DequantizeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(kOp, q, tiles ? 2 : 1, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(kOp, *x, &params.dtype));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "x", x->dimensions(), m.dims, {}));
  DSA_FFI_RETURN_IF_ERROR(
      tiles ? check_codes(kOp, q, m.dims, scale, m.leading,
                          {ceil_div(m.rows, kBlock), ceil_div(m.cols, kBlock)})
            : check_codes(kOp, q, m.dims, scale, m.leading, {ceil_div(m.cols, kBlock)}));
  params.q = static_cast<const uint8_t*>(q.untyped_data());
  params.scale = scale.typed_data();
  params.x = x->untyped_data();
  params.batch = m.batch, params.rows = m.rows, params.cols = m.cols;
  params.block_rows = tiles ? kQuantizeBlock : 1;
  return launch_status(kOp, launch_dequantize(params, stream));
}

// Of handlers whose results are codes and scales, in one layout.
auto codes_and_scales() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<bool>("power_of_two_scale");
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8, jax_dsa::quantize_fp8, jax_dsa::codes_and_scales(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8Tiles, jax_dsa::quantize_fp8_tiles,
                              jax_dsa::codes_and_scales(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8TilesTranspose, jax_dsa::quantize_fp8_tiles_transpose,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("power_of_two_scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8Transpose, jax_dsa::quantize_fp8_transpose,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("power_of_two_scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8Columns, jax_dsa::quantize_fp8_columns,
                              jax_dsa::codes_and_scales(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeFp8, jax_dsa::dequantize_fp8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("tiles"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
