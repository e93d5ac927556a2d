// Launches a decode kernel and the merge of its pieces.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "mqa_decode/merge.cuh"

namespace jax_dsa::mqa_decode {

// Of keys or values as TMA sees them, in boxes of 64 columns and `rows` keys.
inline cudaError_t encode_rows(CUtensorMap* map, const Decode& p, const void* base, int columns,
                               int rows) {
  const int64_t each = p.page_table ? int64_t{p.pages} * p.page_size : p.keys;
  const int64_t batch = p.batch_rows > 0 ? p.batch : 1;
  return encode_tensor_map(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      tensor_box<4>(2, base, {columns, p.groups, each, batch}, {64, 1, rows, 1}));
}

// `kernel` in kBlocks blocks a multiprocessor, with boxes of `box_rows` keys.
template <typename Shared, int kBlocks, typename... Maps>
cudaError_t launch(void (*kernel)(Decode, Maps...), const MqaDecodeParams& params, int tile_rows,
                   int box_rows, int threads, cudaStream_t stream) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  Decode p(params, tile_rows, kBlocks * std::min(device.processors, kMostProcessors));
  const int64_t tiles = ceil_div(p.keys, int64_t{kTile}) + kItemCost + 1;
  if ((p.batch * p.groups * p.passes + kMaxTeams) * tiles > INT32_MAX) return cudaErrorInvalidValue;
  // A tile must not cross a page.
  if (p.page_table && p.page_size % kTile != 0) p.tuning.boxes = false;
  if (p.keys == 0 || (p.page_table && p.pages == 0)) p.tuning.boxes = false;
  constexpr int kMaps = sizeof...(Maps);
  CUtensorMap maps[kMaps] = {};
  const void* const bases[] = {p.k, p.v};
  const int columns[] = {p.dim, p.value_dim};
  for (int i = 0; p.tuning.boxes && i < kMaps && bases[i]; ++i) {
    if (cudaError_t e = encode_rows(&maps[i], p, bases[i], columns[i], box_rows);
        e != cudaSuccess) {
      return e;
    }
  }
  const int64_t blocks = int64_t{p.teams} * p.members;
  cudaError_t e;
  if constexpr (kMaps == 1) {
    e = launch_blocks(kernel, blocks, threads, sizeof(Shared), stream, p, maps[0]);
  } else {
    e = launch_blocks(kernel, blocks, threads, sizeof(Shared), stream, p, maps[0], maps[1]);
  }
  if (e != cudaSuccess || p.teams == 1) return e;
  const auto launch_merge =
      p.tuning.overlap ? launch_behind<Decode, int> : launch_blocks<Decode, int>;
  return launch_merge(merge_kernel, int64_t{kMergeBlocks} * device.processors, kMergeThreads,
                      sizeof(MergeShared), stream, p, tile_rows);
}

}  // namespace jax_dsa::mqa_decode
