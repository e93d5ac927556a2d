// Test values for unpacking FP8 records, for the tests on the emulator and on a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace record_values {

struct CodeGroup {
  uint32_t codes[8];
  float scale;
};

// Returns all codes with power-of-two scales and other scales. Half of the groups have no NaN
// codes, because one NaN sends a whole group through the slow path.
inline std::vector<CodeGroup> code_groups() {
  std::vector<float> scales = {0x1p-130f, 1.f / 3, 0x1.8p-126f, 3e38f, 0.f, -1.f, INFINITY, NAN};
  for (int i = -126; i <= 10; ++i) scales.push_back(std::ldexp(1.f, i));
  std::vector<CodeGroup> all;
  for (float scale : scales) {
    for (int first = 0; first < 512; first += 32) {
      CodeGroup group = {{}, scale};
      for (int i = 0; i < 32; ++i) {
        uint8_t code = first + i;
        if (first >= 256 && (code & 0x7f) == 0x7f) --code;
        reinterpret_cast<uint8_t*>(group.codes)[i] = code;
      }
      all.push_back(group);
    }
  }
  return all;
}

// Returns how many of the 32 values differ, in bits or in being NaN.
inline int wrong(const CodeGroup& group, const uint16_t* got) {
  int count = 0;
  for (int i = 0; i < 32; ++i) {
    __nv_fp8_e4m3 code;
    code.__x = reinterpret_cast<const uint8_t*>(group.codes)[i];
    const __nv_bfloat16 want = __float2bfloat16(float(code) * group.scale);
    __nv_bfloat16 value;
    std::memcpy(&value, got + i, 2);
    const bool nan = std::isnan(__bfloat162float(want));
    count += nan ? !std::isnan(__bfloat162float(value)) : std::memcmp(&value, &want, 2) != 0;
  }
  return count;
}

}  // namespace record_values
