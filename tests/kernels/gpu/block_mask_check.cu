// Exactness and speed of the kernel that makes tiles of masks, without JAX:
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o block_mask_check tests/kernels/gpu/block_mask_check.cu cuda/block_mask/dispatch.cu
//
// block_mask_check test    the problems of the emulator's test and many random ones, bit for bit;
//                          then masks of up to more than 2^31 keys, against a plain kernel
// block_mask_check small   some of it, for compute-sanitizer
// block_mask_check bench   rates beside the machine's copy and read, and variants

#include <cstring>
#include <string>

#include "block_mask/tiles.cuh"
#include "gpu/check.cuh"
#include "problems/block_mask_problem.h"

using namespace block_mask_problem;
using jax_dsa::block_mask::Classify;
using jax_dsa::block_mask::Compress;
using jax_dsa::block_mask::Traits;

namespace {

int failures = 0;

// Results in device memory, poisoned.
template <typename T>
struct Poisoned {
  T* p;
  size_t n;
  explicit Poisoned(size_t n) : p(device<T>(n)), n(n) { CHECK(cudaMemset(p, 0xa5, n * sizeof(T))); }
  ~Poisoned() { cudaFree(p); }
  Poisoned(const Poisoned&) = delete;
  template <typename U>
  bool is(const std::vector<U>& want) const {
    static_assert(sizeof(T) == sizeof(U));
    const std::vector<T> got = download_bytes();
    return got.size() == want.size() && memcmp(got.data(), want.data(), n * sizeof(T)) == 0;
  }

 private:
  std::vector<T> download_bytes() const { return download(p, n); }
};

// ---- against the CPU ---------------------------------------------------------------------------

void check(const Case& c, uint64_t seed) {
  const Problem x = make(c, seed);
  std::vector<void*> copies;
  const BlockMaskParams p = params(x, [&]<typename T>(const std::vector<T>& from) {
    const size_t bytes = from.size() * sizeof(T), whole = (bytes + 15) / 16 * 16;
    void* const to = device<uint8_t>(whole);
    CHECK(cudaMemset(to, 0xff, whole));
    CHECK(cudaMemcpy(to, from.data(), bytes, cudaMemcpyHostToDevice));
    copies.push_back(to);
    return static_cast<const T*>(to);
  });
  int32_t* const tiles = upload(x.tiles);
  {
    const Poisoned<uint8_t> occupied(x.occupied.size()), full(x.full.size()), bits(x.bits.size());
    const Poisoned<int32_t> all_tiles(x.tiles.size());
    const Poisoned<uint8_t> all_bits(x.all_bits.size()), first_bits(x.first_bits.size());
    CHECK(launch_block_mask_classify(p, reinterpret_cast<bool*>(occupied.p),
                                     reinterpret_cast<bool*>(full.p), nullptr));
    CHECK(launch_block_mask_pack(p, tiles, bits.p, x.slots, nullptr));
    CHECK(launch_block_mask_pack(p, tiles, first_bits.p, 1, nullptr));
    CHECK(launch_block_mask_compress(p, all_tiles.p, all_bits.p, nullptr));
    CHECK(cudaDeviceSynchronize());
    const bool classified = occupied.is(x.occupied) && full.is(x.full);
    const bool packed = bits.is(x.bits) && first_bits.is(x.first_bits);
    const bool compressed = all_tiles.is(x.all_tiles) && all_bits.is(x.all_bits);
    if (!classified || !packed || !compressed) {
      ++failures;
      printf("BAD  %s, seed %llu: classify %d, pack %d, compress %d\n", c.name,
             (unsigned long long)seed, classified, packed, compressed);
    }
  }
  copies.push_back(tiles);
  for (void* copy : copies) CHECK(cudaFree(copy));
}

// ---- against a plain kernel --------------------------------------------------------------------

// A byte of bits at a time, of every tile; a tile's kind as two flags.
__global__ void plainly(BlockMaskParams p, unsigned* some, unsigned* hidden, uint8_t* bits) {
  const int64_t rows = ceil_div(p.queries, int64_t{p.block_q});
  const int64_t columns = ceil_div(p.keys, int64_t{p.block_k});
  const int64_t line = p.block_k / 8, all = p.batch * p.heads * rows * columns * p.block_q * line;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t tile = i / line / p.block_q, map = tile / columns / rows;
    const int64_t t = tile / columns % rows * p.block_q + i / line % p.block_q;
    const int64_t entry = map / p.heads, head = map % p.heads;
    const int64_t of_head =
        (p.mask_batch == 1 ? 0 : entry) * p.mask_heads + head / (p.heads / p.mask_heads);
    const uint8_t* const mask =
        p.mask + (of_head * p.mask_queries + (p.mask_queries == 1 ? 0 : t)) * p.keys;
    unsigned seen = 0, there = 0;
    for (int k = 0; k < 8; ++k) {
      const int64_t s = tile % columns * p.block_k + i % line * 8 + k;
      if (t >= p.queries || s >= p.keys) continue;
      there |= 1u << k;
      const int64_t range = entry * p.others.range_stride + t;
      if (p.others.ends && s >= p.others.ends[range]) continue;
      if (mask[s]) seen |= 1u << k;
    }
    bits[i] = static_cast<uint8_t>(seen);
    if (seen) atomicOr(some + tile, 1u);
    if (seen != there) atomicOr(hidden + tile, 1u);
  }
}

