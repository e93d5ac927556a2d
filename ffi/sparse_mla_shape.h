// The dimensions that the handlers of sparse MLA and attn_dist read off q, kv and indices.
#pragma once

#include <limits>

#include "ffi/common.h"

namespace jax_dsa {

struct SparseMlaShape {
  int64_t batch, queries, keys;
  int heads, groups, slots, dim;

  // From q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K].
  static ffi::Error read(const char* op, ffi::AnyBuffer::Dimensions q,
                         ffi::AnyBuffer::Dimensions kv, ffi::AnyBuffer::Dimensions indices,
                         SparseMlaShape* shape) {
    if (q.size() != 4) return invalid_argument(op, "q is not of rank 4");
    if (kv.size() != 4) return invalid_argument(op, "kv is not of rank 4");
    if (indices.size() != 4) return invalid_argument(op, "indices is not of rank 4");
    const int64_t batch = q[0], queries = q[1], heads = q[2], dim = q[3];
    const int64_t keys = kv[1], groups = kv[2], slots = indices[3];
    if (dim != 576 && dim != 512) return invalid_argument(op, "D is neither 576 nor 512");
    if (groups == 0 || heads % groups != 0) return invalid_argument(op, "N is no multiple of G");
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    if (heads > kMax || slots > kMax) return invalid_argument(op, "N or K exceeds 2^31 - 1");
    DSA_FFI_RETURN_IF_ERROR(check_shape(op, "kv", kv, {}, {batch, keys, groups, dim}));
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(op, "indices", indices, {}, {batch, queries, groups, slots}));
    *shape = {batch,
              queries,
              keys,
              static_cast<int>(heads),
              static_cast<int>(groups),
              static_cast<int>(slots),
              static_cast<int>(dim)};
    return ffi::Error::Success();
  }
};

}  // namespace jax_dsa
