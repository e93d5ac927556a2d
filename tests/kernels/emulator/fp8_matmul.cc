// Runs the Hopper kernels of the FP8 matmul on the emulator and compares with float64.
#include "fp8/matmul.cu"
//
#include "fp8/portable_matmul.cu"
#include "fp8/tiers.cc"
#include "fp8_matmul_checks.h"

namespace {

template <int kSplits, typename Tr>
cudaError_t few_rows(const Fp8MatmulParams& p, cudaStream_t stream) {
  return launch_few_rows<Tr>(p, kSplits, stream);
}

// Checks the plan for 132 SMs.
void check_plan(int64_t m, int64_t n, int64_t k, const Plan& expected) {
  const Plan got = plan({.batch = 1, .m = m, .n = n, .k = k}, 132);
  const bool good = got.few_rows == expected.few_rows && got.cta_pair == expected.cta_pair &&
                    got.rows == expected.rows && got.columns == expected.columns &&
                    got.k_splits == expected.k_splits && got.ctas_per_sm == expected.ctas_per_sm;
  printf("%-4s plan of %lld %lld %lld\n", good ? "ok" : "BAD", (long long)m, (long long)n,
         (long long)k);
  failures += !good;
}

}  // namespace

int main(int argc, char** argv) {
  check_plan(8192, 8192, 8192, {false, true, 192, 128, 1, 1});
  check_plan(4096, 7168, 2048, {false, true, 256, 128, 1, 1});
  check_plan(4096, 4096, 7168, {false, true, 256, 128, 1, 1});
  check_plan(4000, 7000, 2000, {false, true, 192, 128, 1, 1});
  check_plan(256, 7168, 7168, {false, false, 128, 128, 1, 1});
  check_plan(100000, 128, 512, {false, false, 256, 128, 1, 1});
  check_plan(16, 7168, 7168, {true, false, 16, 64, 1, 2});
  check_plan(17, 7168, 7168, {true, false, 32, 64, 1, 2});
  check_plan(33, 2112, 7168, {true, false, 64, 128, 4, 2});
  check_plan(16, 2112, 7168, {true, false, 16, 64, 4, 2});
  check_plan(16, 24576, 1536, {true, false, 16, 64, 1, 3});
  check_plan(128, 7168, 7168, {true, false, 128, 128, 4, 2});
  check_plan(128, 24576, 1536, {true, false, 128, 128, 1, 2});
  check_plan(256, 2112, 7168, {true, false, 128, 128, 4, 2});
  check_plan(1, 128, 128, {true, false, 16, 64, 1, 2});
  size_t number = 0;
  const auto all = [&](const Case& c, auto launch) {
    if (emulator::small(argc, argv) && c.m * c.n * c.k > 30'000'000) return;
    for (const auto& options : emulator::schedules(argc, argv, number++)) run(c, options, launch);
  };
  using enum DType;
  // 9 rows of tiles are one full group of the scheduler and one incomplete group.
  all({"256 rows", 1, 300, 400, 656}, launch<Traits<2, 2, 2>>);
  all({"256 rows, f16", 1, 257, 264, 144, kF16}, launch<Traits<2, 2, 2>>);
  all({"256 rows, one CTA", 1, 513, 128, 384, kF32}, launch<Traits<2, 2, 1>>);
  all({"192 rows", 1, 500, 300, 656}, launch<Traits<3, 1, 2>>);
  all({"192 rows, odd N", 2, 195, 131, 144, kF32}, launch<Traits<3, 1, 2>>);
  all({"192 rows, one CTA", 1, 193, 264, 384, kF16}, launch<Traits<3, 1, 1>>);
  all({"192 rows, many", 1, 2200, 200, 16}, launch<Traits<3, 1, 2>>);
  all({"128 rows", 1, 1100, 272, 128}, launch<Traits<2, 1, 1>>);
  all({"128 rows, odd N", 2, 129, 131, 1040}, launch<Traits<2, 1, 1>>);
  all({"128 rows, f32", 1, 140, 57, 528, kF32}, launch<Traits<2, 1, 1>>);
  all({"128 rows split K", 1, 128, 133, 1536}, few_rows<2, Traits<1, 2, 1>>);
  all({"128 rows, one split", 1, 100, 136, 384}, few_rows<1, Traits<1, 2, 1>>);
  all({"16 rows", 1, 16, 200, 640}, few_rows<1, ThinTraits<16, 2>>);
  all({"16 rows, three CTAs", 1, 13, 200, 1040}, few_rows<1, ThinTraits<16, 3>>);
  all({"16 rows split K", 2, 7, 131, 2704, kF32}, few_rows<4, ThinTraits<16, 2>>);
  all({"16 rows, f16", 1, 20, 129, 400, kF16}, few_rows<2, ThinTraits<16, 2>>);
  all({"16 rows, long K", 1, 1, 70, 4096, kF32}, few_rows<1, ThinTraits<16, 2>>);
  all({"32 rows split K", 1, 32, 200, 640}, few_rows<4, ThinTraits<32, 2>>);
  all({"32 rows, f16", 2, 41, 129, 400, kF16}, few_rows<2, ThinTraits<32, 2>>);
  all({"32 rows, three CTAs", 1, 20, 200, 1040, kF32}, few_rows<1, ThinTraits<32, 3>>);
  all({"64 rows", 1, 16, 260, 640}, few_rows<4, Traits<1, 1, 1>>);
  all({"64 rows, more splits than K blocks", 1, 1, 131, 272, kF32}, few_rows<8, Traits<1, 1, 1>>);
  all({"64 rows, f16", 2, 70, 129, 400, kF16}, few_rows<2, Traits<1, 1, 1>>);
  for (int64_t m = 1; m <= 16; ++m) {  // with and without ragged K and N
    all({"1 to 61 rows", 1, m % 4 ? m : 4 * m - 3, 61 + 3 * m, 16 + 112 * m, m % 2 ? kF32 : kBF16},
        jax_dsa::launch_fp8_matmul);
  }
  all({"planned, 16 rows split K", 2, 9, 130, 2048}, jax_dsa::launch_fp8_matmul);
  all({"planned, few rows", 1, 64, 128, 2048}, jax_dsa::launch_fp8_matmul);
  all({"planned, many rows", 1, 140, 384, 256}, jax_dsa::launch_fp8_matmul);
  all({"no K", 1, 5, 7, 0}, jax_dsa::launch_fp8_matmul);
  all({"no rows", 1, 0, 7, 128}, jax_dsa::launch_fp8_matmul);
  all({"no columns", 1, 5, 0, 128}, jax_dsa::launch_fp8_matmul);
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
