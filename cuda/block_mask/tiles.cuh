// Converts a mask to a block mask in a single read: the kind of each tile, its bits, or both.
//
// Tiling. The kernel is bound by memory: a key costs one byte read and at most an eighth of a byte
// written. A CTA processes a strip of one row of tiles: as many tiles as the lanes of a warp cover
// with kKeys keys each, or a single tile that is wider. No tile belongs to two CTAs, so the kernel
// needs no atomics.
//
// Loads. The warps of a CTA alternate between the rows of the strip. A warp reads the 32 * kKeys
// bytes of a row with one instruction and keeps kInFlight rows in flight. It skips keys that other
// conditions mask already. All loads are aligned chunks, whatever the alignment of the row. A lane
// packs its chunk into bits (dp4a: four bytes times four weights) and combines them with the bits
// of the next lane to shift them into place.
//
// Kinds. Each lane records which of its keys were visible in any row and which were masked in any
// row. Two ballots per warp and one exchange between the warps turn these records into the kinds
// of the tiles.
#pragma once

#include <cstdint>

#include "block_mask/block_mask.h"
#include "common/launch.cuh"
#include "common/ptx.cuh"

namespace jax_dsa::block_mask {

// kKeys: keys per lane, 16 or 8; the width of a tile is a multiple of it. kInFlight: rows in flight
// per warp. kCtasPerSm: occupancy for __launch_bounds__. kGeneral: there are segments or another
// map.
template <int kKeys_, int kInFlight_, int kWarps_, int kCtasPerSm_, bool kGeneral_>
struct Traits {
  static constexpr int kKeys = kKeys_, kInFlight = kInFlight_, kWarps = kWarps_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kThreads = 32 * kWarps, kWarpKeys = 32 * kKeys;
  static_assert(kKeys == 16 || kKeys == 8);
};

// The division of the result tiles into strips.
struct Strips {
  int rows, columns;  // rows and columns of tiles per map
  int tiles;          // tiles per strip
  int per_row;        // strips per row of tiles

