// Runs CUDA kernels on the CPU, block by block of cooperating fibers, so that their logic can be
// tested where there is no GPU: barriers, pipelines, swizzled layouts, wgmma. The headers in
// common/ beside this file take the place of those in cuda/common/; a kernel and a launcher that
// reach the hardware only through them compile unchanged.
//
// Asynchronous work happens either as early or as late as the program allows, wgmma by
// `Options::late_wgmma`, copies by `Options::late_copies`, each warp for itself: what a missing
// wait or a barrier in the wrong place would let through shows as a wrong result in one of the four
// combinations, and a deadlock ends the program with the fibers' positions. The order in which
// warps run follows `Options::seed`; now and then a warp stands still until the others need it, as
// one does on a GPU that waits for instructions. The blocks of a cluster run at the same time; the
// shared memory of a block that has ended is overwritten, as if another one had it. Warps that wait
// at one barrier in different places of the code end the program, too. Races in shared memory are
// found by races.h. What this cannot see: rounding of the tensor cores, missing proxy fences, time.
#pragma once

#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <source_location>
#include <vector>

#include "races.h"

namespace emulator {

struct Options {
  bool late_wgmma = false, late_copies = false;
  uint64_t seed = 0;
};

// Whether a program runs only a few small cases, which `make test` does: `program small`.
inline bool small(int argc, char** argv) { return argc > 1 && strcmp(argv[1], "small") == 0; }

[[noreturn]] inline void fail(const char* what) {
  printf("emulator: %s\n", what);
  fflush(stdout);
  abort();
}

// The cases that a program runs: all of them, or the small ones, which are given by name. `name`
// returns the name of a case.
template <typename Case, size_t kCount, typename Name>
std::vector<std::reference_wrapper<const Case>> cases(int argc, char** argv,
                                                      const Case (&all)[kCount],
                                                      std::initializer_list<const char*> names,
                                                      Name name) {
  if (!small(argc, argv)) return {all, all + kCount};
  std::vector<std::reference_wrapper<const Case>> chosen;
  for (const char* wanted : names) {
    const auto same = [&](const Case& c) { return strcmp(name(c), wanted) == 0; };
    const Case* const found = std::find_if(all, all + kCount, same);
    if (found == all + kCount) fail("a small case has a name that no case has");
    chosen.push_back(*found);
  }
  return chosen;
}
template <typename Case, size_t kCount>
auto cases(int argc, char** argv, const Case (&all)[kCount],
           std::initializer_list<const char*> names) {
  return cases(argc, argv, all, names, [](const Case& c) { return c.name; });
}

// The schedules to run case `number` under. A number n as the argument gives all four combinations
// of early and late work with n seeds each. Otherwise there are two of the four combinations, and
// the next case gets the others.
inline std::vector<Options> schedules(int argc, char** argv, size_t number) {
#ifdef EMULATOR_RACES
  return {{true, true, 1}};
#endif
  if (argc < 2 || small(argc, argv)) {
    const bool odd = number % 2 == 1;
    return {{odd, false, 1}, {!odd, true, 2}};
  }
  std::vector<Options> all;
  for (uint64_t seed = 1; seed <= strtoull(argv[1], nullptr, 10); ++seed) {
    for (int late = 0; late < 4; ++late) all.push_back({late % 2 == 1, late / 2 == 1, seed});
  }
  return all;
}

inline constexpr int kSharedBytes = 227 * 1024;
inline constexpr int kStackBytes = 64 * 1024;
inline constexpr int kNamedBarriers = 16;

struct Wgmma {
  float* d;
  int n, k;  // columns; contracted elements
  bool f16;  // the elements of two bytes
  bool a_in_registers, a_transposed, b_transposed, accumulate;
  uint64_t a, b;  // descriptors
  uint32_t a_registers[4];
};

struct Stores {  // bulk stores of one thread
  std::vector<std::function<void()>> open;
  std::vector<bool> done;           // of each group
  std::vector<races::Clock> known;  // after each group
};

struct Fiber {
  ucontext_t start;
  jmp_buf context;  // switches faster than ucontext_t, which asks the kernel for signal masks
  bool started = false;
  std::unique_ptr<char[]> stack;
  unsigned thread, number;  // in its block, and of all that run
  struct Block* block;
  bool done = false;
  const char* waits_for = nullptr;
  uint64_t waits_at = 0;
  std::vector<Wgmma> open;                    // issued, not committed
  std::deque<std::vector<Wgmma>> groups;      // committed, not executed
  std::deque<races::Clock> committed;         // what was known at their commits
  int64_t issued = 0;                         // groups, since the start
  std::vector<std::function<void()>> copies;  // cp.async since the last arrival
  Stores stores;
};

struct Barrier {
  races::Clock known[2];  // to those that pass, by the generation's parity
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::source_location place = {};  // where threads wait in this generation
  bool any = false;                 // of what threads have reported in this generation
  bool told[2] = {};                // the same of the last two, by their parity
};

// What the lanes of a warp show each other in a collective operation; two, taken in turns.
struct Exchange {
  uint64_t value[2][32];
  Barrier barrier;
  std::vector<races::Clock> executed;  // what is known after each group of wgmma
};

struct Block {
  unsigned index;
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* shared;  // aligned to 1024
  std::vector<Fiber> fibers;
  unsigned running;  // fibers
  Barrier everyone, named[kNamedBarriers];
  std::vector<Exchange> warps;
};

struct Machine {
  Options options;  // of the launches to come
  int num_sms = 2;  // SMs, with a block each
  std::mt19937_64 random;
  jmp_buf scheduler;
  Fiber* current = nullptr;
  unsigned threads = 0, blocks = 0;
  size_t shared_bytes = 0;                       // of a block
  unsigned ranks = 1;                            // blocks of a cluster
  Barrier cluster;                               // of the one that runs
  std::vector<std::unique_ptr<Block>> resident;  // blocks that run, those of a cluster in order
  uint64_t progress = 0;                         // counts events that may release a waiting fiber
  std::vector<std::function<void()>> pending, stores;  // asynchronous work not yet done
  std::function<void()> kernel;
  std::map<const void*, std::array<races::Clock, 2>> mbarriers;  // what those that wait then know
  std::map<const void*, races::Clock> counters;
};

inline Machine machine;

inline void require(cudaError_t status) {
  if (status != cudaSuccess) fail("a launcher refused");
}

// ---- fibers ------------------------------------------------------------------------------------

inline void yield() {
  races::nobody();
  if (!_setjmp(machine.current->context)) _longjmp(machine.scheduler, 1);
}
inline void resume(Fiber& f) {
  machine.current = &f;
  if (_setjmp(machine.scheduler)) return;
  races::resume(f.number);
  if (f.started) _longjmp(f.context, 1);
  f.started = true;
  setcontext(&f.start);
}

template <typename Ready>
void wait_until(const char* what, uint64_t at, Ready ready) {
  Fiber& self = *machine.current;
  self.waits_for = what;
  self.waits_at = at;
  while (!ready()) yield();
  self.waits_for = nullptr;
}

inline void arrive(Barrier& barrier, unsigned expected, bool orders = true) {
  ++machine.progress;
  if (orders) races::release(barrier.known[barrier.generation & 1]);
  if (++barrier.arrived == expected) {
    barrier.known[barrier.generation + 1 & 1] = {};
    barrier.arrived = 0;
    barrier.told[barrier.generation & 1] = barrier.any;
    barrier.any = false;
    ++barrier.generation;
    barrier.place = {};
  }
}
inline void sync(Barrier& barrier, unsigned expected, const char* what, uint64_t at,
                 bool orders = true) {
  const uint64_t generation = barrier.generation;
  arrive(barrier, expected, orders);
  wait_until(what, at, [&] { return barrier.generation != generation; });
  if (orders) races::acquire(barrier.known[generation & 1]);
}

// A barrier of several warps, which is for threads that wait at the same instruction.
inline void sync_warps(Barrier& barrier, unsigned expected, const char* what, uint64_t at,
                       const std::source_location& place) {
  if (barrier.place.line() == 0) barrier.place = place;
  if (barrier.place.line() != place.line() ||
      strcmp(barrier.place.function_name(), place.function_name()) != 0) {
    fail("threads wait at one barrier in two places of the code");
  }
  sync(barrier, expected, what, at);
}

// The same, and tells whether any thread's `x` is true.
inline bool any_of_warps(Barrier& barrier, unsigned expected, bool x, uint64_t at,
                         const std::source_location& place) {
  const uint64_t generation = barrier.generation;
  barrier.any |= x;
  sync_warps(barrier, expected, "named barrier", at, place);
  return barrier.told[generation & 1];
}

// Asynchronous work: at once, or when nothing else can happen.
inline void later(std::function<void()> what, bool stores = false) {
  auto work = [what = std::move(what), issued = races::now()] {
    const races::Work acts(issued);
    what();
  };
  if (machine.options.late_copies) {
    (stores ? machine.stores : machine.pending).push_back(std::move(work));
  } else {
    work();
    ++machine.progress;
  }
}

inline void fiber_main() {
  machine.kernel();
  machine.current->done = true;
  ++machine.progress;
  Block& block = *machine.current->block;
  if (--block.running == 0) memset(block.shared, 0xff, machine.shared_bytes);
  yield();
}

inline void report_deadlock() {
  printf("emulator: deadlock\n");
  for (const auto& block : machine.resident) {
    for (const Fiber& f : block->fibers) {
      if (f.thread % 32 == 0 && !f.done) {
        printf("  block %u warp %u: %s %llu\n", block->index, f.thread / 32,
               f.waits_for ? f.waits_for : "running", (unsigned long long)f.waits_at);
      }
    }
  }
  fail("no fiber can go on");
}

// Runs `blocks` blocks of a larger grid, from `first` on, at the same time.
inline void run(unsigned first, unsigned blocks, unsigned grid, unsigned threads,
                size_t shared_bytes, std::function<void()> kernel) {
  machine.random.seed(machine.options.seed);
  machine.threads = threads;
  machine.blocks = grid;
  machine.shared_bytes = shared_bytes;
  machine.cluster = {};
  machine.kernel = std::move(kernel);
  machine.pending.clear();
  machine.stores.clear();
  machine.mbarriers.clear();
  machine.counters.clear();
  auto& resident = machine.resident;
  resident.clear();
  std::vector<uint8_t*> rooms;
  for (unsigned b = 0; b < blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->index = first + b;
    block->memory = std::make_unique_for_overwrite<uint8_t[]>(kSharedBytes + 1024);
    memset(block->memory.get(), 0xff, kSharedBytes + 1024);  // NaN
    block->shared = block->memory.get();
    while (reinterpret_cast<uintptr_t>(block->shared) % 1024) ++block->shared;
    block->fibers = std::vector<Fiber>(threads);
    block->running = threads;
    block->warps = std::vector<Exchange>((threads + 31) / 32);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = block->fibers[t];
      f.thread = t;
      f.number = b * threads + t;
      f.block = block.get();
      f.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = f.stack.get();
      f.start.uc_stack.ss_size = kStackBytes;
      f.start.uc_link = nullptr;
      makecontext(&f.start, fiber_main, 0);
    }
    rooms.push_back(block->shared);
    resident.push_back(std::move(block));
  }
  races::begin(rooms, shared_bytes, threads);
  const unsigned warps = (threads + 31) / 32 * blocks;
  std::vector<bool> asleep(warps);
  std::vector<unsigned> order(warps);
  for (unsigned i = 0; i < warps; ++i) order[i] = i;
  for (;;) {
    const uint64_t before = machine.progress;
    bool all_done = true;
    std::shuffle(order.begin(), order.end(), machine.random);
    for (unsigned i : order) {
      if (asleep[i]) {
        all_done = false;
        continue;
      }
      Block& block = *resident[i % blocks];
      for (unsigned t = i / blocks * 32; t < std::min(threads, (i / blocks + 1) * 32); ++t) {
        Fiber& f = block.fibers[t];
        if (f.done) continue;
        all_done = false;
        resume(f);
      }
    }
    if (all_done) break;
    if (machine.progress != before) {
      if (machine.random() % 4 == 0) asleep[machine.random() % warps] = true;
      continue;
    }
    if (std::find(asleep.begin(), asleep.end(), true) != asleep.end()) {
      std::fill(asleep.begin(), asleep.end(), false);
      continue;
    }
    // Any of the work that waits, and often several pieces at once; stores last of all.
    auto& from = machine.pending.empty() ? machine.stores : machine.pending;
    if (from.empty()) report_deadlock();
    do {
      std::swap(from[machine.random() % from.size()], from.back());
      const auto work = std::move(from.back());
      from.pop_back();
      work();
    } while (!from.empty() && machine.random() % 4);
    ++machine.progress;
  }
  if (!machine.pending.empty()) fail("blocks ended with copies that nobody had waited for");
  for (auto& work : machine.stores) work();
  for (const auto& block : resident) {
    for (const Fiber& f : block->fibers) {
      if (!f.open.empty()) fail("wgmma without a commit");
    }
    for (size_t i = shared_bytes; i < kSharedBytes; ++i) {
      if (block->shared[i] != 0xff) fail("a block wrote past its shared memory");
    }
  }
  resident.clear();
}

