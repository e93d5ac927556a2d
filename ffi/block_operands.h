// How blocks of keys are selected, which several handlers read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/common.h"
#include "indexer/indexer.h"

namespace jax_dsa {

// Reads the attributes of a selection of blocks of `keys` keys. `params->block_size`, `sink_blocks`
// and `local_blocks` get them, and `blocks` gets the number of blocks, at most `most`.
template <typename Params>
ffi::Error read_blocks(const char* op, int64_t keys, int64_t block_size, int64_t sink_blocks,
                       int64_t local_blocks, int64_t most, Params* params, int64_t* blocks) {
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "block_size", block_size, 1, std::max<int64_t>(keys, 1)));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "sink_blocks", sink_blocks, 0, INT64_MAX));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "local_blocks", local_blocks, 0, INT64_MAX));
  params->block_size = block_size;
  params->sink_blocks = sink_blocks;
  params->local_blocks = local_blocks;
  *blocks = indexer_blocks(keys, block_size);
  return check_range(op, "the number of blocks", *blocks, 0, most);
}

}  // namespace jax_dsa
