// The layout of the keys of multi-head latent attention (MLA).
#pragma once

namespace jax_dsa {

inline constexpr int kMlaValueDim = 512;  // a value is the first 512 elements of a key

// An FP8 record is 512 e4m3 values, 4 float32 scales (one per 128 values) and 64 bf16 values.
inline constexpr int kMlaRecordBytes = 656;

}  // namespace jax_dsa
