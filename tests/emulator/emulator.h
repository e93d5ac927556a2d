// Runs CUDA kernels on the CPU, block by block of cooperating fibers, so that their logic can be
// tested where there is no GPU: barriers, pipelines, swizzled layouts, wgmma. The headers in
// common/ beside this file take the place of those in cuda/common/; a kernel that reaches the
// hardware only through them compiles unchanged.
//
// Asynchronous work happens either as early or as late as the program allows, wgmma by
// `Options::late_wgmma`, copies by `Options::late_copies`, each warp for itself: what a missing
// wait or a barrier in the wrong place would let through shows as a wrong result in one of the four
// combinations, and a deadlock ends the program with the fibers' positions. The order in which
// warps run follows `Options::seed`. What this cannot see: rounding of the tensor cores, missing
// proxy fences, time.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace emulator {

struct Options {
  bool late_wgmma = false, late_copies = false;
  uint64_t seed = 0;
};

inline constexpr int kSharedBytes = 227 * 1024;
inline constexpr int kStackBytes = 64 * 1024;
inline constexpr int kNamedBarriers = 16;

struct Wgmma {
  float* d;
  int n, k;  // columns; contracted elements
  bool a_in_registers, a_transposed, b_transposed, accumulate;
  uint64_t a, b;  // descriptors
  uint32_t a_registers[4];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread;
  struct Block* block;
  bool done = false;
  const char* waits_for = nullptr;
  uint64_t waits_at = 0;
  std::vector<Wgmma> open;                    // issued, not committed
  std::deque<std::vector<Wgmma>> groups;      // committed, not executed
  int64_t issued = 0, executed = 0;           // groups, since the start
  std::vector<std::function<void()>> copies;  // cp.async since the last arrival
};

struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

// What the lanes of a warp show each other in a collective operation; two, taken in turns.
struct Exchange {
  uint64_t value[2][32];
  Barrier barrier;
};

struct Block {
  unsigned index;
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* shared;  // aligned to 1024
  std::vector<Fiber> fibers;
  Barrier everyone, named[kNamedBarriers];
  std::vector<Exchange> warps;
};

struct Machine {
  Options options;
  std::mt19937_64 random;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  unsigned threads = 0, blocks = 0;
  uint64_t progress = 0;                       // counts events that may release a waiting fiber
  std::vector<std::function<void()>> pending;  // asynchronous work not yet done
  std::function<void()> kernel;
};

inline Machine machine;

[[noreturn]] inline void fail(const char* what) {
  printf("emulator: %s\n", what);
  fflush(stdout);
  abort();
}

// ---- fibers ------------------------------------------------------------------------------------

inline void yield() { swapcontext(&machine.current->context, &machine.scheduler); }

template <typename Ready>
void wait_until(const char* what, uint64_t at, Ready ready) {
  Fiber& self = *machine.current;
  self.waits_for = what;
  self.waits_at = at;
  while (!ready()) yield();
  self.waits_for = nullptr;
}

inline void arrive(Barrier& barrier, unsigned expected) {
  ++machine.progress;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}
inline void sync(Barrier& barrier, unsigned expected, const char* what, uint64_t at) {
  const uint64_t generation = barrier.generation;
  arrive(barrier, expected);
  wait_until(what, at, [&] { return barrier.generation != generation; });
}

// Asynchronous work: at once, or when nothing else can happen.
inline void later(std::function<void()> work) {
  if (machine.options.late_copies) {
    machine.pending.push_back(std::move(work));
  } else {
    work();
    ++machine.progress;
  }
}

inline void fiber_main() {
  machine.kernel();
  machine.current->done = true;
  ++machine.progress;
  yield();
}

inline void report_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  printf("emulator: deadlock\n");
  for (const auto& block : blocks) {
    for (const Fiber& f : block->fibers) {
      if (f.thread % 32 == 0 && !f.done) {
        printf("  block %u warp %u: %s %llu\n", block->index, f.thread / 32,
               f.waits_for ? f.waits_for : "running", (unsigned long long)f.waits_at);
      }
    }
  }
  fail("no fiber can go on");
}

