// The layout of the keys of multi-head latent attention (MLA).
#pragma once

namespace jax_dsa {

inline constexpr int kMlaValueDim = 512;  // a value is the first 512 elements of a key

// An FP8 record is 512 e4m3 values, 4 float32 scales (one per 128 values) and 64 bf16 values.
inline constexpr int kMlaRecordBytes = 656;

// A page record is 448 e4m3 values, 64 bf16 values and 8 bytes of scales, of which the first 7
// belong to 64 e4m3 values each. Byte x means 2^(x - 127), and 255 means NaN. In a page, the values
// of all records come first, and then the scales of all records.
inline constexpr int kMlaPageRecordBytes = 584;
inline constexpr int kMlaPageRecordValues = 576;  // the bytes of a record's values
inline constexpr int kMlaPageRecordScales = 8;    // the bytes of its scales

}  // namespace jax_dsa
