// Reads a mask once, tile by tile, and says of each tile whether it is empty or full, or what its
// bits are.
//
// Bound by memory: a key costs a byte read and at most an eighth of one written. A block takes a
// strip: one row of tiles, as many of them as a warp's lanes cover with kKeys keys each, or one
// that is wider. Its rows go to its warps in turn. A warp reads the 32 * kKeys bytes of a row with
// one instruction and has kInFlight rows under way; it does not read what is hidden already. Loads
// are of aligned chunks, wherever a row begins: a lane makes bits of its chunk (dp4a: four bytes
// times four weights), and shifts them and the next lane's into place. It notes which of its keys
// were seen in any row, and which were hidden in any; two ballots a warp and one exchange between
// the warps make kinds of tiles of these notes. No tile is in two blocks, and nothing is atomic.
#pragma once

#include <cstdint>

#include "block_mask/block_mask.h"
#include "common/launch.cuh"
#include "common/ptx.cuh"

namespace jax_dsa::block_mask {

// kKeys: of a lane, 16 or 8; tiles are as many wide, or a multiple. kInFlight: rows under way.
// kBlocks: of a SM. kGeneral: there are segments or a map, too.
template <int kKeys_, int kInFlight_, int kWarps_, int kBlocks_, bool kGeneral_>
struct Traits {
  static constexpr int kKeys = kKeys_, kInFlight = kInFlight_, kWarps = kWarps_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kThreads = 32 * kWarps, kWarpKeys = 32 * kKeys;
  static_assert(kKeys == 16 || kKeys == 8);
};

// The tiles of a result, and how they are shared out.
struct Strips {
  int rows, columns;  // of tiles
  int tiles;          // of a strip
  int count;          // of a row of tiles

  Strips(const BlockMaskParams& p, int warp_keys)
      : rows(static_cast<int>(ceil_div(p.queries, int64_t{p.block_q}))),
        columns(static_cast<int>(ceil_div(p.keys, int64_t{p.block_k}))),
        tiles(std::max(1, warp_keys / p.block_k)),
        count(ceil_div(columns, tiles)) {}
  int64_t blocks(const BlockMaskParams& p) const { return p.batch * p.heads * rows * count; }
};

// ---- results -----------------------------------------------------------------------------------

struct Classify {
  bool* occupied;
  bool* full;
  static constexpr bool kKinds = true, kBits = false;
  __device__ void put(int64_t tile, int, bool some, bool all) const {
    occupied[tile] = some;
    full[tile] = all;
  }
};

struct Pack {
  const int32_t* tiles;
  uint8_t* bits;
  int64_t slots;
  static constexpr bool kKinds = false, kBits = true;
  __device__ int slot(int64_t tile, int) const {
    const int slot = __ldg(tiles + tile);
    return slot < slots ? slot : -1;
  }
};

struct Compress {
  int32_t* tiles;
  uint8_t* bits;
  int64_t slots;
  static constexpr bool kKinds = true, kBits = true;
  __device__ int slot(int64_t, int number) const { return number; }
  __device__ void put(int64_t tile, int number, bool some, bool all) const {
    tiles[tile] = !some ? -2 : all ? -1 : number;
  }
};

// ---- a lane's keys -----------------------------------------------------------------------------

// Bits for the first n of kKeys keys, for n in any range.
template <int kKeys>
__device__ __forceinline__ uint32_t first_bits(int n) {
  return (1u << min(max(n, 0), kKeys)) - 1;
}

// As many bytes as a lane has keys, from an address that is a multiple of that. Bytes beside the
// mask may be anything, so only the lowest bit of each counts: no byte reaches another's bit.
template <int kKeys>
struct Chunk {
  uint32_t x[kKeys / 4];

  __device__ __forceinline__ void load(const uint8_t* from, bool valid) {
    if constexpr (kKeys == 16) {
      load_16_now<0>(from, valid, x);
    } else {
      load_8_now(from, valid, x);
    }
  }
  __device__ __forceinline__ uint32_t bits() const {
    constexpr uint32_t kLowest = 0x01010101u;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 4; i += 2) {
      const uint32_t low = __dp4a(x[i] & kLowest, 0x08040201u, 0u);
      bits |= __dp4a(x[i + 1] & kLowest, 0x80402010u, low) << (4 * i);
    }
    return bits;
  }
};

