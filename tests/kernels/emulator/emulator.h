// Runs CUDA kernels on the CPU, so that their logic can be tested without a GPU: barriers,
// pipelines, swizzled layouts, wgmma. Every thread of a CTA is a fiber. The headers in common/
// beside this file replace those in cuda/common/. A kernel and its launcher compile unchanged if
// they reach the hardware only through these headers.
//
// Asynchronous work happens as early or as late as the program allows. `Options::late_wgmma`
// decides for wgmma, `Options::late_copies` for copies, and each warp is on its own. A missing wait
// or a misplaced barrier leads to a wrong result in one of the four combinations. A deadlock ends
// the program with the positions of the fibers. `Options::seed` determines the order in which warps
// run. Now and then a warp stands still until the others cannot proceed without it, like a warp
// that waits for instructions on a GPU.
//
// The CTAs of a cluster run at the same time. The shared memory of a CTA that has ended is
// overwritten, as if another CTA had it. The program also ends if warps wait at one barrier in
// different places of the code. races.h finds races in shared memory. The emulator knows nothing of
// the rounding of tensor cores, missing proxy fences, or time.
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

// Returns the case of a name. `name_of` returns the name of a case.
template <typename Case, size_t kCount, typename Name>
const Case& named(const Case (&all)[kCount], const char* wanted, Name name_of) {
  const auto same = [&](const Case& c) { return strcmp(name_of(c), wanted) == 0; };
  const Case* const found = std::find_if(all, all + kCount, same);
  if (found == all + kCount) fail("no case has the name");
  return *found;
}
template <typename Case, size_t kCount>
const Case& named(const Case (&all)[kCount], const char* wanted) {
  return named(all, wanted, [](const Case& c) { return c.name; });
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
  for (const char* wanted : names) chosen.push_back(named(all, wanted, name));
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

struct Stores {                             // bulk stores of one thread
  std::vector<std::function<void()>> open;  // not yet committed
  std::vector<bool> done;                   // per group: whether its stores have happened
  std::vector<races::Clock> known;          // per group: the clock after its stores
};

struct Fiber {
  ucontext_t start;
  jmp_buf context;  // switches faster than ucontext_t, which asks the kernel for signal masks
  bool started = false;
  std::unique_ptr<char[]> stack;
  unsigned thread, number;  // index in its CTA, and among all fibers that run
  struct Block* block;
  bool done = false;
  const char* waits_for = nullptr;
  uint64_t waits_at = 0;
  std::vector<Wgmma> open;                    // issued, not committed
  std::deque<std::vector<Wgmma>> groups;      // committed, not executed
  std::deque<races::Clock> committed;         // the thread's clock when it committed each group
  int64_t issued = 0;                         // number of groups since the start
  std::vector<std::function<void()>> copies;  // cp.async since the last arrival or group
  std::deque<std::vector<std::function<void()>>> copy_groups;  // groups of cp.async, not landed
  Stores stores;
};

struct Barrier {
  races::Clock known[2];  // the clock of threads that pass, by the generation's parity
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::source_location place = {};  // where threads wait in this generation
  bool any = false;                 // whether any thread has reported true in this generation
  bool any_before[2] = {};          // the same of the last two generations, by their parity
};

// The values that the lanes of a warp exchange in a collective operation. Consecutive operations
// alternate between two buffers.
struct Exchange {
  uint64_t value[2][32];
  Barrier barrier;
  std::vector<races::Clock> executed;  // the clock after each wgmma group
};

struct Block {
  unsigned index;
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* shared;  // aligned to 1024
  std::vector<Fiber> fibers;
  unsigned running;  // number of fibers that have not ended
  Barrier everyone, named[kNamedBarriers];
  std::vector<Exchange> warps;
};

// A kind of GPU, as dispatchers see it.
struct Gpu {
  const char* name;
  int compute_capability;  // 10 * major + minor
  int shared_bytes;        // the most that a CTA can have
};
inline constexpr Gpu kHopperGpu = {"Hopper", 90, kSharedBytes};
// GPUs that run the portable tier, one for each size of shared memory.
inline constexpr Gpu kPortableGpus[] = {
    {"99 KiB", 86, 99 * 1024}, {"163 KiB", 80, 163 * 1024}, {"227 KiB", 100, kSharedBytes}};

struct Machine {
  Options options;  // for the launches to come
  Gpu gpu = kHopperGpu;
  int num_sms = 2;            // each SM runs one CTA
  int max_cluster_size = 16;  // in CTAs
  std::mt19937_64 random;
  jmp_buf scheduler;
  Fiber* current = nullptr;
  unsigned threads = 0, blocks = 0;
  size_t shared_bytes = 0;                       // dynamic shared memory per CTA
  unsigned ranks = 1;                            // CTAs per cluster
  Barrier cluster;                               // the barrier of the cluster that runs
  std::vector<std::unique_ptr<Block>> resident;  // CTAs that run, in the order of their ranks
  uint64_t progress = 0;  // number of events that may release a waiting fiber
  std::vector<std::function<void()>> pending, stores;  // asynchronous work not yet done
  std::function<void()> kernel;
  std::map<const void*, std::array<races::Clock, 2>> mbarriers;  // clocks by phase
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
    barrier.any_before[barrier.generation & 1] = barrier.any;
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

// A barrier of several warps. All threads have to wait at the same instruction.
inline void sync_warps(Barrier& barrier, unsigned expected, const char* what, uint64_t at,
                       const std::source_location& place) {
  if (barrier.place.line() == 0) barrier.place = place;
  if (barrier.place.line() != place.line() ||
      strcmp(barrier.place.function_name(), place.function_name()) != 0) {
    fail("threads wait at one barrier in two places of the code");
  }
  sync(barrier, expected, what, at);
}

// The same; returns whether any thread's `x` is true.
inline bool any_of_warps(Barrier& barrier, unsigned expected, bool x, uint64_t at,
                         const std::source_location& place) {
  const uint64_t generation = barrier.generation;
  barrier.any |= x;
  sync_warps(barrier, expected, "named barrier", at, place);
  return barrier.any_before[generation & 1];
}

// Does asynchronous work, at once or when nothing else can happen.
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

// Runs CTAs `first` to `first + blocks - 1` of a grid at the same time.
inline void run(unsigned first, unsigned blocks, unsigned grid, unsigned threads,
                size_t shared_bytes, std::function<void()> kernel) {
  if (shared_bytes > static_cast<size_t>(machine.gpu.shared_bytes)) {
    fail("a CTA has more shared memory than the GPU offers");
  }
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
  std::vector<uint8_t*> shared;
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
    shared.push_back(block->shared);
    resident.push_back(std::move(block));
  }
  races::begin(shared, shared_bytes, threads);
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
    // Do one or more pieces of the asynchronous work, in random order. Stores come last.
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
  if (!machine.pending.empty()) fail("a kernel ended before its copies were complete");
  for (auto& work : machine.stores) work();
  for (const auto& block : resident) {
    for (const Fiber& f : block->fibers) {
      if (!f.open.empty()) fail("wgmma without a commit");
    }
    for (size_t i = shared_bytes; i < kSharedBytes; ++i) {
      if (block->shared[i] != 0xff) fail("a CTA wrote past its shared memory");
    }
  }
  resident.clear();
}

// Runs `kernel` in `blocks` CTAs at the same time. Each has `shared_bytes` of dynamic shared
// memory.
inline void launch(unsigned blocks, unsigned threads, size_t shared_bytes,
                   std::function<void()> kernel) {
  run(0, blocks, blocks, threads, shared_bytes, std::move(kernel));
}

// Runs one CTA after the other, for a kernel whose CTAs are independent.
inline void launch_in_turn(unsigned blocks, unsigned threads, size_t shared_bytes,
                           const std::function<void()>& kernel) {
  for (unsigned b = 0; b < blocks; ++b) run(b, 1, blocks, threads, shared_bytes, kernel);
}

// Runs one cluster of `ranks` CTAs after the other.
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

// Exchanges a value with the other lanes; returns the values of all 32 lanes. `orders` says whether
// PTX promises that the operation orders the lanes' memory accesses.
inline const uint64_t* exchange(uint64_t value, bool orders = false) {
  Fiber& f = self();
  Exchange& x = f.block->warps[f.thread / 32];
  const int buffer = x.barrier.generation & 1;
  x.value[buffer][f.thread % 32] = value;
  sync(x.barrier, 32, "warp", f.thread / 32, orders);
  return x.value[buffer];
}

// ---- mbarriers ---------------------------------------------------------------------------------

struct Mbarrier {
  uint16_t expected;
  int16_t missing;
  int32_t bytes : 31;
  uint32_t phase : 1;

  // Returns the clocks of threads that wait for either phase.
  races::Clock* known() const;

  void arrive(uint32_t bytes);

  void complete_phase() {
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
inline void Mbarrier::arrive(uint32_t count) {
  races::release(known()[phase]);
  bytes -= static_cast<int32_t>(count);
  complete_phase();
}

inline Mbarrier& mbarrier(uint64_t* word) { return *reinterpret_cast<Mbarrier*>(word); }

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

#include "device_functions.h"
#include "tensor_cores.h"
