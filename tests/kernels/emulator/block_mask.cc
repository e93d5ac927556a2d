// Tests the block mask kernel on the emulator, bit for bit.
#include <sys/mman.h>
#include <unistd.h>

#include "block_mask/dispatch.cu"
#include "problems/block_mask_problem.h"

namespace {

using namespace block_mask_problem;

// Returns a copy of an operand that ends at an inaccessible page, so that reads beyond it fail. The
// copy is never freed.
template <typename T>
const T* guarded(const std::vector<T>& from) {
  const size_t page = sysconf(_SC_PAGESIZE), bytes = from.size() * sizeof(T);
  const size_t pages = (bytes + page - 1) / page * page;
  void* const all =
      mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) emulator::fail("no memory");
  auto* const stop = static_cast<uint8_t*>(all) + pages;
  if (mprotect(stop, page, PROT_NONE) != 0) emulator::fail("no guard");
  memcpy(stop - bytes, from.data(), bytes);
  return reinterpret_cast<const T*>(stop - bytes);
}

// A poisoned result buffer with guard bytes around it that must not change.
class Result {
 public:
  explicit Result(size_t bytes)
      : bytes(bytes), words((bytes + 15) / 16 + 2, make_uint4(~0u, ~0u, ~0u, ~0u)) {}
  template <typename T>
  T* at() {
    return reinterpret_cast<T*>(words.data() + 1);
  }
  template <typename T>
  bool is(const std::vector<T>& expected) {
    const auto* all = reinterpret_cast<const uint8_t*>(words.data());
    for (size_t i = 0; i < words.size() * 16; ++i) {
      if ((i < 16 || i >= 16 + bytes) && all[i] != 0xff) return false;
    }
    return bytes == expected.size() * sizeof(T) && memcmp(all + 16, expected.data(), bytes) == 0;
  }

 private:
  size_t bytes;
  std::vector<uint4> words;
};

bool good(const Case& c, const emulator::Options& options) {
  const Problem x = make(c, options.seed);
  const BlockMaskParams p = params(x, [](const auto& from) { return guarded(from); });
  emulator::machine.options = options;
  Result occupied(x.occupied.size()), full(x.full.size()), bits(x.bits.size());
  Result tiles(x.tiles.size() * 4), all_bits(x.all_bits.size()), first_bits(x.first_bits.size());
  emulator::require(launch_block_mask_classify(p, occupied.at<bool>(), full.at<bool>(), nullptr));
  emulator::require(
      launch_block_mask_pack(p, guarded(x.tiles), bits.at<uint8_t>(), x.slots, nullptr));
  emulator::require(
      launch_block_mask_compress(p, tiles.at<int32_t>(), all_bits.at<uint8_t>(), nullptr));
  emulator::require(
      launch_block_mask_pack(p, guarded(x.tiles), first_bits.at<uint8_t>(), 1, nullptr));
  const bool right[] = {occupied.is(x.occupied) && full.is(x.full),
                        bits.is(x.bits) && first_bits.is(x.first_bits),
                        tiles.is(x.all_tiles) && all_bits.is(x.all_bits)};
  int kinds[3] = {};
  for (const int tile : x.tiles) ++kinds[tile < 0 ? tile + 2 : 2];
  printf("%-4s %-36s classify %s, pack %s, compress %s; %d empty, %d full, %d partial\n",
         right[0] && right[1] && right[2] ? "ok" : "BAD", c.name, right[0] ? "ok" : "BAD",
         right[1] ? "ok" : "BAD", right[2] ? "ok" : "BAD", kinds[0], kinds[1], kinds[2]);
  fflush(stdout);
  return right[0] && right[1] && right[2];
}

}  // namespace

int main(int argc, char** argv) {
  emulator::machine.gpu = emulator::kPortableGpus[0];  // has the least shared memory
  int failures = 0;
  const auto cases = emulator::cases(
      argc, argv, kCases,
      {"of each head", "odd keys", "one row for all queries", "a map", "everything"});
  for (const Case& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      failures += !good(c, options);
    }
  }
  for (uint64_t seed = 1; seed <= (emulator::small(argc, argv) ? 5 : 100); ++seed)
    failures += !good(random_case(seed), {.seed = seed});
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
