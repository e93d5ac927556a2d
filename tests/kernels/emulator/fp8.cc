// Runs FP8 quantisation and dequantisation on the emulator and compares bit for bit.
#include "fp8/dequantize.cu"
#include "fp8/quantize.cu"
#include "fp8/quantize_tiles.cu"
#include "memory.h"
#include "problems/fp8_problem.h"

int main(int argc, char** argv) {
  int failures = 0;
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
