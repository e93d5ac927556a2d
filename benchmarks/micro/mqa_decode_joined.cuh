// An experiment beside cuda/mqa_decode: parts of a request joined within a cluster.
//
// Where requests are few, all are cut alike, and what follows is the merge kernel's: parts of 128
// KiB for 64 rows go to memory and come back, 17 MB for one request of 128 heads, behind another
// launch. Here as many neighbouring teams as a cluster has blocks have parts of the same item. They
// leave them in shared memory, and each block adds up its share of all of them. If the cluster has
// the whole item, that is the result; else clusters leave parts for the merge kernel, an eighth of
// them.
//
// Blocks of a cluster are neighbouring teams and the same member; so the members of a team are in
// clusters of their own.
#pragma once

#include "common/cluster.cuh"
#include "mqa_decode/launch.cuh"
#include "mqa_decode/wide.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kMostJoined = 8;  // blocks of a cluster, on any device
inline constexpr int kKeysFree = 9;    // and 10: named barriers that no other code has

struct JoinedDecode : Decode {
  int joined;

  JoinedDecode(const MqaDecodeParams& p, int tile_rows, int blocks, int joined)
      : Decode(p, tile_rows, blocks), joined(joined) {
    teams = teams / joined * joined;
  }
  bool worthwhile() const {
    return !top && teams >= joined && batch * groups * passes <= teams / joined;
  }

  __device__ int cluster() const { return quotient(blockIdx.x, joined); }
  __device__ int member() const { return cluster() - quotient(cluster(), members) * members; }
  __device__ int team() const {
    return quotient(cluster(), members) * joined + blockIdx.x - cluster() * joined;
  }
  __device__ int slot() const { return (team() * members + member()) * 2; }
  // Even where there is little work: a cluster is then an item's, and some of its blocks have none.
  __device__ int least_teams(int) const { return 0; }
  __device__ int parts_alike(int busy, int items) const {
    return max(quotient(quotient(busy, items), joined), 1) * joined;
  }
  __device__ int results_of(int parts, const Share& share) const {
    if (!joins(share)) return parts;
    return parts > joined ? parts / joined : 0;
  }
  // Whether items are cut alike. All blocks of a cluster say the same: its teams have parts of one
  // item, or none.
  __device__ bool joins(const Share& share) const {
    return share.work > 0 && share.alike > share.work;
  }
};

// What a block leaves for its cluster, in place of keys.
struct alignas(16) Parts {
  float values[kWideRows * kWideValues];  // as PieceLine has them
  float lse[kWideRows];
};
template <int kD>
__device__ Parts& parts_of(WideShared<kD>& shared) {
  static_assert(sizeof(Parts) <= sizeof(shared.keys));
  return *reinterpret_cast<Parts*>(shared.keys);
}

template <typename Shared>
struct JoinedWork : Work<Shared> {
  const JoinedDecode& joined;

  __device__ explicit JoinedWork(const JoinedDecode& p) : Work<Shared>(p), joined(p) {}
};
template <int kSide, int kD>
__device__ __forceinline__ void write_results(const JoinedWork<WideShared<kD>>& w, int number,
                                              const float (&o)[128], const sparse_mla::Rows& rows,
                                              uint32_t stage) {
  using Shared = WideShared<kD>;
  if (!w.joined.joins(w.notes().share)) {
    write_results<kSide>(static_cast<const Work<Shared>&>(w), number, o, rows, stage);
    return;
  }
  Parts& parts = parts_of(dynamic_shared<Shared>());
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float factor[2];
  // The other half has no use for keys any more.
  named_barrier_arrive<256>(kKeysFree + kSide);
  named_barrier_sync<256>(kKeysFree + 1 - kSide);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    const bool empty = total == 0.f;
    // Infinite values show as NaN where all scores are -inf.
    factor[r] = empty ? (w.piece(number).has_tiles ? 1.f : 0.f) : 1.f / total;
    if (kSide == 0 && lane % 4 == 0) {
      parts.lse[warp * 16 + r * 8 + lane / 4] =
          empty ? -INFINITY : (rows.reference[r] + log2f(total)) * kLn2;
    }
  }
  const auto value = [&](int i) {
    const int r = i / 2 % 2;
    return factor[r] == 0.f ? 0.f : o[i] * factor[r];
  };
  float4* to = reinterpret_cast<float4*>(parts.values) + (kSide * 128 + warp * 32) * 32 + lane;
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    to[i * 8] = make_float4(value(i), value(i + 1), value(i + 2), value(i + 3));
  }
}

