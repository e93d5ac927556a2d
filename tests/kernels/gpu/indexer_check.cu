// Tests the indexer's forward kernels against a float64 reference, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o indexer_check tests/kernels/gpu/indexer_check.cu cuda/indexer/dispatch.cu \
//       cuda/indexer/fwd_*.cu cuda/topk/dispatch.cu
//   ./indexer_check [test|small|bench|decode|profile] [seed]
// `decode` times the kernels for few queries beside those for many, `bench` the latter.
// The reference runs on the GPU for every element of small cases; the CPU repeats some of it.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/check.cuh"
#include "indexer/launch.cuh"
#include "topk/topk.h"

using jax_dsa::IndexerDType;
using jax_dsa::IndexerFwdParams;

constexpr uint32_t kPoison = 0x7fc0dead;  // a NaN that no arithmetic makes

// About normal, unit variance.
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
// NaN into the keys of `state` 1 (seen by no query) and, in one channel, 2 (seen).
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

// Where a request's key lies, -1 if its page is not there.
__host__ __device__ inline int64_t key_row(const IndexerFwdParams& p, int64_t batch, int64_t s) {
  if (p.page_table == nullptr) return batch * p.keys + s;
  const int page = p.page_table[batch * p.pages_per_request + s / p.page_size];
  return page >= 0 && page < p.pages ? page * int64_t{p.page_size} + s % p.page_size : -1;
}

// The logit and the sum of its terms' absolute values, by which errors are measured.
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
  unsigned worst;  // bits of the largest |error| / size
};
__global__ void compare(IndexerFwdParams p, const int64_t* tokens, int64_t count, Errors* errors) {
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
__global__ void scan(const uint32_t* x, const uint32_t* other, int64_t n, Errors* errors) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (x[i] == kPoison) atomicAdd(&errors->unwritten, 1ull);
    if (other && x[i] != other[i]) atomicAdd(&errors->changed, 1ull);
  }
}

template <typename T>
std::vector<T> download(const void* p, size_t n) {
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
  int page = 0;  // keys of a page; 0: flat. Every seventh page is not there
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
      const int odd[] = {-1, INT_MIN, p.pages, INT_MAX};
      for (int i = 0; i < needed; ++i) {
        table.push_back(c.poison && i % 7 == 3 ? odd[i / 7 % 4] : free[i]);
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
      uint8_t* there = upload(state);
      poison_keys<<<1024, 128>>>(k, c.scale ? scale : nullptr, there, c.dtype, keys, c.C);
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaFree(there));
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

bool run_case(const Case& c, uint64_t seed) {
  Data data(c, seed);
  IndexerFwdParams& p = data.p;
  const bool small = data.out_size < 20000000;
  Errors* errors = device<Errors>(1);
  CHECK(cudaMemset(errors, 0, sizeof(Errors)));
  fill_word<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out), data.out_size, kPoison);
  CHECK(jax_dsa::launch_indexer_fwd(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  std::vector<int64_t> tokens;
  const int64_t step = std::max<int64_t>(1, data.out_size * c.J * c.C / 3000000000);
  for (int64_t i = 0; i < data.tokens; i += step) tokens.push_back(i);
  tokens.push_back(data.tokens - 1);
  int64_t* there = upload(tokens);
  compare<<<2048, 128>>>(p, there, tokens.size(), errors);
  float* first = nullptr;
  if (small) {  // again, into another array
    first = p.out;
    p.out = device<float>(data.out_size);
    fill_word<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out), data.out_size, kPoison);
    CHECK(jax_dsa::launch_indexer_fwd(p, nullptr));
  }
  scan<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out), reinterpret_cast<uint32_t*>(first),
                      data.out_size, errors);
  CHECK(cudaDeviceSynchronize());
  const Errors e = download<Errors>(errors, 1)[0];
  // The CPU's word on a few elements.
  int cpu_bad = 0;
  const double allowed = c.dtype == IndexerDType::kBF16 ? 2e-6 : 3e-4;
  if (small) {
    const int bytes = c.dtype == IndexerDType::kBF16 ? 2 : 1;
    const auto q = download<char>(p.q, data.q_size * bytes);
    const auto k = download<char>(p.k, data.k_size * bytes);
    const auto w = download<float>(p.weights, data.tokens * c.J);
    const auto scale = download<float>(p.k_scale ? p.k_scale : nullptr, p.k_scale ? data.keys : 0);
    const auto out = download<float>(p.out, data.out_size);
    IndexerFwdParams h = p;
    h.q = q.data(), h.k = k.data(), h.weights = w.data();
    h.k_scale = p.k_scale ? scale.data() : nullptr;
    h.starts = data.starts.data(), h.ends = data.ends.data();
    if (p.page_table) h.page_table = data.table.data();
    for (int i = 0; i < 200; ++i) {
      const int64_t at = mix(seed + 77 + i) % data.out_size;
      double value, size;
      logit(h, at / c.S, at % c.S, value, size);
      const bool same = std::isfinite(value) ? std::fabs(out[at] - value) <= allowed * size
                        : std::isnan(value)  ? std::isnan(out[at])
                                             : out[at] == value;
      cpu_bad += !same;
    }
    CHECK(cudaFree(first));
  }
  float worst;
  std::memcpy(&worst, &e.worst, 4);
  const bool good =
      !e.unwritten && !e.wrong_inf && !e.wrong_nan && !e.changed && !cpu_bad && worst <= allowed;
  printf("%-4s %-34s B%d T%d S%d J%d C%d %s: error %.1e", good ? "ok" : "BAD", c.name, c.B, c.T,
         c.S, c.J, c.C, c.dtype == IndexerDType::kBF16 ? "bf16" : "e4m3", worst);
  if (!good) {
    printf("  unwritten %llu, inf %llu, nan %llu, changed %llu, cpu %d", e.unwritten, e.wrong_inf,
           e.wrong_nan, e.changed, cpu_bad);
  }
  printf("\n");
  CHECK(cudaFree(errors));
  CHECK(cudaFree(there));
  return good;
}

