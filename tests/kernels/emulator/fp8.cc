// Runs FP8 quantisation and dequantisation on the emulator and compares bit for bit.
#include <bit>
#include <cmath>

#include "fp8/dequantize.cu"
#include "fp8/quantize.cu"
#include "fp8/quantize_tiles.cu"
#include "memory.h"
#include "problems/fp8_problem.h"

// Compares the conversions by integer arithmetic with the instructions' results: all codes, all
// floats with the upper half of a code or of the middle between two codes, and their neighbors.
int conversion_failures() {
  using jax_dsa::e4m3_of_float, jax_dsa::float_of_e4m3;
  int failures = 0;
  for (uint32_t code = 0; code < 256; ++code) {
    const float got = float_of_e4m3(code), expected = fp8_problem::e4m3_value(code);
    failures += std::bit_cast<uint32_t>(got) != std::bit_cast<uint32_t>(expected) &&
                !(std::isnan(got) && std::isnan(expected));
  }
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(upper << 16 | lower);
      const uint32_t got = e4m3_of_float(x), expected = fp8_problem::e4m3(x);
      failures += got != expected && !((got & 0x7f) == 0x7f && (expected & 0x7f) == 0x7f);
    }
  }
  printf("%-4s conversions\n", failures == 0 ? "ok" : "BAD");
  return failures;
}

int main(int argc, char** argv) {
  emulator::machine.gpu = emulator::kPortableGpus[0];  // has the least shared memory
  int failures = conversion_failures();
  for (const fp8_problem::Case& c : fp8_problem::kCases) {
    emulator::machine.options = emulator::schedules(argc, argv, 0)[0];
    Memory memory;
    const bool good = fp8_problem::run(c, 1, memory);
    printf("%-4s %s\n", good ? "ok" : "BAD", c.name);
    failures += !good;
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
