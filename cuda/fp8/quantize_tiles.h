// Quantisation to e4m3 in tiles of 128 rows and 128 columns, with a scale for each tile, for each
// row of a tile, or for each column.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// Quantises weights, with a scale for each tile.
struct QuantizeTilesParams {
  const void* x;          // [batch, rows, cols], dtype
  uint8_t* q;             // [batch, rows, cols], e4m3
  uint8_t* q_transposed;  // [batch, cols, rows], the same codes; may be null
  float* scale;           // [batch, ceil(rows / 128), ceil(cols / 128)]
  int64_t batch, rows, cols;
  DType dtype;
  bool power_of_two_scale;  // round every scale up to a power of two
};

cudaError_t launch_quantize_tiles(const QuantizeTilesParams& params, cudaStream_t stream);

// Quantises an operand of gradients that is contracted along its rows in one product and along its
// columns in another. The result for the first is x with a scale for each 1x128 block of its rows,
// that for the second the transpose with a scale for each tile. The smallest scale is 1e-20 / 448.
struct QuantizeTransposeParams {
  const void* x;            // [batch, rows, cols], dtype
  uint8_t* q;               // [batch, rows, cols], e4m3
  float* scale;             // [batch, rows, ceil(cols / 128)]
  uint8_t* q_transposed;    // [batch, cols, rows], e4m3
  float* scale_transposed;  // [batch, ceil(cols / 128), ceil(rows / 128)]
  int64_t batch, rows, cols;
  DType dtype;
  bool power_of_two_scale;
};

cudaError_t launch_quantize_transpose(const QuantizeTransposeParams& params, cudaStream_t stream);

// Quantises an operand of gradients that is contracted along its columns only. The result is the
// transpose with a scale for each 1x128 block of its rows. The smallest scale is 1e-20 / 448.
struct QuantizeColumnsParams {
  const void* x;            // [batch, rows, cols], dtype
  uint8_t* q_transposed;    // [batch, cols, rows], e4m3
  float* scale_transposed;  // [batch, cols, ceil(rows / 128)]
  int64_t batch, rows, cols;
  DType dtype;
  bool power_of_two_scale;
};

cudaError_t launch_quantize_columns(const QuantizeColumnsParams& params, cudaStream_t stream);

}  // namespace jax_dsa
