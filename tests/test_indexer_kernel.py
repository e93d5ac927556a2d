"""The indexer's CUDA kernels against the XLA implementation in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.oracles import indexer as oracle

from jax_dsa import PagedCache, dsa_attention, indexer_logits, indexer_topk, quantize_fp8, topk
from jax_dsa.core.call import Call
from jax_dsa.ops.indexer import cuda, indexer_selected_logits
from jax_dsa.ops.indexer.api import TOPK_BWD
from jax_dsa.ops.indexer.spec import Options, Selected, Selection

pytestmark = pytest.mark.gpu

FP8 = jnp.float8_e4m3fn


def inputs(
    rng: np.random.Generator, *, b: int = 2, t: int, s: int, j: int, c: int, dtype: Any
) -> dict[str, Any]:
    """Returns inputs with random ranges, some of them empty.

    The last two keys are NaN and lie in no range.
    """
    q = jnp.asarray(rng.standard_normal((b, t, j, c)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((b, s, c)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((b, t, j)), jnp.float32)
    starts = rng.integers(-5, s, (b, t)).astype(np.int32)
    ends = np.minimum(rng.integers(-5, s + 5, (b, t)), s - 2).astype(np.int32)
    starts[:, ::2] = 0
    given = {"starts": jnp.asarray(starts), "ends": jnp.asarray(ends), "index_k_scale": None}
    if dtype == FP8:
        (q, scale), (k, k_scale) = quantize_fp8(q, block=(1, c)), quantize_fp8(k, block=(1, c))
        weights = weights * scale[..., 0]
        given["index_k_scale"] = k_scale[..., 0].at[:, -2:].set(jnp.nan)
    k = k.at[:, -2:].set(jnp.nan)
    return given | {"index_q": q, "index_k": k, "index_weights": weights}


def logits(given: dict[str, Any], implementation: str, dtype: Any = None, **options: Any) -> Any:
    if dtype is not None:
        given = given | {name: given[name].astype(dtype) for name in ("index_q", "index_k")}
    call = functools.partial(indexer_logits, implementation=implementation, **options)
    return jax.jit(lambda given: call(**given))(given)


SHAPES = {
    "J 64": {"t": 130, "s": 1111, "j": 64, "c": 128},
    "J 32": {"t": 130, "s": 1111, "j": 32, "c": 128},
    "J 16, C 64": {"t": 62, "s": 400, "j": 16, "c": 64},
    "J 5, C 32": {"t": 62, "s": 403, "j": 5, "c": 32},
    "one query": {"b": 5, "t": 1, "s": 3001, "j": 64, "c": 128},
    "two queries": {"b": 70, "t": 2, "s": 333, "j": 64, "c": 128},
    "four queries": {"b": 3, "t": 4, "s": 1111, "j": 50, "c": 128},
    "four queries, J 32": {"b": 3, "t": 4, "s": 700, "j": 32, "c": 64},
    "three queries, J 9": {"b": 3, "t": 3, "s": 200, "j": 9, "c": 32},
    "few keys": {"t": 213, "s": 7, "j": 64, "c": 64},
    "many queries": {"b": 1, "t": 70000, "s": 70, "j": 8, "c": 32},
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits(name: str, dtype: Any, rng: np.random.Generator) -> None:
    given = inputs(rng, **SHAPES[name], dtype=dtype)
    # The sums of the FP8 tensor cores have fewer bits than float32.
    tol = 2e-5 if dtype == jnp.bfloat16 else 1e-3
    for relu in (True, False):
        got = logits(given, "cuda", relu=relu)
        assert_matches(got, logits(given, "xla", jnp.float32, relu=relu), tol=tol)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(logits(given, "cuda", relu=relu)))


@pytest.mark.parametrize("empty", ["t", "s", "b"])
def test_empty_axes(empty: str) -> None:
    shape = {"b": 2, "t": 3, "s": 5} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], 64, 128), jnp.bfloat16)
    k = jnp.ones((shape["b"], shape["s"], 128), jnp.bfloat16)
    weights = jnp.ones((shape["b"], shape["t"], 64))
    got = indexer_logits(q, k, weights, implementation="cuda")
    assert got.shape == tuple(shape.values())
    indices, values = indexer_topk(q, k, weights, 7, implementation="cuda")
    assert indices.shape == values.shape == (shape["b"], shape["t"], 7)
    if empty == "s":
        assert np.all(np.asarray(indices) == -1) and np.all(np.asarray(values) == -np.inf)
    for slots in (0, 7):
        slots = jnp.zeros((shape["b"], shape["t"], slots), jnp.int32)
        values = indexer_selected_logits(q, k, weights, slots, implementation="cuda")
        assert values.shape == slots.shape
        assert empty != "s" or np.all(np.asarray(values) == -np.inf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("few", [1, 2, 4])
def test_few_queries_get_the_bits_of_many(few: int, dtype: Any, rng: np.random.Generator) -> None:
    """The kernels for few and for many queries agree bit for bit."""
    given = inputs(rng, t=40, s=1111, j=64, c=128, dtype=dtype)
    whole = logits(given, "cuda")
    queries = ("index_q", "index_weights", "starts", "ends")
    some = logits(given | {name: given[name][:, -few:] for name in queries}, "cuda")
    np.testing.assert_array_equal(np.asarray(some), np.asarray(whole[:, -few:]))


def test_more_than_2_31_logits() -> None:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(a, (1, 70000, 8, 32), jnp.bfloat16)
    k = jax.random.normal(b, (1, 31000, 32), jnp.bfloat16)
    weights = jax.random.normal(c, (1, 70000, 8))
    got = indexer_logits(q, k, weights, implementation="cuda")[:, -3:]
    expected = indexer_logits(q[:, -3:], k, weights[:, -3:], implementation="cuda")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("k", [1, 100, 2048])
def test_topk_is_that_of_the_logits(k: int, dtype: Any, rng: np.random.Generator) -> None:
    given = inputs(rng, t=300, s=3000, j=64, c=128, dtype=dtype)
    expected, values = topk(logits(given, "cuda"), k, return_values=True, implementation="cuda")
    select = jax.jit(lambda given: indexer_topk(**given, top_k=k, implementation="cuda"))
    for _ in range(20):
        got = select(given)
        np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(expected))
        np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(values))


@pytest.mark.parametrize(("b", "t"), [(3, 700), (2, 1300)], ids=["entries", "queries"])
def test_topk_in_chunks(b: int, t: int, rng: np.random.Generator) -> None:
    """The logits do not fit in the workspace at once."""
    given = inputs(rng, b=b, t=t, s=40000, j=8, c=32, dtype=jnp.bfloat16)
    got, _ = indexer_topk(**given, top_k=64, implementation="cuda")
    expected = topk(logits(given, "cuda"), 64, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


CANDIDATES = {  # sizes, number of slots, and size of a block
    "J 64, blocks of 8": ({"t": 130, "s": 3001, "j": 64, "c": 128}, 100, 8),
    "J 40, blocks of 128": ({"t": 62, "s": 3001, "j": 40, "c": 128}, 5, 128),
    "J 32, keys": ({"t": 213, "s": 700, "j": 32, "c": 64}, 300, 1),
    "J 5, blocks of 3": ({"t": 62, "s": 403, "j": 5, "c": 32}, 50, 3),
    "one query": ({"b": 5, "t": 1, "s": 3001, "j": 64, "c": 128}, 60, 8),
    "one key": ({"t": 9, "s": 3, "j": 16, "c": 32}, 4, 8),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates(
    name: str, dtype: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selection is bit for bit the top-k of the logits with -inf outside the candidates."""
    shape, slots, block = CANDIDATES[name]
    given = inputs(rng, **shape, dtype=dtype)
    starts = np.clip(given["starts"], 0, shape["s"])
    blocks = -(-shape["s"] // block)
    candidates = rng.integers(0, blocks + 2, (*starts.shape, slots)).astype(np.int32)
    unusual = rng.choice(np.array([-1, -(2**31), 2**31 - 1], np.int32), candidates.shape)
    candidates = np.where(rng.random(candidates.shape) < 0.1, unusual, candidates)
    whole = oracle.inside(np.asarray(logits(given, "cuda")), candidates, block, starts)
    options = {"candidates": candidates, "candidate_block_size": block, "implementation": "cuda"}
    for top_k, budget in ((1, 2**26), (100, 2**26), (100, 2**16)):  # the last in chunks
        monkeypatch.setattr(cuda, "CANDIDATES_BUDGET", budget)
        jax.clear_caches()
        got = jax.jit(lambda given, k=top_k: indexer_topk(**given, top_k=k, **options))(given)
        expected = topk(whole, top_k, return_values=True, implementation="cuda")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, expected)


