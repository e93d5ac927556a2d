// Decode: the same attention for few queries, over a cache (HTreeCache) whose nodes lie as they
// were pooled: keys not rotated, [B, nodes, G, D].
//
// A launch a layer, from the top to the tokens. Thread blocks share out a query's blocks, a warp a
// block; each first selects, all by themselves, among the importances that the launch before has
// left, which is cheaper than a launch of its own. Above the tokens they leave importances of their
// blocks for the next launch; the last one attends, through all layers, and a merge adds up the
// parts.
//
// With few blocks a warp a step is a chain of waits. Then a warp takes 8 rows at a time, and thread
// blocks have so few registers and so little shared memory that the next launch's find room beside
// them: they prepare, and score what does not depend on a selection, while the launch before runs.
// With many blocks a warp has all registers, and loads the next block while it works.
//
// Nothing goes through shared memory but queries and rotations: a lane loads 16 bytes of a key, and
// what it has of 8 neighbouring dimensions are columns of two products, whose order does not matter
// as long as queries follow it. Likewise with values, whose 8 dimensions are columns of 8 products.
// Keys are rotated to where the query stands, by the block's ordinal and the slot in one go, so
// queries are not rotated at all.
#pragma once

#include <cfloat>

#include "htree/attend.cuh"
#include "htree/frequencies.h"
#include "htree/scores.cuh"

namespace jax_dsa::htree {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;
inline constexpr int kMergeThreads = 256;
inline constexpr int kSamples = 64, kBins = 256;
inline constexpr int kMembers = 1024;  // of the bin at the cut, to be ranked by comparisons

struct DecodePass {
  Pass pass;  // without a chunk
  const uint8_t* k;
  const uint8_t* v;
  int64_t nodes;                   // of a batch entry
  int64_t first[kHTreeMaxLayers];  // a layer's first node
  Frequencies frequencies;
  int64_t rows;        // (batch entry, group, query)
  int splits;          // thread blocks of a row
  int width;           // r K
  int words;           // of its bits
  bool few;            // blocks a warp
  float* importance;   // [2, rows, width], by ordinal; layers alternate
  int32_t* lists;      // [layers - 1, rows, K]: nodes selected in layers 1, 2, ...
  uint32_t* bits;      // [layers - 1, rows, words]: ordinals selected
  float* sums;         // [rows, splits, heads of the parts, D]
  float2* references;  // [rows, splits, heads of the parts]: also the sum
};

// Behind it lie the queries, a part of 16 heads after the other, swizzled like blocks, then what a
// selection needs, and in its place afterwards the warps' outputs.
template <int kD, int kR, int kRows>
struct alignas(16) DecodeShared {
  static constexpr int kHalf = kD / 2, kPart = kHeads * kD * 2;  // bytes of a part
  static constexpr int kRow = kD + 8;                            // of an output; for the banks
  static constexpr int kWords = kR * static_cast<int>(kHTreeMaxTopK) / 32;
  struct alignas(16) Selection {
    float samples[kSamples];
    int bins[kBins];
    uint64_t members[kMembers];
    int parents[kHTreeMaxTopK];
    int places[kWords];
    int sums[2][kDecodeWarps];  // of warps
    float low, lowest, high;    // samples
    int count;
  };
  float2 slots[kRows][kHalf + 8];  // cos and sin, at `at_pair`; padded for the banks
  double frequencies[kHalf];
  float2 turns[kDecodeWarps][kHalf];
  float2 references[kDecodeWarps][kHeads];
  uint32_t bits[kWords];
  int list[kHTreeMaxTopK];

  __device__ uint8_t* queries(int part) {
    return reinterpret_cast<uint8_t*>(this + 1) + part * kPart;
  }
  __device__ Selection& selection(int parts) {
    return *reinterpret_cast<Selection*>(queries(parts));
  }
  // Importances by ordinal, -inf for those that are never selected.
  __device__ float4* values(int parts) { return reinterpret_cast<float4*>(&selection(parts) + 1); }
  __device__ float* outputs(int parts) { return reinterpret_cast<float*>(queries(parts)); }

  static constexpr int bytes(int parts, int width, bool selects, bool attends) {
    const int selection = static_cast<int>(sizeof(Selection)) + ceil_div(width, 32) * 32 * 4;
    const int outputs = kDecodeWarps * kHeads * kRow * 4;
    return static_cast<int>(sizeof(DecodeShared)) + parts * kPart +
           std::max(selects ? selection : 0, attends ? outputs : 0);
  }
};

// Where a pair's rotation lies: lane % 4 = i has pairs 8 i to 8 i + 7 of 32, and four lanes read
// two pairs each side by side.
__device__ __forceinline__ int at_pair(int pair) {
  return (pair / 32 * 4 + pair % 8 / 2) * 8 + pair / 8 % 4 * 2 + pair % 2;
}

__device__ __forceinline__ uint4 load_nodes(const uint8_t* from) {
  return __ldg(reinterpret_cast<const uint4*>(from));
}

// A row of a query: where it stands, and what its thread block does.
struct DecodeRow {
  int64_t row, token;
  int batch, group, split, position;