__global__ void compare(const unsigned* some, const unsigned* hidden, const bool* occupied,
                        const bool* full, const int32_t* tiles, int64_t count, int64_t of_map,
                        const uint8_t* want, const uint8_t* bits, int64_t bytes,
                        unsigned long long* wrong) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int64_t i = first; i < count; i += step) {
    const int kind = !some[i] ? -2 : !hidden[i] ? -1 : static_cast<int>(i % of_map);
    if (occupied[i] != (some[i] != 0) || full[i] != (hidden[i] == 0) || tiles[i] != kind) {
      atomicAdd(wrong, 1ull);
    }
  }
  for (int64_t i = first; i < bytes; i += step) {
    if (want[i] != bits[i]) atomicAdd(wrong, 1ull);
  }
}

// Of `block_q` x 128 patches a share is empty and one full, in percent; the others are random.
__global__ void fill(uint8_t* mask, int64_t rows, int64_t keys, int empty, int full,
                     uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x, all = rows * keys;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all; i += step) {
    const int64_t row = i / keys, key = i - row * keys;
    const auto patch = static_cast<int>(mix(seed ^ (row / 128 << 32 | key / 128)) % 100);
    mask[i] = patch < empty ? 0 : patch < empty + full ? 1 : mix(seed + i) & 1;
  }
}

__global__ void fill_causal(int32_t* ends, int queries) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < queries) ends[t] = t + 1;
}

// A mask in device memory, of which `shape` says what it is.
struct Mask {
  BlockMaskParams p = {};
  int64_t keys;  // of the mask
  int64_t maps, of_map, tiles, bits;
  uint8_t* mask;
  int32_t* ends;

  Mask(int64_t batch, int heads, int64_t queries, int64_t keys, int64_t mask_queries, int block_q,
       int block_k, int empty, int full, bool causal)
      : keys(batch * heads * mask_queries * keys),
        mask(device<uint8_t>((this->keys + 15) / 16 * 16)),
        ends(device<int32_t>(queries)) {
    fill<<<4096, 256>>>(mask, batch * heads * mask_queries, keys, empty, full, 17);
    fill_causal<<<static_cast<unsigned>(ceil_div(queries, int64_t{256})), 256>>>(
        ends, static_cast<int>(queries));
    CHECK(cudaGetLastError());
    p.mask = mask, p.mask_batch = batch, p.mask_heads = heads, p.mask_queries = mask_queries;
    p.others.ends = causal ? ends : nullptr;
    p.batch = batch, p.heads = heads, p.queries = queries, p.keys = keys;
    p.block_q = block_q, p.block_k = block_k;
    of_map = ceil_div(queries, int64_t{block_q}) * ceil_div(keys, int64_t{block_k});
    maps = batch * heads, tiles = maps * of_map, bits = tiles * block_q * (block_k / 8);
  }
  ~Mask() { cudaFree(mask), cudaFree(ends); }
  Mask(const Mask&) = delete;
};

