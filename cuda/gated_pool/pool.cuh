// Gated pooling, forward and backward kernels. In each channel, a key y is pooled from the
// contributions i of its block's tokens:
//
//     p_i = softmax_i(gate_i + bias_i)        y = sum_i p_i v_i
//     dv_i = p_i dy                           dgate_i = p_i (v_i - y) dy
//
// If a norm follows, the key is scale * y, and the sum of y^2 over the channels is a second
// result.
//
// Both passes are bound by memory bandwidth. Each reads values and gates once. The backward pass
// recomputes p and y, and writes each gradient once, because each half of a token contributes to
// one key only.
//
// A thread group computes a tile of a key's channels. kLanes threads lie along the channels, with
// four channels each. kRanks such rows of threads divide the contributions, kPerThread for each
// thread. A thread issues all its loads before it uses the first one.
//
// Results are deterministic. Each element is written by one thread group. The gradient of the bias
// is a sum over keys, which stays in registers until the last key and is added up in a fixed order.
#pragma once

#include "common/ptx.cuh"
#include "gated_pool/blocks.cuh"
#include "gated_pool/gated_pool.h"

namespace jax_dsa::gated_pool {

// How a CTA divides keys among its threads. The ratio and the number of halves are compile-time
// constants, or 0 if they come from the call's parameters.
template <int kLanes_, int kRanks_, int kRatio_ = 0, int kHalves_ = 0>
struct Shape {
  static constexpr int kLanes = kLanes_, kRanks = kRanks_, kRatio = kRatio_, kHalves = kHalves_;
  static constexpr int kThreadGroups = kThreads / (kLanes * kRanks);
  static constexpr int kPerThread =  // contributions per thread
      kRanks == 1 && kRatio > 0 ? kRatio * kHalves : 8;
  static constexpr int kTile = kLanes * kWidth;                  // channels per CTA
  static constexpr int kMaxContributions = kRanks * kPerThread;  // contributions per thread group
  // The CTAs of the backward pass that an SM holds. With few contributions, more CTAs are needed to
  // have as many bytes in flight.
  static constexpr int kBwdCtasPerSm = kRatio * kHalves == 4 ? 5 : 3;
  static constexpr bool kIsFull = kRatio * kHalves == kMaxContributions;
  static_assert(kThreadGroups * kLanes * kRanks == kThreads && (kRanks == 1 || kThreadGroups == 1));
  static_assert((kRatio > 0) == (kHalves > 0) && kRatio * kHalves <= kMaxContributions);

  static constexpr __device__ int ratio(const GatedPoolParams& p) {
    return kRatio > 0 ? kRatio : p.ratio;
  }
  static constexpr __device__ int halves(const GatedPoolParams& p) {
    return kHalves > 0 ? kHalves : p.halves;
  }
};
using Few = Shape<32, 1>;   // A thread group is a warp.
using Many = Shape<8, 16>;  // A thread group is the CTA.
// DeepSeek-V4 pools 4 tokens with overlapping halves, or 128 tokens without, and GLM-5.3-Flash 4
// tokens without. These shapes are compiled with the constants.
using Few4 = Shape<32, 1, 4, 2>;
using Few4Single = Shape<32, 1, 4, 1>;
using Many128 = Shape<8, 16, 128, 1>;
static_assert(Many::kMaxContributions == kGatedPoolMaxPooled);

// Returns x as a value that the compiler keeps in registers and does not recompute at each use.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  const uint32_t low = jax_dsa::opaque(static_cast<uint32_t>(x));
  return static_cast<int64_t>(jax_dsa::opaque(static_cast<uint32_t>(x >> 32))) << 32 | low;
}
using jax_dsa::opaque;

template <DType kType>
__device__ __forceinline__ Packed4<kType> minus_infinity() {
  if constexpr (kType == DType::kF32) {
    return {0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u};
  } else {
    const uint32_t two = kType == DType::kBF16 ? 0xff80ff80u : 0xfc00fc00u;
    return {two, two};
  }
}

// The running softmax over some contributions: the largest gate, the sum of the weights
// exp(gate - largest), and the sum of the weights times the values. Without contributions, the
// largest gate is -inf and the exponentials are relative to 0.
struct Sums {
  float largest[kWidth], weight[kWidth], value[kWidth];

  __device__ float base(int c) const { return largest[c] == -INFINITY ? 0.f : largest[c]; }