  __device__ explicit DecodeRow(const DecodePass& x) {
    const HTreeFwdParams& p = x.pass.p;
    const auto splits = static_cast<uint32_t>(x.splits), groups = static_cast<uint32_t>(p.groups);
    const auto queries = static_cast<uint32_t>(p.queries);
    const uint32_t at = blockIdx.x / splits, bg = at / queries;
    row = at, split = static_cast<int>(blockIdx.x % splits);
    batch = static_cast<int>(bg / groups), group = static_cast<int>(bg % groups);
    token = batch * p.queries + at % queries;
    position = __ldg(p.positions + token);
  }
  // Nodes of a layer that are selected, and their ordinals' bits.
  __device__ int64_t list(const DecodePass& x, int layer) const {
    return ((layer - 1) * x.rows + row) * x.pass.p.top_k;
  }
  __device__ int64_t bits(const DecodePass& x, int layer) const {
    return ((layer - 1) * x.rows + row) * x.words;
  }
  __device__ float* importance(const DecodePass& x, int layer) const {
    return x.importance + (layer % 2 * x.rows + row) * x.width;
  }
};

// Sum over all threads; `parity` alternates from one call to the next.
__device__ __forceinline__ int sum_of_all(int x, int parity, int (&sums)[2][kDecodeWarps]) {
  x = __reduce_add_sync(~0u, x);
  if (threadIdx.x % 32 == 0) sums[parity][threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < kDecodeWarps; ++i) x += sums[parity][i];
  return x;
}

// A float's bits as an integer of the same order.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// What is selected first is greatest: the more important, of equals the lower ordinal.
__device__ __forceinline__ uint64_t rank_key(float importance, int ordinal) {
  const uint32_t key = static_cast<uint32_t>(ordered(__float_as_int(importance))) ^ 0x80000000u;
  return uint64_t{key} << 32 | ~static_cast<uint32_t>(ordinal);
}

// Bins of equal width from `base` on, those below and above clamped, as floats that are integers
// and have them in their lowest bits.
struct Bins {
  static constexpr float kFirst = 0x1p23f;
  float floor, base, factor;  // nothing below `floor` is counted

  __device__ float bin_of(float y) const {
    return fminf(fmaxf(fmaf(y - base, factor, kFirst), kFirst), kFirst + (kBins - 1));
  }
};

// take(four values, the first one's place in the word) for a word of candidates. Threads begin with
// different ones, for the banks.
template <typename Take>
__device__ __forceinline__ void each_line(const float4* values, int word, Take take) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int line = (i + threadIdx.x) % 8;
    const float4 y = values[word * 8 + line];
    const float all[4] = {y.x, y.y, y.z, y.w};
    take(all, line * 4);
  }
}

