// A key is pooled, element by element, from the contributions i of its block's tokens:
//
//     p_i = softmax_i(gate_i + bias_i)        y = sum_i p_i v_i
//     dv_i = p_i dy                           dgate_i = p_i (v_i - y) dy
//
// Where a norm follows, the key is scale y, and the sum of all y^2 is a result, too.
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
inline constexpr int kBwdBlocks = 3;  // of a SM, all that there are
inline constexpr int kHeld = 8;       // contributions of a thread
inline constexpr int kWidth = 4;      // channels of a thread

// With a ratio and halves of its own, or 0 for those of the call.
template <int kLanes_, int kRanks_, int kRatio_ = 0, int kHalves_ = 0>
struct Shape {
  static constexpr int kLanes = kLanes_, kRanks = kRanks_, kRatio = kRatio_, kHalves = kHalves_;
  static constexpr int kTeams = kThreads / (kLanes * kRanks);
  static constexpr int kTile = kLanes * kWidth;  // channels of a block of threads
  static constexpr int kMost = kRanks * kHeld;   // contributions
  static constexpr bool kIsFull = kRatio * kHalves == kMost;
  static_assert(kTeams * kLanes * kRanks == kThreads && (kRanks == 1 || kTeams == 1));
  static_assert((kRatio > 0) == (kHalves > 0) && kRatio * kHalves <= kMost);

  static constexpr __device__ int ratio(const GatedPoolParams& p) {
    return kRatio > 0 ? kRatio : p.ratio;
  }
  static constexpr __device__ int halves(const GatedPoolParams& p) {
    return kHalves > 0 ? kHalves : p.halves;
  }
};
using Few = Shape<32, 1>;   // a team is a warp
using Many = Shape<8, 16>;  // a team is the block
using Few4 = Shape<32, 1, 4, 2>;
using Many128 = Shape<8, 16, 128, 1>;
static_assert(Many::kMost == kMostPooled);

// `x`, which is not computed anew at each use.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  const uint32_t low = jax_dsa::opaque(static_cast<uint32_t>(x));
  return static_cast<int64_t>(jax_dsa::opaque(static_cast<uint32_t>(x >> 32))) << 32 | low;
}
using jax_dsa::opaque;

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

template <DType kType>
__device__ __forceinline__ Four<kType> narrow(const float (&x)[kWidth]) {
  if constexpr (kType == DType::kF32) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
            __float_as_uint(x[3])};
  } else {
    return {pack_16<kType>(x[0], x[1]), pack_16<kType>(x[2], x[3])};
  }
}

template <DType kType>
__device__ __forceinline__ Four<kType> minus_infinity() {
  if constexpr (kType == DType::kF32) {
    return {0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u};
  } else {
    const uint32_t two = kType == DType::kBF16 ? 0xff80ff80u : 0xfc00fc00u;
    return {two, two};
  }
}