// What of a lane's keys a head's queries see, but for the mask. Lane u of a warp looks after the
// u-th of the rows under way.
template <typename Tr>
class Others {
 public:
  __device__ __forceinline__ Others(const BlockMaskParams& p, int64_t entry, int head, int key)
      : m(p.others), entry(entry), queries(p.queries), key(key), keys(static_cast<int>(p.keys)) {
    if constexpr (Tr::kGeneral) {
      if (m.kv_segments) {
#pragma unroll
        for (int i = 0; i < Tr::kKeys; ++i) {
          segment[i] = __ldg(m.kv_segments + entry * keys + min(key + i, keys - 1));
        }
      }
      if (m.map_rows) {
        const int64_t b = m.map_batch == 1 ? 0 : entry;
        const int64_t map = b * m.map_heads + head / (p.heads / m.map_heads);
        tiles = m.tiles + map * m.tile_rows * m.tile_columns;
        bits = m.bits + map * m.slots * m.block_q * (m.block_k / 8);
#pragma unroll
        for (int i = 0; i < Tr::kKeys / 8; ++i) {
          column[i] = (key + 8 * i) / m.block_k;
          byte[i] = (key + 8 * i - column[i] * m.block_k) / 8;
        }
      }
    }
  }

  // For this lane's row.
  __device__ __forceinline__ void look(int64_t query, bool valid) {
    const int64_t range = entry * m.range_stride + query;
    start = load_now(m.starts + range, valid && m.starts, 0);
    end = load_now(m.ends + range, valid && m.ends, keys);
    if constexpr (Tr::kGeneral) {
      segment_of_query = load_now(m.q_segments + entry * queries + query, valid && m.q_segments, 0);
      if (m.map_rows) {
        const int row = load_now(m.map_rows + entry * m.map_rows_stride + query, valid, 0);
        map_row = row / m.block_q;
        map_line = row - map_row * m.block_q;
      }
    }
  }

  // Leaves of `wanted` what the rows' queries see, for a whole warp.
  __device__ __forceinline__ void narrow(uint32_t (&wanted)[Tr::kInFlight]) const {
#pragma unroll
    for (int u = 0; u < Tr::kInFlight; ++u) {
      wanted[u] &= first_bits(__shfl_sync(~0u, end, u)) & ~first_bits(__shfl_sync(~0u, start, u));
    }
    if constexpr (Tr::kGeneral) {
      if (m.kv_segments) {
#pragma unroll
        for (int u = 0; u < Tr::kInFlight; ++u) {
          const int own = __shfl_sync(~0u, segment_of_query, u);
          uint32_t same = 0;
#pragma unroll
          for (int i = 0; i < Tr::kKeys; ++i) same |= uint32_t{segment[i] == own} << i;
          wanted[u] &= same;
        }
      }
      if (m.map_rows) narrow_by_map(wanted);
    }
  }

 private:
  const AttentionMask& m;
  const int64_t entry, queries;
  const int key, keys;
  int segment[Tr::kGeneral ? Tr::kKeys : 1];
  const int32_t* tiles;
  const uint8_t* bits;
  int column[Tr::kKeys / 8], byte[Tr::kKeys / 8];       // of the map's tiles; in one
  int start, end, segment_of_query, map_row, map_line;  // the map's row of tiles; in one

