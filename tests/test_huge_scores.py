"""Attention to keys whose scores are huge and equal, with every operator, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.huge import LEVELS, Expected, Rows, expected, rows
from support.marks import slow

import jax_dsa

BOTH = [
    ("xla", 4),
    pytest.param("cuda", 4, marks=pytest.mark.gpu),
    pytest.param("cuda", 64, marks=pytest.mark.gpu),
]


def mqa_decode(x: Rows, q: Any, k: Any, sinks: Any, **options: Any) -> Any:
    return jax_dsa.mqa_decode(
        q, k, key_value_seq_lengths=x.lengths, value_dim=x.dout.shape[3], sinks=sinks,
        return_lse=True, **options,
    )  # fmt: skip


def indices(x: Rows) -> np.ndarray:
    """Returns the keys of each row in descending order, with an empty slot behind each."""
    slots = np.full((len(x.lengths), 1, 2 * x.k.shape[1]), -1, np.int32)
    for b, n in enumerate(x.lengths):
        slots[b, 0, : 2 * n : 2] = np.arange(n)[::-1]
    return slots


def sparse_mla(x: Rows, q: Any, k: Any, sinks: Any, **options: Any) -> Any:
    return jax_dsa.sparse_mla(
        q, k, indices(x), value_dim=x.dout.shape[3], sinks=sinks, return_lse=True, **options
    )


def sparse_attention(x: Rows, q: Any, k: Any, sinks: Any, **options: Any) -> Any:
    v = k[..., : x.dout.shape[3]]
    return jax_dsa.sparse_attention(
        q, k, v, indices(x), block_size=1, sinks=sinks, return_lse=True, **options
    )


def sparse_mla_decode(x: Rows, q: Any, k: Any, sinks: Any, **options: Any) -> Any:
    cache = jax_dsa.FlatCache(k, x.lengths)
    return jax_dsa.sparse_mla_decode(
        q, cache, indices(x), value_dim=x.dout.shape[3], sinks=sinks, return_lse=True, **options
    )


def dsa_attention(x: Rows, q: Any, k: Any, sinks: Any, **options: Any) -> Any:
    out, aux = jax_dsa.dsa_attention(
        q, k, indices=indices(x), value_dim=x.dout.shape[3], sinks=sinks, is_causal=False,
        **options,
    )  # fmt: skip
    return out, aux.lse


def htree_attention(x: Rows, q: Any, k: Any, sinks: None, **options: Any) -> Any:
    """Attends with the query at the last token, which sees all tokens before it.

    With this base of RoPE the dimension that makes the scores does not rotate. If there are few
    dimensions, only 0 and D/2 rotate, which hold zeros here.
    """
    W, E = q.shape[-1] + 4, x.dout.shape[3]
    places = [*range(1, W // 2 - 1), *range(W // 2 + 1, W - 2), W // 2 - 1]
    wide = lambda a: jnp.zeros((*a.shape[:-1], W), a.dtype).at[..., places].set(a)  # noqa: E731
    v = jnp.zeros((*k.shape[:-1], W), k.dtype).at[..., :E].set(k[..., :E])
    q = jnp.repeat(wide(q), k.shape[1], axis=1)
    y = jax_dsa.htree_attention(
        q, wide(k), v, compression=16, top_k=8, rope_base=1e38, return_lse=True, **options
    )
    out, lse = (a[np.arange(len(a)), x.lengths - 1][:, None] for a in y)
    return out[..., :E], lse


OPERATORS = {
    "mqa_decode": mqa_decode,
    "sparse_mla": sparse_mla,
    "sparse_attention": sparse_attention,
    "sparse_mla_decode": sparse_mla_decode,
    "dsa_attention": dsa_attention,
    "htree_attention": htree_attention,
}


def results(
    operator: Any, x: Rows, with_sinks: bool, scale: float = 1.0, **options: Any
) -> tuple[Any, ...]:
    """Returns out, lse and the gradients."""
    sinks = x.sinks if with_sinks else None
    args = (x.q, x.k, sinks) if with_sinks else (x.q, x.k)

    def call(q: Any, k: Any, sinks: Any = None) -> Any:
        return operator(x, q, k, sinks, scale=scale, **options)

    y, pull = jax.vjp(call, *map(jnp.asarray, args))
    return (*y, *pull((jnp.asarray(x.dout), jnp.asarray(x.dlse))))


def check(got: tuple[Any, ...], want: Expected, tol: float, with_dq: bool = True) -> None:
    out, lse, dq, dk, *dsinks = (np.asarray(a, np.float64) for a in got)
    scale = lambda a: max(1.0, np.abs(a).max())  # noqa: E731
    np.testing.assert_allclose(lse, want.max_logit + want.log_sum, rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=0)
    close(out, want.out, atol=tol * scale(want.out))
    if with_dq:
        close(dq[..., :-1], want.dq, atol=tol * scale(want.dq))
    close(dk, want.dk, atol=tol * scale(want.dk))
    if dsinks:
        close(dsinks[0], want.dsinks, atol=tol * scale(want.dsinks))


@pytest.mark.parametrize("plain", [pytest.param(False, id="operator"), slow(True, id="plain")])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(
    name: str, level: float, with_sinks: bool, plain: bool, rng: np.random.Generator
) -> None:
    if with_sinks and name == "htree_attention":
        pytest.skip("it has no sinks")
    x = rows(rng, level, jnp.float32)
    if plain:
        with jax_dsa.plain_xla():
            got = results(OPERATORS[name], x, with_sinks)
    else:
        got = results(OPERATORS[name], x, with_sinks, implementation="xla")
    tol = 1e-4 if name == "htree_attention" else 1e-5  # its keys rotate by a few 1e-5
    check(got, expected(x, with_sinks=with_sinks), tol)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPERATORS)
def test_probabilities_sum_to_one(name: str, level: float, rng: np.random.Generator) -> None:
    """The gradient of lse for a key is the sum of its probabilities over the heads, times q."""
    x = rows(rng, level, jnp.float32)
    x = x._replace(dout=np.zeros_like(x.dout), dlse=np.ones_like(x.dlse))
    dk = results(OPERATORS[name], x, with_sinks=False, implementation="xla")[3]
    want = expected(x).p.sum(1)
    np.testing.assert_allclose(dk[:, :, 0, -1], want, atol=1e-6)
    np.testing.assert_allclose(dk[:, :, 0, -1].sum(1), x.q.shape[2], rtol=1e-6)


@pytest.mark.parametrize("scale", [slow(0.3), 1 / 3, slow(1.7)])
@pytest.mark.parametrize("name", OPERATORS)
def test_scores_with_a_scale(name: str, scale: float, rng: np.random.Generator) -> None:
    """The rounding of the product with the scale is that of the forward pass."""
    x = rows(rng, -1e9, jnp.float32)
    x = x._replace(dout=np.zeros_like(x.dout), dlse=np.ones_like(x.dlse))
    dk = results(OPERATORS[name], x, with_sinks=False, implementation="xla", scale=scale)[3]
    np.testing.assert_allclose(dk[:, :, 0, -1].sum(1), x.q.shape[2] * scale, rtol=1e-6)


@pytest.mark.parametrize(("implementation", "N"), BOTH)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPERATORS)
def test_bfloat16(
    name: str, N: int, level: float, implementation: str, rng: np.random.Generator
) -> None:
    D, E = (576, 512) if implementation == "cuda" else (8, 6)
    tree = name == "htree_attention"
    if tree and implementation == "cuda":
        D, E = 60, 58
    if name == "sparse_attention" and implementation == "cuda":
        N, D, E = min(N, 32), 256, 248
    x = rows(rng, level, jnp.bfloat16, N=N, D=D, E=E)
    chosen = implementation
    if name in ("mqa_decode", "sparse_mla_decode") and implementation == "cuda":
        chosen = None  # the kernel forward, XLA backward
    got = results(OPERATORS[name], x, with_sinks=not tree, implementation=chosen)
    rotates = tree and implementation == "cuda"
    check(got, expected(x, with_sinks=not tree), 2e-2, with_dq=not rotates)


@pytest.mark.parametrize(("implementation", "N"), BOTH)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("selected", [False, True], ids=["all keys", "selected"])
def test_losses(
    selected: bool, level: float, implementation: str, N: int, rng: np.random.Generator
) -> None:
    """The teacher of the indexer's losses, against float64."""
    D, E = (576, 512) if implementation == "cuda" else (8, 6)
    x = rows(rng, level, jnp.bfloat16 if implementation == "cuda" else jnp.float32, N=N, D=D, E=E)
    B, S = x.k.shape[:2]
    low = lambda *shape: jnp.asarray(rng.normal(size=shape), x.q.dtype)  # noqa: E731
    index_q, index_k, weights = low(B, 1, 8, 64), low(B, S, 64), jnp.ones((B, 1, 8), jnp.float32)
    q, k = jnp.asarray(x.q), jnp.asarray(x.k)
    options: dict[str, Any] = {"scale": 1.0, "is_causal": False, "implementation": implementation}

    def loss(index_q: Any) -> Any:
        index = index_q, index_k, weights
        if selected:
            slots = indices(x)
            return jax_dsa.dsa_attention(q, k, *index, indices=slots, **options)[1].kl
        ends = x.lengths[:, None]
        return jax_dsa.dense_indexer_kl_loss(*index, q, k, ends=ends, **options)

    kl, dq = jax.value_and_grad(loss)(index_q)
    teacher, want, want_dq = expected(x).p, 0.0, np.zeros(index_q.shape)
    for b, n in enumerate(x.lengths):
        p = teacher[b, :, :n].mean(0)
        keys, queries = (np.asarray(a, np.float64)[b] for a in (index_k, index_q))
        scores = queries[0] @ keys[:n].T
        logits = np.maximum(scores, 0).sum(0)
        u = np.exp(logits - logits.max())
        u /= u.sum()
        want += (p[p > 0] * np.log(p[p > 0] / u[p > 0])).sum() / B
        want_dq[b, 0] = ((u - p) * (scores > 0)) @ keys[:n] / B
    tol = 3e-2 if implementation == "cuda" else 1e-4
    np.testing.assert_allclose(kl, want, rtol=tol)
    np.testing.assert_allclose(dq, want_dq, atol=tol * np.abs(want_dq).max())
