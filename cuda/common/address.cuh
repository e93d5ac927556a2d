// Shared-memory addresses as PTX instructions take them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

// Returns the 32-bit address of `p` in shared memory.
__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The CTA's dynamic shared memory, as a `T`.
template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<T*>(raw);
}

// Returns to + offset, as an address for cp_async_16. ptxas 13.0 may keep the address of a cp.async
// as a register plus a uniform register and then encodes an illegal instruction. max(sum, offset)
// equals the sum, but ptxas cannot split it. tests/test_machine_code.py searches the machine code
// for such addresses.
__device__ __forceinline__ uint32_t whole_sum(uint32_t to, uint32_t offset) {
  return max(to + offset, offset);
}

}  // namespace jax_dsa
