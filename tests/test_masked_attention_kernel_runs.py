"""Tests the masked attention kernels under transforms, in repeated runs and on large arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches
from support.masked_attention_kernel import RIGHT, Arrays, inputs, integers, mask_of, run

from jax_dsa import masked_attention

pytestmark = pytest.mark.gpu


def test_transforms(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, b=6, t=100, s=130, d=128)
    lengths = integers(rng, 0, 131, 6)

    def gradients(q: Any, k: Any, v: Any, lengths: Any, fn: Any = lambda f: f) -> Any:
        @fn
        def attend(q: Any, k: Any, v: Any) -> Any:
            masks = {"is_causal": True, "key_value_seq_lengths": lengths}
            return masked_attention(q, k, v, **masks, implementation="cuda")

        def loss(*arrays: Any) -> tuple[Any, Any]:
            out = attend(*arrays)
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    grads, out = jax.jit(gradients)(q, k, v, lengths)
    routes = {
        "eager": gradients(q, k, v, lengths),
        "remat": jax.jit(functools.partial(gradients, fn=jax.checkpoint))(q, k, v, lengths),
        "vmap without a batch axis": jax.jit(jax.vmap(gradients))(q, k, v, lengths),
    }
    pairs = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v, lengths)]
    nested = jax.jit(jax.vmap(jax.vmap(gradients)))(*pairs)
    routes["nested vmap"] = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), nested)
    for name, (other_grads, other_out) in routes.items():
        np.testing.assert_array_equal(other_out, out, err_msg=name)
        assert_matches(other_grads, grads, tol=8e-3, what=name)
    # The gradient of keys that all batch entries share is a sum.
    shared = jax.jit(jax.vmap(gradients, in_axes=(0, None, None, 0)))(q, k[0], v[0], lengths)
    tiled = (jnp.tile(x[:1], (6, 1, 1, 1)) for x in (k, v))
    assert_matches(shared, jax.jit(jax.vmap(gradients))(q, *tiled, lengths), tol=8e-3)


def test_forward_is_deterministic(rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=1000, s=1000, d=128)
    mask = mask_of("everything", rng, arrays)
    first = run("cuda", jnp.bfloat16, arrays, mask.arrays, **mask.options)
    for _ in range(5):
        again = run("cuda", jnp.bfloat16, arrays, mask.arrays, **mask.options)
        np.testing.assert_array_equal(again.out, first.out)
        np.testing.assert_array_equal(again.lse, first.lse)


def test_replayed_program(rng: np.random.Generator) -> None:
    """XLA records programs as CUDA graphs and replays them.

    New inputs must give new results, so the tile counters of the kernels must be reset.
    """

    def step(q: Any, k: Any, v: Any, ends: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            masks = {"is_causal": True, "key_value_seq_lengths": ends}
            out = masked_attention(q, k, v, **masks, implementation="cuda")
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    program = jax.jit(step)
    for _ in range(6):
        args = (*inputs(rng, t=300, s=300), integers(rng, 0, 301, 2))
        (grads, out), (want_grads, want) = program(*args), step(*args)
        np.testing.assert_array_equal(out, want)
        assert_matches(grads, want_grads, tol=8e-3)  # the order of sums differs


@pytest.mark.parametrize(
    ("d", "e", "options"),
    [
        (64, 64, {"is_causal": True}),
        (128, 128, {}),
        (192, 128, {"is_causal": True}),  # two warpgroups add to the third slice of dq
        (256, 256, {"is_causal": True}),
        (128, 128, {"is_causal": True, "local_window_size": (300, 0)}),
    ],
    ids=["D64", "dense", "D192", "D256", "window"],
)
def test_deterministic_gradients_have_the_same_bits_in_100_runs(
    d: int, e: int, options: dict[str, Any], rng: np.random.Generator
) -> None:
    arrays = inputs(rng, t=2100, s=2100, d=d, e=e)

    @jax.jit
    def gradients(arrays: Arrays) -> Arrays:
        def loss(*arrays: jax.Array) -> jax.Array:
            out = masked_attention(*arrays, **options, deterministic=True, implementation="cuda")
            return jnp.sin(out.astype(jnp.float32) * 3).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    first = gradients(arrays)
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, gradients(arrays), first)


@pytest.mark.parametrize("segmented", [False, True])
def test_deterministic_gradients_are_right(segmented: bool, rng: np.random.Generator) -> None:
    """Work tiles wait for each other in irregular patterns: sparse masks, empty rows, segments."""
    arrays = inputs(rng, t=613, s=613, d=128)
    options: dict[str, Any] = {"is_causal": True, "deterministic": True}
    masks = {"mask": jnp.asarray(rng.random((1, 2, 613, 613)) < 0.02)}
    if segmented:
        masks["segment_ids"] = integers(rng, 0, 3, 2, 613)
    got = run("cuda", jnp.bfloat16, arrays, masks, **options)
    low, exact = (run("xla", x, arrays, masks, **options) for x in (jnp.bfloat16, jnp.float32))
    for three in zip(got.gradients, low.gradients, exact.gradients, strict=True):
        assert_as_good_as(*three, factor=4.0)


def test_more_than_2_31_key_elements() -> None:
    """A window at the far end of the keys gives the same results as these keys alone."""
    keys, tail = 2**24 + 2**13, 1024
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, n, 1, 128), jnp.bfloat16)
        for i, n in enumerate((200, keys, keys))
    )
    options = {"local_window_size": (300, 0), **RIGHT}
    got = run("cuda", q.dtype, (q, k, v), **options)
    want = run("cuda", q.dtype, (q, k[:, -tail:], v[:, -tail:]), **options)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert_matches(got.gradients[0], want.gradients[0], tol=8e-3)
    for have, wanted in zip(got.gradients[1:], want.gradients[1:], strict=True):
        np.testing.assert_array_equal(have[:, -tail:], wanted)
        assert not jnp.any(have[:, :-tail])


def test_more_than_2_31_query_elements() -> None:
    queries, tail = 2**17 + 2**11, 1024
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, queries, n, 128), jnp.bfloat16)
        for i, n in enumerate((128, 1, 1))
    )
    options = {"local_window_size": (100, 0), "is_causal": True}
    out, lse = masked_attention(q, k, v, **options, return_lse=True, implementation="cuda")
    last = (x[:, -tail:] for x in (q, k, v))
    want, want_lse = masked_attention(*last, **options, return_lse=True, implementation="cuda")
    whole = tail - 128  # the windows of the first queries reach beyond the tail
    np.testing.assert_array_equal(out[:, -whole:], want[:, -whole:])
    np.testing.assert_array_equal(lse[:, -whole:], want_lse[:, -whole:])
