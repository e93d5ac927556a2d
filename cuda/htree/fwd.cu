// Launcher of the forward kernels: for as many queries as the workspace has room for, layer by
// layer scores, top-k and lists, then the attention.

#include <algorithm>

#include "common/launch.cuh"
#include "htree/attend.cuh"
#include "htree/list.cuh"
#include "htree/scores.cuh"
#include "topk/topk.h"

namespace jax_dsa {
namespace {

using htree::Chunk;
using htree::Pass;

// Parts of the workspace, one behind the other.
struct Parts {
  char* at;
  template <typename T>
  void take(T*& part, int64_t elements) {
    part = reinterpret_cast<T*>(at);
    at += ceil_div(elements * int64_t{sizeof(T)}, int64_t{256}) * 256;
  }
};

// Takes the workspace apart; returns its size.
int64_t divide(const HTreeFwdParams& p, int64_t layers, Chunk& chunk) {
  char* const start = static_cast<char*>(p.workspace);
  Parts parts = {start};
  if (layers < 2) return 0;
  chunk.width = p.compression * p.top_k;
  parts.take(chunk.importance, chunk.rows * chunk.width);
  parts.take(chunk.ends, chunk.rows);
  parts.take(chunk.ordinals, chunk.rows * (p.top_k - 1));
  parts.take(chunk.nodes, chunk.rows * p.top_k * (layers - 1));
  parts.take(chunk.masks, chunk.rows * p.top_k * (layers - 1));
  return parts.at - start;
}

template <int kD, int kR>
cudaError_t run(const Pass& pass, cudaStream_t stream) {
  using namespace htree;
  const HTreeFwdParams& p = pass.p;
  const Chunk& chunk = pass.chunk;
  if (pass.blocks() > INT32_MAX || chunk.rows > INT32_MAX) return cudaErrorInvalidValue;
  for (int layer = pass.layers.count - 1; layer > 0; --layer) {
    if (cudaError_t e =
            launch_blocks(scores_kernel<kD, kR>, pass.blocks(), kThreads,
                          static_cast<int>(sizeof(ScoresShared<kD, kR>)), stream, pass, layer);
        e != cudaSuccess) {
      return e;
    }
    TopkParams best = {};
    best.logits = chunk.importance, best.ends = chunk.ends, best.indices = chunk.ordinals;
    best.rows = chunk.rows, best.size = chunk.width, best.k = p.top_k - 1;
    if (cudaError_t e = launch_topk(best, stream); e != cudaSuccess) return e;
    if (cudaError_t e = launch_blocks(list_kernel<kR>, chunk.rows, kListThreads,
                                      static_cast<int>(p.top_k) * 4, stream, pass, layer);
        e != cudaSuccess) {
      return e;
    }
  }
  return launch_blocks(attend_kernel<kD, kR>, pass.blocks(), kThreads,
                       static_cast<int>(sizeof(AttendShared<kD, kR>)), stream, pass);
}

template <int kD>
cudaError_t run(const Pass& pass, cudaStream_t stream) {
  switch (pass.p.compression) {
    case 8:
      return run<kD, 8>(pass, stream);
    case 16:
      return run<kD, 16>(pass, stream);
    case 32:
      return run<kD, 32>(pass, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t htree_fwd_workspace(const HTreeFwdParams& p, int64_t rows) {
  Chunk chunk = {};
  chunk.rows = rows;
  HTreeFwdParams none = p;
  none.workspace = nullptr;
  return divide(none, htree_layers(p.tokens, p.compression, p.top_k).count, chunk);
}

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 ||
      p.heads / p.groups > htree::kWarps * htree::kHeads || p.top_k < 1 || p.top_k > 1024 ||
      (p.compression != 8 && p.compression != 16 && p.compression != 32)) {
    return cudaErrorInvalidValue;
  }
  Pass pass = {};
  pass.p = p;
  pass.layers = htree_layers(p.tokens, p.compression, p.top_k);
  pass.group_heads = static_cast<int>(p.heads / p.groups);
  pass.parts = ceil_div(pass.group_heads, htree::kHeads);
  pass.tile = htree::kWarps / pass.parts;

  // Whole batch entries where one fits, else even parts of one, in whole waves of thread blocks.
  int64_t rows = p.batch * p.queries * p.groups;
  while (rows > p.groups && htree_fwd_workspace(p, rows) > p.workspace_bytes) {
    rows -= ceil_div(rows, int64_t{64});
  }
  if (htree_fwd_workspace(p, rows) > p.workspace_bytes) return cudaErrorInvalidValue;
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const int64_t fit = rows / p.groups;  // queries
  const int64_t entries = std::max<int64_t>(fit / p.queries, 1);
  int64_t count = std::min(fit, p.queries);
  if (count < p.queries) {
    const int64_t wave = std::max<int64_t>(device.processors / p.groups, 1) * pass.tile;
    if (count >= wave) count = count / wave * wave;
  }
  for (int64_t batch = 0; batch < p.batch; batch += entries) {
    for (int64_t query = 0; query < p.queries; query += count) {
      Chunk& chunk = pass.chunk;
      chunk.first_batch = static_cast<int>(batch);
      chunk.batch = static_cast<int>(std::min(entries, p.batch - batch));
      chunk.first_query = query;
      chunk.queries = std::min(count, p.queries - query);
      chunk.rows = chunk.batch * p.groups * chunk.queries;
      pass.tiles = static_cast<int>(ceil_div(chunk.queries, int64_t{pass.tile}));
      divide(p, pass.layers.count, chunk);
      const cudaError_t e = p.dim == 128  ? run<128>(pass, stream)
                            : p.dim == 64 ? run<64>(pass, stream)
                                          : cudaErrorInvalidValue;
      if (e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
