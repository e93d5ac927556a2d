// A key is pooled, element by element, from the contributions i of its block's tokens:
//
//     p_i = softmax_i(gate_i + bias_i)        y = sum_i p_i v_i
//     dv_i = p_i dy                           dgate_i = p_i (v_i - y) dy
//
// Bound by memory: each direction reads values and gates once, and the backward pass, which finds
// p and y again, writes each gradient once: a token's two halves belong to different blocks. A
// team of threads makes a key: kLanes of them lie along the channels, four channels each, and
// kRanks such rows have kHeld contributions each, whose loads are all issued before the first use.
// One team writes an element, and the sum over keys that the bias's gradient is stays in registers
// until the last: all orders are fixed.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "gated_pool/gated_pool.h"

namespace jax_dsa::gated_pool {

inline constexpr int kThreads = 128;
inline constexpr int kHeld = 8;   // contributions of a thread
inline constexpr int kWidth = 4;  // channels of a thread

template <int kLanes_, int kRanks_>
struct Shape {
  static constexpr int kLanes = kLanes_, kRanks = kRanks_;
  static constexpr int kTeams = kThreads / (kLanes * kRanks);
  static constexpr int kTile = kLanes * kWidth;  // channels of a block of threads
  static constexpr int kMost = kRanks * kHeld;   // contributions
  static_assert(kTeams * kLanes * kRanks == kThreads && (kRanks == 1 || kTeams == 1));
};
using Few = Shape<32, 1>;   // a team is a warp
using Many = Shape<8, 16>;  // a team is the block
static_assert(Many::kMost == kMostPooled);

template <DType kType>
using Element = std::conditional_t<kType == DType::kF32, float, uint16_t>;

// Four elements as they lie.
template <DType kType>
using Four = std::conditional_t<kType == DType::kF32, uint4, uint2>;

template <DType kType>
__device__ __forceinline__ void widen(const Four<kType>& x, float (&y)[kWidth]) {
  if constexpr (kType == DType::kF32) {
    y[0] = __uint_as_float(x.x), y[1] = __uint_as_float(x.y);
    y[2] = __uint_as_float(x.z), y[3] = __uint_as_float(x.w);
  } else {
    const float2 low = unpack_16<kType>(x.x), high = unpack_16<kType>(x.y);
    y[0] = low.x, y[1] = low.y, y[2] = high.x, y[3] = high.y;
  }
}

// What is read once, and what nothing here reads again.
template <DType kType>
__device__ __forceinline__ Four<kType> load(const Element<kType>* from) {
  return __ldcs(reinterpret_cast<const Four<kType>*>(from));
}
template <DType kType>
__device__ __forceinline__ void store(Element<kType>* to, const float (&x)[kWidth]) {
  Four<kType> y;
  if constexpr (kType == DType::kF32) {
    y.x = __float_as_uint(x[0]), y.y = __float_as_uint(x[1]);
    y.z = __float_as_uint(x[2]), y.w = __float_as_uint(x[3]);
  } else {
    y.x = pack_16<kType>(x[0], x[1]), y.y = pack_16<kType>(x[2], x[3]);
  }
  __stcs(reinterpret_cast<Four<kType>*>(to), y);
}

// The largest gate of some contributions, and the sums of exp(gate - largest) and of their values
// times it. Of no contribution the largest is -inf, and exponentials are relative to 0.
struct Sums {
  float most[kWidth], weight[kWidth], value[kWidth];

  __device__ float base(int c) const { return most[c] == -INFINITY ? 0.f : most[c]; }

  __device__ void join(const Sums& other) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const float own = most[c];
      most[c] = fmaxf(own, other.most[c]);
      const float kept = exp2_approx((own - base(c)) * kLog2E);
      const float added = exp2_approx((other.most[c] - base(c)) * kLog2E);
      weight[c] = weight[c] * kept + other.weight[c] * added;
      value[c] = value[c] * kept + other.value[c] * added;
    }
  }
};

