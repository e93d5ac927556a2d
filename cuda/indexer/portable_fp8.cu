#include "indexer/portable_launch.cuh"

namespace jax_dsa::indexer {

template struct Portable<IndexerDType::kE4M3>;

}  // namespace jax_dsa::indexer
