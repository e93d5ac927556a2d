// Handlers of quantisation to FP8 (e4m3) and of dequantisation.

#include "ffi/common.h"
#include "fp8/dequantize.h"
#include "fp8/quantize.h"
#include "fp8/quantize_tiles.h"

namespace jax_dsa {
namespace {

constexpr int64_t kBlock = kQuantizeBlock;

int64_t product(Dims dims) {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

// An array whose leading axes are combined: [batch, rows, cols].
struct Matrices {
  Dims dims;     // all axes
  Dims leading;  // the axes that `batch` combines
  int64_t batch, rows, cols;
};

// Reads x as matrices [..., R, C] if `rank` is 2, and as rows [..., C] if it is 1.
ffi::Error read_matrices(const char* op, const char* name, const AnyBuffer& x, size_t rank,
                         Matrices* out) {
  const Dims dims = x.dimensions();
  if (dims.size() < rank) {
    return invalid_argument(op, "'" + std::string(name) + "' has shape " + shape_string(dims) +
                                    ", expected " + (rank == 2 ? "(..., R, C)" : "(..., C)"));
  }
  const Dims leading = dims.first(dims.size() - rank);
  *out = {dims, leading, product(leading), rank == 2 ? dims[dims.size() - 2] : 1, dims.back()};
  return ffi::Error::Success();
}

// Checks codes of shape `q_dims`, and scales of shape `leading` followed by `blocks`.
ffi::Error check_codes(const char* op, const AnyBuffer& q, Dims q_dims, const F32& scale,
                       Dims leading, std::initializer_list<int64_t> blocks) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "q", q.element_type(), {DataType::F8E4M3FN}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "q", q.dimensions(), q_dims, {}));
  return check_shape(op, "scale", scale.dimensions(), leading, blocks);
}

// x [..., C] -> q [..., C] e4m3, scale [..., ceil(C / 128)]
ffi::Error quantize_fp8(cudaStream_t stream, AnyBuffer x, Result<AnyBuffer> q, Result<F32> scale,
                        Attr<bool, "power_of_two_scale"> power_of_two_scale) {
  constexpr const char* kOp = "quantize_fp8";
  Matrices m;
  QuantizeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(kOp, "x", x, 1, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(kOp, "x", x.element_type(), &params.dtype));
  DSA_FFI_RETURN_IF_ERROR(
      check_codes(kOp, *q, m.dims, *scale, m.leading, {ceil_div(m.cols, kBlock)}));
  params.x = x.untyped_data();
  params.q = static_cast<uint8_t*>(q->untyped_data());
  params.scale = scale->typed_data();
  params.rows = m.batch, params.cols = m.cols;
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(kOp, launch_quantize(params, stream));
}

ffi::Error check_transposed(const char* op, const AnyBuffer& q, const Matrices& m) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "q_transposed", q.element_type(), {DataType::F8E4M3FN}));
  return check_shape(op, "q_transposed", q.dimensions(), m.leading, {m.cols, m.rows});
}

// Quantises tiles of 128x128. `q_transposed` may be null.
ffi::Error quantize_tiles(const char* op, cudaStream_t stream, const AnyBuffer& x, AnyBuffer& q,
                          AnyBuffer* q_transposed, F32& scale, bool power_of_two_scale) {
  Matrices m;
  QuantizeTilesParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(op, "x", x, 2, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, "x", x.element_type(), &params.dtype));
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

// x [..., R, C] -> q [..., R, C] e4m3, scale [..., ceil(R / 128), ceil(C / 128)]
ffi::Error quantize_fp8_tiles(cudaStream_t stream, AnyBuffer x, Result<AnyBuffer> q,
                              Result<F32> scale,
                              Attr<bool, "power_of_two_scale"> power_of_two_scale) {
  return quantize_tiles("quantize_fp8_tiles", stream, x, *q, nullptr, *scale, power_of_two_scale);
}

// x [..., R, C] -> q [..., R, C] e4m3, q_transposed [..., C, R] with the same codes,
// scale [..., ceil(R / 128), ceil(C / 128)]
ffi::Error quantize_fp8_tiles_transpose(cudaStream_t stream, AnyBuffer x, Result<AnyBuffer> q,
                                        Result<AnyBuffer> q_transposed, Result<F32> scale,
                                        Attr<bool, "power_of_two_scale"> power_of_two_scale) {
  return quantize_tiles("quantize_fp8_tiles_transpose", stream, x, *q, &*q_transposed, *scale,
                        power_of_two_scale);
}