// Of a team that is the whole block; keys take turns.
template <typename Shape>
struct JoinShared {
  static constexpr int kWarps = kThreads / 32;
  float sums[2][kWarps][3 * kWidth][Shape::kLanes];
};
struct BiasShared {
  float4 sums[kHeld][kThreads];
};

template <DType kType, typename Shape, bool kPacked>
struct Team {
  using T = Element<kType>;

  const GatedPoolParams& p;
  int contributions, rank, channel;
  bool active;  // whether there is such a channel
  int stride;   // from a token to the next
  // Of the block that it works on.
  int64_t entry;   // of the batch
  int slot, last;  // row of the last token; -1 without a block
  bool follows;    // whether there is a block before it

  __device__ Team(const GatedPoolParams& p, int tile)
      : p(p),
        contributions(p.ratio * p.halves),
        rank(static_cast<int>(threadIdx.x) / Shape::kLanes % Shape::kRanks),
        channel(tile * Shape::kTile + static_cast<int>(threadIdx.x) % Shape::kLanes * kWidth),
        active(channel < p.dim),
        stride(p.halves * p.dim) {}

  __device__ static int number() {
    return static_cast<int>(threadIdx.x) / (Shape::kLanes * Shape::kRanks);
  }

  __device__ void find(int64_t entry_, int slot_) {
    entry = entry_, slot = slot_;
    // Hidden, or the offsets and the biases of all contributions would stay in registers.
    stride = static_cast<int>(hidden(static_cast<uint32_t>(p.halves * p.dim)));
    const int tokens = static_cast<int>(p.tokens), first = (slot + 1) * p.ratio - 1;
    if constexpr (kPacked) {
      // A block's end lies as far behind `first` as its document's first row is behind a multiple
      // of the ratio.
      const int32_t* starts = p.starts + entry * p.tokens;
      int found = -1;
      for (int d = static_cast<int>(threadIdx.x) % 32; d < p.ratio && first + d < tokens; d += 32) {
        const int start = __ldg(starts + first + d);
        if (start >= 0 && start % p.ratio == d && start <= first + d - p.ratio + 1)
          found = first + d;
      }
      last = __reduce_max_sync(~0u, found);
      follows = last >= 0 && __ldg(starts + max(last, 0)) <= last - 2 * p.ratio + 1;
    } else {
      last = first < tokens ? first : -1;
      follows = slot > 0;
    }
  }

  __device__ int index(int j) const { return rank * kHeld + j; }
  // Whether contribution i is of the block itself, and not of the one before.
  __device__ bool is_own(int i) const { return i >= contributions - p.ratio; }
  __device__ bool used(int i) const {
    return active && last >= 0 && i < contributions && (is_own(i) || follows);
  }
  __device__ int64_t at(int row, int half) const {
    return ((entry * p.tokens + row) * p.halves + half) * p.dim + channel;
  }
  // Where contribution i lies, from contribution 0 on.
  __device__ int64_t at_first() const { return at(last - contributions + 1, 0); }
  __device__ int offset(int i) const { return i * stride + (is_own(i) ? stride - p.dim : 0); }
  // And of the bias, from an entry's first on.
  __device__ int bias_offset(int i) const {
    return channel + offset(i) - (is_own(i) ? (contributions - p.ratio) * stride : 0);
  }
  __device__ int64_t at_key() const {
    return (entry * (p.tokens / p.ratio) + slot) * p.dim + channel;
  }