  Strips(const BlockMaskParams& p, int warp_keys)
      : rows(static_cast<int>(ceil_div(p.queries, int64_t{p.block_q}))),
        columns(static_cast<int>(ceil_div(p.keys, int64_t{p.block_k}))),
        tiles(std::max(1, warp_keys / p.block_k)),
        per_row(ceil_div(columns, tiles)) {}
  int64_t num_ctas(const BlockMaskParams& p) const { return p.batch * p.heads * rows * per_row; }
};

// ---- results -----------------------------------------------------------------------------------

struct Classify {
  bool* occupied;
  bool* full;
  static constexpr bool kKinds = true, kBits = false;
  __device__ void put(int64_t tile, int, bool any_visible, bool all_visible) const {
    occupied[tile] = any_visible;
    full[tile] = all_visible;
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
  __device__ int slot(int64_t, int tile_index) const { return tile_index; }
  __device__ void put(int64_t tile, int tile_index, bool any_visible, bool all_visible) const {
    tiles[tile] = !any_visible ? -2 : all_visible ? -1 : tile_index;
  }
};

// ---- a lane's keys -----------------------------------------------------------------------------

// Returns a mask of the first n of kKeys bits. n may be out of range.
template <int kKeys>
__device__ __forceinline__ uint32_t first_bits(int n) {
  return (1u << min(max(n, 0), kKeys)) - 1;
}

// A chunk of as many bytes as a lane has keys, at an address that is a multiple of kKeys. Bytes
// outside of the mask may have any value, so only the lowest bit of each byte is used. No byte can
// then affect the bit of another one.
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

// Evaluates the other conditions (ranges, segments, another map) for the keys of a lane. Lane u of
// a warp holds the data of the u-th row in flight.
template <typename Tr>
class OtherMasks {
 public:
  __device__ __forceinline__ OtherMasks(const BlockMaskParams& p, int64_t batch_index, int head,
                                        int key)
      : m(p.others),
        batch_index(batch_index),
        queries(p.queries),
        key(key),
        keys(static_cast<int>(p.keys)) {
    if constexpr (Tr::kGeneral) {
      if (m.kv_segments) {
#pragma unroll
        for (int i = 0; i < Tr::kKeys; ++i) {
          segment[i] = __ldg(m.kv_segments + batch_index * keys + min(key + i, keys - 1));
        }
      }
      if (m.map_rows) {
        const int64_t b = m.map_batch == 1 ? 0 : batch_index;
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

  // Loads the data of the row that this lane holds.
  __device__ __forceinline__ void load_row(int64_t query, bool valid) {
    const int64_t range = batch_index * m.range_stride + query;
    start = load_now(m.starts + range, valid && m.starts, 0);
    end = load_now(m.ends + range, valid && m.ends, keys);
    if constexpr (Tr::kGeneral) {
      segment_of_query =
          load_now(m.q_segments + batch_index * queries + query, valid && m.q_segments, 0);
      if (m.map_rows) {
        const int row = load_now(m.map_rows + batch_index * m.map_rows_stride + query, valid, 0);
        map_row = row / m.block_q;
        row_in_tile = row - map_row * m.block_q;
      }
    }
  }

  // Clears the bits of `wanted` that the queries of the rows in flight do not see. A whole warp
  // calls this.
  __device__ __forceinline__ void intersect(uint32_t (&wanted)[Tr::kInFlight]) const {
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
      if (m.map_rows) intersect_map(wanted);
    }
  }

 private:
  const AttentionMask& m;
  const int64_t batch_index, queries;
  const int key, keys;
  int segment[Tr::kGeneral ? Tr::kKeys : 1];
  const int32_t* tiles;
  const uint8_t* bits;
  // The column of tiles of the map, and the byte in a row of that tile, of every 8 keys.
  int column[Tr::kKeys / 8], byte[Tr::kKeys / 8];
  // The data of this lane's row; `map_row` is a row of tiles of the map.
  int start, end, segment_of_query, map_row, row_in_tile;

  // Returns the bits of the lane's keys before `stop`.
  __device__ __forceinline__ uint32_t first_bits(int stop) const {
    return block_mask::first_bits<Tr::kKeys>(min(max(stop, 0), keys) - key);
  }
  // Issues the loads of all tile kinds before the first load of bits, and all of these before their
  // use, to overlap latencies.
  __device__ __forceinline__ void intersect_map(uint32_t (&wanted)[Tr::kInFlight]) const {
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
      const int row = __shfl_sync(~0u, row_in_tile, u);
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        const bool partial = kind[u][i] >= 0 && kind[u][i] < m.slots;
        const int64_t at = (int64_t{kind[u][i]} * m.block_q + row) * (m.block_k / 8) + byte[i];
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
  uint32_t seen[Tr::kWarps], masked[Tr::kWarps];  // one bit per lane
};

template <typename Tr, typename Out>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    tiles_kernel(const __grid_constant__ BlockMaskParams p, const __grid_constant__ Strips strips,
                 const __grid_constant__ Out out) {
  constexpr int kKeys = Tr::kKeys, kInFlight = Tr::kInFlight, kWarps = Tr::kWarps;
  const int lane = threadIdx.x % 32, warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const unsigned cta = blockIdx.x, tile_line = cta / strips.per_row,
                 map_index = tile_line / strips.rows;
  const int column = (cta - tile_line * strips.per_row) * strips.tiles;
  const int tile_row = tile_line - map_index * strips.rows;
  const int64_t batch_index = map_index / p.heads;
  const int head = map_index - static_cast<int>(batch_index) * p.heads;

  // The tile of this lane, if its keys are in one, and the address of the bits of that tile.
  const int tile_in_strip = strips.tiles == 1 ? 0 : lane * kKeys / p.block_k;
  bool has_tile = tile_in_strip < strips.tiles && column + tile_in_strip < strips.columns;
  const int64_t tile = int64_t{tile_line} * strips.columns + column + tile_in_strip;
  const int64_t row_bytes = p.block_k / 8;
  uint8_t* to = nullptr;
  if constexpr (Out::kBits) {
    const int slot =
        has_tile ? out.slot(tile, tile_row * strips.columns + column + tile_in_strip) : -1;
    has_tile = slot >= 0;
    to = out.bits + (map_index * out.slots + slot) * p.block_q * row_bytes;
  }
  if constexpr (!Out::kKinds) {
    if (!__any_sync(~0u, has_tile)) return;
  }

  const int64_t first_query = int64_t{tile_row} * p.block_q, left = p.queries - first_query;
  const int existing_rows = static_cast<int>(min(left, int64_t{p.block_q}));
  const int rows = Out::kBits ? p.block_q : existing_rows;
  const bool by_query = p.mask && p.mask_queries > 1;
  const uint8_t* mask = p.mask;
  if (mask) {
    const int64_t mask_index =
        (p.mask_batch == 1 ? 0 : batch_index) * p.mask_heads + head / (p.heads / p.mask_heads);
    mask += (mask_index * p.mask_queries + (by_query ? first_query : 0)) * p.keys;
  }

  const int span = strips.tiles * p.block_k;
  uint32_t summary = 0;  // low half: keys visible in any row; high half: keys masked in any row
  for (int chunk_start = 0; chunk_start < span; chunk_start += Tr::kWarpKeys) {
    const int at = chunk_start + lane * kKeys;  // offset from the first key of the strip
    const bool active = has_tile && at < span;
    const int first_key = column * p.block_k + chunk_start, key = column * p.block_k + at;
    const int left_keys = static_cast<int>(p.keys) - first_key;
    const uint32_t existing = active ? first_bits<kKeys>(left_keys - lane * kKeys) : 0;
    OtherMasks<Tr> others(p, batch_index, head, key);
    uint32_t shared_bits = existing;
    if (mask && !by_query) {
      shared_bits = 0;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (existing >> i & 1) shared_bits |= (__ldg(mask + key + i) & 1u) << i;
      }
    }
    uint8_t* const byte = to + (at - tile_in_strip * p.block_k) / 8;
    for (int first = warp; first < rows; first += kWarps * kInFlight) {
      const int own_row = first + lane * kWarps;
      others.load_row(first_query + own_row, lane < kInFlight && own_row < existing_rows);
      uint32_t seen[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        seen[u] = first + u * kWarps < existing_rows ? shared_bits : 0;
      }
      others.intersect(seen);
      if (by_query) {
        // Aligned chunks begin up to kKeys - 1 bytes before the keys of a lane, so the keys of a
        // lane are in its own chunk and the next one. The chunk after lane 31 of row u is loaded by
        // lane u (`tail_chunk`).
        Chunk<kKeys> x[kInFlight], tail_chunk;
        int misalignment[kInFlight];
        const uint8_t* from = mask + first * p.keys + first_key;
#pragma unroll
        for (int u = 0; u < kInFlight; ++u, from += kWarps * p.keys) {
          misalignment[u] = reinterpret_cast<uintptr_t>(from) % kKeys;
          const uint32_t previous = __shfl_up_sync(~0u, seen[u], 1);
          const bool wanted = seen[u] || (previous && misalignment[u] > 0);
          x[u].load(from + (lane * kKeys - misalignment[u]),
                    wanted && lane * kKeys - misalignment[u] < left_keys);
        }
        from = mask + own_row * p.keys + first_key;
        const int own_misalignment = reinterpret_cast<uintptr_t>(from) % kKeys;
        tail_chunk.load(from + (Tr::kWarpKeys - own_misalignment),
                        lane < kInFlight && own_row < existing_rows && own_misalignment > 0 &&
                            Tr::kWarpKeys - own_misalignment < left_keys);
        const uint32_t tail_bits = tail_chunk.bits();
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const uint32_t bits = x[u].bits(), next = __shfl_down_sync(~0u, bits, 1);
          const uint32_t tail = __shfl_sync(~0u, tail_bits, u);
          seen[u] &= (bits | (lane == 31 ? tail : next) << kKeys) >> misalignment[u];
        }
      }
      uint8_t* here = byte + first * row_bytes;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u, here += kWarps * row_bytes) {
        const int row = first + u * kWarps;
        const uint32_t masked = row < existing_rows ? existing ^ seen[u] : 0;
        summary |= seen[u] | masked << 16;
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
    const uint32_t any_visible = __ballot_sync(~0u, (summary & 0xffff) != 0);
    const uint32_t any_masked = __ballot_sync(~0u, summary >> 16 != 0);
    if (lane == 0) shared.seen[warp] = any_visible, shared.masked[warp] = any_masked;
    __syncthreads();
    const int tile_index = static_cast<int>(threadIdx.x);  // index in the strip
    if (tile_index >= strips.tiles || column + tile_index >= strips.columns) return;
    uint32_t seen = 0, masked = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) seen |= shared.seen[w], masked |= shared.masked[w];
    const int lanes = p.block_k / kKeys;
    // The lanes of this tile.
    const uint32_t own = strips.tiles == 1 ? ~0u : ((1u << lanes) - 1) << (tile_index * lanes);
    out.put(int64_t{tile_line} * strips.columns + column + tile_index,
            tile_row * strips.columns + column + tile_index, (seen & own) != 0,
            (masked & own) == 0);
  }
}

template <typename Tr, typename Out>
cudaError_t launch(const BlockMaskParams& p, const Out& out, cudaStream_t stream) {
  const Strips strips(p, Tr::kWarpKeys);
  if (strips.num_ctas(p) > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(tiles_kernel<Tr, Out>, strips.num_ctas(p), Tr::kThreads, sizeof(Shared<Tr>),
                       stream, p, strips, out);
}

}  // namespace jax_dsa::block_mask
