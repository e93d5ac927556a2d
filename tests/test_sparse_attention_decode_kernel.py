"""`sparse_attention_decode` on the kernels of `mqa_decode`, and the lists that it hands to them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow

from jax_dsa import FlatCache, PagedCache, sparse_attention_decode
from jax_dsa.core import ffi
from jax_dsa.ops.mqa_decode import cuda

B, T, N, G, D, K = 3, 2, 4, 2, 64, 3
FORCED = {"is_causal": True, "sink_blocks": 1, "local_blocks": 2}


def handler(target: str, operands: Any, avals: Any, **attrs: Any) -> list[Any]:
    """Computes what the handler of `mqa_decode` returns."""
    assert target == "jax_dsa.mqa_decode.v3"
    q, k, v, starts, ends, sinks, table, cuts = operands
    size, batch, dim = attrs["page_size"], q.shape[0], q.shape[3]
    assert k.shape[1] % size == 0 and starts.shape == ends.shape == (batch, 1)
    pages, slots = k.shape[1] // size, table.shape[2]
    entry = jnp.repeat(table, size, axis=2)
    offset = jnp.arange(slots * size) % size
    is_cut = (entry >= pages) & (offset < cuts[:, :, None])
    page = jnp.where(is_cut, entry - pages, entry)
    seen = (page >= 0) & (page < pages) & (jnp.arange(slots * size) < ends[:, :, None])
    row = jnp.where(seen, page * size + offset, 0)
    heads = jnp.arange(k.shape[2])[None, :, None]
    keys, values = (x[0].astype(jnp.float32)[row, heads] for x in (k, v))
    grouped = q.reshape(batch, k.shape[2], -1, dim).astype(jnp.float32)
    s = jnp.einsum("bgmd,bgkd->bgmk", grouped, keys) * attrs["scale"]
    s = jnp.where(seen[:, :, None], s, -jnp.inf)
    top = s.max(-1, initial=-jnp.inf)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)[..., None])
    total = p.sum(-1)
    sink = 0 if sinks is None else jnp.exp(sinks.reshape(top.shape) - top)
    out = (
        jnp.einsum("bgmk,bgke->bgme", p, values) / jnp.where(total == 0, 1, total + sink)[..., None]
    )
    log_sum = jnp.log(jnp.where(total == 0, 1, total))
    results = [
        x.reshape(a.shape).astype(a.dtype)
        for x, a in zip((out, top, log_sum), avals[:3], strict=True)
    ]
    return [*results, *(jnp.zeros(a.shape, a.dtype) for a in avals[3:])]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels by `handler`."""
    extension = SimpleNamespace(mqa_decode_workspace=lambda **_: (10, 10))
    fake = SimpleNamespace(call=handler, extension=lambda: extension)
    monkeypatch.setattr(cuda, "ffi", fake)
    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    jax.clear_caches()


# The page size or 0, the capacity, the size of a block, and options.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "flat": (0, 24, 4, {}),
    "flat, large blocks": (0, 24, 16, {**FORCED, "sinks": np.array([np.inf, -2, 0.5, 3])}),
    "large pages": (16, 48, 4, {"is_causal": True, "tail_block": True}),
    "small pages": (4, 32, 16, FORCED),
    "neither divides": (6, 24, 4, FORCED),
    "keys": (4, 24, 1, {**FORCED, "topk_length": np.array([[1, 2], [0, -1], [3, 9]], np.int32)}),
}


