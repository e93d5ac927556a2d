// Memory rates compared with that of a device copy, for the check programs of kernels whose time is
// bounded by memory.
#pragma once

#include <string>

#include "gpu/check.cuh"

// Fills words that can be read as two bf16 or as one float32, with magnitudes from 2^-3 to 2.
__global__ void fill(uint32_t* x, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = static_cast<uint32_t>(mix(i)) & 0x81ff81ffu | 0x3e003e00u;
  }
}

class Rates {
 public:
  // A measurement takes `launches` consecutive launches. Names are padded to `width` columns.
  Rates(int launches, int width) : launches_(launches), width_(width) {
    const size_t bytes = size_t{1} << 30;
    auto *const a = device<uint8_t>(bytes), *const b = device<uint8_t>(bytes);
    print("device copy", 2. * bytes,
          [&] { return cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice); });
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
  }
  // Measures and prints the rate of a launch that reads and writes `bytes` bytes in total.
  template <typename F>
  void print(const std::string& name, double bytes, F launch) {
    const float ms = best_milliseconds([&] {
                       for (int i = 0; i < launches_; ++i) CHECK(launch());
                     }) /
                     launches_;
    const double rate = 1e3 * bytes / ms;
    if (copy_ == 0) copy_ = rate;
    printf("%-*s %8.1f us  %.2f TB/s, %.2f of the copy\n", width_, name.c_str(), 1e3 * ms,
           rate * 1e-12, rate / copy_);
  }

 private:
  int launches_, width_;
  double copy_ = 0;
};
