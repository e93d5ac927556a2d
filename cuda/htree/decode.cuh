// Decode: the same attention for few queries, over a cache (HTreeCache) whose nodes lie as they
// were pooled: keys not rotated, [B, nodes, G, D].
//
// A launch a layer, from the top to the tokens. Thread blocks share out a query's blocks, a warp a
// block; each first selects, all by themselves, among the importances that the launch before has
// left, which is cheaper than a launch of its own. Above the tokens they leave importances of their
// blocks for the next launch; the last one attends, through all layers, and a merge adds up the
// parts. A thread block takes no more shared memory and registers than it needs, so that the next
// launch's finds room beside it and prepares while it runs.
//
// Nothing goes through shared memory but queries and rotations: a lane loads 16 bytes of a key, and
// what it has of 8 neighbouring dimensions are columns of two products, whose order does not matter
// as long as queries follow it. Likewise with values, whose 8 dimensions are columns of 8 products.
// Keys are rotated to where the query stands, by the block's ordinal and the slot in one go, so
// queries are not rotated at all.
#pragma once

#include "htree/attend.cuh"
#include "htree/frequencies.h"
#include "htree/scores.cuh"

namespace jax_dsa::htree {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;
inline constexpr int kMergeThreads = 512;
inline constexpr int kBins = 2048;
inline constexpr int kMembers = kBins / 2;  // of the bin at the cut, to be ranked by comparisons

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
  float* importance;   // [2, rows, width], by ordinal; layers alternate
  int32_t* lists;      // [layers - 1, rows, K]: nodes selected in layers 1, 2, ...
  uint32_t* bits;      // [layers - 1, rows, words]: ordinals selected
  float* sums;         // [rows, splits, heads of the parts, D]
  float2* references;  // [rows, splits, heads of the parts]: also the sum
};

// Behind it lie the queries, a part of 16 heads after the other, swizzled like blocks, then `rest`.
template <int kD, int kR>
struct alignas(16) DecodeShared {
  static constexpr int kHalf = kD / 2, kPart = kHeads * kD * 2;  // bytes of a part
  static constexpr int kRow = kD + 8;                            // of an output; for the banks
  static constexpr int kWords = kR * static_cast<int>(kHTreeMaxTopK) / 32;
  float2 slots[kR][kHalf + 8];  // cos and sin, at `at_pair`; padded for the banks
  double frequencies[kHalf];
  float2 turns[kDecodeWarps][kHalf];
  float2 references[kDecodeWarps][kHeads];
  uint32_t bits[kWords];
  int places[kWords];
  int list[kHTreeMaxTopK];
  union {
    int bins[kBins];
    uint64_t members[kMembers];
  };
  int2 ranges[kDecodeWarps];
  int sums[2][kDecodeWarps];  // of warps
  int cut, above, count;

  __device__ uint8_t* queries(int part) {
    return reinterpret_cast<uint8_t*>(this + 1) + part * kPart;
  }
  // Importances by ordinal, NaN for those that are never selected; afterwards the warps' outputs.
  __device__ float* rest(int parts) { return reinterpret_cast<float*>(queries(parts)); }