// Runs `kernel` in `blocks` blocks at the same time.
inline void launch(unsigned blocks, unsigned threads, const Options& options,
                   std::function<void()> kernel) {
  machine.options = options;
  machine.random.seed(options.seed);
  machine.threads = threads;
  machine.blocks = blocks;
  machine.kernel = std::move(kernel);
  machine.pending.clear();
  std::vector<std::unique_ptr<Block>> resident;
  for (unsigned b = 0; b < blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->index = b;
    block->memory = std::make_unique<uint8_t[]>(kSharedBytes + 1024);
    memset(block->memory.get(), 0xff, kSharedBytes + 1024);  // NaN
    block->shared = block->memory.get();
    while (reinterpret_cast<uintptr_t>(block->shared) % 1024) ++block->shared;
    block->fibers = std::vector<Fiber>(threads);
    block->warps = std::vector<Exchange>((threads + 31) / 32);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = block->fibers[t];
      f.thread = t;
      f.block = block.get();
      f.stack = std::make_unique<char[]>(kStackBytes);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = kStackBytes;
      f.context.uc_link = nullptr;
      makecontext(&f.context, fiber_main, 0);
    }
    resident.push_back(std::move(block));
  }
  const unsigned warps = (threads + 31) / 32 * blocks;
  std::vector<unsigned> order(warps);
  for (unsigned i = 0; i < warps; ++i) order[i] = i;
  for (;;) {
    const uint64_t before = machine.progress;
    bool all_done = true;
    std::shuffle(order.begin(), order.end(), machine.random);
    for (unsigned i : order) {
      Block& block = *resident[i % blocks];
      for (unsigned t = i / blocks * 32; t < std::min(threads, (i / blocks + 1) * 32); ++t) {
        Fiber& f = block.fibers[t];
        if (f.done) continue;
        all_done = false;
        machine.current = &f;
        swapcontext(&machine.scheduler, &f.context);
      }
    }
    if (all_done) break;
    if (machine.progress != before) continue;
    if (machine.pending.empty()) report_deadlock(resident);
    do {  // any of it, and often several at once
      std::swap(machine.pending[machine.random() % machine.pending.size()], machine.pending.back());
      const auto work = std::move(machine.pending.back());
      machine.pending.pop_back();
      work();
    } while (!machine.pending.empty() && machine.random() % 16);
    ++machine.progress;
  }
  for (auto& work : machine.pending) work();
  for (const auto& block : resident) {
    for (const Fiber& f : block->fibers) {
      if (!f.open.empty()) fail("wgmma without a commit");
    }
  }
}

// ---- collectives of a warp ---------------------------------------------------------------------

inline Fiber& self() { return *machine.current; }

// Shows `value` to the warp; returns what all 32 lanes showed.
inline const uint64_t* exchange(uint64_t value) {
  Fiber& f = self();
  Exchange& x = f.block->warps[f.thread / 32];
  const int turn = x.barrier.generation & 1;
  x.value[turn][f.thread % 32] = value;
  sync(x.barrier, 32, "warp", f.thread / 32);
  return x.value[turn];
}

// ---- mbarriers ---------------------------------------------------------------------------------

struct Mbarrier {
  uint16_t expected;
  int16_t missing;
  int32_t bytes : 31;
  uint32_t phase : 1;

  void settle() {
    if (missing < 0) fail("an mbarrier had more arrivals than it expects");
    if (missing == 0 && bytes == 0) {
      phase ^= 1;
      missing = static_cast<int16_t>(expected);
      ++machine.progress;
    }
  }
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier(uint64_t* word) { return *reinterpret_cast<Mbarrier*>(word); }

// ---- wgmma -------------------------------------------------------------------------------------

inline float bf16_at(const uint8_t* p) {
  uint16_t x;
  memcpy(&x, p, 2);
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline float bf16_of(uint32_t packed, int half) {
  const uint32_t bits = half ? packed & 0xffff0000u : packed << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// Element (mn, k) of a 128-byte-swizzled operand of bf16.
inline float operand(const uint8_t* shared, uint64_t descriptor, bool transposed, int mn, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fail("wgmma: only 128-byte swizzle is emulated");
  const uint32_t address =
      transposed ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                 : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
  const uint32_t swizzled = address ^ (address >> 7 & 7) << 4;
  if (swizzled + 2 > kSharedBytes) fail("wgmma reads outside shared memory");
  return bf16_at(shared + swizzled);
}

// One instruction, the part of one warp.
inline void execute(Block& block, const Wgmma* const (&lanes)[32], unsigned warp) {
  const Wgmma& op = *lanes[0];
  static float a[16][16], b[16][256];
  for (int lane = 0; lane < 32; ++lane) {
    const Wgmma& x = *lanes[lane];
    if (x.n != op.n || x.a_in_registers != op.a_in_registers || x.b != op.b ||
        x.accumulate != op.accumulate || (!op.a_in_registers && x.a != op.a)) {
      fail("wgmma: the threads of a warp disagree");
    }
    if (!op.a_in_registers) continue;
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] = bf16_of(x.a_registers[i], half);
      }
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int m = 0; m < 16 && !op.a_in_registers; ++m) {
      a[m][k] = operand(block.shared, op.a, op.a_transposed, warp % 4 * 16 + m, k);
    }
    for (int n = 0; n < op.n; ++n) b[k][n] = operand(block.shared, op.b, op.b_transposed, n, k);
  }
  for (int m = 0; m < 16; ++m) {
    float sums[256] = {};
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < op.n; ++n) sums[n] += a[m][k] * b[k][n];
    }
    for (int n = 0; n < op.n; ++n) {
      float& d = lanes[m % 8 * 4 + n % 8 / 2]->d[n / 8 * 4 + m / 8 * 2 + n % 2];
      d = op.accumulate ? d + sums[n] : sums[n];
    }
  }
}

