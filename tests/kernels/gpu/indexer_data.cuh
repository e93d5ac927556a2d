// What indexer_check.cu tests and times: inputs on the GPU, and a float64 reference for them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <vector>

#include "gpu/check.cuh"
#include "indexer/indexer.h"

using jax_dsa::IndexerDType;
using jax_dsa::IndexerFwdParams;

constexpr uint32_t kPoison = 0x7fc0dead;  // a NaN that no arithmetic makes

// Returns a random value from roughly a normal distribution of unit variance.
__host__ __device__ inline float random_value(uint64_t seed, int64_t i) {
  const uint64_t h = mix(seed * 0x1000003 + i);
  int sum = 0;
  for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
  return static_cast<float>(sum - 131070) * (1.f / 37837.f);
}
__host__ __device__ inline float load(const void* x, IndexerDType dtype, int64_t i) {
  return dtype == IndexerDType::kBF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i])
                                      : static_cast<float>(static_cast<const __nv_fp8_e4m3*>(x)[i]);
}
__global__ void fill(void* x, IndexerDType dtype, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (dtype == IndexerDType::kBF16) {
      static_cast<__nv_bfloat16*>(x)[i] = __float2bfloat16(random_value(seed, i));
    } else {
      static_cast<__nv_fp8_e4m3*>(x)[i] = __nv_fp8_e4m3(random_value(seed, i));
    }
  }
}
__global__ void fill_f32(float* x, int64_t n, uint64_t seed, bool positive) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float v = random_value(seed, i);
    x[i] = positive ? 0.5f + fabsf(v) : v;
  }
}
__global__ void fill_word(uint32_t* x, int64_t n, uint32_t word) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x)
    x[i] = word;
}
// Puts NaN into keys that no query sees (state 1), and into one channel of keys with state 2, which
// are seen.
__global__ void poison_keys(void* k, float* scale, const uint8_t* state, IndexerDType dtype,
                            int64_t rows, int channels) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    if (state[r] == 0) continue;
    if (state[r] == 1 && scale && threadIdx.x == 0) scale[r] = NAN;
    for (int c = threadIdx.x; c < (state[r] == 1 ? channels : 1); c += blockDim.x) {
      if (dtype == IndexerDType::kBF16) {
        static_cast<__nv_bfloat16*>(k)[r * channels + c] = __float2bfloat16(NAN);
      } else {
        static_cast<uint8_t*>(k)[r * channels + c] = 0x7f;
      }
    }
  }
}

// Returns the row of key `s` of a request in `k`, or -1 if its page is unmapped.
__host__ __device__ inline int64_t key_row(const IndexerFwdParams& p, int64_t batch, int64_t s) {
  if (p.page_table == nullptr) return batch * p.keys + s;
  const int page = p.page_table[batch * p.pages_per_request + s / p.page_size];
  return page >= 0 && page < p.pages ? page * int64_t{p.page_size} + s % p.page_size : -1;
}

// Computes the logit in float64, and the sum of the absolute values of its terms, which errors are
// relative to.
__host__ __device__ inline void logit(const IndexerFwdParams& p, int64_t token, int64_t s,
                                      double& value, double& size) {
  const int64_t batch = token / p.queries;
  value = size = 0;
  const int64_t row = key_row(p, batch, s);
  if (s < p.starts[token] || s >= p.ends[token] || row < 0) {
    value = -INFINITY;
    return;
  }
  for (int j = 0; j < p.heads; ++j) {
    double x = 0, a = 0;
    for (int c = 0; c < p.channels; ++c) {
      const double y = double{load(p.q, p.dtype, (token * p.heads + j) * p.channels + c)} *
                       double{load(p.k, p.dtype, row * p.channels + c)};
      x += y;
      a += fabs(y);
    }
    if (p.relu && x < 0) x = 0;
    value += double{p.weights[token * p.heads + j]} * x;
    size += fabs(double{p.weights[token * p.heads + j]}) * a;
  }
  const double scale = p.k_scale ? p.k_scale[row] : 1.f;
  value *= scale;
  size *= scale;
}

struct Errors {
  unsigned long long unwritten, wrong_inf, wrong_nan, changed;
  unsigned worst;  // the bits of the largest |error| / size, a float
};
__global__ void compare_logits(IndexerFwdParams p, const int64_t* tokens, int64_t count,
                               Errors* errors) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t token = tokens[i];
    for (int64_t s = threadIdx.x; s < p.keys; s += blockDim.x) {
      double value, size;
      logit(p, token, s, value, size);
      const float got = p.out[token * p.keys + s];
      if (isnan(value) != isnan(got)) atomicAdd(&errors->wrong_nan, 1ull);
      if ((value == -INFINITY) != (got == -INFINITY)) atomicAdd(&errors->wrong_inf, 1ull);
      if (isfinite(value) && isfinite(got)) {
        const float error = fabs(got - value) / fmax(size, 1e-30);
        atomicMax(&errors->worst, __float_as_uint(error));
      }
    }
  }
}
__global__ void check_written(const uint32_t* x, const uint32_t* other, int64_t n, Errors* errors) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (x[i] == kPoison) atomicAdd(&errors->unwritten, 1ull);
    if (other && x[i] != other[i]) atomicAdd(&errors->changed, 1ull);
  }
}