// What is read once, and what nothing here reads again.
template <DType kType>
__device__ __forceinline__ Four<kType> load(const Element<kType>* from) {
  return __ldcs(reinterpret_cast<const Four<kType>*>(from));
}
template <DType kType>
__device__ __forceinline__ void store(Element<kType>* to, const Four<kType>& x) {
  __stcs(reinterpret_cast<Four<kType>*>(to), x);
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
struct SumsShared {
  float4 sums[kHeld + 1][kThreads];
};

template <DType kType, typename Shape, bool kPacked>
struct Team {
  using T = Element<kType>;

  const GatedPoolParams& p;
  const int ratio, halves, rank;
  const bool active;  // whether the thread has channels of its own; else it does the first ones'
  const int channel;
  int stride;  // from a token to the next
  // Of the block that it works on.
  int64_t entry;   // of the batch
  int slot, last;  // row of the last token; -1 without a block
  bool follows;    // whether there is a block before it

  __device__ Team(const GatedPoolParams& p, int tile)
      : p(p),
        ratio(Shape::ratio(p)),
        halves(Shape::halves(p)),
        rank(static_cast<int>(threadIdx.x / Shape::kLanes % Shape::kRanks)),
        active(first_channel(tile) < p.dim),
        channel(active ? first_channel(tile) : 0),
        stride(halves * p.dim) {}

  __device__ static int number() { return threadIdx.x / (Shape::kLanes * Shape::kRanks); }
  __device__ static int first_channel(int tile) {
    return tile * Shape::kTile + static_cast<int>(threadIdx.x) % Shape::kLanes * kWidth;
  }

  __device__ void find(int64_t entry_, int slot_) {
    entry = entry_, slot = slot_;
    // Hidden, or the offsets and the biases of all contributions would stay in registers.
    stride = static_cast<int>(opaque(static_cast<uint32_t>(halves * p.dim)));
    const int tokens = static_cast<int>(p.tokens), first = (slot + 1) * ratio - 1;
    if constexpr (kPacked) {
      // A block's end lies as far behind `first` as its document's first row is behind a multiple
      // of the ratio.
      const int32_t* starts = p.starts + entry * p.tokens;
      int found = -1;
      for (int d = static_cast<int>(threadIdx.x) % 32; d < ratio && first + d < tokens; d += 32) {
        const int start = __ldg(starts + first + d);
        if (start >= 0 && start % ratio == d && start <= first + d - ratio + 1) found = first + d;
      }
      last = __reduce_max_sync(~0u, found);
      follows = last >= 0 && __ldg(starts + max(last, 0)) <= last - 2 * ratio + 1;
    } else {
      last = first < tokens ? first : -1;
      follows = slot > 0;
    }
  }

  __device__ int index(int j) const { return rank * kHeld + j; }
  // Whether contribution i is of the block itself, and not of the one before.
  __device__ bool is_own(int i) const { return halves == 1 || i >= ratio; }
  __device__ bool exists(int i) const { return Shape::kIsFull || i < ratio * halves; }
  // Of a block that there is.
  __device__ bool used(int i) const { return exists(i) && (is_own(i) || follows); }
  __device__ int64_t at(int row, int half) const {
    return ((entry * p.tokens + row) * halves + half) * p.dim + channel;
  }
  // Where contribution i lies, from contribution 0 on.
  __device__ int64_t at_first() const {
    const int first = last - ratio * halves + 1;  // below 0 if no block is before
    return opaque(((entry * p.tokens + first) * halves) * p.dim + channel);
  }
  __device__ int offset(int i) const { return i * stride + (halves == 2 && is_own(i) ? p.dim : 0); }
  // And of the bias, from an entry's first on.
  __device__ uint32_t bias_offset(int i) const {
    return channel + offset(i) - (halves == 2 && is_own(i) ? ratio * stride : 0);
  }
  __device__ int64_t at_key() const {
    return (entry * (p.tokens / ratio) + slot) * p.dim + channel;
  }

  __device__ void read_scale(float (&scale)[kWidth]) const {
    const float* const from = p.scale + entry * p.dim + channel;
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    scale[0] = four.x, scale[1] = four.y, scale[2] = four.z, scale[3] = four.w;
  }

  // Reads the thread's contributions to a block that there is: weights are exp(gate - the thread's
  // largest). Those that are not used have gates of -inf.
  __device__ Sums read(float (&weights)[kHeld][kWidth], Four<kType> (&values)[kHeld]) const {
    Four<kType> gates[kHeld];
    const int64_t first = at_first();
    const T* const from_gates = static_cast<const T*>(p.gates) + first;
    const T* const from_values = static_cast<const T*>(p.values) + first;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      // Without a branch: in place of what is not used the last one.
      const uint32_t from = offset(used(index(j)) ? index(j) : ratio * halves - 1);
      gates[j] = load<kType>(from_gates + from);
      values[j] = load<kType>(from_values + from);
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (!used(index(j))) values[j] = {}, gates[j] = minus_infinity<kType>();
    }
    const float* const biases = p.bias + entry * (ratio * stride);
    Sums all = {};
#pragma unroll
    for (int c = 0; c < kWidth; ++c) all.most[c] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      float4 four = {};
      if (exists(index(j))) {
        four = __ldg(reinterpret_cast<const float4*>(biases + bias_offset(index(j))));
      }
      const float bias[kWidth] = {four.x, four.y, four.z, four.w};
      float gate[kWidth];
      widen<kType>(gates[j], gate);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        weights[j][c] = gate[c] + bias[c];
        all.most[c] = fmaxf(all.most[c], weights[j][c]);
      }
    }
    float base[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) base[c] = -all.base(c) * kLog2E;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      float value[kWidth];
      widen<kType>(values[j], value);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        weights[j][c] = exp2_approx(fmaf(weights[j][c], kLog2E, base[c]));
        all.weight[c] += weights[j][c];
        all.value[c] = fmaf(weights[j][c], value[c], all.value[c]);
      }
    }
    return all;
  }

  // The whole team's sums; `turn` goes up by one from call to call, as it says whose turn a buffer
  // is: slots without a block, which have no barrier, do not count.
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
    const int tokens = static_cast<int>(p.tokens);
    if (!active || (!kPacked && (slot + 2) * int64_t{ratio} <= tokens)) return;
    const int32_t* starts = p.starts + entry * p.tokens;