  __device__ void combine(const Sums& other) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const float own = largest[c];
      largest[c] = fmaxf(own, other.largest[c]);
      const float kept = exp2_approx((own - base(c)) * kLog2E);
      const float added = exp2_approx((other.largest[c] - base(c)) * kLog2E);
      weight[c] = weight[c] * kept + other.weight[c] * added;
      value[c] = value[c] * kept + other.value[c] * added;
    }
  }
};

// Used if the thread group is the whole CTA. Consecutive keys alternate between two buffers.
template <typename Shape>
struct CombineShared {
  static constexpr int kWarps = kThreads / 32;
  float sums[2][kWarps][3 * kWidth][Shape::kLanes];
};
template <typename Shape>
struct SumsShared {
  float4 sums[Shape::kPerThread + 1][kThreads];
};

template <DType kType, typename Shape>
struct ThreadGroup {
  using T = Element<kType>;
  static constexpr int kPerThread = Shape::kPerThread;

  const GatedPoolParams& p;
  const int ratio, halves, rank;
  const bool active;  // false past the last channel: computes channel 0 and writes nothing
  const int channel;
  int stride;  // elements from a token to the next
  // The current block of tokens:
  int64_t entry;  // batch entry
  int slot;
  int last;           // row of the last token; -1 if the slot has no block
  bool has_previous;  // whether the document has a block before this one

  __device__ ThreadGroup(const GatedPoolParams& p, int tile)
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
    // Opaque: otherwise the compiler keeps the offsets and biases of all contributions in registers
    // from key to key.
    stride = static_cast<int>(opaque(static_cast<uint32_t>(halves * p.dim)));
    const int tokens = static_cast<int>(p.tokens);
    if (p.starts) {
      const int32_t* starts = p.starts + entry * p.tokens;
      last = find_last_row(starts, slot, ratio, tokens);
      has_previous = last >= 0 && __ldg(starts + max(last, 0)) <= last - 2 * ratio + 1;
    } else {
      const int first = (slot + 1) * ratio - 1;
      last = first < tokens ? first : -1;
      has_previous = slot > 0;
    }
  }

  __device__ int index(int j) const { return rank * kPerThread + j; }
  // Whether contribution i comes from the block itself and not from the previous block.
  __device__ bool is_own(int i) const { return halves == 1 || i >= ratio; }
  __device__ bool exists(int i) const { return Shape::kIsFull || i < ratio * halves; }
  // Whether contribution i counts, provided that the slot has a block.
  __device__ bool used(int i) const { return exists(i) && (is_own(i) || has_previous); }
  __device__ int64_t at(int row, int half) const {
    return ((entry * p.tokens + row) * halves + half) * p.dim + channel;
  }
  // The offset of contribution 0. That of contribution i is offset(i) further on.
  __device__ int64_t at_first() const {
    const int first = last - ratio * halves + 1;  // may be negative if no block precedes
    return opaque(((entry * p.tokens + first) * halves) * p.dim + channel);
  }
  __device__ int offset(int i) const { return i * stride + (halves == 2 && is_own(i) ? p.dim : 0); }
  // The offset of contribution i's bias within those of a batch entry.
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

  // Reads the thread's contributions and returns their sums. The slot must have a block. The
  // weights are exp(gate - the thread's largest gate). Unused contributions have gates of -inf.
  __device__ Sums read(float (&weights)[kPerThread][kWidth],
                       Packed4<kType> (&values)[kPerThread]) const {
    Packed4<kType> gates[kPerThread];
    const int64_t first = at_first();
    const T* const from_gates = static_cast<const T*>(p.gates) + first;
    const T* const from_values = static_cast<const T*>(p.values) + first;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      // Avoid a branch: load the last contribution in place of an unused one.
      const uint32_t from = offset(used(index(j)) ? index(j) : ratio * halves - 1);
      gates[j] = load<kType>(from_gates + from);
      values[j] = load<kType>(from_values + from);
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (!used(index(j))) values[j] = {}, gates[j] = minus_infinity<kType>();
    }
    const float* const biases = p.bias + entry * (ratio * stride);
    Sums all = {};
