// Finds data races in shared memory on the emulator. A race is two accesses of one byte, at least
// one of them a write, that no synchronisation orders. The order is followed by vector clocks and
// does not depend on the schedule of one run, so one schedule is enough.
//
// Programs that are compiled with -fsanitize=thread call a function at every load and store. This
// file defines these functions in place of the sanitizer and looks at shared memory alone. An actor
// is a thread or a piece of asynchronous work. Asynchronous work begins with the clock of the
// thread that issued it, and threads that wait for it join its clock. Barriers, mbarriers,
// __syncwarp and waits for copies and wgmma order accesses. Shuffles and votes do not, as in PTX.
// Atomics are never in a race here, nor are lanes of a warp that store to one place by one
// instruction.
//
// Without EMULATOR_RACES the functions here do nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

namespace emulator::races {

#ifdef EMULATOR_RACES

#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))

// A vector clock. For every actor it has the time up to which its accesses precede the owner's.
struct Clock {
  std::vector<uint32_t> of;

  EMULATOR_UNSEEN void join(const Clock& other) {
    const size_t size = other.of.size();
    if (of.size() < size) of.resize(size);
    uint32_t* const to = of.data();
    const uint32_t* const from = other.of.data();
    for (size_t i = 0; i < size; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
  }
};

struct Actor {
  uint32_t id = 0;
  Clock clock;
};

struct Access {
  uint32_t actor = 0, time = 0;  // a time of 0 means that there was none
  const void* at = nullptr;
  bool any = false;  // one of several stores, any of which may be the last
};

struct Byte {
  Access write, read;
  std::vector<Access> reads;  // further reads that are not ordered among each other
  bool unseen = false;        // belongs to an mbarrier
};

// Sixteen bytes. As long as they are accessed together, the first represents all of them.
struct Line {
  Byte bytes[16];
  bool together = true, with_unseen = false;

