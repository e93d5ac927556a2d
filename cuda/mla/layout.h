// The layout of a key of multi-head latent attention (MLA).
#pragma once

namespace jax_dsa {

inline constexpr int kMlaValueDim = 512;  // a value is a key's first 512 elements

// An FP8 record: 512 e4m3 values, 4 f32 scales (one per 128 of them), 64 bf16 values.
inline constexpr int kMlaRecordBytes = 656;

}  // namespace jax_dsa