// Runs `kernel` in `blocks` blocks at the same time, with so much dynamic shared memory each.
inline void launch(unsigned blocks, unsigned threads, size_t shared_bytes,
                   std::function<void()> kernel) {
  run(0, blocks, blocks, threads, shared_bytes, std::move(kernel));
}

// One block after the other, of a kernel whose blocks know nothing of each other.
inline void launch_in_turn(unsigned blocks, unsigned threads, size_t shared_bytes,
                           const std::function<void()>& kernel) {
  for (unsigned b = 0; b < blocks; ++b) run(b, 1, blocks, threads, shared_bytes, kernel);
}

// One cluster of `ranks` blocks after the other.
inline void launch_clusters(unsigned clusters, unsigned ranks, unsigned threads,
                            size_t shared_bytes, const std::function<void()>& kernel) {
  machine.ranks = ranks;
  for (unsigned c = 0; c < clusters; ++c) {
    run(c * ranks, ranks, clusters * ranks, threads, shared_bytes, kernel);
  }
  machine.ranks = 1;
}

// ---- collectives of a warp ---------------------------------------------------------------------

inline Fiber& self() { return *machine.current; }

// Shows `value` to the warp; returns what all 32 lanes showed. Only if it `orders` the lanes'
// accesses to memory does PTX promise that it does.
inline const uint64_t* exchange(uint64_t value, bool orders = false) {
  Fiber& f = self();
  Exchange& x = f.block->warps[f.thread / 32];
  const int turn = x.barrier.generation & 1;
  x.value[turn][f.thread % 32] = value;
  sync(x.barrier, 32, "warp", f.thread / 32, orders);
  return x.value[turn];
}