  // Bits for the lane's keys before `stop`.
  __device__ __forceinline__ uint32_t first_bits(int stop) const {
    return block_mask::first_bits<Tr::kKeys>(min(max(stop, 0), keys) - key);
  }
  // All kinds of tiles are under way before the first bits, and these before their use.
  __device__ __forceinline__ void narrow_by_map(uint32_t (&wanted)[Tr::kInFlight]) const {
    constexpr int kBytes = Tr::kKeys / 8;
    int kind[Tr::kInFlight][kBytes];
    uint32_t visible[Tr::kInFlight][kBytes];
#pragma unroll
    for (int u = 0; u < Tr::kInFlight; ++u) {
      const int32_t* const row = tiles + int64_t{__shfl_sync(~0u, map_row, u)} * m.tile_columns;
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        kind[u][i] = load_now(row + column[i], wanted[u] >> (8 * i) & 0xff, -2);
      }
    }
#pragma unroll
    for (int u = 0; u < Tr::kInFlight; ++u) {
      const int line = __shfl_sync(~0u, map_line, u);
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        const bool partial = kind[u][i] >= 0 && kind[u][i] < m.slots;
        const int64_t at = (int64_t{kind[u][i]} * m.block_q + line) * (m.block_k / 8) + byte[i];
        visible[u][i] = partial ? __ldg(bits + at) : kind[u][i] == -1 ? 0xff : 0;
      }
    }
#pragma unroll
    for (int u = 0; u < Tr::kInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        wanted[u] &= visible[u][i] << (8 * i) | ~(0xffu << (8 * i));
      }
    }
  }
};

// ---- the kernel --------------------------------------------------------------------------------

template <typename Tr>
struct Shared {
  uint32_t seen[Tr::kWarps], hidden[Tr::kWarps];  // a bit for each lane
};

