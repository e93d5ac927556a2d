// Checks of the indexer's warm-up loss on the emulator against float64.
#pragma once

#include <vector>

#include "emulator.h"
#include "problems/dense_loss_problem.h"

using namespace dense_loss_problem;

// Returns the number of failures of a case: with a workspace for all queries, for one batch entry,
// and for part of an entry.
inline int check(const Case& c, const emulator::Options& options) {
  int failures = 0;
  const Problem x = make(c, options.seed);
  const Loss want = loss(x);
  const int64_t all = jax_dsa::dense_loss_bytes(c.batch, c.queries, c.keys, c.channels, c.heads);
  const int64_t entry = jax_dsa::dense_loss_bytes(1, c.queries, c.keys, c.channels, c.heads);
  const int64_t chunk =
      jax_dsa::dense_loss_bytes(1, (c.queries + 2) / 3, c.keys, c.channels, c.heads);
  for (const int64_t capacity : {all, entry, chunk}) {
    emulator::machine.options = options, emulator::machine.num_sms = 2;
    Results got(x);
    std::vector<char> memory(capacity + 256, 0x7f);
    const uintptr_t workspace = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
    jax_dsa::DenseLossParams p = params(x, got);
    p.workspace = reinterpret_cast<void*>(workspace), p.capacity = capacity;
    emulator::require(launch_dense_loss(p, nullptr));
    failures += !report(c.name, x, want, got);
  }
  return failures;
}
