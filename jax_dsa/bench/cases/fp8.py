"""Benchmark cases of FP8 quantization, matrix products and linear layers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import COPY, FP8, Case, normal, normal_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax_dsa.bench.case import Scale


def fp8(size: Scale) -> Iterator[Case]:
    """Yields quantization and dequantization, matrix products, and a linear layer.

    The work of quantization, and of products with few rows, is the bytes that are moved. The work
    of other products is their operations.
    """

    for m in (4096, 8 * 4096, 65536):
        dims = size(M=m, C=7168)
        m, c = dims.values()
        for power_of_two_scale in (False, True):
            yield Case(
                "fp8",
                "fwd",
                dims,
                "bf16",
                functools.partial(normal_rows, m, c, jnp.bfloat16),
                functools.partial(jax_dsa.quantize_fp8, power_of_two_scale=power_of_two_scale),
                {COPY: m * (3 * c + 4 * -(-c // 128))},
                note="pow2" if power_of_two_scale else "",
            )
    for m, c in ((8192, 8192), (4 * 8192, 7168)):
        dims = size(M=m, C=c)
        m, c = dims.values()
        x, tiles = functools.partial(normal_rows, m, c, jnp.bfloat16), (128, 128)
        quantize = functools.partial(jax_dsa.quantize_fp8, block=tiles)
        dequantize = functools.partial(jax_dsa.dequantize_fp8, dtype=jnp.bfloat16)
        yield Case("fp8", "fwd", dims, "bf16", x, quantize, {COPY: 3 * m * c}, note="tiles")

        def codes(key: jax.Array, x: Callable[..., tuple] = x) -> tuple:
            return jax_dsa.quantize_fp8(*x(key))

        work = {COPY: m * (3 * c + 4 * -(-c // 128))}
        yield Case("fp8", "fwd", dims, "bf16", codes, dequantize, work, note="dequantise")
    for m, n, k in (
        *((4096, 7168, 2048), (4096, 4096, 7168), (8192, 8192, 8192)),
        *((4000, 7000, 2000), (16, 7168, 7168), (128, 7168, 7168)),
    ):
        few_rows = m <= 128  # Such products are bound by reading the other operand.
        dims = size(M=m, N=n, K=k)
        m, n, k = dims.values()

        def make(key: jax.Array, m: int = m, n: int = n, k: int = k) -> tuple:
            a, b = jax.random.split(key)
            weights = jax_dsa.quantize_fp8(normal(b, n, k), block=(128, 128))
            return *jax_dsa.quantize_fp8(normal(a, m, k)), *weights

        work = {COPY: (m + n) * k + 2 * m * n} if few_rows else {FP8: 2 * m * n * k}
        yield Case("fp8", "fwd", dims, "fp8", make, jax_dsa.fp8_matmul, work)
    dims = size(M=8192, N=8192, K=8192)
    m, n, k = dims.values()

    def operands(key: jax.Array) -> tuple:
        x, w, dy = jax.random.split(key, 3)
        return normal(x, m, k), normal(w, k, n), normal(dy, m, n)

    def forward_and_backward(
        linear: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array, **options: Any
    ) -> tuple:
        y, pullback = jax.vjp(functools.partial(linear, **options), x, w)
        return y, pullback(dy)

    call = functools.partial(forward_and_backward, jax_dsa.fp8_linear)
    peers: dict[str, Any] = {"bf16": functools.partial(forward_and_backward, jnp.matmul)}
    work, note = {FP8: 6 * m * n * k}, "linear-and-gradients"
    yield Case("fp8", "fwd", dims, "bf16", operands, call, work, peers=peers, note=note)