// Adds up the cluster's parts of an item, each block and warp some of the lines; by the warpgroups
// that multiply.
template <int kD>
__device__ void join(const JoinedDecode& p, WideShared<kD>& shared) {
  Parts& parts = parts_of(shared);
  const Share& share = shared.notes.share;
  Piece piece = shared.notes.pieces[0];
  const int each = quotient(share.alike, share.work), clusters = quotient(each, p.joined);
  const int first_team = quotient(p.team(), each) * each;
  const int which = quotient(p.team() - first_team, p.joined);  // of the item's clusters
  // As if the item's first teams had left them.
  piece.slot =
      clusters == 1 ? -1 : ((first_team + which) * p.members + p.member()) * 2 + (which == 0);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kLines = kWideRows * kWideValues / 128;
  const int lines = quotient(kLines / 8, p.joined), first = (cluster_rank() * 8 + warp) * lines;
  const PieceLine<true> at(first, kWideValues);
  float weights[2][kMostJoined], factor[2];
  int64_t place[2];
  bool has[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row + r * 8;
    float top = -INFINITY, total = 0.f;
#pragma unroll
    for (int i = 0; i < kMostJoined; ++i) {
      weights[r][i] = i < p.joined ? cluster_peer(&parts, i)->lse[row] : -INFINITY;
      top = fmaxf(top, weights[r][i]);
    }
    const float base = sparse_mla::Rows::finite(top);
#pragma unroll
    for (int i = 0; i < kMostJoined; ++i) {
      weights[r][i] = exp2_approx((weights[r][i] - base) * kLog2E);
      if (i < p.joined) total += weights[r][i];
    }
    has[r] = piece.row + row < p.rows;
    place[r] = has[r] ? p.place(piece.batch, piece.group, piece.row + row) : 0;
    factor[r] = end_row(p, piece, kWideRows, row, place[r], top * kLog2E, total,
                        has[r] && first < 128 && first % 32 == 0 && lane % 4 == 0);
  }
#pragma unroll 1
  for (int line = first; line < first + lines; ++line) {
    float4 x[kMostJoined], y = {};
#pragma unroll
    for (int i = 0; i < kMostJoined; ++i) {
      if (i >= p.joined) break;
      x[i] = reinterpret_cast<const float4*>(cluster_peer(&parts, i)->values)[line * 32 + lane];
    }
#pragma unroll
    for (int i = 0; i < kMostJoined; ++i) {
      if (i >= p.joined) break;
      y.x += weights[0][i] * x[i].x, y.y += weights[0][i] * x[i].y;
      y.z += weights[1][i] * x[i].z, y.w += weights[1][i] * x[i].w;
    }
    y.x *= factor[0], y.y *= factor[0], y.z *= factor[1], y.w *= factor[1];
    if (piece.slot >= 0) {
      store_4(p.partial + (int64_t{piece.slot} * kLines + line) * 128 + lane * 4,
              {y.x, y.y, y.z, y.w});
    } else {
      auto* out = static_cast<__nv_bfloat16*>(p.out) + at.column + (line - first) * 8;
      store_pair(out + place[0] * kWideValues, y.x, y.y, has[0]);
      store_pair(out + place[1] * kWideValues, y.z, y.w, has[1]);
    }
  }
}

template <int kD, bool kRecords>
__global__ void __launch_bounds__(kWideThreads, 1)
    joined_kernel(const __grid_constant__ JoinedDecode p) {
  auto& shared = dynamic_shared<WideShared<kD>>();
  attend<kD, kRecords, JoinedWork>(p, shared);
  // The share is there for all: those that multiply have found it, the producer has waited for it.
  if (!p.joins(shared.notes.share)) return;
  __syncwarp();
  cluster_sync();
  if (threadIdx.x < 256) join(p, shared);
  __syncwarp();
  cluster_sync();  // nobody ends before its peers have read
}

// The kernel in clusters of so many blocks, if that can be and requests are few enough.
template <int kD, bool kRecords>
cudaError_t launch_joined(const MqaDecodeParams& params, int joined, cudaStream_t stream) {
  const auto kernel = joined_kernel<kD, kRecords>;
  constexpr int kBytes = sizeof(WideShared<kD>);
  int clusters = 0;
  if (cudaError_t e = resident_clusters(kernel, joined, kWideThreads, kBytes, &clusters);
      e != cudaSuccess) {
    return e;
  }
  const JoinedDecode p(params, kWideRows, std::min(clusters * joined, int{kMostProcessors}),
                       joined);
  if (!p.worthwhile()) return launch_mqa_decode(params, stream);
  const cudaError_t e = launch_clusters(kernel, int64_t{p.teams} * p.members / joined, joined,
                                        kWideThreads, kBytes, stream, p);
  if (e != cudaSuccess) return e;
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  return launch_behind(merge_kernel<true, 2>, int64_t{kMergeBlocks} * device.processors,
                       kMergeThreads, sizeof(MergeShared), stream, p, kWideRows);
}

inline cudaError_t launch_joined(const MqaDecodeParams& p, int joined, cudaStream_t stream) {
  const bool wide = !p.v && mqa_decode_rows(p.queries, p.heads, p.groups, p.dim, p.records) == 64;
  if (joined == 1 || !wide || p.batch == 0) return launch_mqa_decode(p, stream);
  if (p.records) return launch_joined<576, true>(p, joined, stream);
  return p.dim == 576 ? launch_joined<576, false>(p, joined, stream)
                      : launch_joined<512, false>(p, joined, stream);
}

}  // namespace jax_dsa::mqa_decode
