// Sparse attention over caches, with instructions of sm_80. decode.cuh has the mathematics.
//
// Tiling. A work tile is (query, KV head, 16 or 32 query heads), and a CTA computes one. Its list
// of blocks is a sequence of keys, which are processed in tiles of 16 to 64 by the loop of
// mla/portable.cuh. A list is not divided.
//
// FP8 caches. Each thread copies its parts of the codes of a tile to a buffer of its own. When they
// have landed, it converts them to bf16 in a slot, exactly, and issues the copies of the next tile.
// Scores and probabilities are multiplied by the factors of their rows.
//
// Shared memory for D = 128, 32 heads and 64 keys: Q 8 KiB, keys and values 2 x 32 KiB, scores 8
// KiB, probabilities 4 KiB. FP8 caches have 32 keys: keys and values 3 x 16 KiB, codes 8 KiB.
#pragma once

#include "common/combine_splits.cuh"
#include "mla/portable.cuh"
#include "sparse_attention/decode_rows.cuh"

namespace jax_dsa::sparse_attention {

// The codes that each thread copies at a time, and the factors of the rows of the next tiles.
template <typename Tr>
struct alignas(16) CodeParts {
  static constexpr int kChunks = Tr::kD / 64;  // per row and thread, of 16 codes each
  static constexpr int kThreads = Tr::kThreads < Tr::kKeys * 8 ? Tr::kThreads : Tr::kKeys * 8;
  static constexpr int kCopies = Tr::kKeys * 8 / kThreads;  // rows per thread
  uint8_t codes[kCopies][kChunks][kThreads][16];
  // Those of a tile arrive while the tiles in the slots are read.
  float key_factors[Tr::kSlots + 1][Tr::kKeys], value_factors[Tr::kSlots + 1][Tr::kKeys];
};
struct NoCodeParts {};

template <typename Tr, bool kFp8>
struct alignas(128) PortableDecodeShared : mla::PortableShared<Tr> {
  [[no_unique_address]] std::conditional_t<kFp8, CodeParts<Tr>, NoCodeParts> parts;
  int list_ends[Tr::kThreads / 32];
};

// Fills the slots with the keys and values of a list, see mla::attend_tiles.
template <typename Tr, bool kFp8>
class ListLoader {
  static constexpr int kKeys = Tr::kKeys, kRowBytes = Tr::kD * (kFp8 ? 1 : 2);
  static_assert(Tr::kSeparateValues && Tr::kE == Tr::kD);

 public:
  static constexpr bool kUnpacks = kFp8;

  __device__ ListLoader(const Decode& p, PortableDecodeShared<Tr, kFp8>& shared,
                        const DecodeTile& tile)
      : p(p),
        shared(shared),
        tiles(ceil_div(list_length(shared) << p.log_block_size, kKeys)),
        first(tile.request(p) * p.batch_rows * p.groups + tile.group),
        rows(p, tile, mla::lookup_row<kKeys, Tr::kThreads>()) {}

  __device__ int tile_count() const { return tiles; }

  __device__ __forceinline__ void load() {
    if (next < tiles) {
      const int found = rows.next();
      const uint64_t policy = l2_policy_evict_first();
      mla::for_each_row<kKeys, Tr::kThreads>([&](int i, int row) {
        const int cache_row = mla::looked_up(found, i);
        const bool valid = cache_row >= 0;
        const int64_t at = first + int64_t{max(cache_row, 0)} * p.groups;
        const char* const k = static_cast<const char*>(p.k) + at * kRowBytes;
        const char* const v = static_cast<const char*>(p.v) + at * kRowBytes;
        if constexpr (kFp8) {
          copy_codes(i, row, k, v, at, valid, policy);
          is_valid[i] = valid;
        } else {
          const int slot = next % Tr::kSlots;
          const uint32_t to = smem_address(shared.keys[slot]);
          mla::gather_row<kKeys, Tr::kBlocks>(to, row, k, valid, policy);
          mla::gather_row<kKeys, Tr::kValueBlocks>(to + Tr::kBlocks * (kKeys * 128), row, v, valid,
                                                   policy);
          if (threadIdx.x % 8 == 0) shared.valid[slot][row] = valid;
        }
      });
      ++next;
    }
    cp_async_commit();
  }

  // Converts the last loaded codes in their slot.
  __device__ __forceinline__ void unpack() {
    if constexpr (kFp8) {
      const int slot = (next - 1) % Tr::kSlots;
      mla::for_each_row<kKeys, Tr::kThreads>([&](int i, int row) {
        if (threadIdx.x % 8 == 0) shared.valid[slot][row] = is_valid[i];
        const uint32_t to = smem_address(shared.keys[slot]) + row * 128;
#pragma unroll
        for (int j = 0; j < CodeParts<Tr>::kChunks; ++j) {
          uint32_t codes[4];
          load_shared_16(smem_address(shared.parts.codes[i][j][threadIdx.x]), codes);
          const int chunk = code_chunk(j);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t y[4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              float x[4];
              unpack_e4m3(codes[half * 2 + k], x);
              y[k * 2] = pack_bf16(x[0], x[1]), y[k * 2 + 1] = pack_bf16(x[2], x[3]);
            }
            store_shared_16(
                to + chunk / 4 * (kKeys * 128) + ((chunk % 4 * 2 + half) ^ row % 8) * 16, y);
          }
        }
      });
    }
  }

