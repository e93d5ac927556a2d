// Tests the kernels of the FP8 matmul against float64 on the CPU, and times all their variants.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o fp8_matmul_check tests/kernels/gpu/fp8_matmul_check.cu cuda/fp8/matmul.cu \
//       cuda/fp8/portable_matmul.cu cuda/fp8/tiers.cc
//   ./fp8_matmul_check [test|small|bench|profile] [seed] [case]
// `case` selects the cases whose names contain it. `bench` prints one line per shape and variant.
// The variant `planned` is what launch_fp8_matmul chooses, and `portable` the kernel for every GPU.
#include <unistd.h>

#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "fp8/matmul_launch.cuh"
#include "fp8/matmul_plan.h"
#include "gpu/check.cuh"
#include "problems/fp8_matmul_problem.h"

using namespace fp8_matmul_problem;
using namespace jax_dsa::fp8;

using Launch = std::function<cudaError_t(const Fp8MatmulParams&)>;
struct Variant {
  std::string name;
  Launch launch;
};

template <typename Tr>
Variant many_rows(const std::string& name) {
  return {name, [](const Fp8MatmulParams& p) { return launch<Tr>(p, nullptr); }};
}
template <typename Tr>
Variant few_rows(const char* name, int k_splits) {
  return {
      std::string(name) + ", K split in " + std::to_string(k_splits),
      [k_splits](const Fp8MatmulParams& p) { return launch_few_rows<Tr>(p, k_splits, nullptr); }};
}
const Variant kPlanned = {
    "planned", [](const Fp8MatmulParams& p) { return jax_dsa::launch_fp8_matmul(p, nullptr); }};

const Variant kPortable = {"portable", [](const Fp8MatmulParams& p) {
                             jax_dsa::Device device;
                             CHECK(jax_dsa::current_device(&device));
                             return jax_dsa::portable::launch_fp8_matmul(p, device, nullptr);
                           }};

std::vector<Variant> variants_for_many_rows() {
  std::vector<Variant> all = {kPlanned, kPortable};
  all.push_back(many_rows<Traits<2, 2, 2>>("256 x 128, pairs"));
  all.push_back(many_rows<Traits<2, 2, 1>>("256 x 128"));
  all.push_back(many_rows<Traits<3, 1, 2>>("192 x 128, pairs"));
  all.push_back(many_rows<Traits<3, 1, 1>>("192 x 128"));
  all.push_back(many_rows<Traits<2, 1, 1>>("128 x 128"));
  return all;
}
std::vector<Variant> variants_for_few_rows(std::vector<int> all_splits) {
  std::vector<Variant> all = {kPlanned, kPortable};
  for (const int k_splits : all_splits) {
    all.push_back(few_rows<ThinTraits<16, 2>>("16 rows", k_splits));
    all.push_back(few_rows<ThinTraits<16, 3>>("16 rows, three CTAs", k_splits));
    all.push_back(few_rows<ThinTraits<32, 2>>("32 rows", k_splits));
    all.push_back(few_rows<ThinTraits<32, 3>>("32 rows, three CTAs", k_splits));
    all.push_back(few_rows<Traits<1, 1, 1>>("64 rows", k_splits));
    all.push_back(few_rows<Traits<1, 2, 1>>("128 rows", k_splits));
  }
  return all;
}
std::vector<Variant> variants(int64_t k_blocks) {
  std::vector<Variant> all = variants_for_many_rows();
  std::vector<int> all_splits;
  for (int k_splits = 1; k_splits <= 8 && k_splits <= k_blocks; k_splits *= 2)
    all_splits.push_back(k_splits);
  for (const Variant& x : variants_for_few_rows(all_splits)) {
    if (x.name != kPlanned.name && x.name != kPortable.name) all.push_back(x);
  }
  return all;
}

std::string case_filter;  // substring of the names of the cases to run
bool chosen(const Case& c) { return std::string(c.name).find(case_filter) != std::string::npos; }