  EMULATOR_UNSEEN void separate() {
    for (int i = 1; together && i < 16; ++i) bytes[i] = bytes[0];
    together = false;
  }
};

inline constexpr uint32_t kAsynchronous = 64;  // actors, which asynchronous work uses in rotation
inline constexpr size_t kMaxCtas = 32;         // CTAs that run at a time

struct State {
  Actor* current = nullptr;
  std::vector<Actor> threads;  // of all CTAs that run
  std::vector<Actor> work;
  uint32_t next = 0;
  struct Memory {
    const uint8_t* begin;
    Line* lines;
  };
  Memory memories[kMaxCtas];  // the shared memory of each CTA
  size_t count = 0, size = 0;
  const uint8_t *low = nullptr, *high = nullptr;  // bounds of all CTAs' shared memory
  bool busy = false;                              // whether accesses come from this file itself
  bool any = false;  // whether stores may race with other stores that set this
  std::set<std::pair<const void*, const void*>> found;
};
inline State state;

EMULATOR_UNSEEN inline void report(const char* what, const Access& old, const void* at) {
  if (!state.found.insert({old.at, at}).second) return;
  printf("race: %s: %p after %p\n", what, at, old.at);
}

EMULATOR_UNSEEN inline void access(Byte& x, bool write, const void* at) {
  if (x.unseen) return;
  const uint32_t id = state.current->id;
  const uint32_t* const known = state.current->clock.of.data();
  const Access now = {id, known[id], at, state.any};
  const bool one_store = x.write.at == at && x.write.actor / 32 == id / 32;
  const bool right = write && (one_store || (now.any && x.write.any));
  if (known[x.write.actor] < x.write.time && !right) {
    report(write ? "a write after a write" : "a read after a write", x.write, at);
  }
  if (!write) {
    if (known[x.read.actor] >= x.read.time) {
      x.read = now;
      return;
    }
    Access* const reads = x.reads.data();
    for (size_t i = 0, n = x.reads.size(); i < n; ++i) {
      if (reads[i].actor == id) {
        reads[i] = now;
        return;
      }
    }
    x.reads.push_back(now);
    return;
  }
  if (known[x.read.actor] < x.read.time) report("a write after a read", x.read, at);
  const Access* const reads = x.reads.data();
  for (size_t i = 0, n = x.reads.size(); i < n; ++i) {
    if (known[reads[i].actor] < reads[i].time) report("a write after a read", reads[i], at);
  }
  x.reads.clear();
  x.read = {};
  x.write = now;
}

// Calls visit(line, first byte, number of bytes) for every line of shared memory in [p, p + size).
template <typename Visit>
EMULATOR_UNSEEN void visit(const void* p, size_t size, Visit visit) {
  const auto* const byte = static_cast<const uint8_t*>(p);
  for (size_t i = 0; i < state.count; ++i) {
    size_t at = byte - state.memories[i].begin;
    if (at >= state.size) continue;
    for (size_t left = size; left > 0;) {
      const size_t first = at % 16, some = 16 - first < left ? 16 - first : left;
      visit(state.memories[i].lines[at / 16], first, some);
      at += some, left -= some;
    }
  }
}

EMULATOR_UNSEEN inline void access(Line& line, size_t first, size_t size, bool write,
                                   const void* at) {
  if (size < 16) line.separate();
  for (size_t i = first; i < (line.together ? 1 : first + size); ++i) {
    access(line.bytes[i], write, at);
  }
  if (size == 16 && write) line.together = !line.with_unseen;
}

EMULATOR_UNSEEN inline void access(const void* p, size_t size, bool write, const void* at) {
  if (p < state.low || p >= state.high || state.current == nullptr || state.busy) return;
  state.busy = true;
  visit(p, size, [=](Line& line, size_t first, size_t some) EMULATOR_UNSEEN {
    access(line, first, some, write, at);
  });
  state.busy = false;
}

// Begins the threads of some CTAs, which are in no race with earlier accesses.
EMULATOR_UNSEEN inline void begin(const std::vector<uint8_t*>& shared, size_t bytes,
                                  unsigned threads) {
  const auto count = static_cast<uint32_t>(shared.size() * threads);
  state.current = nullptr;
  state.threads.assign(count, {});
  state.work.assign(kAsynchronous, {});
  for (uint32_t i = 0; i < count + kAsynchronous; ++i) {
    Actor& actor = i < count ? state.threads[i] : state.work[i - count];
    actor.id = i;
    actor.clock.of.assign(count + kAsynchronous, 0);
    actor.clock.of[i] = 1;
  }
  for (size_t i = 0; i < state.count; ++i) delete[] state.memories[i].lines;
  state.count = 0;
  state.size = bytes;
  state.low = *std::min_element(shared.begin(), shared.end());
  state.high = *std::max_element(shared.begin(), shared.end()) + bytes;
  for (const uint8_t* const at : shared) {
    if (state.count == kMaxCtas) {
      printf("races.h: more than %zu CTAs at a time\n", kMaxCtas);
      abort();
    }
    state.memories[state.count++] = {at, new Line[(bytes + 15) / 16]};
  }
}

// Sets the actor of the accesses that follow.
EMULATOR_UNSEEN inline void resume(unsigned thread) { state.current = &state.threads[thread]; }
EMULATOR_UNSEEN inline void nobody() { state.current = nullptr; }

// Accesses during the lifetime of this object are ignored.
struct Pause {
  Actor* const before = state.current;
  EMULATOR_UNSEEN Pause() { state.current = nullptr; }
  EMULATOR_UNSEEN ~Pause() { state.current = before; }
};

// Stores during the lifetime of this object may race with each other.
struct AnyOf {
  EMULATOR_UNSEEN AnyOf() { state.any = true; }
  EMULATOR_UNSEEN ~AnyOf() { state.any = false; }
};

EMULATOR_UNSEEN inline void release(Clock& to) {
  if (state.current == nullptr) return;
  to.join(state.current->clock);
  ++state.current->clock.of.data()[state.current->id];
}
EMULATOR_UNSEEN inline void acquire(const Clock& from) {
  if (state.current != nullptr) state.current->clock.join(from);
}

EMULATOR_UNSEEN inline void join(Clock& to, const Clock& from) { to.join(from); }

// Returns the current actor's clock, for asynchronous work that it issues.
EMULATOR_UNSEEN inline Clock now() {
  Clock clock;
  release(clock);
  return clock;
}

// Makes asynchronous work the actor during the lifetime of this object.
struct Work {
  Actor* const before = state.current;
  EMULATOR_UNSEEN explicit Work(const Clock& issued) {
    Actor& self = state.work[state.next++ % kAsynchronous];
    const uint32_t time = self.clock.of[self.id] + 1;
    self.clock = issued;
    self.clock.of.resize(state.threads.size() + kAsynchronous);
    self.clock.of[self.id] = time;
    state.current = &self;
  }
  EMULATOR_UNSEEN ~Work() { state.current = before; }
};

EMULATOR_UNSEEN inline void hide(const void* p, size_t size) {
  visit(p, size, [](Line& line, size_t first, size_t some) EMULATOR_UNSEEN {
    line.separate();
    line.with_unseen = true;
    for (size_t i = first; i < first + some; ++i) line.bytes[i].unseen = true;
  });
}
EMULATOR_UNSEEN inline void reads(const void* p, size_t size) {
  access(p, size, false, __builtin_return_address(0));
}
EMULATOR_UNSEEN inline void writes(const void* p, size_t size) {
  access(p, size, true, __builtin_return_address(0));
}

#else

#define EMULATOR_UNSEEN

struct Clock {};
struct Pause {
  Pause() {}
};
struct AnyOf {
  AnyOf() {}
};
struct Work {
  explicit Work(const Clock&) {}
};
inline void begin(const std::vector<uint8_t*>&, size_t, unsigned) {}
inline void resume(unsigned) {}
inline void nobody() {}
inline void release(Clock&) {}
inline void acquire(const Clock&) {}
inline void join(Clock&, const Clock&) {}
inline Clock now() { return {}; }
inline void hide(const void*, size_t) {}
inline void reads(const void*, size_t) {}
inline void writes(const void*, size_t) {}

#endif

}  // namespace emulator::races

#ifdef EMULATOR_RACES

// The functions that the compiler calls.
#define EMULATOR_ACCESS(name, size, write)                                             \
  extern "C" EMULATOR_UNSEEN __attribute__((used)) void __tsan_##name##size(void* p) { \
    emulator::races::access(p, size, write, __builtin_return_address(0));              \
  }
#define EMULATOR_ACCESSES(size)                \
  EMULATOR_ACCESS(read, size, false)           \
  EMULATOR_ACCESS(write, size, true)           \
  EMULATOR_ACCESS(unaligned_read, size, false) \
  EMULATOR_ACCESS(unaligned_write, size, true)
EMULATOR_ACCESSES(1)
EMULATOR_ACCESSES(2)
EMULATOR_ACCESSES(4)
EMULATOR_ACCESSES(8)
EMULATOR_ACCESSES(16)
extern "C" {
EMULATOR_UNSEEN __attribute__((used)) void __tsan_read_range(void* p, unsigned long size) {
  emulator::races::access(p, size, false, __builtin_return_address(0));
}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_write_range(void* p, unsigned long size) {
  emulator::races::access(p, size, true, __builtin_return_address(0));
}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_init() {}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_vptr_update(void**, void*) {}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_vptr_read(void**) {}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_func_entry(void*) {}
EMULATOR_UNSEEN __attribute__((used)) void __tsan_func_exit(void*) {}
}

#endif