#pragma unroll 1
    for (int row = slot * ratio + rank; row < min((slot + 1) * ratio, tokens);
         row += Shape::kRanks) {
      const int start = kPacked ? min(max(__ldg(starts + row), 0), row) : 0;
      const int end = start + ((row - start) / ratio + 1) * ratio - 1;
      const auto is_whole = [&](int end) {
        return end < tokens && (!kPacked || __ldg(starts + end) == start);
      };
      const Four<kType> zeros = {};
      if (!is_whole(end)) {
        store<kType>(dvalues + at(row, halves - 1), zeros);
        store<kType>(dgates + at(row, halves - 1), zeros);
      }
      if (halves == 2 && !is_whole(end + ratio)) {
        store<kType>(dvalues + at(row, 0), zeros);
        store<kType>(dgates + at(row, 0), zeros);
      }
    }
  }
};

template <DType kType, typename Shape, bool kPacked, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    fwd_kernel(const __grid_constant__ GatedPoolFwdParams params, uint32_t items, uint32_t slots,
               int tiles) {
  auto& shared = dynamic_shared<JoinShared<Shape>>();
  using OneTeam = Team<kType, Shape, kPacked>;
  OneTeam team(params.in, static_cast<int>(blockIdx.x % tiles));
  const uint32_t item = blockIdx.x / tiles * Shape::kTeams + OneTeam::number();
  if (item >= items) return;  // a whole team, or the whole block
  team.find(item / slots, static_cast<int>(item % slots));
  float key[kWidth] = {};
  if (team.last >= 0) {  // the same for a whole team
    float weights[kHeld][kWidth];
    Four<kType> values[kHeld];
    const Sums all = team.joined(team.read(weights, values), shared, 0);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) key[c] = all.value[c] * reciprocal_approx(all.weight[c]);
  }
  if (params.in.scale) {
    float squares = 0.f, scale[kWidth];
    team.read_scale(scale);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      if (team.active) squares = fmaf(key[c], key[c], squares);
      key[c] *= scale[c];
    }
#pragma unroll
    for (int d = 1; d < Shape::kLanes; d *= 2) squares += __shfl_xor_sync(~0u, squares, d);
    if (threadIdx.x % Shape::kLanes == 0 && team.rank == 0) {
      const int64_t tile = team.entry * tiles + blockIdx.x % tiles;
      params.squares[tile * slots + team.slot] = squares;
    }
  }
  if (team.active && team.rank == 0) {
    store<kType>(static_cast<Element<kType>*>(params.out) + team.at_key(), narrow<kType>(key));
  }
}