  // Reads the thread's contributions: weights are exp(gate - the thread's largest).
  __device__ Sums read(float (&weights)[kHeld][kWidth], Four<kType> (&values)[kHeld]) const {
    Four<kType> gates[kHeld];
    const int64_t first = at_first();
    const T* const from_gates = static_cast<const Element<kType>*>(p.gates) + first;
    const T* const from_values = static_cast<const Element<kType>*>(p.values) + first;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      values[j] = gates[j] = {};
      if (used(index(j))) {
        gates[j] = load<kType>(from_gates + offset(index(j)));
        values[j] = load<kType>(from_values + offset(index(j)));
      }
    }
    const float* const biases = p.bias + entry * contributions * p.dim;
    Sums all = {};
#pragma unroll
    for (int c = 0; c < kWidth; ++c) all.most[c] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const bool is_used = used(index(j));
      float4 four = {};
      if (is_used) four = __ldg(reinterpret_cast<const float4*>(biases + bias_offset(index(j))));
      const float bias[kWidth] = {four.x, four.y, four.z, four.w};
      float gate[kWidth];
      widen<kType>(gates[j], gate);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        weights[j][c] = is_used ? gate[c] + bias[c] : -INFINITY;
        all.most[c] = fmaxf(all.most[c], weights[j][c]);
      }
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      float value[kWidth];
      widen<kType>(values[j], value);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        weights[j][c] = exp2_approx((weights[j][c] - all.base(c)) * kLog2E);
        all.weight[c] += weights[j][c];
        all.value[c] = fmaf(weights[j][c], value[c], all.value[c]);
      }
    }
    return all;
  }

  // The whole team's sums; `turn` goes up from one block to the next.
  __device__ Sums joined(Sums own, JoinShared<Shape>& shared, int turn) const {
    if constexpr (Shape::kRanks == 1) {
      return own;
    } else {
#pragma unroll
      for (int d = Shape::kLanes; d < 32; d *= 2) {
        Sums other;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          other.most[c] = __shfl_xor_sync(~0u, own.most[c], d);
          other.weight[c] = __shfl_xor_sync(~0u, own.weight[c], d);
          other.value[c] = __shfl_xor_sync(~0u, own.value[c], d);
        }
        own.join(other);
      }
      auto& sums = shared.sums[turn % 2];
      const int lane = static_cast<int>(threadIdx.x) % 32,
                warp = static_cast<int>(threadIdx.x) / 32;
      if (lane < Shape::kLanes) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          sums[warp][c][lane] = own.most[c];
          sums[warp][kWidth + c][lane] = own.weight[c];
          sums[warp][2 * kWidth + c][lane] = own.value[c];
        }
      }
      __syncthreads();
      Sums all;
#pragma unroll
      for (int w = 0; w < JoinShared<Shape>::kWarps; ++w) {
        Sums one;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          one.most[c] = sums[w][c][lane % Shape::kLanes];
          one.weight[c] = sums[w][kWidth + c][lane % Shape::kLanes];
          one.value[c] = sums[w][2 * kWidth + c][lane % Shape::kLanes];
        }
        if (w == 0) {
          all = one;
        } else {
          all.join(one);
        }
      }
      return all;
    }
  }

  // Zeros in the gradients of the slot's tokens that no key is made of.
  __device__ void clear(T* dvalues, T* dgates) const {
    const int tokens = static_cast<int>(p.tokens), ratio = p.ratio;
    if (!active || (!kPacked && (slot + 2) * int64_t{ratio} <= tokens)) return;
    const int32_t* starts = p.starts + entry * p.tokens;
    for (int row = slot * ratio + rank; row < min((slot + 1) * ratio, tokens);
         row += Shape::kRanks) {
      const int start = kPacked ? min(max(__ldg(starts + row), 0), row) : 0;
      const int end = start + ((row - start) / ratio + 1) * ratio - 1;
      const auto is_whole = [&](int end) {
        return end < tokens && (!kPacked || __ldg(starts + end) == start);
      };
      const float zeros[kWidth] = {};
      if (!is_whole(end)) {
        store<kType>(dvalues + at(row, p.halves - 1), zeros);
        store<kType>(dgates + at(row, p.halves - 1), zeros);
      }
      if (p.halves == 2 && !is_whole(end + ratio)) {
        store<kType>(dvalues + at(row, 0), zeros);
        store<kType>(dgates + at(row, 0), zeros);
      }
    }
  }
};