void check_large(const char* name, const Mask& x) {
  unsigned *some = device<unsigned>(x.tiles), *hidden = device<unsigned>(x.tiles);
  CHECK(cudaMemset(some, 0, x.tiles * 4));
  CHECK(cudaMemset(hidden, 0, x.tiles * 4));
  uint8_t* const want = device<uint8_t>(x.bits);
  plainly<<<4096, 256>>>(x.p, some, hidden, want);
  CHECK(cudaGetLastError());
  unsigned long long* const wrong = device<unsigned long long>(1);
  CHECK(cudaMemset(wrong, 0, 8));
  {
    const Poisoned<bool> occupied(x.tiles), full(x.tiles);
    const Poisoned<int32_t> tiles(x.tiles);
    const Poisoned<uint8_t> bits(x.bits), packed(x.bits);
    CHECK(launch_block_mask_classify(x.p, occupied.p, full.p, nullptr));
    CHECK(launch_block_mask_compress(x.p, tiles.p, bits.p, nullptr));
    compare<<<4096, 256>>>(some, hidden, occupied.p, full.p, tiles.p, x.tiles, x.of_map, want,
                           bits.p, x.bits, wrong);
    // Of the tiles that are neither empty nor full, in the same slots.
    CHECK(launch_block_mask_pack(x.p, tiles.p, packed.p, x.of_map, nullptr));
    const std::vector<int32_t> kinds = download(tiles.p, x.tiles);
    const int64_t tile_bytes = x.bits / std::max<int64_t>(x.tiles, 1);
    for (int64_t i = 0; i < x.tiles; ++i) {
      if (kinds[i] < 0) CHECK(cudaMemsetAsync(want + i * tile_bytes, 0, tile_bytes));
    }
    compare<<<4096, 256>>>(some, hidden, occupied.p, full.p, tiles.p, 0, x.of_map, want, packed.p,
                           x.bits, wrong);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
  const unsigned long long count = download(wrong, 1)[0];
  printf("%-4s %s: %lld tiles, %llu wrong\n", count ? "BAD" : "ok", name, (long long)x.tiles,
         count);
  failures += count != 0;
  for (void* p : {(void*)some, (void*)hidden, (void*)want, (void*)wrong}) CHECK(cudaFree(p));
}

void test() {
  for (const Case& c : kCases) {
    for (uint64_t seed = 1; seed <= 3; ++seed) check(c, seed);
  }
  for (uint64_t seed = 1; seed <= 600; ++seed) check(random_case(seed), seed);
  printf("%s against the CPU\n", failures ? "BAD" : "ok");
  check_large("4096 x 4096", {1, 1, 4096, 4096, 4096, 128, 128, 40, 40, false});
  check_large("2 x 3 x 1000 x 3000, causal", {2, 3, 1000, 3000, 1000, 64, 128, 30, 30, true});
  check_large("1 x 2 x 999 x 4001", {1, 2, 999, 4001, 999, 128, 128, 30, 30, false});
  check_large("4 x 1 x 1 x 100000", {4, 1, 1, 100000, 1, 1, 128, 30, 30, false});
  check_large("49200 x 49152, more than 2^31 keys",
              {1, 1, 49200, 49152, 49200, 128, 128, 30, 30, false});
  check_large("46500 x 46341, more than 2^31 keys",
              {1, 1, 46500, 46341, 46500, 128, 128, 30, 30, true});
}

void small() {
  for (const Case& c : kCases) check(c, 1);
  for (uint64_t seed = 1; seed <= 30; ++seed) check(random_case(seed), seed);
}

// ---- bench -------------------------------------------------------------------------------------

double copy_rate = 0;  // bytes a second

void report(const std::string& name, double bytes, float milliseconds) {
  const double rate = bytes / (milliseconds * 1e-3);
  printf("%-58s %8.1f us  %7.1f GB/s  %.3f of the copy\n", name.c_str(), milliseconds * 1e3,
         rate * 1e-9, rate / copy_rate);
  fflush(stdout);
}

// What reading alone takes.
__global__ void read(const uint4* from, int64_t count, uint4* to) {
  uint4 sum = {};
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += 4 * step) {
    uint4 x[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) x[u] = i + u * step < count ? __ldcs(from + i + u * step) : uint4{};
#pragma unroll
    for (int u = 0; u < 4; ++u) sum.x |= x[u].x, sum.y |= x[u].y, sum.z |= x[u].z, sum.w |= x[u].w;
  }
  if (sum.x == 0x12345678u) to[threadIdx.x] = sum;
}