constexpr double kBits =
    8;  // allowed error of a tensor core's sum, in last bits; the largest seen is 5.4

// Runs every variant `times` times. The results must be right and identical, and the guard
// untouched. Returns the number of failures.
int run_case(const Case& c, uint64_t seed, int times) {
  const Problem x(c, seed);
  const auto *a = upload(x.a), *b = upload(x.b);
  const auto *a_scale = upload(x.a_scale), *b_scale = upload(x.b_scale);
  uint8_t* const out = device<uint8_t>(x.out_bytes() + kGuard);
  const Fp8MatmulParams p = x.params(a, a_scale, b, b_scale, out);
  const bool empty = x.outputs() == 0 || c.k == 0;
  int bad = 0;
  for (const Variant& v : empty ? std::vector{kPlanned} : variants(x.k_blocks)) {
    std::vector<std::vector<uint8_t>> got(times);
    for (auto& y : got) {
      CHECK(cudaMemset(out, kPoison, x.out_bytes() + kGuard));
      CHECK(v.launch(p));
      CHECK(cudaDeviceSynchronize());
      y = download(out, x.out_bytes() + kGuard);
    }
    const double error = x.error(got.front(), kBits);
    const bool good = error <= 1 && got.front() == got.back();
    printf("%-4s %-24s %-32s %.2f of the allowed error%s\n", good ? "ok" : "BAD", c.name,
           v.name.c_str(), error, got.front() == got.back() ? "" : ", not deterministic");
    bad += !good;
  }
  for (const void* q : {(const void*)a, (const void*)b, (const void*)a_scale, (const void*)b_scale,
                        (const void*)out}) {
    CHECK(cudaFree(const_cast<void*>(q)));
  }
  return bad;
}

// ---- large problems ----------------------------------------------------------------------------

__global__ void fill_codes(uint8_t* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = mix(seed * 0x1000003 + i);
    const int exponent =
        13 - __clzll(bits);  // large exponents are more frequent, as in quantised values
    x[i] = static_cast<uint8_t>((bits & 0x87) | (exponent < 0 ? 0 : exponent) << 3);
  }
}
__global__ void fill_scales(float* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = 1e-3f + static_cast<float>(mix(seed * 0x1000003 + i) % 1024) * 1e-5f;
  }
}

struct Large {
  Fp8MatmulParams p = {};
  int copies;  // of b, used in rotation so that b is not in the L2 cache
  int64_t k_blocks, b_scales;

  Large(const Case& c, int copies) : copies(copies), k_blocks((c.k + 127) / 128) {
    b_scales = c.batch * ((c.n + 127) / 128) * k_blocks;
    const int64_t a = c.batch * c.m * c.k, b = c.batch * c.n * c.k * copies;
    const int64_t a_scales = c.batch * c.m * k_blocks;
    auto *a_codes = device<uint8_t>(a), *b_codes = device<uint8_t>(b);
    auto *a_scale = device<float>(a_scales), *b_scale = device<float>(b_scales);
    fill_codes<<<1024, 256>>>(a_codes, a, 1);
    fill_codes<<<1024, 256>>>(b_codes, b, 2);
    fill_scales<<<1024, 256>>>(a_scale, a_scales, 3);
    fill_scales<<<1024, 256>>>(b_scale, b_scales, 4);
    auto* out = device<uint8_t>(c.batch * c.m * c.n * (c.dtype == DType::kF32 ? 4 : 2));
    p = {a_codes, a_scale, b_codes, b_scale, out, c.batch, c.m, c.n, c.k, c.dtype};
    CHECK(cudaDeviceSynchronize());
  }
  ~Large() {
    for (const void* x : {(const void*)p.a, (const void*)p.a_scale, (const void*)p.b,
                          (const void*)p.b_scale, (const void*)p.out}) {
      CHECK(cudaFree(const_cast<void*>(x)));
    }
  }
  double flops() const { return 2. * p.batch * p.m * p.n * p.k; }
  double bytes() const {
    const double out = p.dtype == DType::kF32 ? 4 : 2;
    return double(p.batch) * (p.m * p.k + p.n * p.k + out * p.m * p.n) + 4. * b_scales;
  }
};

