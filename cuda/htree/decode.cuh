// Decode: the same attention for few queries, over a cache (HTreeCache) whose nodes lie as they
// were pooled: keys not rotated, [B, nodes, G, D].
//
// A launch a layer, from the top to the tokens. Thread blocks share out a query's blocks, a warp a
// block; each first selects, all by themselves, among the importances that the launch before has
// left, which is cheaper than a launch of its own. Above the tokens they leave importances of their
// blocks for the next launch; the last one attends, through all layers, and a merge adds up the
// parts.
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

template <int kD, int kR>
struct DecodeShared {
  static constexpr int kHalf = kD / 2;
  static constexpr int kWidth = kR * static_cast<int>(kHTreeMaxTopK);
  float2 slots[kR][kHalf + 8];  // cos and sin, at `at_pair`; padded for the banks
  float2 turns[kDecodeWarps][kHalf];
  uint8_t q[kDecodeWarps][kHeads * kD * 2];  // the parts of the group, swizzled like blocks
  union {
    uint32_t keys[kWidth];  // importances, to be compared as integers; 0: never selected
    float sums[kDecodeWarps][kHeads][kD];
  };
  float2 references[kDecodeWarps][kHeads];
  uint32_t equal[kWidth / 32], bits[kWidth / 32];
  int places[kWidth / 32];
  int list[kHTreeMaxTopK];
  int bins[2048];
  int warp_sums[kDecodeWarps];
  int cut[3], left[3], count;
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

// From the importances of a layer to `bits` and `list`, by all threads; the row's first thread
// block keeps them. Afterwards threads still have to meet.
template <int kD, int kR>
__device__ void select(const DecodePass& x, const DecodeRow& row, int layer,
                       DecodeShared<kD, kR>& shared) {
  const HTreeFwdParams& p = x.pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = static_cast<int>(p.top_k);
  const int n = candidates<kR>(x.pass, row.position, layer), others = max(n - 1, 0);
  const int words = ceil_div(n, 32);
  const float* const importance = row.importance(x, layer);
  const bool keeps = row.split == 0;
  for (int i = threadIdx.x; i < words * 32; i += kDecodeThreads) {
    uint32_t key = 0;
    if (i < others) {
      const float y = importance[i] + 0.f;  // no -0
      const uint32_t bits = __float_as_uint(y);
      if (y > -INFINITY) key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    shared.keys[i] = key;
  }
  // The least key that is selected, 11, 11 and 10 bits at a time, and how many of those equal to
  // it.
  uint32_t cut = 0;
  int left = min(k - 1, others);
  if (threadIdx.x < 3) shared.cut[threadIdx.x] = 0, shared.left[threadIdx.x] = 0;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bins = pass == 2 ? 1024 : 2048;
    for (int i = threadIdx.x; i < 2048; i += kDecodeThreads) shared.bins[i] = 0;
    __syncthreads();
    const int above = pass == 0 ? 31 : pass == 1 ? 21 : 10;
    for (int i = threadIdx.x; i < others; i += kDecodeThreads) {
      const uint32_t key = shared.keys[i];
      const bool same = pass == 0 || key >> above == cut >> above;
      if (key && same) atomicAdd(&shared.bins[key >> shift & (bins - 1)], 1);
    }
    __syncthreads();
    // Thread i has the i-th eight bins from the top.
    const int mine = 2048 - 8 * (static_cast<int>(threadIdx.x) + 1);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += shared.bins[mine + i];
    const int through = inclusive_scan(sum);
    if (lane == 31) shared.warp_sums[warp] = through;
    __syncthreads();
    int before = through - sum, total = 0;
    for (int i = 0; i < kDecodeWarps; ++i) {
      before += i < warp ? shared.warp_sums[i] : 0;
      total += shared.warp_sums[i];
    }
    left = min(left, total);  // fewer if some are not finite
    if (before < left && left <= before + sum) {
      int bin = mine + 7;
      for (; before + shared.bins[bin] < left; --bin) before += shared.bins[bin];
      shared.cut[pass] = bin, shared.left[pass] = left - before;
    }
    __syncthreads();
    cut |= static_cast<uint32_t>(shared.cut[pass]) << shift;
    left = shared.left[pass];
  }
  if (left == 0) cut = ~0u;

  for (int first = warp * 32; first < words; first += kDecodeThreads) {
    uint32_t more = 0, equal = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      const uint32_t key = first + i < words ? shared.keys[(first + i) * 32 + lane] : 0;
      const uint32_t is_more = __ballot_sync(~0u, key > cut);
      const uint32_t is_equal = __ballot_sync(~0u, key == cut);
      if (lane == i) more = is_more, equal = is_equal;
    }
    if (first + lane < words) shared.bits[first + lane] = more, shared.equal[first + lane] = equal;
  }
  __syncthreads();
  if (warp == 0) {  // of equals the first; then where a word's nodes come in the list
    int taken = 0, listed = 0;
    for (int first = 0; first < words; first += 32) {
      const bool has = first + lane < words;
      const uint32_t equal = has ? shared.equal[first + lane] : 0;
      const int ties = __popc(equal), through = inclusive_scan(ties);
      uint32_t rest = equal;
      for (int i = min(max(left - taken - through + ties, 0), ties); i > 0; --i) rest &= rest - 1;
      uint32_t word = has ? shared.bits[first + lane] | (equal ^ rest) : 0;
      if (n > 0 && first + lane == (n - 1) / 32) word |= 1u << (n - 1) % 32;
      const int count = __popc(word), place = inclusive_scan(count);
      if (has)
        shared.bits[first + lane] = word, shared.places[first + lane] = listed + place - count;
      taken += __shfl_sync(~0u, through, 31);
      listed += __shfl_sync(~0u, place, 31);
    }
    if (lane == 0) shared.count = listed;
  }
  __syncthreads();
  const int count = shared.count;
  const bool top = layer + 1 == x.pass.layers.count;
  const int32_t* const parents = top ? nullptr : x.lists + row.list(x, layer + 1);
  int16_t* const selected =
      p.selected + ((row.token * p.groups + row.group) * (x.pass.layers.count - 1) + layer - 1) * k;
  for (int i = threadIdx.x; i < words; i += kDecodeThreads) {
    int place = shared.places[i];
    for (uint32_t word = shared.bits[i]; word; word &= word - 1, ++place) {
      const int ordinal = i * 32 + __ffs(word) - 1;
      shared.list[place] = top ? ordinal : parents[ordinal / kR] * kR + ordinal % kR;
      if (keeps) selected[place] = static_cast<int16_t>(ordinal);
    }
    if (keeps) x.bits[row.bits(x, layer) + i] = shared.bits[i];
  }
  for (int i = count + threadIdx.x; i < k; i += kDecodeThreads) {
    shared.list[i] = -1;
    if (keeps) selected[i] = -1;
  }
  __syncthreads();
  if (!keeps) return;
  for (int i = threadIdx.x; i < k; i += kDecodeThreads) {
    x.lists[row.list(x, layer) + i] = shared.list[i];
  }
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
  __device__ __forceinline__ void rotate(const DecodePass& pass, int places,
                                         DecodeShared<kD, kR>& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& turns = shared.turns[warp];
    __syncwarp();  // all have read the ones before
#pragma unroll
    for (int pair = lane; pair < kD / 2; pair += 32) {
      double turn = places * pass.frequencies.turns[pair];
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

template <int kD, int kR, bool kAttends>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodePass x, int layer) {
  using Shared = DecodeShared<kD, kR>;
  auto& shared = dynamic_shared<Shared>();
  const Pass& pass = x.pass;
  const HTreeFwdParams& p = pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = pass.group_heads, parts = pass.parts, last = pass.layers.count - 1;
  const DecodeRow row(x);
  let_next_begin();

  const int64_t query = row.token * p.heads + row.group * heads;
  for (int i = threadIdx.x; i < parts * kHeads * (kD / 8); i += kDecodeThreads) {
    const int chunk = i % (kD / 8), head = i / (kD / 8);
    uint32_t y[4];
    load_16_now<0>(
        static_cast<const char*>(p.q) + (query + (head < heads ? head : 0)) * kD * 2 + chunk * 16,
        head < heads, y);
    store_shared_16(smem_address(shared.q[head / kHeads]) + place<kD>(head % kHeads, chunk), y);
  }
  for (int i = threadIdx.x; i < kR * (kD / 2); i += kDecodeThreads) {
    double turn = i / (kD / 2) * x.frequencies.turns[i % (kD / 2)];
    turn -= rint(turn);
    shared.slots[i / (kD / 2)][at_pair(i % (kD / 2))] = cosine_and_sine(static_cast<float>(turn));
  }
  wait_for_previous();
  if (layer < last) select(x, row, layer + 1, shared);
  __syncthreads();

  const int64_t stride = p.groups * kD * 2;
  const int64_t first_node = (row.batch * x.nodes * p.groups + row.group) * kD * 2;
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
  if constexpr (!kAttends) {
    float* const importance = row.importance(x, layer);
    walk(layer, row.split * kDecodeWarps + warp, x.splits * kDecodeWarps,
         [&](int64_t from, int first, int n) {
           BlockKeys<kD, kR> keys;
           keys.load(x.k + from, stride);
           keys.rotate(x, first - (n - 1), shared);
           constexpr int kColumns = kR / 4;
           Sum sums[kColumns];
#pragma unroll 1
           for (int part = 0; part < parts; ++part) {
             float s[kR / 8][4];
             keys.multiply(smem_address(shared.q[part]), s);
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
      int start = row.split * teams + team;
      const uint32_t queries = smem_address(shared.q[part]);
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
          BlockKeys<kD, kR> keys;
          BlockValues<kD, kR> values;
          keys.load(x.k + from, stride);
          values.load(x.v + from, stride, rows);
          keys.rotate(x, first - (n - 1), shared);
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

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = softmax.sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int head = lane / 4 + r * 8;
      if (lane % 4 == 0) shared.references[warp][head] = make_float2(softmax.reference[r], total);
#pragma unroll
      for (int i = 0; i < kD / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          shared.sums[warp][head][i / 8 * 64 + (lane % 4 * 2 + j) * 8 + i % 8] = o[i][2 * r + j];
        }
      }
    }
    __syncthreads();
    const int64_t to = (row.row * x.splits + row.split) * parts * kHeads;
    for (int i = threadIdx.x; i < parts * kHeads * kD; i += kDecodeThreads) {
      const int d = i % kD, head = i / kD % kHeads, own = i / kD / kHeads;
      float top = -INFINITY, total = 0.f, sum = 0.f;
      for (int j = 0; j < teams; ++j) top = fmaxf(top, shared.references[j * parts + own][head].x);
      for (int j = 0; j < teams; ++j) {
        const int its = j * parts + own;
        const float2 reference = shared.references[its][head];
        const float weight = exp2_approx(reference.x - Softmax::finite(top));
        total += weight * reference.y;
        sum += weight * shared.sums[its][head][d];
      }
      x.sums[to * kD + i] = sum;
      if (d == 0) x.references[to + i / kD] = make_float2(top, total);
    }
  }
}

// out = sum of the parts, over the sum of probabilities; a head of a query a thread block.
template <int kD>
inline constexpr int kMergeShared = kMergeThreads / 32 * (kD + 2) * 4;

template <int kD>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ DecodePass x) {
  constexpr int kWarps = kMergeThreads / 32;
  auto& shared = dynamic_shared<float[kWarps][kD + 2]>();
  static_assert(sizeof(shared) == kMergeShared<kD>);
  const HTreeFwdParams& p = x.pass.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = x.pass.group_heads;
  const int64_t row = blockIdx.x / heads, bg = row / p.queries;
  const int head = static_cast<int>(blockIdx.x % heads), padded = x.pass.parts * kHeads;
  const int64_t first = row * x.splits * padded + head;
  wait_for_previous();
  float top = -INFINITY, total = 0.f, sum[kD / 32] = {};
#pragma unroll 4
  for (int i = lane; i < x.splits; i += 32) {
    top = fmaxf(top, x.references[first + int64_t{i} * padded].x);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
#pragma unroll 4
  for (int i = warp; i < x.splits; i += kWarps) {
    const int64_t line = first + int64_t{i} * padded;
    const float2 reference = x.references[line];
    const float weight = exp2_approx(reference.x - Softmax::finite(top));
    total += weight * reference.y;
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) sum[j] += weight * x.sums[line * kD + j * 32 + lane];
  }
#pragma unroll
  for (int j = 0; j < kD / 32; ++j) shared[warp][j * 32 + lane] = sum[j];
  if (lane == 0) shared[warp][kD] = total;
  __syncthreads();
  const int d = threadIdx.x;
  if (d >= kD) return;
  float all = 0.f, weights = 0.f;
  for (int i = 0; i < kWarps; ++i) all += shared[i][d], weights += shared[i][kD];
  const int64_t token = bg / p.groups * p.queries + row % p.queries;
  const int64_t to = token * p.heads + bg % p.groups * heads + head;
  static_cast<__nv_bfloat16*>(p.out)[to * kD + d] =
      __float2bfloat16(weights == 0.f ? 0.f : all / weights);
  if (d == 0) p.lse[to] = weights == 0.f ? -INFINITY : (top + log2f(weights)) * kLn2;
}

}  // namespace jax_dsa::htree
