// Tests the FP8 quantiser against the CPU, bit for bit; `python -m jax_dsa.bench` times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -o fp8_check \
//       benchmarks/micro/fp8_check.cu cuda/fp8/quantize.cu
//   ./fp8_check
#include "../../tests/emulator/fp8_problem.h"
#include "check.cuh"

using namespace fp8_problem;

bool run_case(const Case& c) {
  const Problem x = make(c, 1);
  const int element = c.dtype == DType::kF32 ? 4 : 2;
  uint8_t* const from = device<uint8_t>(x.bytes.size() + c.offset * element);
  uint8_t* const to = device<uint8_t>(x.codes.size() + c.offset);
  float* const scales = device<float>(x.scales.size());
  uint8_t* const x_from = from + c.offset * element;
  CHECK(cudaMemcpy(x_from, x.bytes.data(), x.bytes.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(to, 0xff, x.codes.size() + c.offset));
  CHECK(jax_dsa::launch_quantize(
      {x_from, to + c.offset, scales, c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
  CHECK(cudaDeviceSynchronize());
  const bool right =
      good(x, download(to + c.offset, x.codes.size()), download(scales, x.scales.size()));
  printf("%-4s %s\n", right ? "ok" : "BAD", c.name);
  for (void* p : {(void*)from, (void*)to, (void*)scales}) CHECK(cudaFree(p));
  return right;
}

int main() {
  int bad = 0;
  for (const Case& c : kCases) bad += !run_case(c);
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}