// Checks random elements of a problem that is too large for the CPU.
int run_large(const Case& c, uint64_t seed) {
  Large x(c, 1);
  CHECK(cudaMemset(x.p.out, 0xff, c.batch * c.m * c.n * (c.dtype == DType::kF32 ? 4 : 2)));
  CHECK(jax_dsa::launch_fp8_matmul(x.p, nullptr));
  CHECK(cudaDeviceSynchronize());
  int bad = 0;
  double worst = 0;
  for (int i = 0; i < 200; ++i) {
    const int64_t at = mix(seed + i) % (c.batch * c.m * c.n), row = at / c.n, n = at % c.n;
    const int64_t batch = row / c.m, scale_rows = (c.n + 127) / 128;
    const auto a = download(x.p.a + row * c.k, c.k);
    const auto b = download(x.p.b + (batch * c.n + n) * c.k, c.k);
    const auto a_scale = download(x.p.a_scale + row * x.k_blocks, x.k_blocks);
    const int64_t b_row = batch * scale_rows + n / 128;
    const auto b_scale = download(x.p.b_scale + b_row * x.k_blocks, x.k_blocks);
    double expected = 0, size = 0, bit = 0;
    for (int64_t j = 0; j < x.k_blocks; ++j) {
      const BlockProduct block(&a[128 * j], &b[128 * j], std::min(c.k - 128 * j, int64_t{128}));
      const double scale = double{a_scale[j]} * double{b_scale[j]};
      expected += scale * block.sum, size += scale * block.size, bit += scale * block.bit;
    }
    float got;
    if (c.dtype == DType::kF32) {
      got = download(static_cast<const float*>(x.p.out) + at, 1)[0];
    } else {
      const uint32_t bits = uint32_t{download(static_cast<const uint16_t*>(x.p.out) + at, 1)[0]}
                            << 16;
      std::memcpy(&got, &bits, 4);
    }
    const double round = c.dtype == DType::kF32 ? 1e-7 : std::ldexp(1., -8);
    const double error =
        std::fabs(got - expected) / (kBits * bit + 1e-6 * size + round * std::fabs(expected));
    bad += !(error <= 1);
    worst = std::fmax(worst, std::isnan(error) ? INFINITY : error);
  }
  printf("%-4s %-28s %.2f of the allowed error\n", bad ? "BAD" : "ok", c.name, worst);
  return bad != 0;
}

// ---- times -------------------------------------------------------------------------------------