// ---- mbarriers ---------------------------------------------------------------------------------

struct Mbarrier {
  uint16_t expected;
  int16_t missing;
  int32_t bytes : 31;
  uint32_t phase : 1;

  // Of what is known to those that wait for either phase.
  races::Clock* known() const;

  void came(uint32_t bytes);

  void settle() {
    if (missing < 0) fail("an mbarrier had more arrivals than it expects");
    if (missing == 0 && bytes == 0) {
      phase ^= 1;
      known()[phase] = {};
      missing = static_cast<int16_t>(expected);
      ++machine.progress;
    }
  }
};
static_assert(sizeof(Mbarrier) == 8);

inline races::Clock* Mbarrier::known() const { return machine.mbarriers[this].data(); }
inline void Mbarrier::came(uint32_t count) {
  races::release(known()[phase]);
  bytes -= static_cast<int32_t>(count);
  settle();
}

inline Mbarrier& mbarrier(uint64_t* word) { return *reinterpret_cast<Mbarrier*>(word); }

// ---- wgmma -------------------------------------------------------------------------------------

EMULATOR_UNSEEN inline float bf16_at(const uint8_t* p) {
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

inline float f16_of(uint32_t packed, int half) {
  _Float16 x;
  const uint16_t bits = half ? packed >> 16 : packed & 0xffff;
  memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}
EMULATOR_UNSEEN inline float f16_at(const uint8_t* p) {
  _Float16 x;
  memcpy(&x, p, 2);
  return static_cast<float>(x);
}

EMULATOR_UNSEEN inline float e4m3_at(const uint8_t* p) {
  const int exponent = *p >> 3 & 15, mantissa = *p & 7;
  const float size = (*p & 127) == 127 ? NAN
                     : exponent        ? std::ldexp(8.f + mantissa, exponent - 10)
                                       : std::ldexp(float(mantissa), -9);
  return *p & 128 ? -size : size;
}

// `address` in a tile whose rows of 128 bytes (mode 1), 64 (2) or 32 (3) are swizzled.
EMULATOR_UNSEEN inline uint32_t swizzled(uint32_t address, int mode) {
  return address ^ (address >> 7 & 7 >> (mode - 1)) << 4;
}

// Where element (mn, k) of an operand of bf16 or f16 or, K-major, of e4m3 lies in shared memory. So
// do those that share 16 bytes with it.
EMULATOR_UNSEEN inline uint32_t place(const Wgmma& op, uint64_t descriptor, bool transposed, int mn,
                                      int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int mode = descriptor >> 62, row = 256 >> mode;
  if (mode == 0 || (mode != 1 && transposed)) fail("wgmma: a layout that is not emulated");
  const uint32_t address =
      transposed ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                 : start + mn / 8 * stride + mn % 8 * row + k * (32 / op.k);
  const uint32_t at = swizzled(address, mode);
  if (at + 32 / op.k > kSharedBytes) fail("wgmma reads outside shared memory");
  return at;
}
EMULATOR_UNSEEN inline float operand(const uint8_t* shared, const Wgmma& op, uint64_t descriptor,
                                     bool transposed, int mn, int k) {
  const uint8_t* const at = shared + place(op, descriptor, transposed, mn, k);
  return op.k == 32 ? e4m3_at(at) : op.f16 ? f16_at(at) : bf16_at(at);
}
inline void reads(const uint8_t* shared, const Wgmma& op, uint64_t descriptor, bool transposed,
                  int first, int count) {
  const int chunk = op.k / 2;  // elements of 16 bytes
  for (int mn = first; mn < first + count; mn += transposed ? chunk : 1) {
    for (int k = 0; k < op.k; k += transposed ? 1 : chunk) {
      races::reads(shared + place(op, descriptor, transposed, mn, k), 16);
    }
  }
}

// One instruction, the part of one warp.
EMULATOR_UNSEEN inline void execute(Block& block, const Wgmma* const (&lanes)[32], unsigned warp) {
  const Wgmma& op = *lanes[0];
  if (!op.a_in_registers) reads(block.shared, op, op.a, op.a_transposed, warp % 4 * 16, 16);
  reads(block.shared, op, op.b, op.b_transposed, 0, op.n);
  static float a[16][32], b[32][256];
  for (int lane = 0; lane < 32; ++lane) {
    const Wgmma& x = *lanes[lane];
    if (x.n != op.n || x.a_in_registers != op.a_in_registers || x.b != op.b ||
        x.accumulate != op.accumulate || (!op.a_in_registers && x.a != op.a)) {
      fail("wgmma: the threads of a warp disagree");
    }
    if (!op.a_in_registers) continue;
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] =
            (op.f16 ? f16_of : bf16_of)(x.a_registers[i], half);
      }
    }
  }
  for (int k = 0; k < op.k; ++k) {
    for (int m = 0; m < 16 && !op.a_in_registers; ++m) {
      a[m][k] = operand(block.shared, op, op.a, op.a_transposed, warp % 4 * 16 + m, k);
    }
    for (int n = 0; n < op.n; ++n) {
      b[k][n] = operand(block.shared, op, op.b, op.b_transposed, n, k);
    }
  }
  for (int m = 0; m < 16; ++m) {
    float sums[256] = {};
    for (int k = 0; k < op.k; ++k) {
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
  races::Clock issued =
      block.warps[warp].executed.empty() ? races::Clock() : block.warps[warp].executed.back();
  for (int lane = 0; lane < 32; ++lane) {
    races::join(issued, first[lane].committed.front());
    first[lane].committed.pop_front();
  }
  const races::Work acts(issued);
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
  block.warps[warp].executed.push_back(races::now());
  ++machine.progress;
}

inline void commit() {
  Fiber& f = self();
  f.groups.push_back(std::move(f.open));
  f.open.clear();
  f.committed.push_back(races::now());
  ++f.issued;
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
  const auto& executed = f.block->warps[f.thread / 32].executed;
  if (f.issued > int64_t(pending)) races::acquire(executed[f.issued - pending - 1]);
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
#include <bit>
#include <cmath>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

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

inline void __syncthreads(const std::source_location& place = std::source_location::current()) {
  emulator::sync_warps(emulator::self().block->everyone, emulator::machine.threads, "__syncthreads",
                       0, place);
}
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0, true); }
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
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const int first = emulator::self().thread % 32 / width * width;
  bits = emulator::exchange(bits)[first + lane % width];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const int lane = static_cast<int>(emulator::self().thread % 32);
  return __shfl_sync(~0u, value, lane < lanes ? lane : lane - lanes);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int lanes) {
  const int lane = static_cast<int>(emulator::self().thread % 32);
  return __shfl_sync(~0u, value, lane + lanes < 32 ? lane + lanes : lane);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* all = emulator::exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(static_cast<int>(all[i]) == value) << i;
  return bits;
}
inline int __reduce_min_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  int least = value;
  for (int i = 0; i < 32; ++i) least = std::min(least, static_cast<int>(all[i]));
  return least;
}
inline int __reduce_max_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  int most = value;
  for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<int>(all[i]));
  return most;
}
inline int __reduce_add_sync(unsigned, int value) {
  const uint64_t* all = emulator::exchange(static_cast<uint32_t>(value));
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
  return static_cast<int>(sum);
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint64_t* all = emulator::exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]);
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
template <typename T>
void __stcs(T* p, T x) {
  *p = x;
}
using std::isnan;
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}
// Byte i of the result is the one of eight that digit i of `selector` numbers.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned x = 0;
  for (int i = 0; i < 4; ++i) {
    if (selector >> (4 * i) & 8) emulator::fail("a sign that __byte_perm does not emulate");
    x |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return x;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

template <typename T>
T atomicAdd(T* p, T x) {
  const emulator::races::Pause pause;
  const T old = *p;
  *p += x;
  ++emulator::machine.progress;
  return old;
}

template <typename T>
T atomicOr(T* p, T x) {
  const emulator::races::Pause pause;
  const T old = *p;
  *p |= x;
  return old;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T x) {
  *p = x;
}

template <typename A, typename B>
constexpr auto min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return a > b ? a : b;
}
