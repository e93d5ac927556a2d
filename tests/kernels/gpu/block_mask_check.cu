// Tests the block mask kernel bit for bit, then times it, without JAX.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o block_mask_check tests/kernels/gpu/block_mask_check.cu cuda/block_mask/dispatch.cu
//   ./block_mask_check [test|small|bench]
// `test` solves the problems of the emulator test and many random ones, then compares masks with up
// to more than 2^31 keys with a plain kernel. `small` is for compute-sanitizer. `bench` prints
// rates next to the rates of a copy and of reads alone, also of variants of the kernel.

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

// A poisoned result in device memory.
template <typename T>
struct Poisoned {
  T* p;
  size_t n;
  explicit Poisoned(size_t n) : p(device<T>(n)), n(n) { CHECK(cudaMemset(p, 0xa5, n * sizeof(T))); }
  ~Poisoned() { cudaFree(p); }
  Poisoned(const Poisoned&) = delete;
  template <typename U>
  bool is(const std::vector<U>& expected) const {
    static_assert(sizeof(T) == sizeof(U));
    const std::vector<T> got = download_bytes();
    return got.size() == expected.size() && memcmp(got.data(), expected.data(), n * sizeof(T)) == 0;
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

// A plain implementation. Each thread computes one byte of bits at a time. The kind of a tile is
// stored as two flags.
__global__ void reference_kernel(BlockMaskParams p, unsigned* any_visible, unsigned* any_masked,
                                 uint8_t* bits) {
  const int64_t rows = ceil_div(p.queries, int64_t{p.block_q});
  const int64_t columns = ceil_div(p.keys, int64_t{p.block_k});
  const int64_t line = p.block_k / 8, all = p.batch * p.heads * rows * columns * p.block_q * line;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t tile = i / line / p.block_q, map = tile / columns / rows;
    const int64_t t = tile / columns % rows * p.block_q + i / line % p.block_q;
    const int64_t batch_index = map / p.heads, head = map % p.heads;
    const int64_t mask_index =
        (p.mask_batch == 1 ? 0 : batch_index) * p.mask_heads + head / (p.heads / p.mask_heads);
    const uint8_t* const mask =
        p.mask + (mask_index * p.mask_queries + (p.mask_queries == 1 ? 0 : t)) * p.keys;
    unsigned seen = 0, existing = 0;
    for (int k = 0; k < 8; ++k) {
      const int64_t s = tile % columns * p.block_k + i % line * 8 + k;
      if (t >= p.queries || s >= p.keys) continue;
      existing |= 1u << k;
      const int64_t range = batch_index * p.others.range_stride + t;
      if (p.others.ends && s >= p.others.ends[range]) continue;
      if (mask[s]) seen |= 1u << k;
    }
    bits[i] = static_cast<uint8_t>(seen);
    if (seen) atomicOr(any_visible + tile, 1u);
    if (seen != existing) atomicOr(any_masked + tile, 1u);
  }
}

__global__ void compare(const unsigned* any_visible, const unsigned* any_masked,
                        const bool* occupied, const bool* full, const int32_t* tiles, int64_t count,
                        int64_t tiles_per_map, const uint8_t* expected, const uint8_t* bits,
                        int64_t bytes, unsigned long long* wrong) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int64_t i = first; i < count; i += step) {
    const int kind = !any_visible[i]  ? -2
                     : !any_masked[i] ? -1
                                      : static_cast<int>(i % tiles_per_map);
    if (occupied[i] != (any_visible[i] != 0) || full[i] != (any_masked[i] == 0) ||
        tiles[i] != kind) {
      atomicAdd(wrong, 1ull);
    }
  }
  for (int64_t i = first; i < bytes; i += step) {
    if (expected[i] != bits[i]) atomicAdd(wrong, 1ull);
  }
}

// Fills the mask with 128 x 128 patches. `empty` and `full` are the percentages of empty and full
// ones; the others are random.
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