  __device__ __forceinline__ void landed(int) const {}
  __device__ __forceinline__ void adjust(int tile, float (&s)[Tr::kLaneKeys]) const {
    if constexpr (kFp8) {
      const int own = mla::lane_key<Tr>();
      const float* const factors = shared.parts.key_factors[tile % (Tr::kSlots + 1)] + own;
      const uint8_t* const valid = shared.valid[tile % Tr::kSlots] + own;
#pragma unroll
      for (int i = 0; i < Tr::kLaneKeys; ++i) {
        if (valid[i]) s[i] *= factors[i];
      }
    }
  }
  __device__ __forceinline__ void weigh(int tile, float (&s)[Tr::kLaneKeys]) const {
    if constexpr (kFp8) {
      const float* const factors =
          shared.parts.value_factors[tile % (Tr::kSlots + 1)] + mla::lane_key<Tr>();
#pragma unroll
      for (int i = 0; i < Tr::kLaneKeys; ++i) s[i] *= factors[i];
    }
  }

 private:
  // The index of this thread's j-th chunk among those of the codes of a row's keys, then values.
  __device__ static int code_chunk(int j) { return j * 8 + threadIdx.x % 8; }

  __device__ __forceinline__ void copy_codes(int i, int row, const char* k, const char* v,
                                             int64_t at, bool valid, uint64_t policy) {
    const uint32_t to = whole_sum(smem_address(shared.parts.codes[i]), threadIdx.x * 16);
#pragma unroll
    for (int j = 0; j < CodeParts<Tr>::kChunks; ++j) {
      const int chunk = code_chunk(j);
      cp_async_16_alone(to + j * static_cast<uint32_t>(sizeof(shared.parts.codes[0][0])),
                        chunk < Tr::kD / 16 ? k + chunk * 16 : v + chunk * 16 - Tr::kD, valid,
                        policy);
    }
    if (threadIdx.x % 8 < 2) {
      const int slot = next % (Tr::kSlots + 1);
      const bool of_key = threadIdx.x % 8 == 0;
      float& factor =
          of_key ? shared.parts.key_factors[slot][row] : shared.parts.value_factors[slot][row];
      const float* const from = of_key ? p.k_scale : p.v_scale;
      if (from) {
        cp_async_4(smem_address(&factor), from + at, valid);
      } else {
        factor = 1.f;
      }
    }
  }

  const Decode& p;
  PortableDecodeShared<Tr, kFp8>& shared;
  int tiles, next = 0;
  int64_t first;  // the row of position 0, in rows of one KV head
  RowFinder<kKeys> rows;
  bool is_valid[ceil_div(kKeys, Tr::kThreads / 8)];  // whether the last loaded rows are valid
};

template <typename Tr, bool kFp8>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_decode_kernel(const __grid_constant__ Decode p) {
  static_assert(Tr::kGroups == 1);
  auto& shared = dynamic_shared<PortableDecodeShared<Tr, kFp8>>();
  const DecodeTile tile(p, Tr::kRows);
  const auto row_index = [&](int row) { return int64_t{tile.token} * p.heads + tile.head + row; };
  const int rows = p.per_group - tile.first_row;
  find_list_end<Tr::kThreads>(p, tile, shared);
  mla::for_each_row<Tr::kRows, Tr::kThreads>([&](int, int row) {
    const bool exists = row < rows;
    mla::gather_row<Tr::kRows, Tr::kBlocks>(
        smem_address(shared.q), row,
        static_cast<const char*>(p.q) + row_index(exists ? row : 0) * (Tr::kD * 2), exists,
        l2_policy_evict_first());
  });
  __syncthreads();
  ListLoader<Tr, kFp8> loader(p, shared, tile);
  mla::PortableRow state;
  float o[Tr::kRows / 16][Tr::kOutputs];
  mla::attend_tiles<Tr>(shared, loader, loader.tile_count(), 0, p.scale, 0.f, state, o);

  const int lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  const float total = mla::over_row<Tr>(state.sum, [](float a, float b) { return a + b; });
  if (lane < Tr::kWarpRows) {
    const int row = mla::lane_row<Tr>();
    // If all scores are -inf the output is zero, or NaN if it has an infinite value.
    CombinedRow combined(state.running_max, total);
    if (combined.empty) {
      combined.factor = 1.f;
    } else if (p.sinks && row < rows) {
      combined.apply_sink(p.sinks[int64_t{tile.request(p)} * p.sinks_stride + tile.head + row]);
    }
    shared.factor[0][row] = combined.factor;
    if (row < rows) {
      p.max_logit[row_index(row)] = max_with_nan(state.running_max, total);
      p.log_sum[row_index(row)] = log_of_sum(total);
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < Tr::kRows / 8; ++j) {
    const int row = j * 8 + lane / 4;
    if (row >= rows) continue;
    const float factor = shared.factor[0][row];
    __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.out) + row_index(row) * Tr::kE +
                              warp * (Tr::kE / 4) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < Tr::kOutputs; i += 4) {
      const float* const x = &o[j / 2][i + j % 2 * 2];
      store_pair(to + i * 2, x[0] * factor, x[1] * factor, true);
    }
  }
}

}  // namespace jax_dsa::sparse_attention