#pragma unroll
    for (int c = 0; c < kWidth; ++c) all.largest[c] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
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
        all.largest[c] = fmaxf(all.largest[c], weights[j][c]);
      }
    }
    float base[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) base[c] = -all.base(c) * kLog2E;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
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

  // Returns the sums of the whole thread group. `count` counts the calls and selects the buffer.
  // Slots without a block do not count, because they do not reach the barrier.
  __device__ Sums combined(Sums own, CombineShared<Shape>& shared, int count) const {
    if constexpr (Shape::kRanks == 1) {
      return own;
    } else {
#pragma unroll
      for (int d = Shape::kLanes; d < 32; d *= 2) {
        Sums other;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          other.largest[c] = __shfl_xor_sync(~0u, own.largest[c], d);
          other.weight[c] = __shfl_xor_sync(~0u, own.weight[c], d);
          other.value[c] = __shfl_xor_sync(~0u, own.value[c], d);
        }
        own.combine(other);
      }
      auto& sums = shared.sums[count % 2];
      const int lane = static_cast<int>(threadIdx.x) % 32,
                warp = static_cast<int>(threadIdx.x) / 32;
      if (lane < Shape::kLanes) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          sums[warp][c][lane] = own.largest[c];
          sums[warp][kWidth + c][lane] = own.weight[c];
          sums[warp][2 * kWidth + c][lane] = own.value[c];
        }
      }
      __syncthreads();
      Sums all;
#pragma unroll
      for (int w = 0; w < CombineShared<Shape>::kWarps; ++w) {
        Sums one;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          one.largest[c] = sums[w][c][lane % Shape::kLanes];
          one.weight[c] = sums[w][kWidth + c][lane % Shape::kLanes];
          one.value[c] = sums[w][2 * kWidth + c][lane % Shape::kLanes];
        }
        if (w == 0) {
          all = one;
        } else {
          all.combine(one);
        }
      }
      return all;
    }
  }

  // Writes zeros to the gradients of those halves of the slot's tokens that contribute to no key.
  __device__ void clear(T* dvalues, T* dgates) const {
    const int tokens = static_cast<int>(p.tokens);
    if (!active || (!p.starts && (slot + 2) * int64_t{ratio} <= tokens)) return;
    const int32_t* const starts = p.starts ? p.starts + entry * p.tokens : nullptr;
#pragma unroll 1
    for (int row = slot * ratio + rank; row < min((slot + 1) * ratio, tokens);
         row += Shape::kRanks) {
      const int start = starts ? min(max(__ldg(starts + row), 0), row) : 0;
      const int end = start + ((row - start) / ratio + 1) * ratio - 1;
      const auto is_whole = [&](int end) {
        return end < tokens && (!starts || __ldg(starts + end) == start);
      };
      const Packed4<kType> zeros = {};
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

template <DType kType, typename Shape, int kCtasPerSm>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    fwd_kernel(const __grid_constant__ GatedPoolFwdParams params, uint32_t keys, uint32_t slots,
               int tiles) {
  auto& shared = dynamic_shared<CombineShared<Shape>>();
  using Group = ThreadGroup<kType, Shape>;
  constexpr int kPerThread = Shape::kPerThread;
  Group group(params.in, static_cast<int>(blockIdx.x % tiles));
  const uint32_t key_index = blockIdx.x / tiles * Shape::kThreadGroups + Group::number();
  if (key_index >= keys) return;  // uniform in each thread group
  group.find(key_index / slots, static_cast<int>(key_index % slots));
  float key[kWidth] = {};
  if (group.last >= 0) {  // uniform in a thread group
    float weights[kPerThread][kWidth];
    Packed4<kType> values[kPerThread];
    const Sums all = group.combined(group.read(weights, values), shared, 0);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) key[c] = all.value[c] * reciprocal_approx(all.weight[c]);
  }
  if (params.in.scale) {
    float squares = 0.f, scale[kWidth];
    group.read_scale(scale);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      if (group.active) squares = fmaf(key[c], key[c], squares);
      key[c] *= scale[c];
    }
#pragma unroll
    for (int d = 1; d < Shape::kLanes; d *= 2) squares += __shfl_xor_sync(~0u, squares, d);
    if (threadIdx.x % Shape::kLanes == 0 && group.rank == 0) {
      const int64_t tile = group.entry * tiles + blockIdx.x % tiles;
      params.squares[tile * slots + group.slot] = squares;
    }
  }
  if (group.active && group.rank == 0) {
    store<kType>(static_cast<Element<kType>*>(params.out) + group.at_key(), narrow<kType>(key));
  }
}