// A mask in device memory and the sizes of its results.
struct Mask {
  BlockMaskParams p = {};
  int64_t keys;  // number of bytes of the mask
  int64_t maps, tiles_per_map, tiles, bits;
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
    tiles_per_map = ceil_div(queries, int64_t{block_q}) * ceil_div(keys, int64_t{block_k});
    maps = batch * heads, tiles = maps * tiles_per_map, bits = tiles * block_q * (block_k / 8);
  }
  ~Mask() { cudaFree(mask), cudaFree(ends); }
  Mask(const Mask&) = delete;
};

void check_large(const char* name, const Mask& x) {
  unsigned *any_visible = device<unsigned>(x.tiles), *any_masked = device<unsigned>(x.tiles);
  CHECK(cudaMemset(any_visible, 0, x.tiles * 4));
  CHECK(cudaMemset(any_masked, 0, x.tiles * 4));
  uint8_t* const expected = device<uint8_t>(x.bits);
  reference_kernel<<<4096, 256>>>(x.p, any_visible, any_masked, expected);
  CHECK(cudaGetLastError());
  unsigned long long* const wrong = device<unsigned long long>(1);
  CHECK(cudaMemset(wrong, 0, 8));
  {
    const Poisoned<bool> occupied(x.tiles), full(x.tiles);
    const Poisoned<int32_t> tiles(x.tiles);
    const Poisoned<uint8_t> bits(x.bits), packed(x.bits);
    CHECK(launch_block_mask_classify(x.p, occupied.p, full.p, nullptr));
    CHECK(launch_block_mask_compress(x.p, tiles.p, bits.p, nullptr));
    compare<<<4096, 256>>>(any_visible, any_masked, occupied.p, full.p, tiles.p, x.tiles,
                           x.tiles_per_map, expected, bits.p, x.bits, wrong);
    // pack must produce the bits of the partial tiles in the same slots, and zeros elsewhere.
    CHECK(launch_block_mask_pack(x.p, tiles.p, packed.p, x.tiles_per_map, nullptr));
    const std::vector<int32_t> kinds = download(tiles.p, x.tiles);
    const int64_t tile_bytes = x.bits / std::max<int64_t>(x.tiles, 1);
    for (int64_t i = 0; i < x.tiles; ++i) {
      if (kinds[i] < 0) CHECK(cudaMemsetAsync(expected + i * tile_bytes, 0, tile_bytes));
    }
    compare<<<4096, 256>>>(any_visible, any_masked, occupied.p, full.p, tiles.p, 0, x.tiles_per_map,
                           expected, packed.p, x.bits, wrong);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
  const unsigned long long count = download(wrong, 1)[0];
  printf("%-4s %s: %lld tiles, %llu wrong\n", count ? "BAD" : "ok", name, (long long)x.tiles,
         count);
  failures += count != 0;
  for (void* p : {(void*)any_visible, (void*)any_masked, (void*)expected, (void*)wrong})
    CHECK(cudaFree(p));
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

double copy_rate = 0;  // bytes per second

void report(const std::string& name, double bytes, float milliseconds) {
  const double rate = bytes / (milliseconds * 1e-3);
  printf("%-58s %8.1f us  %7.1f GB/s  %.3f of the copy\n", name.c_str(), milliseconds * 1e3,
         rate * 1e-9, rate / copy_rate);
  fflush(stdout);
}

// Reads an array, to measure the rate of reads alone.
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

// Times all three functions on a mask of which `read` bytes must be read.
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
           CHECK(launch_block_mask_pack(x.p, y.tiles.p, y.bits.p, x.tiles_per_map, nullptr));
         }));
}

template <typename Tr>
void time_variant(const Mask& x, const Results& y) {
  char name[96];
  snprintf(name, sizeof(name), "  %d keys per lane, %d rows in flight, %d warps, %d CTAs per SM",
           Tr::kKeys, Tr::kInFlight, Tr::kWarps, Tr::kCtasPerSm);
  report(std::string(name) + ": classify", double(x.keys), best_milliseconds([&] {
           CHECK(jax_dsa::block_mask::launch<Tr>(x.p, Classify{y.occupied.p, y.full.p}, nullptr));
         }));
  report(std::string(name) + ": compress", double(x.keys) + x.bits, best_milliseconds([&] {
           CHECK(jax_dsa::block_mask::launch<Tr>(
               x.p, Compress{y.tiles.p, y.bits.p, x.tiles_per_map}, nullptr));
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