def test_candidates_that_are_all_keys(rng: np.random.Generator) -> None:
    given = inputs(rng, t=213, s=1111, j=64, c=128, dtype=jnp.bfloat16)
    blocks = np.broadcast_to(rng.permutation(160).astype(np.int32), (2, 213, 160))
    options = {"top_k": 100, "implementation": "cuda"}
    got = indexer_topk(**given, **options, candidates=blocks, candidate_block_size=7)
    expected = indexer_topk(**given, **options)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("t", "page"), [(1, 64), (2, 128), (3, 192), (30, 64)])
def test_pages(t: int, page: int, dtype: Any, rng: np.random.Generator) -> None:
    """A paged cache gives the same selection as a flat one without the keys on unmapped pages."""
    batch, own = 5, 8
    given = inputs(rng, b=batch, t=t, s=own * page, j=64, c=128, dtype=dtype)
    k, k_scale = given.pop("index_k"), given.pop("index_k_scale")
    pages = batch * own + 3
    table = rng.permutation(pages)[: batch * own].reshape(batch, own).astype(np.int32)

    def pool(x: jax.Array) -> jax.Array:
        empty = jnp.full((pages, page, *x.shape[2:]), jnp.nan, x.dtype)
        return empty.at[table].set(x.reshape(batch, own, page, *x.shape[2:]))

    hole = rng.random(table.shape) < 0.2
    holes = np.where(hole, rng.choice([-1, pages, 2**31 - 1], table.shape), table)
    lengths = jnp.full(batch, own * page, jnp.int32)
    cache = PagedCache(pool(k)[:, :, None], jnp.asarray(holes, jnp.int32), lengths)
    scales = None if k_scale is None else pool(k_scale)
    got = indexer_topk(
        **given, index_k=cache, index_k_scale=scales, top_k=100, implementation="cuda"
    )
    whole = logits(given | {"index_k": k, "index_k_scale": k_scale}, "cuda")
    mapped = jnp.asarray(np.repeat(~hole, page, axis=1))[:, None]
    expected = topk(
        jnp.where(mapped, whole, -jnp.inf), 100, return_values=True, implementation="cuda"
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_selected_keys(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """They have the bits of the logits of all keys."""
    given = inputs(rng, **SHAPES[name], dtype=dtype)
    del given["starts"], given["ends"]
    rows, keys = given["index_weights"].shape[:2], given["index_k"].shape[1]
    indices = rng.integers(-5, keys + 5, (*rows, 150)).astype(np.int32)
    unusual = rng.choice(np.array([-(2**31), 2**31 - 1], np.int32), indices.shape)
    indices = np.where(rng.random(indices.shape) < 0.1, unusual, indices)
    for relu in (True, False):
        whole = logits(given, "cuda", relu=relu)
        expected = jnp.take_along_axis(whole, jnp.clip(indices, 0, keys - 1), axis=2)
        expected = jnp.where((indices >= 0) & (indices < keys), expected, -jnp.inf)
        select = functools.partial(indexer_selected_logits, implementation="cuda", relu=relu)
        got = jax.jit(lambda given, select=select: select(**given, indices=indices))(given)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_replayed_selection_has_its_bits(dtype: Any, rng: np.random.Generator) -> None:
    given = inputs(rng, t=300, s=3000, j=64, c=128, dtype=dtype)
    indices, recorded = indexer_topk(**given, top_k=512, implementation="cuda")
    del given["starts"], given["ends"]
    got = indexer_selected_logits(**given, indices=indices, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(recorded))


BACKWARD_SHAPES = {
    "J 64": {"t": 130, "s": 1111, "j": 64, "c": 128, "k": 300},
    "J 5, C 32": {"t": 62, "s": 403, "j": 5, "c": 32, "k": 77},
    "C 64": {"t": 213, "s": 900, "j": 32, "c": 64, "k": 64},
    "one query": {"b": 5, "t": 1, "s": 3001, "j": 64, "c": 128, "k": 2048},
    "any slots": {"t": 50, "s": 300, "j": 64, "c": 128, "k": 200},
    "more slots than keys": {"t": 20, "s": 30, "j": 64, "c": 128, "k": 130},
}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("name", BACKWARD_SHAPES)
def test_gradients_of_selected_logits(
    name: str, with_scale: bool, relu: bool, rng: np.random.Generator
) -> None:
    """The selections are given, because the last selected key may depend on rounding."""
    shape = dict(BACKWARD_SHAPES[name])
    slots = shape.pop("k")
    given = inputs(rng, **shape, dtype=jnp.bfloat16)
    k, k_scale = jnp.nan_to_num(given["index_k"]), None
    if with_scale:
        k_scale = jnp.asarray(rng.uniform(0.5, 2, k.shape[:2]), jnp.float32)
    batch, queries = given["index_weights"].shape[:2]
    indices = np.full((batch, queries, slots), -1, np.int32)
    for row in indices.reshape(-1, slots):
        count = rng.integers(0, min(slots, shape["s"]) + 1)
        row[:count] = np.sort(rng.choice(shape["s"], count, replace=False))
    if name == "any slots":  # Unsorted, with duplicates, and with empty slots in between.
        indices = rng.integers(-5, shape["s"] + 5, indices.shape).astype(np.int32)
    g = jnp.asarray(rng.standard_normal(indices.shape), jnp.float32)
    options = Options(relu=relu, top_k=slots)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def gradients(implementation: str, dtype: Any) -> Any:
        q, weights = given["index_q"].astype(dtype), given["index_weights"]
        x = Selected(q, k.astype(dtype), weights, k_scale, jnp.asarray(indices))
        return TOPK_BWD(Call("indexer_topk", implementation), options, x, Selection(None, g))

    # The kernels round g, the weighted q and dq to bfloat16.
    got, expected = gradients("cuda", jnp.bfloat16), gradients("xla", jnp.bfloat16)
    assert_matches(got, expected, tol=8e-3)


def test_deterministic_gradients_repeat(rng: np.random.Generator) -> None:
    """With `deterministic`, `dsa_attention` uses XLA for the indexer, whose kernel is not."""
    given = inputs(rng, t=200, s=600, j=64, c=128, dtype=jnp.bfloat16)
    q, kv = (
        jnp.asarray(rng.standard_normal((2, n, h, 576)), jnp.bfloat16)
        for n, h in ((200, 64), (600, 1))
    )
    index = [given[name] for name in ("index_q", "index_k", "index_weights")]
    index[1] = jnp.nan_to_num(index[1])

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3, 4))
    def gradients(*operands: jax.Array) -> jax.Array:
        out, aux = dsa_attention(*operands, top_k=128, query_start=400, deterministic=True)
        return jnp.sin(out.astype(jnp.float32)).sum() + aux.kl

    first = gradients(q, kv, *index)
    for _ in range(4):
        again = gradients(q, kv, *index)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first, again)
    with pytest.raises(NotImplementedError, match="deterministic"):
        jax.grad(
            lambda k: indexer_topk(
                index[0], k, index[2], 8, deterministic=True, implementation="cuda"
            )[1].sum()
        )(index[1])


def test_in_a_replayed_program(rng: np.random.Generator) -> None:
    program = jax.jit(lambda given: indexer_topk(**given, top_k=64, implementation="cuda"))
    for _ in range(6):
        given = inputs(rng, t=30, s=500, j=64, c=128, dtype=jnp.bfloat16)
        expected = indexer_topk(**given, top_k=64, implementation="cuda")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), program(given), expected)