template <typename Tr, typename Out>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocks)
    tiles_kernel(const __grid_constant__ BlockMaskParams p, const __grid_constant__ Strips strips,
                 const __grid_constant__ Out out) {
  constexpr int kKeys = Tr::kKeys, kInFlight = Tr::kInFlight, kWarps = Tr::kWarps;
  const int lane = threadIdx.x % 32, warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const unsigned block = blockIdx.x, line = block / strips.count, which = line / strips.rows;
  const int column = (block - line * strips.count) * strips.tiles;
  const int tile_row = line - which * strips.rows;
  const int64_t entry = which / p.heads;
  const int head = which - static_cast<int>(entry) * p.heads;

  // Of a lane: its tile, if its keys are in one, and where the tile's bits go.
  const int of_strip = strips.tiles == 1 ? 0 : lane * kKeys / p.block_k;
  bool mine = of_strip < strips.tiles && column + of_strip < strips.columns;
  const int64_t tile = int64_t{line} * strips.columns + column + of_strip;
  const int64_t line_bytes = p.block_k / 8;
  uint8_t* to = nullptr;
  if constexpr (Out::kBits) {
    const int slot = mine ? out.slot(tile, tile_row * strips.columns + column + of_strip) : -1;
    mine = slot >= 0;
    to = out.bits + (which * out.slots + slot) * p.block_q * line_bytes;
  }
  if constexpr (!Out::kKinds) {
    if (!__any_sync(~0u, mine)) return;
  }

  const int64_t first_query = int64_t{tile_row} * p.block_q, left = p.queries - first_query;
  const int there_rows = static_cast<int>(min(left, int64_t{p.block_q}));
  const int rows = Out::kBits ? p.block_q : there_rows;
  const bool by_query = p.mask && p.mask_queries > 1;
  const uint8_t* mask = p.mask;
  if (mask) {
    const int64_t of_head =
        (p.mask_batch == 1 ? 0 : entry) * p.mask_heads + head / (p.heads / p.mask_heads);
    mask += (of_head * p.mask_queries + (by_query ? first_query : 0)) * p.keys;
  }

  const int span = strips.tiles * p.block_k;
  uint32_t notes = 0;  // of the lane's keys: seen in any row; above them, hidden in any
  for (int part = 0; part < span; part += Tr::kWarpKeys) {
    const int at = part + lane * kKeys;  // from the strip's first key
    const bool active = mine && at < span;
    const int first_key = column * p.block_k + part, key = column * p.block_k + at;
    const int left_keys = static_cast<int>(p.keys) - first_key;
    const uint32_t there = active ? first_bits<kKeys>(left_keys - lane * kKeys) : 0;
    Others<Tr> others(p, entry, head, key);
    uint32_t common = there;
    if (mask && !by_query) {
      common = 0;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (there >> i & 1) common |= (__ldg(mask + key + i) & 1u) << i;
      }
    }
    uint8_t* const byte = to + (at - of_strip * p.block_k) / 8;
    for (int first = warp; first < rows; first += kWarps * kInFlight) {
      const int looked = first + lane * kWarps;
      others.look(first_query + looked, lane < kInFlight && looked < there_rows);
      uint32_t seen[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        seen[u] = first + u * kWarps < there_rows ? common : 0;
      }
      others.narrow(seen);
      if (by_query) {
        // Chunks begin up to 15 bytes before a row's keys; a lane's are in its own and the next.
        Chunk<kKeys> x[kInFlight], last;  // lane u's last is the one after those of row u
        int before[kInFlight];
        const uint8_t* from = mask + first * p.keys + first_key;
#pragma unroll
        for (int u = 0; u < kInFlight; ++u, from += kWarps * p.keys) {
          before[u] = reinterpret_cast<uintptr_t>(from) % kKeys;
          const uint32_t also = __shfl_up_sync(~0u, seen[u], 1);
          const bool wanted = seen[u] || (also && before[u] > 0);
          x[u].load(from + (lane * kKeys - before[u]),
                    wanted && lane * kKeys - before[u] < left_keys);
        }
        from = mask + looked * p.keys + first_key;
        const int own_before = reinterpret_cast<uintptr_t>(from) % kKeys;
        last.load(from + (Tr::kWarpKeys - own_before), lane < kInFlight && looked < there_rows &&
                                                           own_before > 0 &&
                                                           Tr::kWarpKeys - own_before < left_keys);
        const uint32_t last_bits = last.bits();
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const uint32_t bits = x[u].bits(), next = __shfl_down_sync(~0u, bits, 1);
          const uint32_t after_all = __shfl_sync(~0u, last_bits, u);
          seen[u] &= (bits | (lane == 31 ? after_all : next) << kKeys) >> before[u];
        }
      }
      uint8_t* here = byte + first * line_bytes;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u, here += kWarps * line_bytes) {
        const int row = first + u * kWarps;
        const uint32_t hidden = row < there_rows ? there ^ seen[u] : 0;
        notes |= seen[u] | hidden << 16;
        if (!Out::kBits || !active || row >= rows) continue;
        if constexpr (kKeys == 16) {
          *reinterpret_cast<uint16_t*>(here) = static_cast<uint16_t>(seen[u]);
        } else {
          *here = static_cast<uint8_t>(seen[u]);
        }
      }
    }
  }

  if constexpr (Out::kKinds) {
    auto& shared = dynamic_shared<Shared<Tr>>();
    const uint32_t some = __ballot_sync(~0u, (notes & 0xffff) != 0);
    const uint32_t not_all = __ballot_sync(~0u, notes >> 16 != 0);
    if (lane == 0) shared.seen[warp] = some, shared.hidden[warp] = not_all;
    __syncthreads();
    const int number = static_cast<int>(threadIdx.x);  // of a tile in the strip
    if (number >= strips.tiles || column + number >= strips.columns) return;
    uint32_t seen = 0, hidden = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) seen |= shared.seen[w], hidden |= shared.hidden[w];
    const int lanes = p.block_k / kKeys;
    const uint32_t own =
        strips.tiles == 1 ? ~0u : ((1u << lanes) - 1) << (number * lanes);  // its lanes
    out.put(int64_t{line} * strips.columns + column + number,
            tile_row * strips.columns + column + number, (seen & own) != 0, (hidden & own) == 0);
  }
}

template <typename Tr, typename Out>
cudaError_t launch(const BlockMaskParams& p, const Out& out, cudaStream_t stream) {
  const Strips strips(p, Tr::kWarpKeys);
  if (strips.blocks(p) > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(tiles_kernel<Tr, Out>, strips.blocks(p), Tr::kThreads, sizeof(Shared<Tr>),
                       stream, p, strips, out);
}

}  // namespace jax_dsa::block_mask
