"""The kernels of the indexer's losses against the XLA implementation in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

from jax_dsa import dense_indexer_kl_loss, indexer_kl_loss

pytestmark = pytest.mark.gpu


@functools.partial(jax.jit, static_argnames=("weight", "implementation"))
def sparse(
    logits: Any, teacher: Any, valid: Any = None, *, weight: int = 1, implementation: str
) -> Any:
    loss = functools.partial(indexer_kl_loss, implementation=implementation)
    return jax.value_and_grad(lambda x: weight * loss(x, teacher, valid))(logits)


@pytest.mark.parametrize("slots", [1, 77, 512, 2048, 5000, 20000])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plain", [False, True])  # plain: the backward pass has nothing to scale
def test_selected_keys(slots: int, masked: bool, plain: bool, rng: np.random.Generator) -> None:
    logits = 3 * rng.standard_normal((2, 31, slots), np.float32)
    teacher = rng.random((2, 31, slots), np.float32)
    valid = rng.random((2, 31, slots)) < 0.7
    if plain:
        valid[..., 0] = True  # all rows count
    else:
        valid[0, 3] = False
        teacher[1, 4] = 0
    if masked:
        logits[~valid] = teacher[~valid] = np.nan
    else:
        logits[~valid] = -np.inf
        teacher[~valid] = np.nan
    args = (logits, teacher, valid) if masked else (logits, teacher)
    run = functools.partial(sparse, *args, weight=1 if plain else 3)
    got, want = (run(implementation=which) for which in ("cuda", "xla"))
    # A row's KL is a difference of logarithms, so its rounding error does not shrink with it.
    assert_matches(got[0], want[0], tol=2e-6, what="loss", least=0.1)
    assert_matches(got[1], want[1], tol=2e-6, what="gradient")
    again = run(implementation="cuda")
    jax.tree.map(np.testing.assert_array_equal, got, again)


def test_nan_in_the_teacher_reaches_the_loss_and_its_own_row(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((1, 4, 300), np.float32)
    teacher = rng.random((1, 4, 300), np.float32)
    teacher[0, 2, 7] = np.nan
    loss, grad = sparse(logits, teacher, implementation="cuda")
    assert np.isnan(loss)
    assert np.isnan(grad[0, 2]).all()
    assert not np.isnan(np.delete(grad, 2, axis=1)).any()


SHAPES = {
    "latent": {"t": 70, "s": 300, "n": 128, "d": 576, "j": 64, "c": 128},
    "latent, D 512, few heads": {"t": 99, "s": 200, "n": 12, "d": 512, "j": 20, "c": 64},
    "latent, groups": {"t": 33, "s": 150, "n": 32, "g": 2, "d": 512, "j": 8, "c": 32},
    "multi-head": {"t": 200, "s": 260, "n": 16, "g": 16, "d": 192, "j": 64, "c": 128},
    "multi-head, D 128": {"t": 65, "s": 64, "n": 4, "g": 2, "d": 128, "j": 1, "c": 128},
    "one query": {"b": 1, "t": 1, "s": 1, "n": 128, "d": 576, "j": 64, "c": 128},
    "several rounds": {"b": 1, "t": 1500, "s": 1500, "n": 16, "d": 576, "j": 64, "c": 128},
}


def inputs(
    rng: np.random.Generator,
    *,
    b: int = 2,
    t: int,
    s: int,
    n: int,
    g: int = 1,
    d: int,
    j: int,
    c: int,
) -> list[jax.Array]:
    """Returns index_q, index_k, index_weights, q and kv."""
    shapes = (b, t, j, c), (b, s, c), (b, t, j), (b, t, n, d), (b, s, g, d)
    index_q, index_k, weights, q, kv = (rng.standard_normal(x, np.float32) for x in shapes)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (index_q, index_k, q, kv)]
    return [*low[:2], jnp.asarray(0.1 * weights), *low[2:]]


@functools.partial(jax.jit, static_argnames=("implementation", "relu", "scale", "is_causal"))
def dense(*args: Any, **options: Any) -> Any:
    """Returns value and gradients. The optional sixth argument is index_k_scale."""
    index, (q, kv) = (*args[:3], *args[5:]), args[3:5]

    def loss(*index: Any) -> Any:
        k_scale = index[3] if len(index) > 3 else None
        return dense_indexer_kl_loss(*index[:3], q, kv, index_k_scale=k_scale, **options)

    return jax.value_and_grad(loss, argnums=tuple(range(len(index))))(*index)


def compare(args: list[jax.Array], **options: Any) -> None:
    exact = [x.astype(jnp.float32) for x in args]
    want, want_grads = dense(*exact, implementation="xla", **options)
    got, grads = dense(*args, implementation="cuda", **options)
    assert_matches(got, want, tol=1e-4, what="loss")
    # The kernels round the factors of keys and queries to bfloat16, with errors of up to 2^-9.
    for i, (g, w) in enumerate(zip(grads, want_grads, strict=True)):
        g = g.astype(jnp.float32)
        assert_matches(g, w, tol=8e-3, what=f"gradient {i}", least=1e-6)
    again = dense(*args, implementation="cuda", **options)
    jax.tree.map(np.testing.assert_array_equal, (got, grads), again)


@pytest.mark.parametrize("name", SHAPES)
def test_all_keys(name: str, rng: np.random.Generator) -> None:
    compare(inputs(rng, **SHAPES[name]))


def test_all_keys_with_options(rng: np.random.Generator) -> None:
    args = inputs(rng, **SHAPES["latent"])
    starts = jnp.asarray(rng.integers(-5, 200, (2, 70)), jnp.int32)
    ends = starts + jnp.asarray(rng.integers(-3, 150, (2, 70)), jnp.int32)
    k_scale = jnp.asarray(np.exp(rng.standard_normal((2, 300))), jnp.float32)
    compare([*args, k_scale], starts=starts, ends=ends, is_causal=False)
    compare(args, starts=starts, query_start=230, relu=False, scale=0.01)


def test_chunks_of_queries(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs(rng, **SHAPES["several rounds"])
    whole = dense(*args, implementation="cuda")
    monkeypatch.setattr("jax_dsa.ops.losses.cuda.DENSE_BUDGET", 2**22)
    jax.clear_caches()
    assert_matches(dense(*args, implementation="cuda"), whole, tol=1e-2, what="in chunks")