  static constexpr int bytes(int parts, int width, bool selects, bool attends) {
    const int sums = attends ? kDecodeWarps * kHeads * kRow * 4 : 0;
    return static_cast<int>(sizeof(DecodeShared)) + parts * kPart +
           std::max(selects ? ceil_div(width, 32) * 32 * 4 : 0, sums);
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
    row = blockIdx.x / x.splits, split = static_cast<int>(blockIdx.x % x.splits);
    const int64_t bg = row / p.queries;
    batch = static_cast<int>(bg / p.groups), group = static_cast<int>(bg % p.groups);
    token = batch * p.queries + row % p.queries;
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
template <typename Shared>
__device__ __forceinline__ int sum_of_all(int x, int parity, Shared& shared) {
  x = __reduce_add_sync(~0u, x);
  if (threadIdx.x % 32 == 0) shared.sums[parity][threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < kDecodeWarps; ++i) x += shared.sums[parity][i];
  return x;
}

// A float's bits as an integer of the same order, and back.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// What is selected first is greatest: the more important, of equals the lower ordinal.
__device__ __forceinline__ uint64_t rank_key(float importance, int ordinal) {
  const uint32_t key = static_cast<uint32_t>(ordered(__float_as_int(importance))) ^ 0x80000000u;
  return uint64_t{key} << 32 | ~static_cast<uint32_t>(ordinal);
}

// Sets the bits of those of the others that are selected. Bins of equal width between the least and
// the greatest importance tell which one is cut; its members are ranked by comparisons. If it has
// too many, since they are equal or one is far from all others, the least key that is selected is
// found bit by bit.
template <int kD, int kR>
__device__ void find_selected(const float* importance, int words, int others, int top_k,
                              float* values, DecodeShared<kD, kR>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = words * 32;
  for (int i = threadIdx.x; i < kBins; i += kDecodeThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.cut = kBins, shared.above = shared.count = 0;
  float low = INFINITY, high = -INFINITY;
#pragma unroll 16
  for (int i = threadIdx.x; i < size; i += kDecodeThreads) {
    float y = i < others ? importance[i] + 0.f : NAN;  // no -0
    if (!(y > -INFINITY)) y = NAN;
    low = fminf(low, y), high = fmaxf(high, y);
    values[i] = y;
  }
  const int least = __reduce_min_sync(~0u, ordered(__float_as_int(low)));
  const int most = __reduce_max_sync(~0u, ordered(__float_as_int(high)));
  if (lane == 0) shared.ranges[warp] = make_int2(least, most);
  __syncthreads();
  for (int i = 0; i < kDecodeWarps; ++i) {
    low = fminf(low, __int_as_float(ordered(shared.ranges[i].x)));
    high = fmaxf(high, __int_as_float(ordered(shared.ranges[i].y)));
  }
  // Where a value lies among the bins, the same order; what is not finite counts as the greatest.
  const float factor = (kBins - 1) / (high - low);
  const auto place_of = [&](float y) {
    return fminf((y - low) * factor, static_cast<float>(kBins - 1));
  };
#pragma unroll 8
  for (int i = threadIdx.x; i < size; i += kDecodeThreads) {
    const float y = values[i];
    if (y == y) atomicAdd(&shared.bins[static_cast<int>(place_of(y))], 1);
  }
  __syncthreads();
  // Thread i has the i-th eight bins from the top.
  static_assert(kBins == 8 * kDecodeThreads);
  const int mine = kBins - 8 * (static_cast<int>(threadIdx.x) + 1);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += shared.bins[mine + i];
  const int through = inclusive_scan(sum);
  if (lane == 31) shared.sums[0][warp] = through;
  __syncthreads();
  int before = through - sum, total = 0;
  for (int i = 0; i < kDecodeWarps; ++i) {
    before += i < warp ? shared.sums[0][i] : 0;
    total += shared.sums[0][i];
  }
  const int wanted = min(top_k - 1, total);
  if (before < wanted && wanted <= before + sum) {
    int bin = mine + 7;
    for (; before + shared.bins[bin] < wanted; --bin) before += shared.bins[bin];
    shared.cut = bin, shared.above = before;
  }
  __syncthreads();

  const float from = static_cast<float>(shared.cut), to = from + 1.f;
#pragma unroll 4
  for (int word = warp; word < words; word += kDecodeWarps) {
    const int i = word * 32 + lane;
    const float y = values[i], at = place_of(y);
    const uint32_t more = __ballot_sync(~0u, y == y && at >= to);
    if (lane == 0) shared.bits[word] = more;
    if (y == y && at >= from && at < to) {
      const int member = atomicAdd(&shared.count, 1);
      if (member < kMembers) shared.members[member] = rank_key(y, i);
    }
  }
  __syncthreads();
  const int members = shared.count, left = wanted - shared.above;
  if (members <= kMembers) {
    for (int i = threadIdx.x; i < members; i += kDecodeThreads) {
      const uint64_t key = shared.members[i];
      int rank = 0;
#pragma unroll 8
      for (int j = 0; j < members; ++j) rank += shared.members[j] > key;
      const uint32_t ordinal = ~static_cast<uint32_t>(key);
      if (rank < left) atomicOr(&shared.bits[ordinal / 32], 1u << ordinal % 32);
    }
  } else {
    uint64_t least_key = 0;
    for (int bit = 63; bit >= 0; --bit) {
      const uint64_t trial = least_key | uint64_t{1} << bit;
      int count = 0;
      for (int i = threadIdx.x; i < size; i += kDecodeThreads) {
        count += values[i] == values[i] && rank_key(values[i], i) >= trial;
      }
      if (sum_of_all(count, bit % 2, shared) >= wanted) least_key = trial;
    }
    for (int word = warp; word < words; word += kDecodeWarps) {
      const int i = word * 32 + lane;
      const bool is = values[i] == values[i] && rank_key(values[i], i) >= least_key;
      const uint32_t selected = __ballot_sync(~0u, is);
      if (lane == 0) shared.bits[word] = selected;
    }
  }
  __syncthreads();
}

// From the importances of a layer to `bits` and `list`, by all threads; the row's first thread
// block keeps them. Afterwards threads still have to meet.
template <int kD, int kR>
__device__ void select(const DecodePass& x, const DecodeRow& row, int layer,
                       DecodeShared<kD, kR>& shared) {
  const HTreeFwdParams& p = x.pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = static_cast<int>(p.top_k);
  const int n = candidates<kR>(x.pass, row.position, layer), words = ceil_div(n, 32);
  find_selected(row.importance(x, layer), words, max(n - 1, 0), k, shared.rest(x.pass.parts),
                shared);
  // Where a word's nodes come in the list. A thread has some words side by side.
  const bool keeps = row.split == 0;
  const int each = ceil_div(words, kDecodeThreads), mine = static_cast<int>(threadIdx.x) * each;
  int count = 0;
  for (int i = mine; i < min(mine + each, words); ++i) {
    if (i == (n - 1) / 32) shared.bits[i] |= 1u << (n - 1) % 32;
    if (keeps) x.bits[row.bits(x, layer) + i] = shared.bits[i];
    shared.places[i] = count;
    count += __popc(shared.bits[i]);
  }
  const int through = inclusive_scan(count);
  if (lane == 31) shared.sums[0][warp] = through;
  __syncthreads();
  int start = through - count, total = 0;
  for (int i = 0; i < kDecodeWarps; ++i) {
    start += i < warp ? shared.sums[0][i] : 0;
    total += shared.sums[0][i];
  }
  for (int i = mine; i < min(mine + each, words); ++i) shared.places[i] += start;
  __syncthreads();

  const bool top = layer + 1 == x.pass.layers.count;
  const int32_t* const parents = top ? nullptr : x.lists + row.list(x, layer + 1);
  int32_t* const list = x.lists + row.list(x, layer);
  int16_t* const selected =
      p.selected + ((row.token * p.groups + row.group) * (x.pass.layers.count - 1) + layer - 1) * k;
  const auto put = [&](int place, int node, int ordinal) {
    shared.list[place] = node;
    if (keeps) list[place] = node, selected[place] = static_cast<int16_t>(ordinal);
  };
  for (int i = threadIdx.x; i < words * 4; i += kDecodeThreads) {  // eight ordinals
    const uint32_t word = shared.bits[i / 4];
    const int first = i % 4 * 8;
    int place = shared.places[i / 4] + __popc(word & ((1u << first) - 1));
    for (uint32_t rest = word >> first & 0xff; rest; rest &= rest - 1, ++place) {
      const int ordinal = i * 8 + __ffs(rest) - 1;
      put(place, top ? ordinal : parents[ordinal / kR] * kR + ordinal % kR, ordinal);
    }
  }
  for (int i = total + static_cast<int>(threadIdx.x); i < k; i += kDecodeThreads) put(i, -1, -1);
}

// What a warp has of a block's keys: of row i * 8 + lane / 4 the chunks lane % 4 + 4 j.
template <int kD, int kR>
struct BlockKeys {
  uint32_t x[kR / 8][kD / 32][4];

  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kR / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        const uint4 y = load_nodes(block + (i * 8 + lane / 4) * stride + (lane % 4 + 4 * j) * 16);
        x[i][j][0] = y.x, x[i][j][1] = y.y, x[i][j][2] = y.z, x[i][j][3] = y.w;
      }
    }
  }