void ceilings() {
  const int64_t bytes = int64_t{1} << 30;
  uint8_t *const a = device<uint8_t>(bytes), *const b = device<uint8_t>(bytes);
  fill<<<4096, 256>>>(a, bytes / 1024, 1024, 0, 0, 3);
  const float copy =
      best_milliseconds([&] { CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
  copy_rate = 2. * bytes / (copy * 1e-3);
  report("copy of 1 GiB, read and written", 2. * bytes, copy);
  const float milliseconds = best_milliseconds([&] {
    read<<<num_sms() * 8, 256>>>(reinterpret_cast<const uint4*>(a), bytes / 16,
                                 reinterpret_cast<uint4*>(b));
  });
  report("reading 1 GiB", bytes, milliseconds);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
}

struct Results {
  Poisoned<bool> occupied, full;
  Poisoned<int32_t> tiles;
  Poisoned<uint8_t> bits;
  explicit Results(const Mask& x)
      : occupied(x.tiles), full(x.tiles), tiles(x.tiles), bits(x.bits) {}
};

// All three uses of a mask of which `read` bytes have to be read.
void time_mask(const std::string& name, const Mask& x, double read) {
  const Results y(x);
  report("classify " + name, read, best_milliseconds([&] {
           CHECK(launch_block_mask_classify(x.p, y.occupied.p, y.full.p, nullptr));
         }));
  report("compress " + name, read + x.bits, best_milliseconds([&] {
           CHECK(launch_block_mask_compress(x.p, y.tiles.p, y.bits.p, nullptr));
         }));
  int64_t partial = 0;
  for (const int32_t tile : download(y.tiles.p, x.tiles)) partial += tile >= 0;
  const double share = partial / double(x.tiles);
  report("pack     " + name, share * (double(x.keys) + x.bits) + x.bits, best_milliseconds([&] {
           CHECK(launch_block_mask_pack(x.p, y.tiles.p, y.bits.p, x.of_map, nullptr));
         }));
}

template <typename Tr>
void time_variant(const Mask& x, const Results& y) {
  char name[96];
  snprintf(name, sizeof(name), "  %d keys a lane, %d rows under way, %d warps, %d blocks",
           Tr::kKeys, Tr::kInFlight, Tr::kWarps, Tr::kBlocks);
  report(std::string(name) + ": classify", double(x.keys), best_milliseconds([&] {
           CHECK(jax_dsa::block_mask::launch<Tr>(x.p, Classify{y.occupied.p, y.full.p}, nullptr));
         }));
  report(std::string(name) + ": compress", double(x.keys) + x.bits, best_milliseconds([&] {
           CHECK(jax_dsa::block_mask::launch<Tr>(x.p, Compress{y.tiles.p, y.bits.p, x.of_map},
                                                 nullptr));
         }));
}

void bench() {
  ceilings();
  {
    const Mask x(1, 1, 32768, 32768, 32768, 128, 128, 0, 0, false);
    time_mask("1 x 1 x 32768 x 32768, random", x, double(x.keys));
    const Results y(x);
    time_variant<Traits<16, 8, 4, 5, false>>(x, y);
    time_variant<Traits<16, 8, 8, 2, false>>(x, y);
    time_variant<Traits<16, 4, 4, 8, false>>(x, y);
    time_variant<Traits<16, 4, 8, 4, false>>(x, y);
    time_variant<Traits<8, 8, 4, 5, false>>(x, y);
    time_variant<Traits<16, 4, 4, 4, true>>(x, y);
  }
  {
    const Mask x(1, 1, 32768, 32768, 32768, 128, 128, 90, 0, false);
    time_mask("the same, 90 % of the tiles empty", x, double(x.keys));
  }
  {
    const Mask x(1, 1, 32768, 32768, 32768, 128, 128, 0, 0, true);
    time_mask("the same, causal", x, 0.5 * x.keys);
  }
  {
    const Mask x(1, 64, 4096, 4096, 4096, 128, 128, 0, 0, false);
    time_mask("1 x 64 x 4096 x 4096, random", x, double(x.keys));
  }
  {
    const Mask x(1, 1, 32768, 32767, 32768, 128, 128, 0, 0, false);
    time_mask("1 x 1 x 32768 x 32767, unaligned", x, double(x.keys));
  }
  {
    const Mask x(1, 1, 2048, 2048, 2048, 128, 128, 0, 0, false);
    time_mask("1 x 1 x 2048 x 2048", x, double(x.keys));
  }
  {
    const Mask x(8, 1, 1, 131072, 1, 1, 128, 0, 0, false);
    time_mask("8 x 1 x 1 x 131072, padding", x, double(x.keys));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "test";
  if (mode == "bench") {
    bench();
  } else {
    mode == "small" ? small() : test();
    printf(failures ? "FAILED %d\n" : "all good\n", failures);
  }
  return failures != 0;
}