// The blocks of an entry share out its keys, so that each sums the bias's gradient of many.
template <DType kType, typename Shape, bool kPacked>
__global__ void __launch_bounds__(kThreads, kBwdBlocks - (Shape::kRanks > 1 && !Shape::kIsFull))
    bwd_kernel(const __grid_constant__ GatedPoolBwdParams params, int slots, int tiles) {
  const GatedPoolParams& p = params.in;
  using OneTeam = Team<kType, Shape, kPacked>;
  OneTeam team(p, static_cast<int>(blockIdx.x % tiles));
  const int64_t block = blockIdx.x / tiles, entry = block / params.parts;
  const int part = static_cast<int>(block % params.parts);
  auto* const dvalues = static_cast<Element<kType>*>(params.dvalues);
  auto* const dgates = static_cast<Element<kType>*>(params.dgates);
  float sums[kHeld + 1][kWidth] = {};  // the last of `scale`
  auto& dscale = sums[kHeld];
  int turn = 0;
  for (int64_t slot = part * Shape::kTeams + OneTeam::number(); slot < slots;
       slot += params.parts * Shape::kTeams) {
    team.find(entry, static_cast<int>(slot));
    if (team.last >= 0) {  // the same for a whole team
      float dkey[kWidth];
      widen<kType>(load<kType>(static_cast<const Element<kType>*>(params.dout) + team.at_key()),
                   dkey);
      float weights[kHeld][kWidth];
      Four<kType> values[kHeld];
      const Sums own = team.read(weights, values);
      const Sums all = team.joined(own, dynamic_shared<JoinShared<Shape>>(), turn++);
      float mean[kWidth], factor[kWidth];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        factor[c] = reciprocal_approx(all.weight[c]);
        mean[c] = all.value[c] * factor[c];
        if constexpr (Shape::kRanks > 1) {
          factor[c] *= exp2_approx((own.base(c) - all.base(c)) * kLog2E);
        }
      }
      if (p.scale) {
        float scale[kWidth];
        team.read_scale(scale);
        const int64_t key = entry * (p.tokens / team.ratio) + slot;
        const float twice = 2.f * __ldg(params.dsquares + key);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          dscale[c] = fmaf(dkey[c], mean[c], dscale[c]);
          dkey[c] = fmaf(dkey[c], scale[c], twice * mean[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kWidth; ++c) dkey[c] *= factor[c];
      const int64_t first = team.at_first();
      Element<kType>* const to_dvalues = dvalues + first;
      Element<kType>* const to_dgates = dgates + first;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        // They stay as they lie until here.
        values[j].x = opaque(values[j].x), values[j].y = opaque(values[j].y);
        float value[kWidth], dvalue[kWidth], dgate[kWidth];
        widen<kType>(values[j], value);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          dvalue[c] = weights[j][c] * dkey[c];
          dgate[c] = dvalue[c] * (value[c] - mean[c]);
          sums[j][c] += dgate[c];
        }
        const Four<kType> new_values = narrow<kType>(dvalue), new_gates = narrow<kType>(dgate);
        const uint32_t offset = team.offset(team.index(j));
        if (team.active && team.used(team.index(j))) {
          store<kType>(to_dvalues + offset, new_values);
          store<kType>(to_dgates + offset, new_gates);
        }
      }
    }
    team.clear(dvalues, dgates);
  }
  if constexpr (Shape::kTeams > 1) {
    auto& shared = dynamic_shared<SumsShared>().sums;
#pragma unroll
    for (int j = 0; j <= kHeld; ++j) {
      shared[j][threadIdx.x] = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
    }
    __syncthreads();
    if (OneTeam::number() > 0) return;
#pragma unroll
    for (int j = 0; j <= kHeld; ++j) {
#pragma unroll
      for (int t = 1; t < Shape::kTeams; ++t) {
        const float4 x = shared[j][threadIdx.x + t * Shape::kLanes];
        sums[j][0] += x.x, sums[j][1] += x.y, sums[j][2] += x.z, sums[j][3] += x.w;
      }
    }
  }
  if (!team.active) return;
  const int of_bias = team.ratio * team.stride;
  float* const to = params.sums + block * (of_bias + (p.scale ? p.dim : 0));
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = team.index(j);
    if (team.exists(i)) store_4(to + team.bias_offset(i), sums[j]);
  }
  if (p.scale && team.rank == 0) store_4(to + of_bias + team.channel, dscale);
}

}  // namespace jax_dsa::gated_pool
