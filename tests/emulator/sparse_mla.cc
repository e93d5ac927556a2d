// The sparse MLA kernels on the emulator, against float64.
#include "sparse_mla/bwd.cuh"
#include "sparse_mla/bwd_order.cuh"
#include "sparse_mla/bwd_pack.cuh"
#include "sparse_mla/fwd.cuh"
#include "sparse_mla/fwd_few.cuh"
#include "sparse_mla/sum_rows.cuh"
#include "sparse_mla_problem.h"

namespace {

using namespace jax_dsa;
using namespace sparse_mla_problem;

int failures = 0;

void report(const char* what, const Case& c, const emulator::Options& options, bool good,
            std::initializer_list<Error> errors) {
  printf("%-4s %-4s %-20s %s %s seed %llu ", good ? "ok" : "BAD", what, c.name,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed);
  for (const Error& e : errors) printf(" %.1e of %.1e", e.worst, e.top);
  printf("\n");
  fflush(stdout);
  failures += !good;
}

void forward(const Case& c, const emulator::Options& options) {
  const Problem x = make(c, options.seed);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  std::vector<bf16> out(rows * 512, __float2bfloat16(NAN));
  std::vector<float> lse(rows, NAN);
  SparseMlaFwdParams p = {};
  p.q = x.q.data(), p.kv = x.kv.data(), p.indices = x.indices.data();
  p.ends = c.ends ? x.ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.sinks = c.sinks ? x.sinks.data() : nullptr;
  p.sinks_stride = c.sinks == 2 ? c.heads : 0;
  p.out = out.data(), p.lse = lse.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  const auto run = [&]<int kD>() {
    const int heads = c.heads / c.groups;
    const int threads = heads <= 32 ? sparse_mla::kFewThreads : sparse_mla::kThreads;
    emulator::launch(2, threads, options, [&] {
      heads <= 16   ? sparse_mla::fwd_few_kernel<kD, 16>(p)
      : heads <= 32 ? sparse_mla::fwd_few_kernel<kD, 32>(p)
                    : sparse_mla::fwd_kernel<kD>(p);
    });
  };
  c.dim == 576 ? run.template operator()<576>() : run.template operator()<512>();
  Error lse_error, out_error;
  for (int64_t r = 0; r < rows; ++r) {
    const Row want = attend(x, r / c.heads, r % c.heads);
    lse_error.add(lse[r], want.lse);
    for (int d = 0; d < 512; ++d) out_error.add(__bfloat162float(out[r * 512 + d]), want.out[d]);
  }
  report("fwd", c, options, lse_error.good(1e-4) && out_error.good(6e-3), {lse_error, out_error});
}

void backward(const Case& c, const emulator::Options& options) {
  const Problem x = make(c, options.seed);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  const Gradients want = differentiate(x, options.seed);
  std::vector<bf16> dq(rows * c.dim, __float2bfloat16(NAN));
  std::vector<float> dkv(want.dkv.size());
  SparseMlaBwdParams p = {};
  p.q = x.q.data(), p.kv = x.kv.data(), p.indices = x.indices.data();
  p.ends = c.ends ? x.ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.dout = want.dout.data(), p.lse = want.lse.data(), p.out = want.out.data();
  p.dlse = want.dlse.data();
  p.dq = dq.data(), p.dkv = dkv.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.count = p.batch * p.queries;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  // So that few queries wrap around the ring, and few keys have windows.
  p.tickets_behind = 5, p.window_bytes = 1;
  int shared_tiles = 0;
  const auto run = [&]<bool kRows>() {
    SparseMlaBwdParams unpacked = p;
    unpacked.by_rows = kRows;
    const int n = sparse_mla::packed_queries(unpacked);
    SparseMlaBwdParams p = sparse_mla::packed(unpacked, n);
    const sparse_mla::BwdWork work(p);
    std::vector<int32_t> order(order_words(p, work) + sparse_mla::packed_words(p), -1);
    p.order = order.data();
    std::vector<uint32_t> counters(sparse_mla::counter_bytes(work) / 4);
    std::vector<uint4> images(work.image_blocks() * kBlockBytes / 16);
    memset(images.data(), 0xff, images.size() * 16);
    p.counters = counters.data(), p.images = images.data();
    if (n > 1) {
      const int room = sparse_mla::order_room(c.slots);
      int32_t* const slots = sparse_mla::packed_slots(p, work);
      int32_t* const lengths = slots + p.count * p.slots;
      emulator::launch_in_turn(p.count, sparse_mla::kOrderThreads, options,
                               [&] { sparse_mla::pack_kernel(unpacked, n, room, slots, lengths); });
      p.indices = slots, p.topk_length = lengths;
    }
    if (work.shares(p)) {
      const int room = sparse_mla::order_room(p.slots);
      emulator::launch_in_turn(work.steps, sparse_mla::kOrderThreads, options,
                               [&] { sparse_mla::order_kernel(p, work, room); });
      p.indices = p.order;
      for (int64_t i = 0; i < work.steps; ++i) shared_tiles += common_tiles(p, work)[i];
    } else {
      p.order = nullptr;
    }
    const auto kernel = [&]<int kD>() {
      emulator::launch(2, sparse_mla::kThreads, options, [&] {
        if constexpr (!kRows) {
          if (n > 1) return sparse_mla::bwd_kernel<kD, false, true>(p, work);
        }
        sparse_mla::bwd_kernel<kD, kRows, false>(p, work);
      });
    };
    c.dim == 576 ? kernel.template operator()<576>() : kernel.template operator()<512>();
  };
  run.template operator()<false>();
  Error dq_error, dkv_error;
  for (size_t i = 0; i < dq.size(); ++i) dq_error.add(__bfloat162float(dq[i]), want.dq[i]);
  for (size_t i = 0; i < dkv.size(); ++i) {
    const int column = i % c.dim;
    dkv_error.add(dkv[i - column + sparse_mla_dkv_place(column)], want.dkv[i]);
  }
  report("bwd", c, options,
         dq_error.good(2e-2) && dkv_error.good(2e-2) && shared_tiles >= c.shared_tiles,
         {dq_error, dkv_error});

  // The same by rows of two queries at a time, which are summed afterwards.
  std::fill(dkv.begin(), dkv.end(), 0.f);
  std::fill(dq.begin(), dq.end(), __float2bfloat16(NAN));
  const int64_t tokens = p.count, keys = int64_t{c.batch} * c.keys * c.groups, at_once = 2;
  const RowOrder of_rows = order_rows(x, at_once);
  const int64_t query_rows = tokens ? of_rows.order.size() / tokens : 0;
  std::vector<bf16> summands(at_once * query_rows * c.dim);
  p.rows = summands.data();
  for (p.first = 0; p.first < tokens; p.first += at_once) {
    p.count = std::min(at_once, tokens - p.first);
    std::fill(summands.begin(), summands.end(), __float2bfloat16(NAN));
    run.template operator()<true>();
    const sparse_mla::SumRowsParams sum = {
        .rows = summands.data(),
        .order = of_rows.order.data() + p.first * query_rows,
        .key = of_rows.key.data() + p.first * query_rows,
        .dkv = dkv.data(),
        .first_key = p.first / at_once * (keys + 1),
        .keys = keys,
        .row_count = static_cast<int>(p.count * query_rows),
    };
    const int block = sparse_mla::kSumKeys;
    emulator::launch_in_turn((keys + block - 1) / block, block * c.dim / 8, options, [&] {
      c.dim == 576 ? sparse_mla::sum_rows_kernel<576>(sum) : sparse_mla::sum_rows_kernel<512>(sum);
    });
  }
  dq_error = dkv_error = {};
  for (size_t i = 0; i < dq.size(); ++i) dq_error.add(__bfloat162float(dq[i]), want.dq[i]);
  for (size_t i = 0; i < dkv.size(); ++i) dkv_error.add(dkv[i], want.dkv[i]);
  report("rows", c, options, dq_error.good(2e-2) && dkv_error.good(2e-2), {dq_error, dkv_error});
}

const Case kCases[] = {
    {"one tile", 1, 1, 64, 64, 1, 576, 64},
    {"four tiles", 1, 2, 300, 64, 1, 576, 256},
    {"D 512, odd tiles", 1, 3, 300, 128, 1, 512, 150},
    {"nine queries", 1, 9, 90, 64, 1, 512, 64},
    {"selected by top-k", 2, 3, 250, 64, 1, 512, 200, false, false, false, 0, 1.f, true, 2},
    {"repeated keys", 1, 5, 30, 24, 1, 576, 130, false, false, false, 0, 1.f, false, 1},
    {"adversarial", 2, 3, 90, 40, 1, 576, 131, true, true, true, 2},
    {"sharp", 1, 3, 200, 64, 1, 576, 320, false, true, false, 1, 12.f},
    {"groups", 1, 3, 70, 6, 3, 512, 77, true, false, true, 1},
    {"three head tiles", 1, 3, 60, 160, 1, 512, 80},
    {"windows", 2, 3, 900, 64, 1, 512, 520, false, false, false, 0, 1.f, true, 3},
    {"windows of two head tiles", 1, 1, 40, 72, 1, 512, 1030},
    {"no slots", 1, 3, 10, 16, 1, 576, 0},
    {"16 heads", 1, 16, 700, 16, 1, 576, 330, false, false, false, 0, 1.f, true, 8},
    {"16 heads, empty queries", 2, 12, 300, 16, 1, 512, 150, true, true, true, 2},
    {"8 heads, repeated keys", 1, 16, 30, 8, 1, 576, 70, false, true},
    {"13 heads, sharp", 1, 9, 200, 13, 1, 576, 320, false, true, true, 1, 12.f},
    {"24 heads", 1, 6, 90, 24, 1, 512, 100, true, false, true, 1},
    {"32 heads, sharp", 1, 6, 200, 32, 1, 576, 210, true, false, true, 2, 12.f},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Case& c : kCases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      forward(c, options);
      backward(c, options);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