// The keys of a batch entry are divided among `splits` CTAs per channel tile. Each CTA sums the
// gradient of the bias over many keys.
template <DType kType, typename Shape>
__global__ void __launch_bounds__(kThreads,
                                  Shape::kBwdCtasPerSm - (Shape::kRanks > 1 && !Shape::kIsFull))
    bwd_kernel(const __grid_constant__ GatedPoolBwdParams params, int slots, int tiles) {
  const GatedPoolParams& p = params.in;
  using Group = ThreadGroup<kType, Shape>;
  constexpr int kPerThread = Shape::kPerThread;
  Group group(p, static_cast<int>(blockIdx.x % tiles));
  const int64_t cta = blockIdx.x / tiles, entry = cta / params.splits;
  const int split = static_cast<int>(cta % params.splits);
  auto* const dvalues = static_cast<Element<kType>*>(params.dvalues);
  auto* const dgates = static_cast<Element<kType>*>(params.dgates);
  // The gradient of the bias, and in the last row that of `scale`.
  float sums[kPerThread + 1][kWidth] = {};
  auto& dscale = sums[kPerThread];
  int count = 0;
  for (int64_t slot = split * Shape::kThreadGroups + Group::number(); slot < slots;
       slot += params.splits * Shape::kThreadGroups) {
    group.find(entry, static_cast<int>(slot));
    if (group.last >= 0) {  // uniform in a thread group
      float dkey[kWidth];
      widen<kType>(load<kType>(static_cast<const Element<kType>*>(params.dout) + group.at_key()),
                   dkey);
      float weights[kPerThread][kWidth];
      Packed4<kType> values[kPerThread];
      const Sums own = group.read(weights, values);
      const Sums all = group.combined(own, dynamic_shared<CombineShared<Shape>>(), count++);
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
        group.read_scale(scale);
        const int64_t key = entry * (p.tokens / group.ratio) + slot;
        const float twice = 2.f * __ldg(params.dsquares + key);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          dscale[c] = fmaf(dkey[c], mean[c], dscale[c]);
          dkey[c] = fmaf(dkey[c], scale[c], twice * mean[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kWidth; ++c) dkey[c] *= factor[c];
      const int64_t first = group.at_first();
      Element<kType>* const to_dvalues = dvalues + first;
      Element<kType>* const to_dgates = dgates + first;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        // Opaque: otherwise the compiler widens the values early, which costs registers.
        values[j].x = opaque(values[j].x), values[j].y = opaque(values[j].y);
        float value[kWidth], dvalue[kWidth], dgate[kWidth];
        widen<kType>(values[j], value);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          dvalue[c] = weights[j][c] * dkey[c];
          dgate[c] = dvalue[c] * (value[c] - mean[c]);
          sums[j][c] += dgate[c];
        }
        const Packed4<kType> new_values = narrow<kType>(dvalue), new_gates = narrow<kType>(dgate);
        const uint32_t offset = group.offset(group.index(j));
        if (group.active && group.used(group.index(j))) {
          store<kType>(to_dvalues + offset, new_values);
          store<kType>(to_dgates + offset, new_gates);
        }
      }
    }
    group.clear(dvalues, dgates);
  }
  if constexpr (Shape::kThreadGroups > 1) {
    auto& shared = dynamic_shared<SumsShared<Shape>>().sums;
#pragma unroll
    for (int j = 0; j <= kPerThread; ++j) {
      shared[j][threadIdx.x] = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
    }
    __syncthreads();
    if (Group::number() > 0) return;
#pragma unroll
    for (int j = 0; j <= kPerThread; ++j) {
#pragma unroll
      for (int t = 1; t < Shape::kThreadGroups; ++t) {
        const float4 x = shared[j][threadIdx.x + t * Shape::kLanes];
        sums[j][0] += x.x, sums[j][1] += x.y, sums[j][2] += x.z, sums[j][3] += x.w;
      }
    }
  }
  if (!group.active) return;
  const int bias_size = group.ratio * group.stride;
  float* const to = params.sums + cta * (bias_size + (p.scale ? p.dim : 0));
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = group.index(j);
    if (group.exists(i)) store_4(to + group.bias_offset(i), sums[j]);
  }
  if (p.scale && group.rank == 0) store_4(to + bias_size + group.channel, dscale);
}

}  // namespace jax_dsa::gated_pool
