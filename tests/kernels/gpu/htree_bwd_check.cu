// Tests the backward kernels of hierarchical tree attention against float64 on the CPU, then
// times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o htree_bwd_check tests/kernels/gpu/htree_bwd_check.cu cuda/htree/*.cu \
//       cuda/htree/tiers.cc cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./htree_bwd_check [test|small|bench] [seed or T]
// With JAX_DSA_TIER=portable the portable kernels run.
// How to read the output of `test`: dq comes from the walk, dk and dv from the lists and the
// nodes' kernel. All are wrong if the records are. `bench` times every kernel for two chunk
// sizes and two CTA shapes, and the portable kernels with the shared memory of every GPU.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/htree_call.cuh"
#include "htree/bwd_launch.cuh"
#include "htree/portable_walk.cuh"
#include "problems/htree_gradients.h"

using namespace htree_problem;

namespace {

struct BwdCall : Call {
  HTreeBwdParams b = {};

  BwdCall(int64_t batch, int64_t tokens, int64_t queries, int64_t heads, int64_t groups,
          int64_t dim, int64_t compression, int64_t top_k, int64_t rows)
      : Call(batch, tokens, queries, heads, groups, dim, compression, top_k, true,
             std::min<int64_t>(batch * queries * groups, 6336)) {
    b.fwd = p;
    b.dout = room<bf16>(batch * queries * heads * dim);
    b.dlse = room<float>(batch * queries * heads);
    b.dq = room<bf16>(batch * queries * heads * dim);
    b.dk = room<bf16>(batch * tokens * groups * dim);
    b.dv = room<bf16>(batch * tokens * groups * dim);
    b.fwd.workspace_bytes = htree_bwd_workspace(b, rows ? rows : batch * queries * groups);
    b.fwd.workspace = room<uint8_t>(b.fwd.workspace_bytes);
  }
};

bool run_case(const Case& c, uint64_t seed) {
  Problem x = make(c, seed);
  const Cotangents y = cotangents(x, seed);
  BwdCall call(c.batch, c.tokens, c.queries, c.heads, c.groups, c.dim, c.compression, c.top_k,
               c.chunk);
  call.p.scale = call.b.fwd.scale = x.scale;
  put(call.build.k, x.k), put(call.build.v, x.v), put(call.p.q, x.q);
  put(call.p.positions, x.positions), put(call.b.dout, y.dout), put(call.b.dlse, y.dlse);
  CHECK(launch_htree_build(call.build, nullptr));
  CHECK(launch_htree_fwd(call.p, nullptr));
  std::vector<bf16> got[3], first[3];
  bool same = true;
  for (int run = 0; run < 3; ++run) {
    CHECK(launch_htree_bwd(call.b, nullptr));
    CHECK(cudaDeviceSynchronize());
    const size_t sizes[] = {x.q.size(), x.k.size(), x.k.size()};
    const void* from[] = {call.b.dq, call.b.dk, call.b.dv};
    for (int i = 0; i < 3; ++i) {
      got[i] = download(static_cast<const bf16*>(from[i]), sizes[i]);
      if (run == 0) first[i] = got[i];
      same &= memcmp(first[i].data(), got[i].data(), sizes[i] * 2) == 0;
    }
  }
  const auto selected = download(
      call.p.selected, int64_t{c.batch} * c.queries * c.groups * (x.layers.count - 1) * c.top_k);
  const Gradients expected = gradients(x, y, selected.data());
  const GradientError dq = gradient_error(got[0].data(), expected.dq),
                      dk = gradient_error(got[1].data(), expected.dk),
                      dv = gradient_error(got[2].data(), expected.dv);
  const bool good = dq.good(c.size) && dk.good(c.size) && dv.good(c.size) && same;
  printf("%-4s %-26s T %d, %d layers: dq %.1e (%.1e), dk %.1e (%.1e), dv %.1e (%.1e)%s\n",
         good ? "ok" : "BAD", c.name, c.tokens, x.layers.count, dq.norm, dq.most, dk.norm, dk.most,
         dv.norm, dv.most, same ? "" : "  DIFFERS");
  fflush(stdout);
  return good;
}

// ---- timing ------------------------------------------------------------------------------------

template <typename S>
void time_shape(const char* name, const HTreeBwdParams& p, int64_t queries, int shared_bytes) {
  htree::BwdPlan x = htree::make_bwd_plan(p);
  const auto pairs = count_pairs(p.fwd.queries, p.fwd.top_k, x.plan.layers.count);
  Timer all, restore, pack, dq, visits, nodes, spread;
  for (int run = 0; run < 2; ++run) {  // the first run warms up
    for (int64_t first = 0; first < p.fwd.queries; first += queries) {
      htree::set_chunk(p, x, {0, 1, first, std::min(queries, p.fwd.queries - first)});
      all([&] {
        restore([&] { return htree::launch_restore(x, nullptr); });
        pack([&] { return htree::launch_pack(x, nullptr); });
        dq([&] { return htree::launch_queries<S, 128, 16>(x, shared_bytes, nullptr); });
        visits([&] { return htree::launch_visits(x, nullptr); });
        nodes([&] { return htree::launch_nodes<S::kHopper, 128, 16>(x, shared_bytes, nullptr); });
        return cudaSuccess;
      });
    }
    all([&] { return spread([&] { return htree::launch_spread(p, x, nullptr); }), cudaSuccess; });
    const float sum = all.total(), a = restore.total(), b = pack.total(), c = dq.total(),
                d = visits.total(), e = nodes.total(), f = spread.total();
    if (run == 0) continue;
    const double cycles = 132 * 1.7e6 / pairs[0];  // per millisecond, at about the clock under load
    printf(
        "  %-20s %5lld queries %8.2f ms: lists %.2f, records %.2f, dq %.2f (%.0f cycles a block), "
        "visits %.2f, nodes %.2f (%.0f cycles a block), spread %.2f\n",
        name, (long long)queries, sum, a, b, c, c * cycles, d, e, e * cycles, f);
    fflush(stdout);
  }
}

void bench(int64_t tokens) {
  const int64_t heads = 16, queries = 6336, row = 128, n = tokens * row;
  BwdCall call(1, tokens, tokens, heads, 1, 128, 16, 512, std::min(queries, tokens));
  const auto fill_in = [&](const void* x, int64_t n, int seed, int64_t row, bool alike) {
    fill<<<2048, 256>>>(static_cast<bf16*>(const_cast<void*>(x)), n, seed, row, alike ? 64 : 1,
                        alike ? 0.1f : 0.f);
    CHECK(cudaGetLastError());
  };
  fill_in(call.build.k, n, 1, row, false), fill_in(call.build.v, n, 2, row, false);
  fill_in(call.b.dout, n * heads, 4, row * heads, false);
  count_up<<<1024, 256>>>(const_cast<int32_t*>(call.p.positions), tokens);
  CHECK(cudaMemset(const_cast<float*>(call.b.dlse), 0, tokens * heads * 4));
  CHECK(launch_htree_build(call.build, nullptr));
  for (const bool alike : {false, true}) {
    fill_in(call.p.q, n * heads, 3, row * heads, alike);
    const float fwd = best_milliseconds([&] { CHECK(launch_htree_fwd(call.p, nullptr)); });
    std::vector<bf16> got[2][3];
    for (auto& y : got) {
      CHECK(launch_htree_bwd(call.b, nullptr));
      CHECK(cudaDeviceSynchronize());
      y[0] = download(static_cast<const bf16*>(call.b.dq), n * heads);
      y[1] = download(static_cast<const bf16*>(call.b.dk), n);
      y[2] = download(static_cast<const bf16*>(call.b.dv), n);
    }
    bool same = true;
    for (int i = 0; i < 3; ++i) {
      same &= memcmp(got[0][i].data(), got[1][i].data(), got[0][i].size() * 2) == 0;
    }
    printf("T %lld N16 G1 D128 r16 K512, %s: forward %.2f ms; %s bits in two runs\n",
           (long long)tokens, alike ? "neighbors alike" : "every query by itself", fwd,
           same ? "the same" : "DIFFERENT");
    time_shape<htree::BwdShape>("8 warps", call.b, queries, kMaxSharedBytes);
    time_shape<htree::BwdShape>("8 warps", call.b, queries / 2, kMaxSharedBytes);
    time_shape<htree::CtaShape<8, 232, 32>>("8 warps, 32 rows", call.b, queries, kMaxSharedBytes);
    for (const int kib : {227, 163, 99}) {
      const std::string name = "portable, " + std::to_string(kib) + " KiB";
      time_shape<htree::PortableBwdShape>(name.c_str(), call.b, queries, kib * 1024);
    }
  }
}

const Case kLargeCases[] = {
    {"dense", 1, 8191, 40, 16, 1, 128, 16, 512, 8191},
    {"one layer more", 1, 8193, 40, 16, 1, 128, 16, 512, 8193},
    {"sharp", 1, 20000, 40, 16, 1, 128, 16, 512, 19990, false, 0.f, 4},
    {"K 1024, r 8", 2, 9001, 20, 40, 2, 128, 8, 1024, 9000, true},
    {"K 64, r 32", 1, 70000, 30, 64, 1, 128, 32, 64, 69000},
    {"all queries, in chunks", 1, 3000, 3000, 4, 1, 64, 16, 16, 0, false, 0.f, 1, false, 1000},
    {"three layers", 1, 131073, 20, 16, 1, 128, 16, 512, 131073},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t number = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  if (what == "test" || what == "small") {
    return report(number, [&](uint64_t seed) {
      int bad = 0;
      for (const Case& c : kBwdCases) bad += !run_case(c, seed);
      for (const Case& c : kSmallCases) {
        if (has_gradients(c)) bad += !run_case(c, seed);
      }
      for (const Case& c : kLargeCases) {
        if (what == "test") bad += !run_case(c, seed);
      }
      return bad;
    });
  }
  for (const int64_t tokens : {16384, 65536, 131072, 262144}) {
    if (!number || number == static_cast<uint64_t>(tokens)) bench(tokens);
  }
  return 0;
}
