// Rows of keys at offsets beyond 32 bits. The memory in front of them is reserved and never
// touched, so it takes no room.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

#include "emulator.h"

namespace emulator {

// Returns how many rows of `row_bytes` bytes reach beyond 2^33 bytes. Offsets then need more than
// 32 bits even if a kernel counts elements of two bytes. The number is a multiple of `multiple`.
inline int64_t far_rows(int64_t row_bytes, int64_t multiple = 1) {
  return ((int64_t{1} << 33) / row_bytes / multiple + 1) * multiple;
}

// Copies blocks of `bytes` bytes, of which each follows `gap` bytes of its own. A block holds the
// rows of a batch entry, or a page pool.
class FarRows {
 public:
  FarRows(const void* from, int64_t blocks, int64_t bytes, int64_t gap)
      : size_(std::max<int64_t>(blocks * (gap + bytes), 1)) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) fail("the machine does not reserve memory for far rows");
    data_ = static_cast<uint8_t*>(memory);
    for (int64_t b = 0; b < blocks && bytes > 0; ++b) {
      memcpy(data_ + b * (gap + bytes) + gap, static_cast<const uint8_t*>(from) + b * bytes, bytes);
    }
  }
  ~FarRows() { munmap(data_, size_); }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  uint8_t* data() const { return data_; }

 private:
  int64_t size_;
  uint8_t* data_;
};

// Returns positions that are `rows` further back. Those below `first` stay, because they mean none.
inline std::vector<int32_t> far_positions(std::vector<int32_t> positions, int64_t rows,
                                          int32_t first = 0) {
  for (int32_t& x : positions) {
    if (x >= first) x = static_cast<int32_t>(std::min<int64_t>(x + rows, INT_MAX));
  }
  return positions;
}

}  // namespace emulator