@pytest.mark.parametrize("lengths", [(24, 7, 1), slow((99, 0, 13))])
@pytest.mark.parametrize("name", CASES)
def test_lists(name: str, lengths: Any, rng: np.random.Generator, kernels: None) -> None:
    page, capacity, size, options = CASES[name]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].astype(np.float32)
    lengths = jnp.asarray(lengths, jnp.int32)
    if page == 0:
        shape: tuple = (B, capacity, G, D)
        make = functools.partial(FlatCache, lengths=lengths)
    else:
        shape = 9, page, G, D
        table = rng.integers(-1, 10, size=(B, capacity // page)).astype(np.int32)
        make = functools.partial(PagedCache, page_table=jnp.asarray(table), lengths=lengths)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.bfloat16)
    pair = [make(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)) for _ in range(2)]
    indices = rng.integers(-2, capacity // size + 2, size=(B, T, G, K)).astype(np.int32)
    indices[..., 2] = indices[..., 1]
    call = functools.partial(
        sparse_attention_decode,
        block_size=size,
        return_lse=True,
        return_max_logit=True,
        **options,
    )
    got = call(q, *pair, indices, implementation="cuda")
    want = call(q, *pair, indices, implementation="xla")
    assert_matches(got[0], want[0], 2e-2)
    assert_matches(got[1:], want[1:], 1e-5)


def test_vmap_of_pools(rng: np.random.Generator, kernels: None) -> None:
    """The pools of the mapped calls follow one another."""
    pools = [jnp.asarray(rng.normal(size=(2, 5, 8, G, D)), jnp.bfloat16) for _ in range(2)]
    q = jnp.asarray(rng.normal(size=(2, B, 1, N, D)), jnp.bfloat16)
    table = jnp.asarray(rng.integers(-1, 6, size=(B, 3)), jnp.int32)
    indices = rng.integers(-1, 7, size=(2, B, 1, K)).astype(np.int32)

    def call(q: Any, k: Any, v: Any, indices: Any, implementation: str) -> Any:
        caches = [PagedCache(x, table, jnp.asarray([24, 9, 3])) for x in (k, v)]
        return sparse_attention_decode(
            q, *caches, indices, block_size=4, return_lse=True, implementation=implementation
        )

    got, want = (
        jax.vmap(functools.partial(call, implementation=name))(q, *pools, indices)
        for name in ("cuda", "xla")
    )
    assert_matches(got[0], want[0], 2e-2)
    assert_matches(got[1], want[1], 1e-5)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": jnp.float32}, "it takes bfloat16, got float32"),
    "fp8": ({"stored": jnp.float8_e4m3fn}, "it takes bfloat16, got bfloat16, float8_e4m3fn"),
    "dim": ({"dim": 96}, r"it has D=E in \(64, 128, 256\), got D=96 and E=96"),
    "scale": ({"scale": -1.0}, "it takes scale > 0"),
    "batch_invariant": ({"batch_invariant": True}, "depend on the number of requests"),
    "capacity": ({"capacity": 129, "block_size": 64}, "too small a common divisor"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_limits(name: str, kernels: None) -> None:
    options, message = UNSUPPORTED[name]
    options = {"block_size": 4, **options}
    dtype, dim = options.pop("dtype", jnp.bfloat16), options.pop("dim", D)
    capacity, stored = options.pop("capacity", 24), options.pop("stored", dtype)
    cache = FlatCache.empty(B, capacity, dim, groups=G, dtype=stored)
    q, indices = jnp.zeros((B, 1, N, dim), dtype), jnp.zeros((B, 1, K), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"sparse_attention_decode: .*{message}"):
        sparse_attention_decode(q, cache, cache, indices, implementation="cuda", **options)


# B, T, N, G, D, block size, slots, capacity, page size or 0.
ON_A_GPU = [
    (1, 1, 64, 4, 128, 128, 16, 8192, 0),
    (64, 1, 64, 4, 128, 128, 16, 4096, 64),
    (5, 3, 24, 2, 256, 4, 512, 4096, 64),
    (3, 8, 6, 1, 64, 32, 9, 960, 48),
    (2, 2, 80, 1, 128, 64, 5, 1024, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ON_A_GPU, ids=str)
def test_the_kernel(sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    b, t, n, g, d, size, slots, capacity, page = sizes
    lengths = jnp.asarray(rng.integers(1, capacity + 9, b), jnp.int32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    if page:
        r = capacity // page
        table = jnp.asarray(rng.permutation(b * r + 5)[: b * r].reshape(b, r) - 2, jnp.int32)
        pair: list[Any] = [
            PagedCache(normal(b * r + 3, page, g, d), table, lengths) for _ in range(2)
        ]
    else:
        pair = [FlatCache(normal(b, capacity, g, d), lengths) for _ in range(2)]
    q = normal(b, t, n, d)
    ends = -(-np.asarray(lengths) // size)[:, None, None, None]
    indices = (rng.random((b, t, g, slots)) * ends).astype(np.int32)
    indices = np.where(rng.random(indices.shape) < 0.1, -1, indices)
    sinks = jnp.asarray(rng.standard_normal(n), jnp.float32)
    call = functools.partial(
        sparse_attention_decode,
        block_size=size,
        sinks=sinks,
        return_lse=True,
        return_max_logit=True,
        **FORCED,
    )
    got = jax.jit(functools.partial(call, implementation="cuda"))(q, *pair, indices)
    want = jax.jit(functools.partial(call, implementation="xla"))(q, *pair, indices)
    assert_matches(got[0], want[0], 2e-2)
    assert_matches(got[1:], want[1:], 1e-4)