constexpr auto kBF16 = IndexerDType::kBF16, kE4M3 = IndexerDType::kE4M3;

template <typename F>
std::vector<float> time_ms(int count, F run) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int i = 0; i <= count; ++i) {
    CHECK(cudaEventRecord(a));
    run();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    float x;
    CHECK(cudaEventElapsedTime(&x, a, b));
    if (i > 0) ms.push_back(x);
  }
  return ms;
}

void bench(const Case& c) {
  Data data(c, 5);
  double pairs = 0;
  for (int64_t i = 0; i < data.tokens; ++i) pairs += std::max(0, data.ends[i] - data.starts[i]);
  std::vector<float> ms;
  for (int turn = 0; turn < 3; ++turn) {
    usleep(100000);  // the device cools down
    for (float x : time_ms(5, [&] { CHECK(jax_dsa::launch_indexer_fwd(data.p, nullptr)); })) {
      ms.push_back(x);
    }
  }
  std::sort(ms.begin(), ms.end());
  const double flops = pairs * 2 * c.J * c.C * 1e-9;
  const float mid = ms[ms.size() / 2];
  printf("%-28s %.3f ms  %.0f TFLOPS (best %.0f, worst %.0f)\n", c.name, mid, flops / mid,
         flops / ms[0], flops / ms.back());
}