// From the importances of a layer to `bits` and `list`, by all threads; the row's first thread
// block keeps them. Afterwards threads still have to meet.
//
// A sample of the importances tells which ones cannot be among the selected, and how wide bins have
// to be; the others are counted by bins, which tells the bin that is cut, and its members are
// ranked by comparisons. If the sample has misled, all are counted. If the bin has too many
// members, since they are equal, the least key that is selected is found bit by bit. A thread has
// words of 32 candidates.
template <int kR, typename Shared>
__device__ void select(const DecodePass& x, const DecodeRow& row, int layer, int n,
                       Shared& shared) {
  const HTreeFwdParams& p = x.pass.p;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int k = static_cast<int>(p.top_k), wanted = k - 1;
  const int words = ceil_div(n, 32);
  const int others = max(n - 1, 0), lines = words * 8;
  auto& own = shared.selection(x.pass.parts);
  float4* const values = shared.values(x.pass.parts);
  const float* const scalars = reinterpret_cast<const float*>(values);
  const bool top = layer + 1 == x.pass.layers.count;

  // A line in 2^shift gives a sample.
  const int shift = lines > kSamples ? 32 - __clz((lines - 1) / kSamples) : 0;
  const auto* const importance = reinterpret_cast<const float4*>(row.importance(x, layer));
  constexpr int kAtOnce = 8;
  for (int first = thread; first < lines; first += kAtOnce * kDecodeThreads) {
    // Thread blocks begin with different lines, so that they do not wait for the same part of the
    // L2.
    const auto line_of = [&](int i) { return first + (i + row.split) % kAtOnce * kDecodeThreads; };
    float4 y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = line_of(i);
      y[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (line * 4 < others) y[i] = __ldcg(importance + line);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = line_of(i);
      const auto clean = [](float z) { return fmaxf(z + 0.f, -INFINITY); };  // no NaN, no -0
      y[i] = make_float4(clean(y[i].x), clean(y[i].y), clean(y[i].z), clean(y[i].w));
      if (line == others / 4) {  // what lies behind the others may be anything
        const int rest = others % 4;
        y[i] = make_float4(rest > 0 ? y[i].x : -INFINITY, rest > 1 ? y[i].y : -INFINITY,
                           rest > 2 ? y[i].z : -INFINITY, -INFINITY);
      }
      if (line < lines) values[line] = y[i];
      const int sample = line >> shift;
      if (line < lines && ((line ^ sample * 5) & ((1 << shift) - 1)) == 0)
        own.samples[sample] = y[i].x;
    }
  }
  if (!top) {
    const int32_t* const parents = x.lists + row.list(x, layer + 1);
    for (int i = thread; i < k; i += kDecodeThreads) own.parents[i] = parents[i];
  }
  __syncthreads();

  // Four threads rank a sample.
  static_assert(kSamples * 4 == kDecodeThreads);
  const int sample = thread / 4;
  const float sampled = own.samples[sample];
  int rank = 0, valid = 0;
#pragma unroll
  for (int i = 0; i < kSamples / 4; ++i) {
    const int at = i * 4 + thread % 4;
    const float y = own.samples[at];
    rank += y > sampled || (y == sampled && at < sample);
    valid += y > -INFINITY;
  }
#pragma unroll
  for (int i = 1; i < 4; i *= 2) {
    rank += __shfl_xor_sync(~0u, rank, i);
    valid += __shfl_xor_sync(~0u, valid, i);
  }
  // So many of them are selected if the sample is good, and some more if it is not.
  const float expected = static_cast<float>(valid) * wanted / max(others, 1);
  const int least = static_cast<int>(fminf(expected + 4.f * sqrtf(expected) + 2.f, kSamples));
  if (thread % 4 == 0 && rank == 0) own.high = sampled;
  if (thread % 4 == 0 && rank == max(valid - 1, 0)) own.lowest = sampled;
  if (thread % 4 == 0 && rank == max(min(least, valid - 1), 0)) own.low = sampled;
  __syncthreads();

  Bins bins;
  int cut, above;
  bool filters = least < valid;
  for (float low = own.low;; low = own.lowest) {
    bins.floor = filters ? low : -FLT_MAX;
    bins.base = fmaxf(low, -FLT_MAX);
    // Three times as far as the samples reach: now and then none of them is above the cut.
    const float width = 3.f * (own.high - bins.base);
    bins.factor = width > 0.f ? kBins / width : 0.f;
    for (int word = thread; word < words; word += kDecodeThreads) {
      each_line(values, word, [&](const float (&y)[4], int) {
#pragma unroll
        for (float z : y) {
          const float bin = bins.bin_of(z);
          count_if(&own.bins[__float_as_int(bin) - __float_as_int(Bins::kFirst)], z >= bins.floor);
        }
      });
    }
    __syncthreads();
    // Each warp by itself: a lane has eight bins, the first lane the highest.
    constexpr int kEach = kBins / 32;
    int counts[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      counts[i] = own.bins[kBins - 1 - (lane * kEach + i)];
      sum += counts[i];
    }
    const int through = inclusive_scan(sum), total = __shfl_sync(~0u, through, 31);
    cut = kBins - 1 - lane * kEach, above = through - sum;
    const uint32_t reach = __ballot_sync(~0u, through >= wanted);
    bool open = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      open = open && above + counts[i] < wanted;
      if (open) above += counts[i], --cut;
    }
    const int holder = reach ? __ffs(reach) - 1 : 0;
    cut = __shfl_sync(~0u, cut, holder), above = __shfl_sync(~0u, above, holder);
    if (!reach || wanted == 0) cut = wanted == 0 ? kBins : -1, above = wanted;
    if (total >= wanted || !filters) break;
    filters = false;  // the sample has misled: all are counted
    __syncthreads();
    for (int i = thread; i < kBins; i += kDecodeThreads) own.bins[i] = 0;
    __syncthreads();
  }

  const int each = ceil_div(words, kDecodeThreads), mine = thread * each;
  const int end = min(mine + each, words);
  const float from = Bins::kFirst + static_cast<float>(cut), to = from + 1.f;
  for (int word = mine; word < end; ++word) {
    uint32_t more = 0, equal = 0;  // equal: or more
    each_line(values, word, [&](const float (&y)[4], int first) {
      uint32_t its_more = 0, its_equal = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float at = bins.bin_of(y[i]);
        const bool is = y[i] >= bins.floor && at >= from;
        its_equal |= uint32_t{is} << i, its_more |= uint32_t{is && at >= to} << i;
      }
      more |= its_more << first, equal |= its_equal << first;
    });
    shared.bits[word] = more, equal &= ~more;
    own.places[word] = static_cast<int>(equal);
    for (; equal; equal &= equal - 1) {
      const int i = word * 32 + __ffs(equal) - 1, member = atomicAdd(&own.count, 1);
      if (member < kMembers) own.members[member] = rank_key(scalars[i], i);
    }
  }
  __syncthreads();
  const int members = own.count, left = wanted - above;
  if (members <= kMembers) {
    for (int word = mine; word < end; ++word) {
      for (uint32_t equal = own.places[word]; equal; equal &= equal - 1) {
        const int bit = __ffs(equal) - 1, i = word * 32 + bit;
        const uint64_t key = rank_key(scalars[i], i);
        int before = 0;
#pragma unroll 8
        for (int j = 0; j < members; ++j) before += own.members[j] > key;
        if (before < left) shared.bits[word] |= 1u << bit;
      }
    }
  } else {
    uint64_t least_key = 0;
    const auto bits_from = [&](int word, uint64_t key) {
      uint32_t bits = 0;
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const int bit = (i + thread) % 32, at = word * 32 + bit;
        const bool is = scalars[at] > -INFINITY && rank_key(scalars[at], at) >= key;
        bits |= uint32_t{is} << bit;
      }
      return bits;
    };
    for (int bit = 63; bit >= 0; --bit) {
      const uint64_t trial = least_key | uint64_t{1} << bit;
      int count = 0;
      for (int word = mine; word < end; ++word) count += __popc(bits_from(word, trial));
      if (sum_of_all(count, bit % 2, own.sums) >= wanted) least_key = trial;
    }
    __syncthreads();
    for (int word = mine; word < end; ++word) {
      shared.bits[word] = wanted > 0 ? bits_from(word, least_key) : 0;
    }
  }
  // Where a word's nodes come in the list.
  const bool keeps = row.split == 0;
  int count = 0;
  for (int word = mine; word < end; ++word) {
    if (word == (n - 1) / 32) shared.bits[word] |= 1u << (n - 1) % 32;
    if (keeps) x.bits[row.bits(x, layer) + word] = shared.bits[word];
    count += __popc(shared.bits[word]);
  }
  const int scanned = inclusive_scan(count);
  if (lane == 31) own.sums[0][warp] = scanned;
  __syncthreads();
  int place = scanned - count, all = 0;
