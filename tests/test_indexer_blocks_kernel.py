"""The CUDA kernels of `indexer_block_topk` against the XLA implementation.

All inputs are small integers, so that every sum is exact and the results must be equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

from jax_dsa import FlatCache, PagedCache, block_topk, indexer_block_topk
from jax_dsa.ops.indexer import blocks, cuda
from jax_dsa.ops.indexer.spec import BlockOperands, BlockOptions, BlockSelected, BlockSelection
from jax_dsa.ops.topk.spec import Blocks

FP8 = jnp.float8_e4m3fn
gpu = pytest.mark.gpu


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(rng.integers(-2, 3, shape), jnp.float32).astype(dtype)


def inputs(
    rng: np.random.Generator,
    *,
    b: int = 2,
    t: int,
    s: int,
    j: int = 4,
    c: int = 128,
    dtype: Any = jnp.bfloat16,
    per_head: bool = True,
    starts: bool = False,
) -> dict[str, Any]:
    """Returns inputs with random ranges, some of them empty. Keys that lie in no range are NaN."""
    first = np.zeros((b, t), np.int32)
    ends = np.minimum(rng.integers(-5, s + 5, (b, t)), s - 2).astype(np.int32)
    if starts:
        first = np.repeat(rng.integers(-5, s, (b, -(-t // 20))), 20, 1)[:, :t].astype(np.int32)
    given: dict[str, Any] = {
        "index_q": integers(rng, (b, t, j, c), dtype),
        "index_k": integers(rng, (b, s, c), dtype).at[:, -2:].set(jnp.nan),
        "index_weights": None if per_head else integers(rng, (b, t, j), jnp.float32),
        "per_head": per_head,
        "starts": jnp.asarray(first) if starts else None,
        "ends": jnp.asarray(ends),
    }
    if dtype == FP8:
        scale = jnp.asarray(2.0 ** rng.integers(-1, 2, (b, s)), jnp.float32)
        given["index_k_scale"] = scale.at[:, -2:].set(jnp.nan)
    return given


def select(given: dict[str, Any], implementation: str | None, **options: Any) -> Any:
    arrays = {
        name: x for name, x in given.items() if isinstance(x, (jax.Array, FlatCache, PagedCache))
    }
    rest = {name: x for name, x in given.items() if name not in arrays}
    call = jax.jit(
        lambda arrays: indexer_block_topk(
            **arrays, **rest, **options, implementation=implementation
        )
    )
    return call(arrays)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks of 128": ({"t": 300, "s": 3000}, {"block_size": 128}),
    "blocks of 64": ({"t": 130, "s": 1111, "c": 64}, {"block_size": 64, "sink_blocks": 1}),
    "blocks of 100": ({"t": 62, "s": 1000, "c": 32, "j": 3}, {"block_size": 100}),
    "blocks of 1000": ({"t": 200, "s": 5000, "j": 1}, {"block_size": 1000, "local_blocks": 0}),
    "one block": ({"t": 70, "s": 500}, {"block_size": 2**31 - 1}),
    "documents": ({"t": 200, "s": 700, "starts": True}, {"block_size": 64}),
    "many heads": ({"t": 20, "s": 900, "j": 64, "c": 32}, {"block_size": 128}),
    "one query": ({"b": 5, "t": 1, "s": 3001}, {"block_size": 128}),
    "one key": ({"t": 3, "s": 3, "c": 32}, {"block_size": 128}),
    "many queries": ({"b": 1, "t": 9000, "s": 70000, "c": 32}, {"block_size": 64}),
    "relu": ({"t": 100, "s": 600}, {"block_size": 128, "relu": True}),
    "together": ({"t": 130, "s": 1111, "j": 16, "per_head": False}, {"block_size": 128}),
    "together, small blocks": (
        {"t": 62, "s": 1000, "j": 5, "c": 32, "per_head": False, "starts": True},
        {"block_size": 7, "relu": True},
    ),
    "together, many": ({"b": 1, "t": 3000, "s": 9000, "per_head": False}, {"block_size": 128}),
    "together, few": ({"b": 3, "t": 2, "s": 700, "per_head": False}, {"block_size": 64}),
}


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_selection(name: str, dtype: Any, rng: np.random.Generator) -> None:
    shape, options = CASES[name]
    given = inputs(rng, **shape, dtype=dtype)
    options = {"relu": False, "top_k": 5} | options
    got = select(given, "cuda", **options)
    jax.tree.map(np.testing.assert_array_equal, got, select(given, "xla", **options))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, got, select(given, "cuda", **options))


@gpu
@pytest.mark.parametrize("per_head", [False, True])
def test_not_finite(per_head: bool, rng: np.random.Generator) -> None:
    """NaN in visible keys reaches their own blocks only."""
    given = inputs(rng, t=100, s=1000, c=32, per_head=per_head)
    bad = rng.random(given["index_k"].shape[:2]) < 0.005
    given["index_k"] = jnp.where(bad[..., None], jnp.nan, given["index_k"])
    options = {"relu": False, "top_k": 4, "block_size": 64, "sink_blocks": 2}
    got = select(given, "cuda", **options)
    jax.tree.map(np.testing.assert_array_equal, got, select(given, "xla", **options))


@gpu
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("t", "page"), [(1, 64), (3, 192), (30, 128)])
def test_caches(t: int, page: int, dtype: Any, per_head: bool, rng: np.random.Generator) -> None:
    batch, own = 5, 8
    given = inputs(rng, b=batch, t=t, s=own * page, c=64, dtype=dtype, per_head=per_head)
    del given["starts"], given["ends"]
    k, k_scale = given.pop("index_k"), given.pop("index_k_scale", None)
    lengths = jnp.asarray(rng.integers(0, own * page - 1, batch), jnp.int32)
    options = {"relu": False, "top_k": 3, "block_size": 128, "is_causal": True}
    given["index_k_scale"] = k_scale
    given["index_k"] = FlatCache(k[:, :, None], lengths)
    got = select(given, "cuda", **options)
    jax.tree.map(np.testing.assert_array_equal, got, select(given, "xla", **options))

    table = rng.permutation(batch * own + 3)[: batch * own].reshape(batch, own).astype(np.int32)

    def pool(x: jax.Array) -> jax.Array:
        empty = jnp.full((batch * own + 3, page, *x.shape[2:]), jnp.nan, x.dtype)
        return empty.at[table].set(x.reshape(batch, own, page, *x.shape[2:]))

    holes = np.where(rng.random(table.shape) < 0.2, -1, table).astype(np.int32)
    given["index_k_scale"] = None if k_scale is None else pool(k_scale)
    given["index_k"] = PagedCache(pool(k)[:, :, None], jnp.asarray(holes), lengths)
    got = select(given, "cuda", **options)
    jax.tree.map(np.testing.assert_array_equal, got, select(given, "xla", **options))


@gpu
@pytest.mark.parametrize(
    "shape", [(2, 130, 1111), (3, 1, 9000), (1, 50, 20), (1, 30000, 300)], ids=str
)
@pytest.mark.parametrize("block_size", [1, 7, 64, 400])
def test_blocks_of_given_logits(
    shape: tuple[int, ...], block_size: int, rng: np.random.Generator
) -> None:
    """Integers give equal maxima. Some logits are NaN or infinite; those out of range are NaN."""
    logits = rng.integers(-9, 10, shape).astype(np.float32)
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), shape)
    logits = np.where(rng.random(shape) < 0.01, odd, logits)
    first = rng.integers(-5, shape[2], shape[:2]).astype(np.int32)
    ends = rng.integers(-5, shape[2] + 5, shape[:2]).astype(np.int32)
    for starts in (None, first):
        at, low = np.arange(shape[2]), 0 if starts is None else starts[..., None]
        given = jnp.asarray(np.where((at >= low) & (at < ends[..., None]), logits, np.nan))
        for forced in ({}, {"sink_blocks": 1, "local_blocks": 2}, {"local_blocks": 0}):
            options = {"block_size": block_size, "starts": starts, "ends": ends, **forced}
            got = block_topk(given, 5, **options, implementation="cuda")
            expected = block_topk(given, 5, **options, implementation="xla")
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@gpu
def test_vmap(rng: np.random.Generator) -> None:
    given = inputs(rng, b=3, t=40, s=300)
    q, k, ends = given["index_q"], given["index_k"], given["ends"]

    def one(implementation: str) -> Any:
        return jax.vmap(
            lambda q, k, ends: indexer_block_topk(
                q, k, None, 2, block_size=64, per_head=True, relu=False, ends=ends,
                implementation=implementation,
            )
        )  # fmt: skip

    jax.tree.map(np.testing.assert_array_equal, one("cuda")(q, k, ends), one("xla")(q, k, ends))


@gpu
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(per_head: bool, rng: np.random.Generator) -> None:
    given = inputs(rng, t=130, s=1111, per_head=per_head)
    q, k, ends = given["index_q"], jnp.nan_to_num(given["index_k"]), given["ends"]
    weights = None if per_head else given["index_weights"]
    shape = (2, 130, 4, 5) if per_head else (2, 130, 5)
    g = jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def gradients(implementation: str) -> Any:
        def loss(q: Any, k: Any, weights: Any) -> Any:
            _, logits = indexer_block_topk(
                q, k, weights, 5, block_size=64, per_head=per_head, ends=ends,
                implementation=implementation,
            )  # fmt: skip
            return jnp.sum(jnp.where(logits > -jnp.inf, logits, 0) * g)

        return jax.jit(jax.grad(loss, (0, 1) if per_head else (0, 1, 2)))(q, k, weights)

    # The kernels round g, the weighted q and dq to bfloat16.
    assert_matches(gradients("cuda"), gradients("xla"), tol=8e-3)


@gpu
@pytest.mark.parametrize("size", [8192, 131072])
@pytest.mark.parametrize("per_head", [False, True])
def test_workspace_is_bounded(per_head: bool, size: int) -> None:
    """Less than 64 MiB are needed beside operands and results."""
    q = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, size, 128), jnp.bfloat16)
    program = jax.jit(
        lambda q, k: indexer_block_topk(
            q, k, None, 16, block_size=128, per_head=per_head, relu=not per_head, is_causal=True,
            query_start=size - 8192, implementation="cuda",
        )
    )  # fmt: skip
    analysis = program.lower(q, k).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 64 * 2**20


# ---- without a GPU ------------------------------------------------------------------------------


def operands(
    shape: tuple[int, ...], *, dtype: Any = jnp.bfloat16, size: int = 600, **given: Any
) -> BlockOperands:
    b, t, c = shape[0], shape[1], shape[4]
    absent = dict.fromkeys(("weights", "k_scale", "starts", "page_table"))
    q, k = jnp.zeros(shape, dtype), jnp.zeros((b, size, c), dtype)
    return BlockOperands(**{"q": q, "k": k, "ends": jnp.full((b, t), size)} | absent | given)


def options_of(block_size: int, **given: Any) -> BlockOptions:
    blocks_given = Blocks(top_k=3, block_size=block_size, sink_blocks=1, local_blocks=2)
    return BlockOptions(
        **{"relu": False, "top_k": 3, "mean": False, "blocks": blocks_given} | given
    )


def test_what_the_kernels_take() -> None:
    def why(block_size: int, x: BlockOperands, **given: Any) -> str:
        return cuda.block_topk_fwd_supports(options_of(block_size, **given), x) or ""

    each, together = (2, 5, 4, 1, 32), (2, 5, 1, 4, 32)
    table, starts = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 5), jnp.int32)
    for block_size in (64, 100, 2**31 - 1):
        assert why(block_size, operands(each)) == ""
    for block_size in (1, 64, 2**31 - 1):
        assert why(block_size, operands(together)) == ""
    assert why(64, operands(each, page_table=table), page_size=64) == ""
    assert why(64, operands(each, dtype=FP8)) == ""
    assert "pooling" in why(64, operands(each), mean=True)
    assert "float32" in why(64, operands(each, dtype=jnp.float32))
    assert "blocks of 64 keys" in why(63, operands(each))
    assert "multiple of 64" in why(100, operands(each, page_table=table), page_size=64)
    assert "no 'starts'" in why(64, operands(each, page_table=table, starts=starts), page_size=64)
    assert "pages of" in why(64, operands(each, page_table=table), page_size=32)
    assert "one group" in why(64, operands((2, 5, 2, 2, 32)))
    assert "16384 blocks, got 20000" in why(1, operands(together, size=20000))
    assert "J in 1..64, got J=65" in why(64, operands((1, 1, 65, 1, 32)))
    assert "C in" in why(64, operands((1, 1, 4, 1, 16)))


@pytest.mark.parametrize("shape", [(2, 5, 4, 1, 32), (2, 5, 1, 4, 32)], ids=["each", "together"])
@pytest.mark.parametrize("budget", [None, 1])
def test_calls_of_handlers(
    shape: tuple[int, ...], budget: int | None, monkeypatch: pytest.MonkeyPatch, rng: Any
) -> None:
    """Replaces the handlers by the XLA implementation and checks their operands."""
    if budget is not None:
        monkeypatch.setattr(cuda, "BLOCKS_BUDGET", budget)
    options, per_head = options_of(64), shape[2] > 1
    x = operands(shape)._replace(
        q=integers(rng, shape, jnp.bfloat16), k=integers(rng, (2, 600, 32), jnp.bfloat16)
    )
    rows = jax.ShapeDtypeStruct((*shape[:3], 3), jnp.float32)

    def call(target: str, given: Any, avals: Any, **attrs: Any) -> Any:
        if target == "jax_dsa.indexer_topk_bwd.v1":
            assert given[0].shape[:2] == (2, 5 * shape[2]) and avals[0].shape == given[0].shape
            return [jnp.full(a.shape, 2, a.dtype) if a is not None else None for a in avals]
        assert target == "jax_dsa.indexer_block_topk_fwd.v1"
        own = BlockOperands(*given)
        assert (own.weights is None) == (own.starts is None) == per_head
        *results, scores, logits = avals
        queries = 1 if budget else 10
        assert scores.shape == (queries * shape[2] * 10, 2)
        assert logits is None if per_head else logits.shape == (queries * 600,)
        assert {name: int(value) for name, value in attrs.items()} == {
            "relu": 0, "page_size": 0, "block_size": 64, "sink_blocks": 1, "local_blocks": 2,
        }  # fmt: skip
        assert all(a is rows for a in results)
        return [*blocks.indexer_block_topk_fwd(options, own), None, None]

    monkeypatch.setattr(cuda.ffi, "call", call)
    y = cuda.indexer_block_topk_fwd(options, BlockSelection(rows, rows, rows), x)
    expected = blocks.indexer_block_topk_fwd(options, x)
    jax.tree.map(np.testing.assert_array_equal, y, expected)

    selected = BlockSelected(q=x.q, k=x.k, weights=x.weights, k_scale=None, keys=y.keys)
    grads = blocks.indexer_block_topk_bwd(options, selected, y)
    got = cuda.indexer_block_topk_bwd(options, grads, selected, y)
    assert cuda.block_topk_bwd_supports(options, selected, y) is None
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, grads)
