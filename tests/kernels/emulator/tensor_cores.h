// wgmma on the emulator; emulator.h includes this file.
#pragma once

#include "emulator.h"

namespace emulator {

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

// Swizzles an address in a tile whose rows have 128 bytes (mode 1), 64 bytes (2) or 32 bytes (3).
EMULATOR_UNSEEN inline uint32_t swizzled(uint32_t address, int mode) {
  return address ^ (address >> 7 & 7 >> (mode - 1)) << 4;
}

// Returns the place in shared memory of element (mn, k) of an operand. Operands are bf16 or f16, or
// K-major e4m3. The elements that share 16 bytes with it follow or precede it there.
EMULATOR_UNSEEN inline uint32_t place(const Wgmma& op, uint64_t descriptor, bool transposed, int mn,
                                      int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int mode = descriptor >> 62, row = 256 >> mode;
  if (mode == 0 || (mode != 1 && transposed)) fail("wgmma: this layout is not emulated");
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

// Executes one warp's quarter of an instruction.
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

}  // namespace emulator
