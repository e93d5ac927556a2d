// FP8 records in portable kernels (mla/portable.cuh).
//
// Each thread copies its parts of a tile's records to a buffer of its own. When they have landed,
// it unpacks them to bf16 in a slot, and issues the copies of the next tile. With D 512 the records
// are page records.
#pragma once

#include <type_traits>

#include "mla/plan.cuh"
#include "mla/portable.cuh"
#include "mla/records.cuh"

namespace jax_dsa::mla {

// The parts of records that each thread copies at a time: of each of its rows, the 64 codes of a
// block, 8 bf16 values and a scale. Of a page record, the last of eight threads has no codes, and a
// thread has four scales, one of which is its own.
template <typename Tr>
struct alignas(16) RecordParts {
  static constexpr int kThreads = Tr::kThreads < Tr::kKeys * 8 ? Tr::kThreads : Tr::kKeys * 8;
  static constexpr int kCopies = Tr::kKeys * 8 / kThreads;  // rows per thread
  static constexpr bool kPageRecords = Tr::kD == 512;
  static constexpr int kValueBlock = kPageRecords ? 7 : 8;  // of the tile
  uint8_t codes[kCopies][4][kThreads][16];
  uint8_t values[kCopies][kThreads][16];
  float scales[kCopies][kThreads];

  // Copies the parts of a record, the i-th row of this thread.
  __device__ __forceinline__ void copy(int i, KeySource record, uint64_t policy) {
    const int block = threadIdx.x % 8;
    const bool valid = record.exists(), has_codes = valid && (!kPageRecords || block < 7);
    const char* const from = record.at;
    const uint32_t to = whole_sum(smem_address(codes[i][0][0]), threadIdx.x * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      cp_async_16(to + j * static_cast<uint32_t>(sizeof(codes[0][0])), from + block * 64 + j * 16,
                  has_codes, policy);
    }
    cp_async_16(whole_sum(smem_address(values[i][0]), threadIdx.x * 16),
                from + (kPageRecords ? 448 : 528) + block * 16, valid, policy);
    cp_async_4(whole_sum(smem_address(scales[i]), threadIdx.x * 4),
               kPageRecords ? from + record.scales + block / 4 * 4 : from + 512 + block / 2 * 4,
               valid);
  }

  // Unpacks the parts to the tile at `keys`. Calls unpacked(i, row) for each of the thread's rows.
  template <typename Unpacked>
  __device__ __forceinline__ void unpack(uint32_t keys, Unpacked unpacked) const {
    constexpr uint32_t kBlock = Tr::kKeys * 128;
    const int chunk = threadIdx.x % 8;
    for_each_row<Tr::kKeys, Tr::kThreads>([&](int i, int row) {
      const uint32_t to = keys + chunk * kBlock + row * 128;
      float scale = scales[i][threadIdx.x];
      if constexpr (kPageRecords) {
        scale = page_record_scale(__float_as_uint(scale) >> chunk % 4 * 8 & 255);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kPageRecords && chunk == 7) continue;
        uint32_t x[8];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          load_shared_16(smem_address(codes[i][half * 2 + j][threadIdx.x]),
                         reinterpret_cast<uint32_t (&)[4]>(x[j * 4]));
        }
        unpack_values(x, scale, [&](int j, const uint32_t (&y)[4]) {
          store_shared_16(to + ((half * 4 + j) ^ row % 8) * 16, y);
        });
      }
      uint32_t x[4];
      load_shared_16(smem_address(values[i][threadIdx.x]), x);
      store_shared_16(keys + kValueBlock * kBlock + row * 128 + (chunk ^ row % 8) * 16, x);
      unpacked(i, row);
    });
  }
};

struct NoRecordParts {};
template <typename Tr, bool kRecords>
using RecordPartsIf = std::conditional_t<kRecords, RecordParts<Tr>, NoRecordParts>;

}  // namespace jax_dsa::mla