#pragma unroll
  for (int i = 0; i < kDecodeWarps; ++i) {
    place += i < warp ? own.sums[0][i] : 0;
    all += own.sums[0][i];
  }
  int32_t* const list = x.lists + row.list(x, layer);
  int16_t* const selected =
      p.selected + ((row.token * p.groups + row.group) * (x.pass.layers.count - 1) + layer - 1) * k;
  const auto put = [&](int at, int node, int ordinal) {
    shared.list[at] = node;
    if (keeps) list[at] = node, selected[at] = static_cast<int16_t>(ordinal);
  };
  for (int word = mine; word < end; ++word) {
    for (uint32_t rest = shared.bits[word]; rest; rest &= rest - 1, ++place) {
      const int ordinal = word * 32 + __ffs(rest) - 1;
      put(place, top ? ordinal : own.parents[ordinal / kR] * kR + ordinal % kR, ordinal);
    }
  }
  for (int i = all + thread; i < k; i += kDecodeThreads) put(i, -1, -1);
}

// What a warp has of a unit's keys: of row i * 8 + lane / 4 the chunks lane % 4 + 4 j.
template <int kD, int kRows>
struct Keys {
  uint32_t x[kRows / 8][kD / 32][4];

  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        const uint4 y = load_nodes(block + (i * 8 + lane / 4) * stride + (lane % 4 + 4 * j) * 16);
        x[i][j][0] = y.x, x[i][j][1] = y.y, x[i][j][2] = y.z, x[i][j][3] = y.w;
      }
    }
  }

  // By `places` and, of each row, its number.
  template <typename Shared>
  __device__ __forceinline__ void rotate(int places, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& turns = shared.turns[warp];
    __syncwarp();  // all have read the ones before
#pragma unroll
    for (int pair = lane; pair < kD / 2; pair += 32) {
      double turn = places * shared.frequencies[pair];
      turn -= rint(turn);
      turns[at_pair(pair)] = cosine_and_sine(static_cast<float>(turn));
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kD / 64; ++j) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // pairs 2 part, 2 part + 1 of the lane's eight
        const int at = (j * 4 + part) * 8 + lane % 4 * 2;
        const float4 a = *reinterpret_cast<const float4*>(&turns[at]);
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          const float4 b = *reinterpret_cast<const float4*>(&shared.slots[i * 8 + lane / 4][at]);
          const float cos0 = a.x * b.x - a.y * b.y, sin0 = a.y * b.x + a.x * b.y;
          const float cos1 = a.z * b.z - a.w * b.w, sin1 = a.w * b.z + a.z * b.w;
          uint32_t &low = x[i][j][part], &high = x[i][j + kD / 64][part];
          const float2 y = unpack_bf16(low), z = unpack_bf16(high);
          low = pack_bf16(y.x * cos0 - z.x * sin0, y.y * cos1 - z.y * sin1);
          high = pack_bf16(z.x * cos0 + y.x * sin0, z.y * cos1 + y.y * sin1);
        }
      }
    }
  }

  // s [16 heads, r] of a part's queries.
  __device__ __forceinline__ void multiply(uint32_t queries, float (&s)[kRows / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint32_t a[4], b[4];
      load_shared_16(queries + place<kD>(lane / 4, lane % 4 + 4 * j), a);
      load_shared_16(queries + place<kD>(lane / 4 + 8, lane % 4 + 4 * j), b);
      const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        mma_16<DType::kBF16>(s[i], first, x[i][j][0], x[i][j][1]);
        mma_16<DType::kBF16>(s[i], second, x[i][j][2], x[i][j][3]);
      }
    }
  }
};

