// The pooling of blocks of tokens on the emulator, against float64.
#include "gated_pool/dispatch.cu"
#include "gated_pool_problem.h"

namespace {

struct Memory {
  std::deque<std::vector<uint4>> all;

  template <typename T>
  T* room(size_t n) {
    all.emplace_back(n * sizeof(T) / 16 + 1);
    memset(all.back().data(), 0xff, all.back().size() * 16);  // NaN
    return reinterpret_cast<T*>(all.back().data());
  }
  template <typename T>
  const T* put(const std::vector<T>& x) {
    T* const to = room<T>(x.size());
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
  for (const gated_pool_problem::Case& c : gated_pool_problem::kCases) {
    emulator::machine.options = emulator::schedules(argc, argv, 0)[0];
    Memory memory;
    failures += !gated_pool_problem::run(c, 1, memory);
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
