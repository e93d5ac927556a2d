// Chooses the top-k kernel. Short rows are held in registers. Otherwise, a few long rows are
// processed by several CTAs each, and many rows by one CTA each, which has more threads if the rows
// are long.

#include <algorithm>

#include "common/device.h"
#include "common/error.h"
#include "common/launch.cuh"
#include "topk/cluster.h"
#include "topk/fwd.cuh"
#include "topk/resident.cuh"
#include "topk/split.cuh"

namespace jax_dsa {
namespace {

constexpr int kMaxRanks = 8;    // CTAs of the largest cluster that every GPU with clusters supports
constexpr int kMaxSplits = 16;  // CTAs per row without clusters
// The number of logits per CTA from which another CTA per row is worth its synchronisation.
constexpr int64_t kMinSplit = int64_t{1} << 15;
// The row size from which a wide CTA is faster for any number of rows.
constexpr int64_t kLongRow = int64_t{1} << 16;

// Returns the number of entries of a list for `wanted` values. Beside these it has room for as many
// again, and for at least one tile.
template <typename T>
int capacity_for(int64_t wanted) {
  return static_cast<int>(ceil_div(wanted + std::max<int64_t>(wanted, T::kTile), int64_t{4}) * 4);
}

// Returns the number of CTAs per row, a power of 2, of which `resident` run at the same time.
int ranks_for(int64_t rows, int64_t size, int64_t resident, int most) {
  int ranks = 1;
  while (ranks < most && rows * ranks * 2 <= resident && size >= 2 * ranks * kMinSplit) ranks *= 2;
  return ranks;
}

// Launches the streaming kernels with one CTA or several CTAs per row.
template <typename T>
cudaError_t launch_rows(const TopkParams& p, int64_t wanted, int ranks, cudaStream_t stream) {
  const int capacity = capacity_for<T>(wanted);
  if (ranks > 1 && p.workspace_bytes >= topk::split_bytes(p.rows, wanted, ranks)) {
    return topk::launch_splits<T>(p, capacity, ranks, stream);
  }
  return topk::launch<T>(p, capacity, 1, stream);
}

}  // namespace

int64_t topk_workspace_bytes(int64_t rows, int64_t size, int64_t k) {
  const int ranks = ranks_for(rows, size, int64_t{kMaxSms} * topk::Wide::kCtasPerSm, kMaxSplits);
  return ranks > 1 ? topk::split_bytes(rows, std::min(k, size), ranks) : 0;
}

cudaError_t launch_topk(const TopkParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  const int64_t wanted = std::min(p.k, p.size);
  if (wanted > kTopkMaxSelected || p.size > kTopkMaxSize) return cudaErrorInvalidValue;
  if (p.rows > INT32_MAX / kMaxRanks) return cudaErrorInvalidValue;
  if (topk::fits<topk::Resident>(p)) return topk::launch_resident<topk::Resident>(p, stream);
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));

  const int64_t resident = int64_t{std::min(device.num_sms, kMaxSms)} * topk::Wide::kCtasPerSm;
  if constexpr (kHasHopperTier) {
    const int ranks = ranks_for(p.rows, p.size, resident, kMaxRanks);
    if (device.tier == Tier::kHopper && ranks > 1) {
      return hopper::launch_topk_clusters(p, capacity_for<topk::Latency>(wanted), ranks, stream);
    }
  }
  const int ranks = ranks_for(p.rows, p.size, resident, kMaxSplits);
  const bool fits =
      topk::Wide::shared_bytes(capacity_for<topk::Wide>(wanted)) <= device.shared_bytes;
  if (fits && (p.rows <= resident || p.size >= kLongRow)) {
    return launch_rows<topk::Wide>(p, wanted, ranks, stream);
  }
  return launch_rows<topk::Throughput>(p, wanted, ranks, stream);
}

}  // namespace jax_dsa