  // By `places` and, of each row, its slot.
  __device__ __forceinline__ void rotate(int places, DecodeShared<kD, kR>& shared) {
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
        for (int i = 0; i < kR / 8; ++i) {
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
  __device__ __forceinline__ void multiply(uint32_t queries, float (&s)[kR / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kR / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint32_t a[4], b[4];
      load_shared_16(queries + place<kD>(lane / 4, lane % 4 + 4 * j), a);
      load_shared_16(queries + place<kD>(lane / 4 + 8, lane % 4 + 4 * j), b);
      const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int i = 0; i < kR / 8; ++i) {
        mma_16<DType::kBF16>(s[i], first, x[i][j][0], x[i][j][1]);
        mma_16<DType::kBF16>(s[i], second, x[i][j][2], x[i][j][3]);
      }
    }
  }
};

// And of its values: of rows 2 (lane % 4), the next one, and both 8 further on, the chunks lane / 4
// and, of D 128, 8 further on.
template <int kD, int kR>
struct BlockValues {
  static constexpr int kSteps = ceil_div(kR, 16), kRows = kR == 8 ? 2 : 4;
  uint4 x[kSteps][kD / 64][kRows];

  // Rows from `rows` on are zeros.
  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
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
                                           const float (&s)[kR / 8][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4] = {};
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
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
          for (int i = 0; i < kRows / 2; ++i) {
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

// Registers are given out as if there were so many threads: to a launch and the one behind it
// together no more than a multiprocessor has, but for large blocks.
template <int kD, int kR, DecodeStep kStep>
inline constexpr int kDecodeRoom =
    kD * kR > 2048                 ? kDecodeThreads * (kStep == DecodeStep::kAttend ? 1 : 2)
    : kStep == DecodeStep::kAttend ? 384
                                   : 704;

template <int kD, int kR, DecodeStep kStep>
__global__ void __launch_bounds__(kDecodeRoom<kD, kR, kStep>, 1)
    decode_kernel(const __grid_constant__ DecodePass x, int layer) {
  using Shared = DecodeShared<kD, kR>;
  auto& shared = dynamic_shared<Shared>();
  const Pass& pass = x.pass;
  const HTreeFwdParams& p = pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = pass.group_heads, parts = pass.parts, last = pass.layers.count - 1;
  const DecodeRow row(x);
  let_next_begin();

  const int64_t stride = p.groups * kD * 2;
  const int64_t first_node = (row.batch * x.nodes * p.groups + row.group) * kD * 2;
  // The first block of the top layer is on its way while the rest is prepared.
  BlockKeys<kD, kR> keys;
  const int own = warp * x.splits + row.split;
  if (kStep == DecodeStep::kTop && own * kR < candidates<kR>(pass, row.position, layer)) {
    keys.load(x.k + first_node + (x.first[layer] + int64_t{own} * kR) * stride, stride);
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
  const int pair = threadIdx.x % (kD / 2);
  const double frequency = x.frequencies.turns[pair];
  if (threadIdx.x < kD / 2) shared.frequencies[pair] = frequency;
  for (int slot = threadIdx.x / (kD / 2); slot < kR; slot += kDecodeThreads / (kD / 2)) {
    double turn = slot * frequency;
    turn -= rint(turn);
    shared.slots[slot][at_pair(pair)] = cosine_and_sine(static_cast<float>(turn));
  }
  wait_for_previous();
  if (kStep != DecodeStep::kTop && layer < last) select(x, row, layer + 1, shared);
  __syncthreads();

  const float scale_log2 = p.scale * kLog2E;
  // A layer's blocks, from the `start`-th one on every `step`-th: take(number, ordinal of the first
  // candidate, n), with where its first row lies behind `first_node`.
  const auto walk = [&](int at, int start, int step, auto take) {
    const int n = candidates<kR>(pass, row.position, at), count = ceil_div(n, kR);
    const int32_t* const list = at == last    ? nullptr
                                : at == layer ? nullptr
                                              : x.lists + row.list(x, at + 1);
#pragma unroll 1
    for (int i = start; i < count; i += step) {
      const int parent = at == last ? i : at == layer ? shared.list[i] : list[i];
      if (parent < 0) break;
      take(first_node + (x.first[at] + int64_t{parent} * kR) * stride, i * kR, n);
    }
  };
  if constexpr (kStep != DecodeStep::kAttend) {
    float* const importance = row.importance(x, layer);
    walk(layer, own, x.splits * kDecodeWarps, [&](int64_t from, int first, int n) {
      if (kStep != DecodeStep::kTop || first != own * kR) keys.load(x.k + from, stride);
      keys.rotate(first - (n - 1), shared);
      constexpr int kColumns = kR / 4;
      Sum sums[kColumns];
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        float s[kR / 8][4];
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
      const Column<kR> mine(lane);
      if (mine.first && first + mine.column < n - 1) {
        importance[first + mine.column] = sums[0].log2();
      }
    });
  } else {
    // A team has a warp a part.
    const int teams = kDecodeWarps / parts, team = warp / parts, part = warp % parts;
    float o[kD / 8][4] = {};
    Softmax softmax;
    if (team < teams) {
      const int step = x.splits * teams;
      int start = team * x.splits + row.split;
      const uint32_t queries = smem_address(shared.queries(part));
      for (int at = last; at >= 0; --at) {
        walk(at, start, step, [&](int64_t from, int first, int n) {
          const int rows = min(n - first - (at > 0), kR);
          uint32_t hides = rows < kR ? ~0u << max(rows, 0) : 0;
          if (at > 0) {
            const uint32_t* const bits = at == 1 ? shared.bits : x.bits + row.bits(x, at);
            hides |= bits[first / 32] >> first % 32;
          }
          constexpr uint32_t kAll = ~0u >> (32 - kR);
          if ((hides & kAll) == kAll) return;
          BlockValues<kD, kR> values;
          keys.load(x.k + from, stride);
          values.load(x.v + from, stride, rows);
          keys.rotate(first - (n - 1), shared);
          float s[kR / 8][4];
          keys.multiply(queries, s);
#pragma unroll
          for (int i = 0; i < kR / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int key = i * 8 + lane % 4 * 2 + j % 2;
              s[i][j] = hides >> key & 1 ? -INFINITY : s[i][j] * scale_log2;
            }
          }
          softmax.apply(s, o);
          values.multiply(o, s);
        });
        // The next layer goes on with the teams that come next.
        start = (start + step - ceil_div(candidates<kR>(pass, row.position, at), kR) % step) % step;
      }
    }

    constexpr int kRow = Shared::kRow;
    float* const sums = shared.rest(parts);  // [warps, heads, kRow], columns as products have them
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
    for (int i = threadIdx.x; i < padded; i += kDecodeThreads) {
      const int head = i % kHeads, own = i / kHeads;
      float top = -INFINITY, total = 0.f;
      for (int j = own; j < teams * parts; j += parts) {
        top = fmaxf(top, shared.references[j][head].x);
      }
      for (int j = own; j < teams * parts; j += parts) {
        float2& reference = shared.references[j][head];
        reference.x = exp2_approx(reference.x - Softmax::finite(top));  // now the weight
        total += reference.x * reference.y;
      }
      x.references[to + i] = make_float2(top, total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < padded * (kD / 4); i += kDecodeThreads) {
      const int column = i % (kD / 4) * 4, head = i / (kD / 4) % kHeads,
                part = i / (kD / 4) / kHeads;
      float4 sum = {};
      for (int j = part; j < teams * parts; j += parts) {
        const float weight = shared.references[j][head].x;
        const float4 y =
            *reinterpret_cast<const float4*>(&sums[(j * kHeads + head) * kRow + column]);
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
      }
      reinterpret_cast<float4*>(x.sums + to * kD)[i] = sum;
    }
  }
}

// out = sum of the parts, over the sum of probabilities; a head of a query a thread block, whose
// warps share the parts out and load several at a time.
template <int kD>
inline constexpr int kMergeShared = kMergeThreads / 32 * (kD + 2) * 4;

template <int kD>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ DecodePass x) {
  constexpr int kWarps = kMergeThreads / 32, kAhead = 3, kEach = kD / 32;
  using Line = std::conditional_t<kEach == 4, float4, float2>;  // a lane's of a part
  auto& shared = dynamic_shared<float[kWarps][kD + 2]>();
  static_assert(sizeof(shared) == kMergeShared<kD>);
  const HTreeFwdParams& p = x.pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = x.pass.group_heads;
  const int64_t row = blockIdx.x / heads, bg = row / p.queries;
  const int head = static_cast<int>(blockIdx.x % heads), padded = x.pass.parts * kHeads;
  const int64_t first = row * x.splits * padded + head;
  wait_for_previous();
  float top = -INFINITY, total = 0.f, sum[kEach] = {};
#pragma unroll 1
  for (int i = warp; i < x.splits; i += kWarps * kAhead) {
    float2 references[kAhead];
    Line lines[kAhead] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      references[j] = make_float2(-INFINITY, 0.f);
      const int split = i + j * kWarps;
      const int64_t line = first + int64_t{split} * padded;
      if (split < x.splits) {
        references[j] = x.references[line];
        lines[j] = reinterpret_cast<const Line*>(x.sums + line * kD)[lane];
      }
    }
    float next = top;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next = fmaxf(next, references[j].x);
    const float factor = exp2_approx(top - Softmax::finite(next));
    top = next, total *= factor;
#pragma unroll
    for (int d = 0; d < kEach; ++d) sum[d] *= factor;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float weight = exp2_approx(references[j].x - Softmax::finite(top));
      total += weight * references[j].y;
#pragma unroll
      for (int d = 0; d < kEach; ++d) {
        sum[d] += weight * reinterpret_cast<const float*>(&lines[j])[d];
      }
    }
  }
#pragma unroll
  for (int d = 0; d < kEach; ++d) shared[warp][lane * kEach + d] = sum[d];
  if (lane == 0) shared[warp][kD] = total, shared[warp][kD + 1] = top;
  __syncthreads();
  const int d = threadIdx.x;
  if (d >= kD) return;
  for (int i = 0; i < kWarps; ++i) top = fmaxf(top, shared[i][kD + 1]);
  float all = 0.f, weights = 0.f;
  for (int i = 0; i < kWarps; ++i) {
    const float weight = exp2_approx(shared[i][kD + 1] - Softmax::finite(top));
    all += weight * shared[i][d], weights += weight * shared[i][kD];
  }
  const int64_t token = bg / p.groups * p.queries + row % p.queries;
  const int64_t to = token * p.heads + bg % p.groups * heads + head;
  const int dimension = d / 64 * 64 + d % 8 * 8 + d / 8 % 8;  // of column d
  static_cast<__nv_bfloat16*>(p.out)[to * kD + dimension] =
      __float2bfloat16(weights == 0.f ? 0.f : all / weights);
  if (d == 0) p.lse[to] = weights == 0.f ? -INFINITY : (top + log2f(weights)) * kLn2;
}

}  // namespace jax_dsa::htree
