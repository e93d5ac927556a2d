"""The device's rates of matrix products and copies, measured by the same clock as the operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.bench.case import BF16, COPY, FP8, Case, normal

MATMUL = {"M": 8192, "N": 8192, "K": 8192}
COPIED = 2**30  # bytes that are copied


def _matmul(a: jax.Array, b: jax.Array, *, implementation: str) -> jax.Array:
    del implementation
    return jnp.einsum("mk,nk->mn", a, b)


def _fp8_matmul(a: jax.Array, b: jax.Array, *, implementation: str) -> jax.Array:
    """Multiplies with one library call, so that the timing loop can hoist no conversion."""
    del implementation
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _copy(x: jax.Array, *, implementation: str) -> jax.Array:
    """Reads and writes every byte. XLA would eliminate a plain copy."""
    del implementation
    return x ^ jnp.uint32(1)


def ceilings(scale: int = 1) -> dict[str, Case]:
    """Returns the ceilings as cases, by name.

    Args:
        scale: Divisor of the sizes, for machines without a GPU.
    """
    dims = {letter: size // scale for letter, size in MATMUL.items()}
    m, n, k = dims.values()
    elements = COPIED // 4 // scale

    def operands(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = jax.random.split(key)
        return normal(a, m, k), normal(b, n, k)

    def fp8_operands(key: jax.Array) -> tuple:
        a, b = operands(key)
        return a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)

    def words(key: jax.Array) -> tuple:
        return (jax.random.bits(key, (elements,), jnp.uint32),)

    flops = 2 * m * n * k
    return {
        BF16: Case(BF16, "fwd", dims, "bf16", operands, _matmul, {BF16: flops}),
        FP8: Case(FP8, "fwd", dims, "fp8", fp8_operands, _fp8_matmul, {FP8: flops}),
        COPY: Case(COPY, "fwd", {"C": elements}, "u32", words, _copy, {COPY: 8 * elements}),
    }
