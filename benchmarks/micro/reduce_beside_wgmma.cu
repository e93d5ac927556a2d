// Measures whether reductions into global memory slow down the tensor cores of the same SM.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o reduce_beside_wgmma benchmarks/micro/reduce_beside_wgmma.cu
// One warpgroup multiplies from shared memory (m64n256k16). The other one adds float32 values to
// scattered rows of 576 elements, by red.v4 (eight lanes per 128 bytes of a row) or by
// cp.reduce.async.bulk (256 bytes), or stores to them. Each runs alone, then both together. If both
// together take as long as the slower one alone, they do not slow each other down.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "gpu/check.cuh"

using namespace jax_dsa;

constexpr int kColumns = 576;

enum Mode { kNone, kRed, kBulk, kStore };

struct alignas(1024) Tiles {
  uint8_t a[8192];
  uint8_t b[4][8192];
  uint8_t stage[4][4096];
};

template <Mode kMode>
__global__ void __launch_bounds__(256, 1)
    run(float* to, const int* rows, int rows_per_warp, int products) {
  auto& shared = dynamic_shared<Tiles>();
  for (int i = threadIdx.x; i < int{sizeof(Tiles) / 4}; i += 256) {
    reinterpret_cast<uint32_t*>(&shared)[i] = i < 10240 ? mix(i) & 0x3fff3fff : 0x3f800000;
  }
  fence_async_proxy();
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < 4) {
    float d[128] = {};
    const uint64_t a = mn_major_descriptor(smem_address(shared.a), 8192);
    const uint64_t b = mn_major_descriptor(smem_address(shared.b), 8192);
    for (int i = 0; i < products; ++i) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_bf16<kMNMajor, kMNMajor>(d, a + k * 128, b + k * 128, true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(d);
    }
    float sum = 0;
    for (float x : d) sum += x;
    if (sum == 12345.f) to[threadIdx.x] = sum;
  } else if (kMode != kNone) {
    const int* own_rows = rows + (blockIdx.x * 4 + warp - 4) * int64_t{rows_per_warp};
    if constexpr (kMode == kBulk) {
      if (lane < 16) {
        for (int row = lane; row < rows_per_warp; row += 16) {
          float* const at = to + int64_t{__ldg(own_rows + row)} * kColumns;
#pragma unroll
          for (int i = 0; i < 256; i += 64) {
            asm volatile(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;" ::"l"(
                    at + i),
                "r"(smem_address(shared.stage[warp - 4] + lane * 256))
                : "memory");
            bulk_commit();
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
          }
        }
        bulk_wait();
      }
    } else {
      for (int row = lane / 8; row < rows_per_warp; row += 4) {
        float* const at = to + int64_t{__ldg(own_rows + row)} * kColumns + lane % 8 * 4;
#pragma unroll
        for (int i = 0; i < 256; i += 32) {
          if constexpr (kMode == kRed) {
            red_add(at + i, 1.f, 2.f, 3.f, 4.f);
          } else {
            asm volatile("st.global.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(at + i), "f"(1.f)
                         : "memory");
          }
        }
      }
    }
  }
}

int main() {
  const int rows_per_warp = 4096, keys = 8192;
  for (int blocks : {num_sms(), num_sms() / 2, 8}) {
    const int64_t count = int64_t{blocks} * 4 * rows_per_warp;
    std::vector<int> rows(count);
    for (int64_t i = 0; i < count; ++i) rows[i] = mix(i) % keys;
    int* d_rows = upload(rows);
    float* to = device<float>(int64_t{keys} * kColumns);
    CHECK(cudaMemset(to, 0, int64_t{keys} * kColumns * 4));
    const auto time = [&](auto kernel, int products) {
      CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 int{sizeof(Tiles)}));
      return best_milliseconds(
          [&] { kernel<<<blocks, 256, sizeof(Tiles)>>>(to, d_rows, rows_per_warp, products); });
    };
    const int products = 1200;
    printf("%3d SMs, us: wgmma alone %.0f", blocks, 1e3 * time(run<kNone>, products));
    printf("  red alone %.0f both %.0f", 1e3 * time(run<kRed>, 0), 1e3 * time(run<kRed>, products));
    printf("  bulk alone %.0f both %.0f", 1e3 * time(run<kBulk>, 0),
           1e3 * time(run<kBulk>, products));
    printf("  stores alone %.0f both %.0f\n", 1e3 * time(run<kStore>, 0),
           1e3 * time(run<kStore>, products));
    CHECK(cudaFree(d_rows));
    CHECK(cudaFree(to));
  }
  return 0;
}
