"""The FP8 matmul in XLA, and the operands that its kernel gets."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import assert_matches
from support.fp8 import random
from support.oracles import fp8 as oracle

from jax_dsa import dequantize_fp8, fp8_matmul, quantize_fp8
from jax_dsa.core import ffi
from jax_dsa.ops.fp8_matmul import cuda as matmul_kernels
from jax_dsa.ops.fp8_matmul.spec import Operands, Product


@pytest.mark.parametrize(("m", "n", "k"), [(3, 256, 256), (5, 130, 300), (1, 1, 1)])
def test_matmul_matches_oracle(m: int, n: int, k: int, rng: np.random.Generator) -> None:
    a, b = random(rng, m, k), random(rng, n, k)
    a_codes, a_scales = quantize_fp8(jnp.asarray(a))
    b_codes, b_scales = quantize_fp8(jnp.asarray(b), block=(128, 128))
    quantised = (a_codes, a_scales, b_codes, b_scales)
    want = oracle.matmul(*(np.asarray(x) for x in quantised)).astype(np.float32)
    matmul = functools.partial(fp8_matmul, implementation="xla")
    assert_matches(matmul(*quantised, dtype=jnp.float32), want, 1e-5)
    assert matmul(*quantised).dtype == jnp.bfloat16
    assert_matches(matmul(jnp.asarray(a), None, jnp.asarray(b), None), want, 1e-5)
    mixed = matmul(jnp.asarray(a)[None], None, b_codes, b_scales)
    assert_matches(mixed, want[None], 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_gradients(dtype: Any, rng: np.random.Generator) -> None:
    a = jnp.asarray(random(rng, 2, 5, 150), dtype)
    b = jnp.asarray(random(rng, 140, 150), dtype)
    ct = jnp.asarray(rng.normal(size=(2, 5, 140)), dtype)
    da, db = jax.vjp(lambda a, b: fp8_matmul(a, None, b, None), a, b)[1](ct)
    assert da.dtype == db.dtype == dtype
    a_hat = np.asarray(dequantize_fp8(*quantize_fp8(a)), np.float64)
    codes = quantize_fp8(b, block=(128, 128))
    b_hat = np.asarray(dequantize_fp8(*codes, block=(128, 128)), np.float64)
    g = np.asarray(ct, np.float64)
    tol = 1e-5 if dtype == jnp.float32 else 1e-2
    assert_matches(np.asarray(da, np.float64), np.einsum("umn,nk->umk", g, b_hat), tol)
    assert_matches(np.asarray(db, np.float64), np.einsum("umn,umk->nk", g, a_hat), tol)
    # A quantised operand is constant. The gradient of the other operand does not depend on that.
    only_a = jax.grad(lambda a: (fp8_matmul(a, None, *codes) * ct).astype(jnp.float32).sum())(a)
    assert_matches(only_a, da, tol)


def test_codes_on_an_explicit_mesh_are_constants(
    rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The gradient of codes is zero and has the sharding of the codes."""
    w = jnp.asarray(rng.normal(size=(8, 256)), jnp.float32)
    mesh = jax.make_mesh((8,), ("x",), devices=cpus)
    with jax.set_mesh(mesh):
        x = jax.device_put(
            rng.normal(size=(8, 256)).astype(np.float32), NamedSharding(mesh, P("x"))
        )
        codes, scale = quantize_fp8(x)

        def total(codes: jax.Array) -> jax.Array:
            product = fp8_matmul(codes, scale, w, None, dtype=jnp.float32)
            return product.sum() + dequantize_fp8(codes, scale).sum()

        grad = jax.jit(jax.grad(total))(codes)
        assert grad.sharding == codes.sharding and grad.dtype == codes.dtype
        assert not np.asarray(grad, np.float32).any()


@pytest.mark.parametrize("k", [128, 130, 300, 1])
def test_rows_are_padded_for_the_kernel(
    k: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets rows that are multiples of 16 bytes, and the product is the same."""
    a, b = (jnp.asarray(random(rng, n, k)) for n in (3, 5))
    quantised = (*quantize_fp8(a), *quantize_fp8(b, block=(128, 128)))

    def call(target: str, operands: Any, avals: Any) -> list[jax.Array]:
        a, a_scale, b, b_scale = (x[0] for x in operands)
        assert a.shape[-1] == b.shape[-1] == -(-k // 16) * 16
        out = fp8_matmul(a, a_scale, b, b_scale, dtype=avals.out.dtype, implementation="xla")
        return [out[None]]

    monkeypatch.setattr(ffi, "call", call)
    operands = Operands(*(x[None] for x in quantised))
    avals = Product(jax.ShapeDtypeStruct((1, 3, 5), jnp.float32))
    got = matmul_kernels.fp8_matmul_fwd(None, avals, operands)
    want = fp8_matmul(*quantised, dtype=jnp.float32, implementation="xla")
    assert_matches(got.out[0], want, 1e-6)
