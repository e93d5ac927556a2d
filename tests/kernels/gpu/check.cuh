// Shared code of the check programs in this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(x)                                                               \
  do {                                                                         \
    cudaError_t e = (x);                                                       \
    if (e != cudaSuccess) {                                                    \
      printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e)); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

// Returns pseudorandom bits that depend on `x`.
__host__ __device__ inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline int num_sms() {
  int n = 0;
  CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
  return n;
}

template <typename T>
T* device(size_t n) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, std::max<size_t>(n * sizeof(T), 16)));
  return p;
}
template <typename T>
T* upload(const std::vector<T>& v) {
  T* p = device<T>(v.size());
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <typename T>
std::vector<T> download(const T* p, size_t n) {
  std::vector<T> v(n);
  CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

// The device arrays of a test problem, which the destructor frees.
struct Memory {
  static constexpr uint8_t kPoison = 0xff;  // bytes that are NaN in every float type
  std::vector<void*> all;

  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* p : all) CHECK(cudaFree(p));
  }
  // Returns memory filled with kPoison, `offset` bytes after an aligned address.
  template <typename T = uint8_t>
  T* room(size_t n, int offset = 0) {
    const size_t bytes = n * sizeof(T) + offset;
    uint8_t* const p = device<uint8_t>(bytes);
    all.push_back(p);
    CHECK(cudaMemset(p, kPoison, std::max<size_t>(bytes, 1)));
    return reinterpret_cast<T*>(p + offset);
  }
  template <typename T>
  const T* put(const std::vector<T>& x, int offset = 0) {
    T* const to = room<T>(x.size(), offset);
    CHECK(cudaMemcpy(to, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
  }
  template <typename T>
  std::vector<T> get(const T* from, size_t n) {
    return download(from, n);
  }
  void require(cudaError_t status) {
    CHECK(status);
    CHECK(cudaDeviceSynchronize());
  }
};

// Returns the shortest time of four runs of the work that `launch` enqueues.
template <typename F>
float best_milliseconds(F launch) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  float best = 1e9f;
  for (int run = 0; run < 4; ++run) {
    CHECK(cudaEventRecord(a));
    launch();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    best = ms < best ? ms : best;
  }
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  return best;
}
