"""Every operator under JAX's configurations, such as x64, strict promotion and `disable_jit`."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import TransformCase
from support.cases.registry import CASES, one_fast
from support.compare import assert_matches
from support.marks import slow
from support.transforms import both_ways

import jax_dsa
from jax_dsa.core import ffi, streaming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

B, T, N, S, D = 2, 3, 4, 7, 6


def floats(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def append(k: Any, v: Any, counts: Any, positions: Any) -> Any:
    """Appends to caches of every kind."""
    flat = jax_dsa.FlatCache.empty(B, S, D).append(k).append(k, counts).update(k, positions)
    pages = jax_dsa.PagedCache.empty(9, 2, B, 4, D).append(k).append(k, counts).update(k, positions)
    tree = jax_dsa.HTreeCache.empty(B, 9, D, compression=2, top_k=2).append(k, v)
    tree = tree.append(k, v, counts)
    return tuple(jax.tree.leaves((flat, pages, tree, tree.layers)))


def windows(q: Any, k: Any, lengths: Any) -> Any:
    options = {"causal_alignment": "bottom_right", "local_window_size": (2, 1)}
    out = jax_dsa.masked_attention(q, k, k, key_value_seq_lengths=lengths, **options)
    mask = jax_dsa.make_block_mask(shape=(1, 1, T, S), is_causal=True, block_q=2, block_k=8)
    ids = {"segment_ids": (jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32))}
    blocks = jax_dsa.masked_attention(q, k, k, block_mask=mask, **ids)
    decoded = jax_dsa.mqa_decode(
        q, k, starts=lengths // 2, local_window_size=lengths, key_value_seq_lengths=lengths
    )
    return out, blocks, decoded


def inspect(q: Any, k: Any) -> Any:
    return tuple(jax.tree.leaves(jax_dsa.htree_select(q, k, compression=2, top_k=1)))


def records(rows: Any) -> Any:
    stored = jax_dsa.serving.pack_records(rows)
    return jax_dsa.serving.unpack_records(stored, jnp.bfloat16)


def each_start(q: Any, kv: Any, indices: Any, starts: Any) -> Any:
    out, lse = jax_dsa.sparse_mla(
        q, kv, indices, is_causal=True, query_start=starts, key_stride=2, return_lse=True
    )
    return out, jax_dsa.attn_dist(q, kv, indices, lse)


def deterministic(q: Any, k: Any, weights: Any) -> Any:
    return jax_dsa.indexer_topk(q, k, weights, 3, deterministic=True)[1]


def case(name: str, fn: Callable, make_args: Callable, diff: tuple[int, ...] = ()) -> TransformCase:
    return TransformCase(name, fn, make_args, diff, {})


# Calls that the operators' own cases leave out.
OTHERS = [
    case(
        "append",
        append,
        lambda rng: (
            *(floats(rng, B, T, 1, D) for _ in range(2)),
            jnp.asarray([1, 3], jnp.int32),
            jnp.asarray(rng.integers(-1, S + 1, (B, T)), jnp.int32),
        ),
    ),
    case(
        "windows",
        windows,
        lambda rng: (
            floats(rng, B, T, N, D),
            floats(rng, B, S, 2, D),
            jnp.asarray([2, S], jnp.int32),
        ),
        (0, 1),
    ),
    case("inspect", inspect, lambda rng: (floats(rng, B, S, N, D), floats(rng, B, S, 2, D))),
    case("records", records, lambda rng: (floats(rng, B, 576),)),
    case(
        "each_start",
        each_start,
        lambda rng: (
            floats(rng, B, T, N, D),
            floats(rng, B, S, 1, D),
            jnp.asarray(rng.integers(-1, S, (B, T, 5)), jnp.int32),
            jnp.asarray([3, 9], jnp.int32),
        ),
        (0, 1),
    ),
    case(
        "deterministic",
        deterministic,
        lambda rng: (floats(rng, B, T, N, D), floats(rng, B, S, D), floats(rng, B, T, N)),
        (0, 1, 2),
    ),
]
ALL = pytest.mark.parametrize("case", one_fast([*CASES, *OTHERS]))
# An integer without a dtype is of another type in x64 alone.
X64 = pytest.mark.parametrize("x64", [slow(False, id="x32"), pytest.param(True, id="x64")])


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@X64
@ALL
def test_nothing_is_promoted(
    case: Any, x64: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX promotes neither ranks nor dtypes; strict configurations would raise at tracing.

    In x64 an integer without an explicit dtype is an int64, which a scan over chunks cannot carry.
    """
    monkeypatch.setattr(streaming, "BUDGET", 1)
    args = case.make_args(rng)
    want = jax.eval_shape(both_ways(case), *args)
    with configured(
        jax_numpy_rank_promotion="raise", jax_numpy_dtype_promotion="strict", jax_enable_x64=x64
    ):
        got = jax.eval_shape(both_ways(case), *args)
    assert jax.tree.map(str, got) == jax.tree.map(str, want)


@pytest.mark.parametrize("dim", [512, 576])
def test_nothing_is_promoted_around_a_kernel(
    dim: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX promotes nothing either in the code that surrounds a kernel's custom call."""

    def sizes(**_: Any) -> tuple[int, int, int]:
        return 16, 16, 16

    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    monkeypatch.setattr(ffi, "extension", lambda: SimpleNamespace(sparse_mla_bwd_workspace=sizes))
    shapes = {"q": (1, T, 64, dim), "kv": (1, S, 1, dim)}
    shapes |= {"index_q": (1, T, 64, 128), "index_k": (1, S, 128)}
    args = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    args["index_weights"] = jax.ShapeDtypeStruct((1, T, 64), jnp.float32)
    args["sinks"] = jax.ShapeDtypeStruct((64,), jnp.float32)

    def loss(args: Any, deterministic: bool) -> Any:
        out, aux = jax_dsa.dsa_attention(**args, top_k=3, deterministic=deterministic)
        return out.astype(jnp.float32).sum() + aux.kl + aux.lse.sum()

    with configured(jax_numpy_rank_promotion="raise", jax_numpy_dtype_promotion="strict"):
        for order in (False, True):
            traced = jax.jit(jax.grad(functools.partial(loss, deterministic=order))).trace(args)
            assert "jax_dsa.sparse_mla_bwd" in str(traced.jaxpr)


CONFIGURATIONS = {
    "x64, NaNs raise": {"jax_enable_x64": True, "jax_debug_nans": True},
    "without jit": {"jax_disable_jit": True},
}


@pytest.mark.slow
@ALL
def test_same_results(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    want = jax.jit(both_ways(case))(*args)
    for name, settings in CONFIGURATIONS.items():
        with configured(**settings):
            got = jax.jit(both_ways(case))(*args)
        assert_matches(got, want, what=name)