// And of its values: of rows 2 (lane % 4), the next one, and both 8 further on, the chunks lane / 4
// and, of D 128, 8 further on.
template <int kD, int kRows>
struct Values {
  static constexpr int kSteps = ceil_div(kRows, 16), kLines = kRows == 8 ? 2 : 4;
  uint4 x[kSteps][kD / 64][kLines];

  // Rows from `rows` on are zeros.
  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
        const int row = step * 16 + r / 2 * 8 + lane % 4 * 2 + r % 2;
#pragma unroll
        for (int half = 0; half < kD / 64; ++half) {
          x[step][half][r] = make_uint4(0, 0, 0, 0);
          if (row < rows) {
            x[step][half][r] = load_nodes(block + row * stride + (half * 8 + lane / 4) * 16);
          }
        }
      }
    }
  }

  // o += probabilities times the values. Column lane / 4 of tile 8 half + j is dimension
  // 64 half + 8 (lane / 4) + j.
  __device__ __forceinline__ void multiply(float (&o)[kD / 8][4],
                                           const float (&s)[kRows / 8][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4] = {};
#pragma unroll
      for (int i = 0; i < kLines / 2; ++i) {
        a[2 * i] = pack_bf16(s[2 * step + i][0], s[2 * step + i][1]);
        a[2 * i + 1] = pack_bf16(s[2 * step + i][2], s[2 * step + i][3]);
      }
#pragma unroll
      for (int half = 0; half < kD / 64; ++half) {
        const auto word = [&](int r, int i) {
          const uint4& y = x[step][half][r];
          return i == 0 ? y.x : i == 1 ? y.y : i == 2 ? y.z : y.w;
        };
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t which = j % 2 ? 0x7632 : 0x5410;
          uint32_t b[2] = {};
#pragma unroll
          for (int i = 0; i < kLines / 2; ++i) {
            b[i] = __byte_perm(word(2 * i, j / 2), word(2 * i + 1, j / 2), which);
          }
          mma_16<DType::kBF16>(o[half * 8 + j], a, b[0], b[1]);
        }
      }
    }
  }
};

// What a launch does: scores of the top layer; a selection and scores below; a selection, if there
// are layers to select in, and the attention.
enum class DecodeStep { kTop, kMiddle, kAttend };

// A warp takes a unit at a time: a block, or, if there are only a few blocks a warp, 8 rows.
template <int kR, bool kFew>
inline constexpr int kUnit = kFew ? 8 : kR;

// Registers are given out as if there were so many threads. If there are only a few blocks a warp,
// a launch and the one behind it together have no more than a SM.
template <DecodeStep kStep, bool kFew>
inline constexpr int kDecodeRoom = !kFew                          ? kDecodeThreads
                                   : kStep == DecodeStep::kAttend ? 384
                                                                  : 704;