double bench_copy() {
  const size_t bytes = size_t{1} << 30;
  char *a = device<char>(bytes), *b = device<char>(bytes);
  std::vector<float> ms =
      time_ms(7, [&] { CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
  std::sort(ms.begin(), ms.end());
  const double rate = 2. * bytes / ms[3] * 1e-9;
  printf("device copy %.2f TB/s\n", rate);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  return rate;
}

// ---- few queries -------------------------------------------------------------------------------

// Microseconds a call, in a graph of calls that take turns over so many caches that none is in the
// L2. A call is launched with the set's number.
template <typename F>
float graph_us(int sets, F launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t calls;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const int count = std::max(sets, 8);
  for (int i = 0; i < count; ++i) launch(i % sets, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&calls, graph, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> us;
  for (int i = 0; i < 12; ++i) {
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(calls, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 2) us.push_back(ms * 1e3f / count);
  }
  CHECK(cudaGraphExecDestroy(calls));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

using Launch = cudaError_t (*)(const IndexerFwdParams&, cudaStream_t);

template <IndexerDType kDType>
void bench_few(int B, int T, int S, int J, int page, double rate) {
  using namespace jax_dsa::indexer;
  constexpr int kC = 128, kK = 2048;
  const Case c = {"", kDType, B, T, S, J, kC, kFull, true, kDType == kE4M3, false, page};
  const int64_t row_bytes = kC * (kDType == kBF16 ? 2 : 1);
  const int64_t bytes = int64_t{B} * S * (row_bytes + (c.scale ? 4 : 0));
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / bytes, 1, 32));
  // One pool for all sets, each of which has its own pages, or its own batch.
  Case all = c;
  all.B = B * sets;
  Data data(all, 5);
  int32_t* indices = device<int32_t>(data.tokens * kK);
  float* values = device<float>(data.tokens * kK);
  const auto of_set = [&](int set) {
    IndexerFwdParams p = data.p;
    p.batch = B;
    const int64_t request = int64_t{set} * B, token = request * T;
    p.q = static_cast<const char*>(p.q) + token * J * row_bytes;
    p.whole_rows = false;
    p.weights += token * J, p.starts += token, p.ends += token, p.out += token * S;
    if (page > 0) {
      p.page_table += request * p.pages_per_request;
    } else {
      p.k = static_cast<const char*>(p.k) + request * S * row_bytes;
      if (p.k_scale) p.k_scale += request * S;
    }
    return p;
  };
  const auto logits = [&](Launch launch) {
    return graph_us(sets, [&](int set, cudaStream_t s) { CHECK(launch(of_set(set), s)); });
  };
  const auto select = [&](int set, cudaStream_t s) {
    const IndexerFwdParams p = of_set(set);
    const int64_t at = int64_t{set} * B * T * kK;
    CHECK(jax_dsa::launch_topk(
        {p.out, p.starts, p.ends, indices + at, values + at, int64_t{B} * T, S, kK}, s));
  };
  const float many = logits(launch_layout<kDType, kC>);
  const float few = logits(jax_dsa::launch_indexer_fwd);
  const float topk = graph_us(sets, select);
  const float both = graph_us(sets, [&](int set, cudaStream_t s) {
    CHECK(jax_dsa::launch_indexer_fwd(of_set(set), s));
    select(set, s);
  });
  const double floor_us = bytes / rate * 1e-6;
  printf("%s B%d T%d S%d J%d %s: %.1f us of keys; many %.1f, few %.1f us (%.2f of the copy), ",
         kDType == kBF16 ? "bf16" : "e4m3", B, T, S, J, page ? "paged" : "flat", floor_us, many,
         few, floor_us / few);
  if (J == 64 && T == 1) {
    const float two = logits(launch_decode<DecodeTraits<kDType, kC, 64, 1, 2>>);
    printf("with two warpgroups %.1f, ", two);
  }
  printf("top-k %.1f, few and top-k %.1f us\n", topk, both);
  CHECK(cudaFree(indices));
  CHECK(cudaFree(values));
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : time(nullptr);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("seed %llu\n", (unsigned long long)seed);
  const Case cases[] = {
      {"one tile", kE4M3, 1, 8, 64, 64, 128, kFull, true, false, false},
      {"one tile, no relu", kBF16, 1, 8, 64, 64, 128, kFull, false, false, false},
      {"causal", kE4M3, 1, 213, 700, 64, 128},
      {"causal", kBF16, 1, 213, 701, 64, 128},
      {"random ranges", kE4M3, 2, 62, 1339, 64, 128, kRandom},
      {"random ranges", kBF16, 3, 62, 333, 64, 128, kRandom, true, false},
      {"packed", kE4M3, 1, 1000, 1003, 32, 128, kPacked},
      {"packed", kBF16, 2, 500, 505, 32, 128, kPacked, true, false},
      {"few heads", kE4M3, 1, 99, 257, 5, 64, kRandom},
      {"few heads", kBF16, 1, 99, 257, 16, 64, kRandom, false, true},
      {"one head", kBF16, 2, 33, 130, 1, 32},
      {"odd heads", kE4M3, 2, 33, 130, 63, 32},
      {"odd heads", kBF16, 2, 33, 130, 33, 64},
      {"odd heads", kE4M3, 2, 41, 190, 17, 128, kRandom, false},
      {"16 heads", kE4M3, 2, 70, 190, 16, 32, kRandom},
      {"32 heads", kBF16, 1, 70, 190, 31, 32, kRandom},
      {"64 heads", kE4M3, 1, 70, 190, 64, 64, kRandom},
      {"nothing seen", kE4M3, 1, 100, 9001, 64, 128, kNone},
      {"one query", kBF16, 5, 1, 4099, 64, 128, kFull},
      {"one key", kE4M3, 3, 50, 1, 64, 128, kRandom},
      {"keys beyond T, no queries see", kBF16, 1, 300, 77, 32, 64},
      {"many items", kE4M3, 1, 4000, 4001, 64, 128, kCausal},
      {"many items", kBF16, 2, 2050, 3001, 64, 128, kRandom},
      {"many items", kE4M3, 7, 900, 1025, 32, 64, kPacked},
      {"one query", kE4M3, 3, 1, 4099, 64, 128, kRandom},
      {"one query, pages", kE4M3, 130, 1, 1024, 64, 128, kRandom, true, true, true, 64},
      {"two queries, pages", kE4M3, 5, 2, 2304, 64, 128, kRandom, false, true, true, 128},
      {"three queries", kBF16, 4, 3, 777, 64, 128, kRandom},
      {"four queries, pages", kBF16, 3, 4, 1344, 63, 128, kRandom, true, true, true, 192},
      {"four queries", kE4M3, 7, 4, 1001, 32, 64, kCausal},
      {"two queries", kBF16, 9, 2, 333, 20, 32, kRandom, true, false},
      {"three queries, few heads", kE4M3, 200, 3, 130, 9, 128, kRandom},
      {"nothing seen, few queries", kE4M3, 9, 2, 901, 64, 128, kNone},
      {"small, pages", kE4M3, 3, 2, 448, 64, 128, kRandom, true, true, true, 64},
      {"beyond 2^31", kE4M3, 1, 32771, 65601, 3, 32, kCausal, true, true, false},
  };
  if (what == "test" || what == "small") {
    int bad = 0;
    for (const Case& c : cases) {
      const int64_t work = int64_t{c.B} * c.T * c.S;
      if (what == "small" && work > 30000) continue;
      bad += !run_case(c, seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const Case fp8 = {"fp8 T4096 S8192 J64", kE4M3, 1, 4096, 8192, 64, 128, kFull, true, true, false};
  if (what == "profile") {
    Data data(fp8, 5);
    for (int i = 0; i < 2; ++i) CHECK(jax_dsa::launch_indexer_fwd(data.p, nullptr));
    CHECK(cudaDeviceSynchronize());
    return 0;
  }
  const double rate = bench_copy();
  if (what == "decode") {
    for (int S : {8192, 131072}) {
      for (int B : {1, 8, 64, 128}) bench_few<kE4M3>(B, 1, S, 64, 64, rate);
    }
    for (int T : {2, 3, 4}) bench_few<kE4M3>(64, T, 65536, 64, 64, rate);
    bench_few<kE4M3>(64, 1, 131072, 32, 64, rate);
    bench_few<kE4M3>(64, 4, 131072, 32, 64, rate);
    bench_few<kE4M3>(64, 1, 131072, 64, 0, rate);
    for (int S : {8192, 131072}) bench_few<kBF16>(64, 1, S, 64, 64, rate);
    bench_few<kBF16>(64, 4, 65536, 64, 0, rate);
    return 0;
  }
  bench(fp8);
  bench({"fp8 T4096 S32768 J64", kE4M3, 1, 4096, 32768, 64, 128, kFull, true, true, false});
  bench({"fp8 T4096 S8192 J32", kE4M3, 1, 4096, 8192, 32, 128, kFull, true, true, false});
  bench(
      {"bf16 T8192 S8192 J64 causal", kBF16, 1, 8192, 8192, 64, 128, kCausal, true, false, false});
  bench({"bf16 T8192 S8192 J64", kBF16, 1, 8192, 8192, 64, 128, kFull, true, false, false});
  bench({"fp8 T8192 S8192 J64 causal", kE4M3, 1, 8192, 8192, 64, 128, kCausal, true, true, false});
  bench({"fp8 T4096 S131072 J64 causal", kE4M3, 1, 4096, 131072, 64, 128, kCausal, true, true,
         false});
  return 0;
}
