// Measures how fast float32 values are added to scattered rows of 576 elements, depending on how
// the 32 lanes of a warp are assigned to rows.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o reduce_patterns benchmarks/micro/reduce_patterns.cu
// The patterns are red.v4 with 2, 4, 8 or 32 neighbouring lanes in a row (32, 64, 128 or 512
// bytes), red.v2 and red with 128 bytes of a row, red.v4 with 128 bytes and another order of lanes,
// and cp.reduce.async.bulk of 1 KiB. Rows are chosen at random among S. 4 or 8 warps run on each
// SM, on one half or one quarter of the SMs, or on one SM. This shows the limit of one SM and of
// the L2.
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "common/ptx.cuh"
#include "gpu/check.cuh"

using namespace jax_dsa;

constexpr int kColumns = 576;

// Each group of kLanes lanes adds 256 columns to one row after the other, kFloats per lane. A
// lane's number within the group is changed by an exclusive or with kOrder.
template <int kLanes, int kFloats = 4, int kOrder = 0>
__global__ void reduce(float* to, const int* rows, int rows_per_warp) {
  const int lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int* own_rows = rows + int64_t{warp} * rows_per_warp;
  for (int row = lane / kLanes; row < rows_per_warp; row += 32 / kLanes) {
    float* at = to + int64_t{__ldg(own_rows + row)} * kColumns + (lane % kLanes ^ kOrder) * kFloats;
#pragma unroll
    for (int i = 0; i < 256; i += kLanes * kFloats) {
      if constexpr (kFloats == 4) {
        red_add(at + i, 1.f, 2.f, 3.f, 4.f);
      } else if constexpr (kFloats == 2) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at + i), "f"(1.f), "f"(2.f)
                     : "memory");
      } else {
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + i), "f"(1.f) : "memory");
      }
    }
  }
}

__global__ void reduce_bulk(float* to, const int* rows, int rows_per_warp) {
  __shared__ alignas(128) float values[8][256];
  const int lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int* own_rows = rows + int64_t{warp} * rows_per_warp;
  for (int i = lane; i < 256; i += 32) values[threadIdx.x / 32][i] = 1.f;
  fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
  for (int row = 0; row < rows_per_warp; ++row) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;" ::"l"(
            to + int64_t{__ldg(own_rows + row)} * kColumns),
        "r"(smem_address(values[threadIdx.x / 32]))
        : "memory");
    if (row % 16 == 15) {
      bulk_commit();
      asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
    }
  }
  bulk_commit();
  bulk_wait();
}

int main() {
  const int rows_per_warp = 8192;
  for (int keys : {4096, 8192, 32768, 131072}) {
    const int all = num_sms();
    for (const auto [blocks, warps] :
         {std::pair{all, 4}, {all, 8}, {all / 2, 8}, {all / 4, 8}, {1, 8}}) {
      const int64_t count = int64_t{blocks} * warps * rows_per_warp;
      std::vector<int> rows(count);
      for (int64_t i = 0; i < count; ++i) rows[i] = mix(i) % keys;
      int* d_rows = upload(rows);
      float* to = device<float>(int64_t{keys} * kColumns);
      CHECK(cudaMemset(to, 0, int64_t{keys} * kColumns * 4));
      const auto time = [&](auto kernel) {
        const float best =
            best_milliseconds([&] { kernel<<<blocks, warps * 32>>>(to, d_rows, rows_per_warp); });
        return count * 1024. / best * 1e-9;
      };
      printf(
          "S%-6d %3d x %d warps  TB/s: 32 B %.3f  64 B %.3f  128 B %.3f  512 B %.3f  "
          "8 B per lane %.3f  4 B per lane %.3f  other orders %.3f %.3f  bulk 1 KiB %.3f\n",
          keys, blocks, warps, time(reduce<2>), time(reduce<4>), time(reduce<8>), time(reduce<32>),
          time(reduce<16, 2>), time(reduce<32, 1>), time(reduce<8, 4, 1>), time(reduce<8, 4, 6>),
          time(reduce_bulk));
      CHECK(cudaFree(d_rows));
      CHECK(cudaFree(to));
    }
  }
  return 0;
}
