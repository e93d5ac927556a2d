"""Tests the masked attention kernels with biases, and the gradients of biases."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.masked_attention_kernel import RIGHT, bias_for, compare, inputs, integers, mask_of, run
from support.oracles import masked_attention as oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["dense", "causal", "block mask per head"])
@pytest.mark.parametrize("rows", [False, True], ids=["a row", "rows"])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 2, 4])
def test_biases(h: int, b: int, rows: bool, name: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=300, s=269, d=128)
    mask = mask_of(name, rng, arrays)
    bias = bias_for(rng, arrays, b, h, 300 if rows else 1)
    compare((*arrays, bias), mask.arrays, **mask.options)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (72, 128), (192, 128), (256, 256)])
def test_bias_dims(
    d: int, e: int, dtype: Any, softcap: float | None, rng: np.random.Generator
) -> None:
    arrays = inputs(rng, t=150, s=200, d=d, e=e, dtype=dtype)
    for heads in (1, 4):
        bias = bias_for(rng, arrays, 2, heads, 150)
        compare((*arrays, bias), is_causal=True, softcap=softcap, scale=-0.1)


@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 213), (62, 8193), (8193, 62)])
def test_bias_sizes(t: int, s: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, b=1, t=t, s=s)
    for rows in {1, t}:
        compare((*arrays, bias_for(rng, arrays, 1, 4, rows)))


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize(
    "name", ["causal", "lengths", "block mask per batch entry and head", "everything"]
)
def test_unseen_biases(name: str, rows: int, rng: np.random.Generator) -> None:
    """Biases that no query sees may be NaN, and their gradients are 0."""
    arrays = inputs(rng, t=150, s=300)
    mask = mask_of(name, rng, arrays)
    seen = oracle.counts((2, 4, 150, 300), 2, **mask.visible) > 0
    if rows == 1:
        seen = seen.any(2, keepdims=True)
    bias = bias_for(rng, arrays, 2, 4, rows)
    dirty = jnp.where(seen, bias, jnp.nan)
    want, got = (run("cuda", bias.dtype, (*arrays, x), mask.arrays, **mask.options)
                 for x in (bias, dirty))  # fmt: skip
    np.testing.assert_array_equal(got.out, want.out)
    assert_matches(got.gradients, want.gradients, tol=8e-3)
    assert np.all(np.asarray(got.gradients[3])[~seen] == 0)


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("h", [1, 2, 4])
def test_bias_with_kept_keys(h: int, rows: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=500)
    masks = {"kv_indices": integers(rng, -5, 505, 2, 2, 62)}
    for b in (1, 2):
        compare((*arrays, bias_for(rng, arrays, b, h, rows)), masks, **RIGHT)


@pytest.mark.parametrize("empty", ["b", "t", "s"])
def test_bias_with_empty_axes(empty: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, **({"b": 2, "t": 3, "s": 5, "n": 4} | {empty: 0}))
    for rows in {1, arrays[0].shape[1]}:
        bias = bias_for(rng, arrays, 1, 4, rows)
        got = run("cuda", bias.dtype, (*arrays, bias))
        assert got.gradients[3].shape == bias.shape
        assert not np.asarray(got.gradients[3], np.float32).any()