template <DType kType, typename Shape, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    fwd_kernel(const __grid_constant__ GatedPoolFwdParams params, uint32_t items, uint32_t slots,
               int tiles) {
  auto& shared = dynamic_shared<JoinShared<Shape>>();
  using OneTeam = Team<kType, Shape, kPacked>;
  OneTeam team(params.in, static_cast<int>(blockIdx.x % tiles));
  const uint32_t item = blockIdx.x / tiles * Shape::kTeams + OneTeam::number();
  if (item >= items) return;  // a whole team, or the whole block
  team.find(item / slots, static_cast<int>(item % slots));
  float weights[kHeld][kWidth];
  Four<kType> values[kHeld];
  const Sums all = team.joined(team.read(weights, values), shared, 0);
  if (!team.active || team.rank > 0) return;
  float key[kWidth] = {};
#pragma unroll
  for (int c = 0; c < kWidth; ++c) {
    if (team.last >= 0) key[c] = all.value[c] / all.weight[c];
  }
  store<kType>(static_cast<Element<kType>*>(params.out) + team.at_key(), key);
}

// The blocks of an entry share out its keys, so that each sums the bias's gradient of many.
template <DType kType, typename Shape, bool kPacked, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    bwd_kernel(const __grid_constant__ GatedPoolBwdParams params, int slots, int tiles) {
  const GatedPoolParams& p = params.in;
  using OneTeam = Team<kType, Shape, kPacked>;
  OneTeam team(p, static_cast<int>(blockIdx.x % tiles));
  const int64_t block = blockIdx.x / tiles, entry = block / params.parts;
  const int part = static_cast<int>(block % params.parts);
  auto* const dvalues = static_cast<Element<kType>*>(params.dvalues);
  auto* const dgates = static_cast<Element<kType>*>(params.dgates);
  float dbias[kHeld][kWidth] = {};
  int turn = 0;
  for (int64_t slot = part * Shape::kTeams + OneTeam::number(); slot < slots;
       slot += params.parts * Shape::kTeams, ++turn) {
    team.find(entry, static_cast<int>(slot));
    float dkey[kWidth] = {};
    if (team.active && team.last >= 0) {
      widen<kType>(load<kType>(static_cast<const Element<kType>*>(params.dout) + team.at_key()),
                   dkey);
    }
    float weights[kHeld][kWidth];
    Four<kType> values[kHeld];
    const Sums own = team.read(weights, values);
    const Sums all = team.joined(own, dynamic_shared<JoinShared<Shape>>(), turn);
    float share[kWidth], mean[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const float scale = 1.f / all.weight[c];
      mean[c] = all.value[c] * scale;
      share[c] =
          Shape::kRanks == 1 ? scale : scale * exp2_approx((own.base(c) - all.base(c)) * kLog2E);
    }
    const int64_t first = team.at_first();
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (!team.used(team.index(j))) continue;
      // They stay as they lie until here.
      values[j].x = hidden(values[j].x), values[j].y = hidden(values[j].y);
      float value[kWidth], dvalue[kWidth], dgate[kWidth];
      widen<kType>(values[j], value);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        dvalue[c] = weights[j][c] * share[c] * dkey[c];
        dgate[c] = dvalue[c] * (value[c] - mean[c]);
        dbias[j][c] += dgate[c];
      }
      store<kType>(dvalues + first + team.offset(team.index(j)), dvalue);
      store<kType>(dgates + first + team.offset(team.index(j)), dgate);
    }
    team.clear(dvalues, dgates);
  }
  float* const sums = params.dbias + block * p.ratio * p.halves * p.dim;
  if constexpr (Shape::kTeams > 1) {
    auto& shared = dynamic_shared<BiasShared>().sums;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      shared[j][threadIdx.x] = {dbias[j][0], dbias[j][1], dbias[j][2], dbias[j][3]};
    }
    __syncthreads();
    if (OneTeam::number() > 0) return;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
#pragma unroll
      for (int t = 1; t < Shape::kTeams; ++t) {
        const float4 x = shared[j][threadIdx.x + t * Shape::kLanes];
        dbias[j][0] += x.x, dbias[j][1] += x.y, dbias[j][2] += x.z, dbias[j][3] += x.w;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = team.index(j);
    if (team.active && i < team.contributions) store_4(sums + team.bias_offset(i), dbias[j]);
  }
}

}  // namespace jax_dsa::gated_pool
