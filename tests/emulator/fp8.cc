// The FP8 quantiser on the emulator, bit for bit.
#include "fp8/quantize.cu"
#include "fp8_problem.h"

int main() {
  using namespace fp8_problem;
  int failures = 0;
  for (const Case& c : kCases) {
    const Problem x = make(c, 1);
    const int element = c.dtype == DType::kF32 ? 4 : 2;
    std::vector<uint4> in(x.bytes.size() / 16 + 2), out(x.codes.size() / 16 + 2);
    auto* const from = reinterpret_cast<uint8_t*>(in.data()) + c.offset * element;
    auto* const to = reinterpret_cast<uint8_t*>(out.data()) + c.offset;
    std::vector<float> scales(x.scales.size() + 1, 7.f);
    std::copy(x.bytes.begin(), x.bytes.end(), from);
    emulator::require(jax_dsa::launch_quantize(
        {from, to, scales.data(), c.rows, c.cols, c.dtype, c.power_of_two}, nullptr));
    const bool right = good(x, {to, to + x.codes.size()}, scales) && scales.back() == 7.f &&
                       to[x.codes.size()] == 0;
    printf("%-4s %s\n", right ? "ok" : "BAD", c.name);
    failures += !right;
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
