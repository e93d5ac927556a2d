// The row kernels of the indexer's losses on the emulator, against float64.
#include "losses/kl_rows.cu"
#include "problems/kl_rows_problem.h"

int main() {
  emulator::machine.gpu = emulator::kPortableGpus[0];  // has the least shared memory
  using namespace kl_rows_problem;
  int failures = 0;
  const auto report = [&](const char* name, const char* what, double worst) {
    const bool good = worst < 2e-6;
    printf("%-4s %-24s %s %.1e\n", good ? "ok" : "BAD", name, what, worst);
    failures += !good;
  };
  for (const Case& c : kCases) {
    const Problem x = make(c, 1);
    const int64_t n = c.rows * c.slots;
    // Arrays start `offset` elements after a 16-byte aligned address.
    std::vector<float4> logits_memory(n / 4 + 2), teacher_memory(n / 4 + 2);
    std::vector<float4> grad_memory(n / 4 + 2, make_float4(NAN, NAN, NAN, NAN));
    float* logits = reinterpret_cast<float*>(logits_memory.data()) + c.offset;
    float* teacher = reinterpret_cast<float*>(teacher_memory.data()) + c.offset;
    float* grad = reinterpret_cast<float*>(grad_memory.data()) + c.offset;
    std::copy(x.logits.begin(), x.logits.end(), logits);
    std::copy(x.teacher.begin(), x.teacher.end(), teacher);
    std::vector<float> kl(c.rows, NAN);
    std::vector<uint8_t> counts(c.rows, 7);
    jax_dsa::KlRowsParams p = {};
    p.logits = logits, p.teacher = teacher;
    p.valid = c.mask == kValid ? reinterpret_cast<const bool*>(x.valid.data()) : nullptr;
    p.starts = c.mask == kRanges ? x.starts.data() : nullptr;
    p.ends = c.mask == kRanges ? x.ends.data() : nullptr;
    p.kl = kl.data(), p.counts = reinterpret_cast<bool*>(counts.data());
    p.grad = c.in_place ? logits : grad;
    p.row_weight = kRowWeight;
    p.rows = c.rows, p.slots = c.slots;
    emulator::require(jax_dsa::launch_kl_rows(p, nullptr));
    const std::vector<float> got(p.grad, p.grad + n);
    report(c.name, "KL and gradient", worst_error(x, expected(x), kl, counts, got));

    const std::vector<float> factor = factors(c.rows);
    for (const bool in_place : {false, true}) {
      std::vector<float> scaled = in_place ? got : std::vector<float>(n, -7.f);
      emulator::require(
          jax_dsa::launch_scale_rows({in_place ? scaled.data() : got.data(), factor.data(),
                                      kRowWeight, scaled.data(), c.rows, c.slots},
                                     nullptr));
      report(c.name, in_place ? "scaled in place" : "scaled",
             good_scaled(c, got, factor, scaled) ? 0 : INFINITY);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
