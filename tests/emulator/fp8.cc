// The FP8 quantisers and dequantisation on the emulator, bit for bit.
#include "fp8/dequantize.cu"
#include "fp8/quantize.cu"
#include "fp8/quantize_tiles.cu"
#include "fp8_problem.h"

namespace {

struct Memory {
  static constexpr uint8_t kPoison = 0xff;  // NaN where it is read
  std::deque<std::vector<uint4>> all;

  uint8_t* room(size_t bytes, int offset) {
    all.emplace_back((bytes + offset) / 16 + 1);
    memset(all.back().data(), kPoison, all.back().size() * 16);
    return reinterpret_cast<uint8_t*>(all.back().data()) + offset;
  }
  const uint8_t* put(const std::vector<uint8_t>& x, int offset) {
    uint8_t* const to = room(x.size(), offset);
    std::copy(x.begin(), x.end(), to);
    return to;
  }
  template <typename T>
  std::vector<T> get(const T* from, size_t n) {
    return {from, from + n};
  }
  void require(cudaError_t status) { emulator::require(status); }
};

}  // namespace

int main(int argc, char** argv) {
  int failures = 0;
  for (const fp8_problem::Case& c : fp8_problem::kCases) {
    emulator::machine.options = emulator::schedules(argc, argv, 0)[0];
    Memory memory;
    const bool right = fp8_problem::run(c, 1, memory);
    printf("%-4s %s\n", right ? "ok" : "BAD", c.name);
    failures += !right;
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