template <int kD, int kR, DecodeStep kStep, bool kFew>
__global__ void __launch_bounds__(kDecodeRoom<kStep, kFew>, 1)
    decode_kernel(const __grid_constant__ DecodePass x, int layer) {
  constexpr int kRows = kUnit<kR, kFew>;
  using Shared = DecodeShared<kD, kR, kRows>;
  auto& shared = dynamic_shared<Shared>();
  const Pass& pass = x.pass;
  const HTreeFwdParams& p = pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = pass.group_heads, parts = pass.parts, last = pass.layers.count - 1;
  const DecodeRow row(x);
  launch_dependents();

  const int64_t stride = p.groups * kD * 2;
  const int64_t first_node = (row.batch * x.nodes * p.groups + row.group) * kD * 2;
  const int pair = threadIdx.x % (kD / 2);
  const double frequency = x.frequencies.turns[pair];
  if (threadIdx.x < kD / 2) shared.frequencies[pair] = frequency;
  for (int slot = threadIdx.x / (kD / 2); slot < kRows; slot += kDecodeThreads / (kD / 2)) {
    double turn = slot * frequency;
    turn -= rint(turn);
    shared.slots[slot][at_pair(pair)] = cosine_and_sine(static_cast<float>(turn));
  }
  const bool selects = kStep != DecodeStep::kTop && layer < last;
  if (selects) {
    auto& selection = shared.selection(parts);
    for (int i = threadIdx.x; i < kBins; i += kDecodeThreads) selection.bins[i] = 0;
    if (threadIdx.x < kSamples) selection.samples[threadIdx.x] = -INFINITY;
    if (threadIdx.x == 0) selection.count = 0;
  }
  // A team has a warp a part; to importances all parts are for one warp.
  const int teams = kStep == DecodeStep::kAttend ? kDecodeWarps / parts : kDecodeWarps;
  const int team = kStep == DecodeStep::kAttend ? warp / parts : warp;
  const int step = x.splits * teams, start = team * x.splits + row.split;
  // A unit's rows to the L2, before they are loaded.
  const auto prefetch = [&](const uint8_t* array, int64_t from) {
    constexpr int kLines = kD * 2 / 128;
    if (from < 0) return;
#pragma unroll
    for (int i = lane; i < kRows * kLines; i += 32) {
      prefetch_line_l2(array + from + i / kLines * stride + i % kLines * 128);
    }
  };
  // The warp's first unit, if it is of the top layer, does not depend on other launches.
  Keys<kD, kRows> keys;
  constexpr bool kEarly = kStep == DecodeStep::kTop || (kStep == DecodeStep::kAttend && kFew);
  bool early = false;
  if constexpr (kEarly) {
    const int n = candidates<kR>(pass, row.position, last);
    early = last > 0 && team < teams && start * kRows < n - 1;
    if (early) {
      const int64_t from = first_node + (x.first[last] + int64_t{start} * kRows) * stride;
      keys.load(x.k + from, stride);
      if (kStep == DecodeStep::kAttend) prefetch(x.v, from);
    }
  }
  const int64_t query = row.token * p.heads + row.group * heads;
  for (int i = threadIdx.x; i < parts * kHeads * (kD / 8); i += kDecodeThreads) {
    const int chunk = i % (kD / 8), head = i / (kD / 8);
    uint32_t y[4];
    load_16_now<0>(
        static_cast<const char*>(p.q) + (query + (head < heads ? head : 0)) * kD * 2 + chunk * 16,
        head < heads, y);
    const uint32_t part = smem_address(shared.queries(head / kHeads));
    store_shared_16(part + place<kD>(head % kHeads, chunk), y);
  }
  __syncthreads();
  const uint32_t queries = smem_address(shared.queries(warp % parts));
  float first_scores[kRows / 8][4];
  if (kEarly && kStep == DecodeStep::kAttend && early) {
    const int n = candidates<kR>(pass, row.position, last);
    keys.rotate(start * kRows - (n - 1), shared);
    keys.multiply(queries, first_scores);
  }
  const int choices = selects ? candidates<kR>(pass, row.position, layer + 1) : 0;
  grid_dependency_wait();
  if (selects) {
    select<kR>(x, row, layer + 1, choices, shared);
    __syncthreads();
  }

  const float scale_log2 = p.scale * kLog2E;
  // A layer's units, from the `first`-th one on every `step`-th: take(where its first row lies
  // behind `first_node`, where that of the next one or -1, its first candidate's ordinal, n).
  const auto walk = [&](int at, int first, auto take) {
    constexpr int kUnits = kR / kRows;  // of a block
    const int n = candidates<kR>(pass, row.position, at), count = ceil_div(n, kRows);
    const int32_t* const list = at == last    ? nullptr
                                : at == layer ? nullptr
                                              : x.lists + row.list(x, at + 1);
    const auto place_of = [&](int unit) {
      if (unit >= count) return int64_t{-1};
      const int block = unit / kUnits;
      const int parent = at == last ? block : at == layer ? shared.list[block] : list[block];
      const int64_t node = x.first[at] + int64_t{parent} * kR + unit % kUnits * kRows;
      return parent < 0 ? -1 : first_node + node * stride;
    };
    int64_t from = place_of(first);
#pragma unroll 1
    for (int i = first; from >= 0; i += step) {
      const int64_t next = place_of(i + step);
      take(from, next, i * kRows, n);
      from = next;
    }
  };
  if constexpr (kStep != DecodeStep::kAttend) {
    float* const importance = row.importance(x, layer);
    walk(layer, start, [&](int64_t from, int64_t next, int first, int n) {
      if (!early) keys.load(x.k + from, stride);
      early = !kFew;
      Keys<kD, kRows> ahead;
      if (!kFew && next >= 0) ahead.load(x.k + next, stride);
      keys.rotate(first - (n - 1), shared);
      constexpr int kColumns = kRows / 4;
      Sum sums[kColumns];
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        float s[kRows / 8][4];
        keys.multiply(smem_address(shared.queries(part)), s);
        const int head = part * kHeads + lane / 4;
        const float absent[2] = {head < heads ? 0.f : -INFINITY,
                                 head + 8 < heads ? 0.f : -INFINITY};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          sums[i] = sums[i] + Sum::of(s[i / 2][i % 2] * scale_log2 + absent[0],
                                      s[i / 2][i % 2 + 2] * scale_log2 + absent[1]);
        }
      }
      join<kColumns, 16>(sums);
      const Column<kRows> mine(lane);
      if (mine.first && first + mine.column < n - 1) {
        importance[first + mine.column] = fmaxf(sums[0].log2(), -FLT_MAX);  // as in scores.cuh
      }
      if (!kFew) keys = ahead;
    });
  } else {
    float o[kD / 8][4] = {};
    Softmax softmax;
    // Bit i: the i-th row of a unit does not count.
    constexpr uint32_t kAll = ~0u >> (32 - kRows);
    const auto hidden_rows = [&](int at, int first, int rows) {
      uint32_t hides = rows < kRows ? ~0u << max(rows, 0) : 0;
      if (at > 0) {
        const uint32_t* const bits = at == 1 ? shared.bits : x.bits + row.bits(x, at);
        hides |= bits[first / 32] >> first % 32;
      }
      return hides & kAll;
    };
    const auto attend = [&](float (&s)[kRows / 8][4], const Values<kD, kRows>& values,
                            uint32_t hides) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = i * 8 + lane % 4 * 2 + j % 2;
          s[i][j] = hides >> key & 1 ? -INFINITY : s[i][j] * scale_log2;
        }
      }
      softmax.apply(s, o);
      values.multiply(o, s);
    };
    Values<kD, kRows> first_values;
    const auto load_first = [&] {
      if (!kEarly || !early) return;
      const int n = candidates<kR>(pass, row.position, last);
      const int64_t from = first_node + (x.first[last] + int64_t{start} * kRows) * stride;
      first_values.load(x.v + from, stride, min(n - 1 - start * kRows, kRows));
    };
    const auto attend_first = [&] {
      if (!kEarly || !early) return;
      early = false;
      const int n = candidates<kR>(pass, row.position, last);
      const uint32_t hides = hidden_rows(last, start * kRows, min(n - 1 - start * kRows, kRows));
      if (hides != kAll) attend(first_scores, first_values, hides);
    };
    if (team < teams) {
      int next_start = start, skipped = early ? step : 0;
      for (int at = last; at >= 0; --at) {
        walk(at, next_start + skipped, [&](int64_t from, int64_t next, int first, int n) {
          const int rows = min(n - first - (at > 0), kRows);
          const uint32_t hides = hidden_rows(at, first, rows);
          if (hides == kAll) return;
          Values<kD, kRows> values;
          load_first();
          keys.load(x.k + from, stride);
          values.load(x.v + from, stride, rows);
          if (!kFew) prefetch(x.k, next), prefetch(x.v, next);
          attend_first();  // while they come
          keys.rotate(first - (n - 1), shared);
          float s[kRows / 8][4];
          keys.multiply(queries, s);
          attend(s, values, hides);
        });
        // The next layer goes on with the teams that come next.
        const int count = ceil_div(candidates<kR>(pass, row.position, at), kRows);
        next_start = (next_start + step - count % step) % step, skipped = 0;
      }
      load_first();
      attend_first();
    }

    constexpr int kRow = Shared::kRow;
    float* const sums =
        shared.outputs(parts);  // [warps, heads, kRow], columns as products have them
    const int padded = parts * kHeads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = softmax.sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int head = lane / 4 + r * 8;
      if (lane % 4 == 0) shared.references[warp][head] = make_float2(softmax.reference[r], total);
      float* const to = sums + (warp * kHeads + head) * kRow + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kD / 8; ++i) {
        *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[i][2 * r], o[i][2 * r + 1]);
      }
    }
    __syncthreads();
    const int64_t to = (row.row * x.splits + row.split) * padded;
    for (int i = threadIdx.x; i < padded * (kD / 4); i += kDecodeThreads) {
      const int column = i % (kD / 4) * 4, head = i / (kD / 4) % kHeads,
                part = i / (kD / 4) / kHeads;
      float top = -INFINITY, total = 0.f;
      for (int j = part; j < teams * parts; j += parts) {
        top = fmaxf(top, shared.references[j][head].x);
      }
      float4 sum = {};
      for (int j = part; j < teams * parts; j += parts) {
        const float2 reference = shared.references[j][head];
        const float weight = exp2_approx(reference.x - Softmax::finite(top));
        const float4 y =
            *reinterpret_cast<const float4*>(&sums[(j * kHeads + head) * kRow + column]);
        total += weight * reference.y;
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
      }
      reinterpret_cast<float4*>(x.sums + to * kD)[i] = sum;
      if (column == 0) x.references[to + i / (kD / 4)] = make_float2(top, total);
    }
  }
}