// Reads x and the codes of its transpose, and checks the latter's scales, which have the shape of
// x's leading axes followed by `blocks(m)`.
template <typename Params, typename Blocks>
ffi::Error read_transposed(const char* op, const AnyBuffer& x, AnyBuffer& q_transposed,
                           F32& scale_transposed, const Blocks& blocks, Matrices* m,
                           Params* params) {
  DSA_FFI_RETURN_IF_ERROR(read_matrices(op, "x", x, 2, m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(op, "x", x.element_type(), &params->dtype));
  DSA_FFI_RETURN_IF_ERROR(check_transposed(op, q_transposed, *m));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "scale_transposed", scale_transposed.dimensions(),
                                      m->leading, {blocks(m->cols), ceil_div(m->rows, kBlock)}));
  params->x = x.untyped_data();
  params->q_transposed = static_cast<uint8_t*>(q_transposed.untyped_data());
  params->scale_transposed = scale_transposed.typed_data();
  params->batch = m->batch, params->rows = m->rows, params->cols = m->cols;
  return ffi::Error::Success();
}

// x [..., R, C] -> q [..., R, C] e4m3, scale [..., R, ceil(C / 128)], q_transposed [..., C, R],
// scale_transposed [..., ceil(C / 128), ceil(R / 128)]
ffi::Error quantize_fp8_transpose(cudaStream_t stream, AnyBuffer x, Result<AnyBuffer> q,
                                  Result<F32> scale, Result<AnyBuffer> q_transposed,
                                  Result<F32> scale_transposed,
                                  Attr<bool, "power_of_two_scale"> power_of_two_scale) {
  constexpr const char* kOp = "quantize_fp8_transpose";
  Matrices m;
  QuantizeTransposeParams params = {};
  const auto tiles = [](int64_t cols) { return ceil_div(cols, kBlock); };
  DSA_FFI_RETURN_IF_ERROR(
      read_transposed(kOp, x, *q_transposed, *scale_transposed, tiles, &m, &params));
  DSA_FFI_RETURN_IF_ERROR(
      check_codes(kOp, *q, m.dims, *scale, m.leading, {m.rows, ceil_div(m.cols, kBlock)}));
  params.q = static_cast<uint8_t*>(q->untyped_data());
  params.scale = scale->typed_data();
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(kOp, launch_quantize_transpose(params, stream));
}

// x [..., R, C] -> q_transposed [..., C, R] e4m3, scale_transposed [..., C, ceil(R / 128)]
ffi::Error quantize_fp8_columns(cudaStream_t stream, AnyBuffer x, Result<AnyBuffer> q_transposed,
                                Result<F32> scale_transposed,
                                Attr<bool, "power_of_two_scale"> power_of_two_scale) {
  constexpr const char* kOp = "quantize_fp8_columns";
  Matrices m;
  QuantizeColumnsParams params = {};
  const auto columns = [](int64_t cols) { return cols; };
  DSA_FFI_RETURN_IF_ERROR(
      read_transposed(kOp, x, *q_transposed, *scale_transposed, columns, &m, &params));
  params.power_of_two_scale = power_of_two_scale;
  return launch_status(kOp, launch_quantize_columns(params, stream));
}

// q [..., C] e4m3, scale [..., ceil(C / 128)] -> x [..., C], bfloat16, float16 or float32. With
// `tiles`, q is [..., R, C] and scale [..., ceil(R / 128), ceil(C / 128)].
ffi::Error dequantize_fp8(cudaStream_t stream, AnyBuffer q, F32 scale, Result<AnyBuffer> x,
                          Attr<bool, "tiles"> tiles) {
  constexpr const char* kOp = "dequantize_fp8";
  Matrices m;
  DequantizeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_matrices(kOp, "q", q, tiles ? 2 : 1, &m));
  DSA_FFI_RETURN_IF_ERROR(read_dtype(kOp, "x", x->element_type(), &params.dtype));
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

DSA_FFI_HANDLER("jax_dsa.dequantize_fp8.v1", dequantize_fp8, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.quantize_fp8.v1", quantize_fp8, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.quantize_fp8_columns.v1", quantize_fp8_columns, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.quantize_fp8_tiles.v1", quantize_fp8_tiles, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.quantize_fp8_tiles_transpose.v1", quantize_fp8_tiles_transpose, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.quantize_fp8_transpose.v2", quantize_fp8_transpose, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