template <typename F>
float median_ms(double flops, F run) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  constexpr int kRounds = 3, kRunsPerRound = 10;  // back to back, so that launch latency is hidden
  std::vector<float> ms;
  for (int i = 0; i <= kRounds; ++i) {
    usleep(std::max(3000., 9e-8 * flops));  // let the device cool down
    run();
    CHECK(cudaEventRecord(begin));
    for (int j = 0; j < kRunsPerRound; ++j) run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float x;
    CHECK(cudaEventElapsedTime(&x, begin, end));
    if (i > 0) ms.push_back(x / kRunsPerRound);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

double copy_rate = 0;  // bytes read and written per second

void bench_copy() {
  const size_t bytes = size_t{1} << 30;
  char *a = device<char>(bytes), *b = device<char>(bytes);
  const float ms =
      median_ms(0, [&] { CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
  copy_rate = 2e3 * bytes / ms;
  printf("device copy %.2f TB/s\n", copy_rate * 1e-12);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
}

void bench(const Case& c, const std::vector<Variant>& all, int copies = 1) {
  if (!chosen(c)) return;
  Large x(c, copies);
  const Plan plan = jax_dsa::fp8::plan(x.p, num_sms());
  printf("%s: M%lld N%lld K%lld, planned: %s%d x %d, K split in %d\n", c.name, (long long)c.m,
         (long long)c.n, (long long)c.k, plan.cta_pair ? "pairs, " : "", plan.rows, plan.columns,
         plan.k_splits);
  for (const Variant& v : all) {
    int launches = 0;
    const float ms = median_ms(x.flops(), [&] {
      Fp8MatmulParams p = x.p;
      p.b += launches++ % copies * c.batch * c.n * c.k;
      CHECK(v.launch(p));
    });
    printf("  %-32s %9.1f us %7.0f TFLOPS  %.2f TB/s, %.2f of the copy\n", v.name.c_str(), 1e3 * ms,
           x.flops() / ms * 1e-9, x.bytes() / ms * 1e-9, x.bytes() / ms * 1e3 / copy_rate);
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : time(nullptr);
  if (argc > 3) case_filter = argv[3];
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("seed %llu\n", (unsigned long long)seed);
  using enum DType;
  const Case cases[] = {
      {"one tile", 1, 128, 128, 128},
      {"ragged", 1, 300, 400, 656},
      {"ragged, f32", 2, 260, 130, 272, kF32},
      {"ragged, f16", 1, 257, 264, 144, kF16},
      {"odd N", 2, 129, 131, 1040, kBF16},
      {"odd N, f32", 1, 70, 129, 400, kF32},
      {"four scales per load", 1, 136, 136, 512},
      {"one row, one column", 1, 1, 1, 16, kF32},
      {"one row", 3, 1, 300, 1024},
      {"16 rows", 1, 16, 264, 4096},
      {"no K", 1, 5, 7, 0},
      {"no rows", 1, 0, 7, 128},
  };
  if (what == "test" || what == "small") {
    int bad = 0;
    for (const Case& c : cases) {
      const bool small = c.batch * c.m * c.n * c.k < 10000000;
      if (!chosen(c)) continue;
      if (what == "test" || small) bad += run_case(c, seed, what == "test" ? 2 : 1);
    }
    if (what == "test") {
      const Case large[] = {{"many tiles", 1, 4000, 7000, 2000},
                            {"many tiles, f32", 2, 3000, 1111, 4224, kF32},
                            {"long K", 1, 300, 520, 100000, kF32},
                            {"few rows", 1, 16, 7168, 7168},
                            {"outputs beyond 2^31", 1, 32771, 65601, 128},
                            {"codes beyond 2^31", 1, 70, 65601, 32784, kF32}};
      for (const Case& c : large) {
        if (chosen(c)) bad += run_large(c, seed);
      }
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  if (what == "profile") {
    Large x({"", 1, 4096, 4096, 7168}, 1);
    for (int i = 0; i < 2; ++i) CHECK(jax_dsa::launch_fp8_matmul(x.p, nullptr));
    CHECK(cudaDeviceSynchronize());
    return 0;
  }
  bench_copy();
  bench({"8192", 1, 8192, 8192, 8192}, variants_for_many_rows());
  bench({"wide", 1, 4096, 7168, 2048}, variants_for_many_rows());
  bench({"deep", 1, 4096, 4096, 7168}, variants_for_many_rows());
  bench({"nothing divides", 1, 4000, 7000, 2000}, variants_for_many_rows());
  bench({"odd N", 1, 4000, 7001, 2000}, {kPlanned});
  bench({"f32", 1, 8192, 8192, 8192, kF32}, variants_for_many_rows());
  bench({"256 rows", 1, 256, 7168, 7168}, variants_for_many_rows(), 4);
  for (const int64_t m : {1, 16, 32, 64, 128}) {
    bench({"few rows", 1, m, 7168, 7168}, variants_for_few_rows({1, 2, 4}), 4);
  }
  bench({"few rows, few columns", 1, 16, 2112, 7168}, variants_for_few_rows({2, 4, 8}), 8);
  for (const int64_t n : {4096, 18432, 36864}) {
    bench({"few rows, many columns", 1, 16, n, 7168}, variants_for_few_rows({1, 2}), 4);
  }
  bench({"few rows, short K", 1, 16, 24576, 1536}, variants_for_few_rows({1}), 4);
  return 0;
}