// out = sum of the parts, over the sum of probabilities; half of a head of a query a thread block.
// A group of threads has a part at a time, of which each has 4 columns, and loads several ahead.
template <int kD>
struct MergeShared {
  static constexpr int kColumns = kD / 2, kMembers = kColumns / 4;
  static constexpr int kGroups = kMergeThreads / kMembers;
  float sums[kGroups][kColumns];
  float2 references[kGroups];
};

template <int kD>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ DecodePass x) {
  using Shared = MergeShared<kD>;
  constexpr int kGroups = Shared::kGroups, kColumns = Shared::kColumns;
  constexpr int kAhead = ceil_div(kMaxSms, kGroups);
  auto& shared = dynamic_shared<Shared>();
  const HTreeFwdParams& p = x.pass.p;
  const int group = threadIdx.x / Shared::kMembers, member = threadIdx.x % Shared::kMembers;
  const int heads = x.pass.group_heads, padded = x.pass.parts * kHeads;
  const int half = blockIdx.x % 2, head = blockIdx.x / 2 % heads;
  const int64_t row = blockIdx.x / 2 / heads, bg = row / p.queries;
  const int64_t first = row * x.splits * padded + head;
  grid_dependency_wait();
  float top = -INFINITY, total = 0.f;
  float4 sum = {};
#pragma unroll 1
  for (int i = group; i < x.splits; i += kGroups * kAhead) {
    float2 references[kAhead];
    float4 lines[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      references[j] = make_float2(-INFINITY, 0.f), lines[j] = {};
      const int split = i + j * kGroups;
      const int64_t line = first + int64_t{split} * padded;
      if (split < x.splits) {
        references[j] = x.references[line];
        lines[j] = reinterpret_cast<const float4*>(x.sums + line * kD + half * kColumns)[member];
      }
    }
    float next = top;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next = fmaxf(next, references[j].x);
    const float factor = exp2_approx(top - Softmax::finite(next));
    top = next, total *= factor;
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float weight = exp2_approx(references[j].x - Softmax::finite(top));
      const float4 y = lines[j];
      total += weight * references[j].y;
      sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
    }
  }
  reinterpret_cast<float4*>(shared.sums[group])[member] = sum;
  if (member == 0) shared.references[group] = make_float2(top, total);
  __syncthreads();
  const int d = threadIdx.x;
  if (d >= kColumns) return;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) top = fmaxf(top, shared.references[i].x);
  float all = 0.f, weights = 0.f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float weight = exp2_approx(shared.references[i].x - Softmax::finite(top));
    all += weight * shared.sums[i][d], weights += weight * shared.references[i].y;
  }
  const int64_t token = bg / p.groups * p.queries + row % p.queries;
  const int64_t to = token * p.heads + bg % p.groups * heads + head;
  const int column = half * kColumns + d, dimension = column / 64 * 64 + d % 8 * 8 + column / 8 % 8;
  static_cast<__nv_bfloat16*>(p.out)[to * kD + dimension] =
      __float2bfloat16(weights == 0.f ? 0.f : all / weights);
  if (column == 0) p.lse[to] = weights == 0.f ? -INFINITY : (top + log2f(weights)) * kLn2;
}

}  // namespace jax_dsa::htree