template <typename T>
std::vector<T> download_as(const void* p, size_t n) {
  std::vector<T> v(n);
  CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

enum Ranges { kFull, kCausal, kRandom, kPacked, kNone };
struct Case {
  const char* name;
  IndexerDType dtype;
  int B, T, S, J, C;
  Ranges ranges = kCausal;
  bool relu = true, scale = true, poison = true;
  int page = 0;  // keys per page; 0 means no pages. Every seventh page is unmapped.
};

void make_ranges(const Case& c, uint64_t seed, std::vector<int>& starts, std::vector<int>& ends) {
  for (int64_t i = 0; i < int64_t{c.B} * c.T; ++i) {
    const int t = i % c.T;
    const uint64_t a = mix(seed + 2 * i), b = mix(seed + 2 * i + 1);
    int start = 0, end = c.S;
    if (c.ranges == kCausal) end = std::clamp(c.S - c.T + t + 1, 0, c.S);
    if (c.ranges == kRandom) start = a % (c.S + 1), end = b % (c.S + 1);
    if (c.ranges == kRandom && i % 5 == 0) end = start;
    if (c.ranges == kPacked) start = t / 100 * 100 % (c.S + 1), end = std::min(t + 1, c.S);
    if (c.ranges == kNone) start = a % (c.S + 1), end = b % (start + 1);
    starts.push_back(start);
    ends.push_back(end);
  }
}

struct Data {
  IndexerFwdParams p = {};
  std::vector<int> starts, ends, table;
  int64_t tokens, keys, q_size, k_size, out_size;

  Data(const Case& c, uint64_t seed) {
    tokens = int64_t{c.B} * c.T, keys = int64_t{c.B} * c.S;
    if (c.page > 0) {
      p.page_size = c.page, p.pages_per_request = c.S / c.page, p.pools = 1;
      const int needed = static_cast<int>(c.B * p.pages_per_request);
      p.pages = needed + 3, keys = int64_t{p.pages} * c.page;
      std::vector<int> free(p.pages);
      for (int i = 0; i < p.pages; ++i) free[i] = i;
      for (int i = p.pages - 1; i > 0; --i) std::swap(free[i], free[mix(seed + i) % (i + 1)]);
      const int unmapped[] = {-1, INT_MIN, p.pages, INT_MAX};
      for (int i = 0; i < needed; ++i) {
        table.push_back(c.poison && i % 7 == 3 ? unmapped[i / 7 % 4] : free[i]);
      }
    }
    q_size = tokens * c.J * c.C, k_size = keys * c.C, out_size = tokens * c.S;
    const int bytes = c.dtype == IndexerDType::kBF16 ? 2 : 1;
    void *q = device<char>(q_size * bytes), *k = device<char>(k_size * bytes);
    float *w = device<float>(tokens * c.J), *scale = device<float>(keys);
    make_ranges(c, seed, starts, ends);
    p.q = q, p.k = k, p.weights = w, p.k_scale = c.scale ? scale : nullptr;
    p.starts = upload(starts), p.ends = upload(ends), p.out = device<float>(out_size);
    p.batch = c.B, p.queries = c.T, p.keys = c.S, p.heads = c.J, p.channels = c.C;
    p.dtype = c.dtype, p.relu = c.relu, p.whole_rows = true;
    if (c.page > 0) p.page_table = table.data();
    fill<<<1024, 256>>>(q, c.dtype, q_size, seed + 1);
    fill<<<1024, 256>>>(k, c.dtype, k_size, seed + 2);
    fill_f32<<<1024, 256>>>(w, tokens * c.J, seed + 3, false);
    fill_f32<<<1024, 256>>>(scale, keys, seed + 4, true);
    if (c.poison) {
      std::vector<uint8_t> state(keys, 1);
      for (int64_t i = 0; i < tokens; ++i) {
        for (int s = starts[i]; s < ends[i]; ++s) {
          const int64_t row = key_row(p, i / c.T, s);
          if (row >= 0) state[row] = 0;
        }
      }
      for (int64_t s = 0; s < keys; s += 37) {
        if (state[s] == 0) state[s] = 2;
      }
      uint8_t* device_state = upload(state);
      poison_keys<<<1024, 128>>>(k, c.scale ? scale : nullptr, device_state, c.dtype, keys, c.C);
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaFree(device_state));
    }
    if (c.page > 0) p.page_table = upload(table);
    CHECK(cudaDeviceSynchronize());
  }
  ~Data() {
    for (const void* x :
         {p.q, p.k, (const void*)p.weights, (const void*)p.k_scale, (const void*)p.starts,
          (const void*)p.ends, (const void*)p.out, (const void*)p.page_table}) {
      CHECK(cudaFree(const_cast<void*>(x)));
    }
  }
};