// Executes the oldest group of the warp.
inline void execute_group(Block& block, unsigned warp) {
  Fiber* first = &block.fibers[warp * 32];
  const size_t count = first->groups.front().size();
  for (size_t i = 0; i < count; ++i) {
    const Wgmma* lanes[32];
    for (int lane = 0; lane < 32; ++lane) {
      if (first[lane].groups.empty() || first[lane].groups.front().size() != count) {
        fail("wgmma: the threads of a warp issued different groups");
      }
      lanes[lane] = &first[lane].groups.front()[i];
    }
    execute(block, lanes, warp);
  }
  for (int lane = 0; lane < 32; ++lane) first[lane].groups.pop_front();
  ++machine.progress;
}

inline void commit() {
  Fiber& f = self();
  f.groups.push_back(std::move(f.open));
  f.open.clear();
  const unsigned warp = f.thread / 32;
  exchange(0);
  if (!machine.options.late_wgmma && f.thread % 32 == 0) {
    while (!f.groups.empty()) execute_group(*f.block, warp);
  }
  exchange(0);
}

inline void wait_groups(size_t pending) {
  Fiber& f = self();
  if (!f.open.empty()) fail("wgmma: a wait with uncommitted instructions");
  exchange(0);
  if (f.thread % 32 == 0) {
    bool done = false;
    auto finish = [&] {
      while (f.groups.size() > pending) execute_group(*f.block, f.thread / 32);
      done = true;
    };
    if (machine.options.late_wgmma && f.groups.size() > pending) {
      machine.pending.push_back(finish);
      wait_until("wgmma", 0, [&] { return done; });
    } else {
      finish();
    }
  }
  exchange(0);
}

// ---- shared memory -----------------------------------------------------------------------------

inline uint32_t shared_offset(const void* p) {
  const auto* byte = static_cast<const uint8_t*>(p);
  const uint8_t* base = self().block->shared;
  if (byte < base || byte >= base + kSharedBytes) fail("not an address in shared memory");
  return static_cast<uint32_t>(byte - base);
}
inline uint8_t* shared_at(uint32_t offset) {
  if (offset >= kSharedBytes) fail("an address outside shared memory");
  return self().block->shared + offset;
}

}  // namespace emulator

// ---- what CUDA declares ------------------------------------------------------------------------

#include <algorithm>
#include <cmath>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace emulator {
struct ThreadIndex {
  struct X {
    operator unsigned() const { return self().thread; }
  } x;
};
struct BlockIndex {
  struct X {
    operator unsigned() const { return self().block->index; }
  } x;
};
struct GridSize {
  struct X {
    operator unsigned() const { return machine.blocks; }
  } x;
};
struct BlockSize {
  struct X {
    operator unsigned() const { return machine.threads; }
  } x;
};
}  // namespace emulator

inline const emulator::ThreadIndex threadIdx;
inline const emulator::BlockIndex blockIdx;
inline const emulator::GridSize gridDim;
inline const emulator::BlockSize blockDim;

inline void __syncthreads() {
  emulator::sync(emulator::self().block->everyone, emulator::machine.threads, "__syncthreads", 0);
}
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0); }
inline void __threadfence() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulator::exchange(bits)[emulator::self().thread % 32 ^ mask];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulator::exchange(bits)[lane % 32];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* all = emulator::exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

template <typename T>
T atomicAdd(T* p, T x) {
  const T old = *p;
  *p += x;
  ++emulator::machine.progress;
  return old;
}

template <typename A, typename B>
constexpr auto min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return a > b ? a : b;
}
