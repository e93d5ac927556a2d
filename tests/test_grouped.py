"""Attention with grouped heads to selected blocks: losses, positions, caches and misuse.

tests/test_parity.py compares the layers with `transformers`, and tests/test_models.py checks what
they share with other layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.marks import slow
from support.oracles import grouped as oracle
from support.published_layers import GROUPED, LAYERS, SEGMENT_IDS, B, M, T, hidden, layer
from support.sparse_attention import sizes_of_intermediates

from jax_dsa import nn
from jax_dsa.core.documents import document_starts
from jax_dsa.nn import blocks

MEAN = LAYERS["mean key"]
KINDS = {"best key": GROUPED, "mean key": MEAN}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "warm-up"])
@kinds
def test_losses(kind: str, sparse: bool, packed: bool, rng: np.random.Generator) -> None:
    """Values and gradients equal those of a formula in float64, also where the selection is given.

    Queries and keys of the attention have no gradient.
    """
    c = KINDS[kind]
    keys = T if c.indexer == "max" else T // c.block_size
    shapes = (B, T, c.index_heads, c.index_dim), (B, keys, c.index_dim)
    shapes += (B, T, c.num_heads, c.head_dim), (B, T, c.kv_heads, c.head_dim)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    starts = document_starts(SEGMENT_IDS) if packed else jnp.zeros((B, T), jnp.int32)
    ends = jnp.broadcast_to(jnp.arange(1, T + 1, dtype=jnp.int32), (B, T))
    given = starts if packed else None
    found, _ = blocks.select(c, *arrays[:2], given, ends)
    selected = np.asarray(found) if sparse else None
    seen = oracle.seen_tokens(c, selected, np.asarray(starts))
    scores = np.einsum(
        "btgmd,bsgd->btgms", arrays[2].reshape(B, T, c.kv_heads, -1, c.head_dim), arrays[3]
    )
    scores = np.where(seen[:, :, :, None], scores * c.scale, -np.inf)
    lse = np.log(np.exp(scores).sum(-1)).reshape(B, T, c.num_heads)

    def loss(index_q: Any, index_k: Any, q: Any, k: Any, *, replayed: bool = True) -> Any:
        if not sparse:
            return blocks.warmup_loss(c, index_q, index_k, q, k, given)
        logits = None if replayed else blocks.select(c, index_q, index_k, given, ends)[1]
        arguments = index_q, index_k, found, q, k, lse, starts, ends
        return blocks.selected_loss(c, *arguments, logits)

    value, *grads = oracle.loss(c, *arrays, selected, np.asarray(starts))
    want = [np.asarray(x, np.float32) for x in (value, *grads)]
    for replayed in (True, False) if sparse and c.indexer == "mean" else (True,):
        run = jax.value_and_grad(lambda *x, r=replayed: loss(*x, replayed=r), (0, 1, 2, 3))
        value, (dq, dk, *main) = jax.jit(run)(*arrays)
        assert_matches((value, dq, dk), want, 2e-5)
        assert not any(np.any(x) for x in main)


@kinds
@pytest.mark.slow
def test_the_loss_in_chunks_of_queries(kind: str, rng: np.random.Generator) -> None:
    """With "mean key", queries without a block do not count, in any chunk."""
    module, x = layer(rng, KINDS[kind]), hidden(rng)[:, :28]
    chunked = dataclasses.replace(KINDS[kind], query_chunk=7)
    params = nnx.split(module)[1]

    def run(config: nn.GroupedConfig) -> Any:
        made = nnx.eval_shape(lambda: nn.GroupedAttention(config, rngs=nnx.Rngs(0)))
        graph = nnx.split(made)[0]

        def loss(params: Any, x: Any) -> Any:
            y, aux = nnx.merge(graph, params)(x, segment_ids=SEGMENT_IDS[:, :28])
            return jnp.sin(y).sum() + aux.kl, (y, aux)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    assert_matches(run(chunked), run(KINDS[kind]), 1e-5)
    with pytest.raises(ValueError, match=r"GroupedAttention: argument 'x'.*query_chunk = 7"):
        nn.GroupedAttention(chunked, rngs=nnx.Rngs(0))(x[:, :9])


@pytest.mark.parametrize("sparse", [True, slow(False)])
@kinds
def test_no_array_of_queries_times_keys(kind: str, sparse: bool) -> None:
    """Checks a layer's forward and backward pass, with the indexer's loss, in both stages."""
    length = 16384
    c = dataclasses.replace(KINDS[kind], query_chunk=1024)
    graph, params = nnx.split(nnx.eval_shape(lambda: nn.GroupedAttention(c, rngs=nnx.Rngs(0))))

    def loss(params: Any, x: Any) -> Any:
        y, aux = nnx.merge(graph, params)(x, sparse=sparse)
        return jnp.sin(y).sum() + aux.kl

    x = jax.ShapeDtypeStruct((1, length, M), jnp.float32)
    sizes = sizes_of_intermediates(jax.grad(loss, (0, 1)), params, x)
    assert max(sizes) < length * length


def test_positions_in_time_height_and_width(rng: np.random.Generator) -> None:
    """Pair 1 rotates by the second position, pair 2 by the third, and all others by the first."""
    x = rng.normal(size=(2, 5, 3, 10)).astype(np.float32)
    positions = rng.integers(0, 50, (3, 2, 5)).astype(np.int32)
    got = np.asarray(nn.rope(x, positions, sections=(2, 2, 1)))
    for pair, axis in enumerate((0, 1, 2, 0, 1)):
        want = np.asarray(nn.rope(x, positions[axis]))
        np.testing.assert_array_equal(got[..., pair::5], want[..., pair::5])
    with pytest.raises(ValueError, match=r"rope: argument 'positions'.*want 3 and then the first"):
        nn.rope(x, positions[0], sections=(2, 2, 1))
    for wrong in ((2, 2, 2), (1, 2, 2), (5,), (2, 2.0, 1)):
        with pytest.raises(ValueError, match=r"rope: argument 'sections' is .*those of 5 pairs"):
            nn.rope(x, positions, sections=wrong)


@kinds
def test_three_equal_positions_are_one(kind: str, rng: np.random.Generator) -> None:
    c = dataclasses.replace(KINDS[kind], rope_dim=6, mrope_sections=(1, 1, 1))
    module, x = layer(rng, c), hidden(rng)
    place = jnp.asarray(np.cumsum(rng.integers(1, 3, (B, T)), axis=1), jnp.int32)
    run = jax.jit(lambda x, p: module(x, positions=p, segment_ids=SEGMENT_IDS))
    y, aux = run(x, place)
    both = jnp.stack([place] * 3)
    again, found = run(x, both)
    assert_matches(again, y, 1e-6)
    np.testing.assert_array_equal(found.indices, aux.indices)
    other, _ = run(x, both.at[1].add(7 * (jnp.arange(T) % 3)))
    assert np.abs(other - y).max() > 1e-3


@kinds
def test_decoding_with_positions(kind: str, rng: np.random.Generator) -> None:
    """A block's key has the position of its first token, which may be from an earlier call."""
    c = dataclasses.replace(KINDS[kind], rope_dim=6, mrope_sections=(1, 1, 1))
    module, x = layer(rng, c), hidden(rng)
    places = jnp.asarray(np.cumsum(rng.integers(0, 3, (3, B, T)), axis=2), jnp.int32)
    want, aux = jax.jit(lambda x, p: module(x, positions=p))(x, places)
    step = jax.jit(lambda x, p, cache: module.decode(x, cache, positions=p))
    cache, start = module.init_cache(B, T), 0
    for n in (6, 1, 9, 1, 12):
        here = slice(start, start + n)
        y, cache, indices = step(x[:, here], places[:, :, here], cache)
        assert_matches(y, want[:, here], 1e-4)
        np.testing.assert_array_equal(indices, aux.indices[:, here])
        start += n


@kinds
def test_blocks_that_a_query_may_not_select(kind: str, rng: np.random.Generator) -> None:
    """They are empty slots, like those that do not exist."""
    module, x = layer(rng, KINDS[kind]), hidden(rng)
    run = jax.jit(lambda x, i: module(x, indices=i, segment_ids=SEGMENT_IDS))
    shape = (B, T, 2, 3) if kind == "best key" else (B, T, 3)
    given = rng.integers(-3, 12, shape).astype(np.int32)
    y, aux = run(x, given)
    own = (jnp.arange(T) - document_starts(SEGMENT_IDS)).reshape(B, T, *(1,) * (len(shape) - 2))
    last = own // 4 if kind == "best key" else (own + 1) // 4 - 1
    want = np.where((given >= 0) & (given <= last), given, -1)
    np.testing.assert_array_equal(aux.indices, want)
    assert_matches(run(x, want)[0], y, 1e-6)
    assert np.isfinite(aux.kl) and np.isfinite(y).all()


def test_a_layer_that_shares_a_selection(rng: np.random.Generator) -> None:
    x = hidden(rng)
    shared = nn.GroupedAttention(GROUPED, "shared", rngs=nnx.Rngs(0))
    full = nn.GroupedAttention(GROUPED, rngs=nnx.Rngs(0))
    assert shared.indexer is None
    want, aux = full(x)
    y, found = shared(x, indices=aux.indices)
    assert_matches(y, want, 1e-5)
    assert found.kl is None
    cache = shared.init_cache(B, T)
    assert cache.index_k is None and cache.open_block is None
    y, _, indices = shared.decode(x, cache, indices=aux.indices)
    assert_matches(y, want, 1e-4)
    np.testing.assert_array_equal(indices, aux.indices)
    for call in (shared, lambda x: shared.decode(x, cache)):
        with pytest.raises(ValueError, match="'indices' is None, expected a selection because"):
            call(x)


@kinds
def test_a_new_indexer_for_a_dense_layer(kind: str, rng: np.random.Generator) -> None:
    """With all keys, the layer computes what the dense layer does. Without the flag, it is told."""
    c, x = KINDS[kind], hidden(rng)
    dense, made = layer(rng, dataclasses.replace(c, indexer=None)), layer(rng, c)
    with pytest.raises(
        KeyError, match=r"load_hf: .*lacks .*; load the layer of a dense model with"
    ):
        nn.load_hf(made, nn.save_hf(dense))
    nn.load_hf(made, nn.save_hf(dense), new_indexer=True)
    y, aux = made(x, sparse=False)
    assert_matches(y, dense(x)[0], 1e-5)
    assert aux.kl > 0 and dense(x, sparse=False)[1].kl is None


@pytest.mark.parametrize("kind", ["best key", "mean key", "grouped"])
def test_a_paged_cache(kind: str, rng: np.random.Generator) -> None:
    """Pages are shuffled, and a request whose pages are missing keeps its tokens for later."""
    module, x = layer(rng, LAYERS[kind]), hidden(rng)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    want = jax.jit(lambda x: module(x)[0])(x)
    cache = module.init_cache(B, 32, page_size=8, num_pages=9)
    table = np.array([[7, 2, 5, 0], [3, -1, -1, -1]], np.int32)
    cache = cache.with_page_table(jnp.asarray(table))
    first, cache, _ = step(x[:, :13], cache)
    assert cache.lengths.tolist() == [13, 8] and cache.free_tokens.tolist() == [19, 0]
    assert_matches(first[0], want[0, :13], 1e-4)
    assert_matches(first[1, :8], want[1, :8], 1e-4)
    table[1] = [3, 8, 1, 4]
    cache = cache.with_page_table(jnp.asarray(table)).with_lengths(jnp.array([8, 8]))
    rest, cache, _ = step(x[:, 8:], cache)
    assert_matches(rest, want[:, 8:], 1e-4)
    assert cache.lengths.tolist() == [T, T]


def test_an_unsupported_length_gives_nan_until_a_new_request(rng: np.random.Generator) -> None:
    """With "mean", the raw keys of the last tokens are kept. Whole blocks need none."""
    module, x = layer(rng, MEAN), hidden(rng, 4, 11, M)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    want, cache, _ = step(x, module.init_cache(4, 40, max_rollback=2))
    # Back by 2 tokens, to a whole block, to the middle of an old block, and forward.
    cache = cache.with_lengths(jnp.array([9, 4, 5, 13]))
    y, cache, _ = step(x[:, :3], cache)
    np.testing.assert_array_equal(np.isnan(y).all((1, 2)), [False, False, True, True])
    assert np.isfinite(y[:2]).all()
    y, _, _ = step(x, cache.with_lengths(jnp.zeros(4, jnp.int32)))
    assert_matches(y, want, 1e-5)


@kinds
def test_fp8_and_bfloat16(kind: str, rng: np.random.Generator) -> None:
    x = hidden(rng)
    exact = layer(rng, KINDS[kind])
    want, aux = exact(x)
    for change, tolerance in (({"fp8": True}, 0.1), ({"dtype": jnp.bfloat16}, 0.05)):
        made = nn.GroupedAttention(dataclasses.replace(KINDS[kind], **change), rngs=nnx.Rngs(0))
        nnx.update(made, nnx.state(exact))
        y, found = jax.jit(lambda x, i, m=made: m(x, indices=i))(x, aux.indices)
        assert y.dtype == made.config.dtype and found.lse.dtype == jnp.float32
        assert_matches(y.astype(jnp.float32), want, tolerance)


WRONG_FIELDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "indexer": ({"indexer": "min"}, ValueError, r"'indexer' is 'min', want one of \('max', 'me"),
    "block_size": ({"block_size": 8}, ValueError, r"'block_size' is 8, want one of \(1, 4, 16"),
    "heads": ({"num_heads": 5}, ValueError, "'num_heads' is 5, want a multiple of kv_heads = 2"),
    "index_heads": ({"index_heads": 3}, ValueError, "'index_heads' is 3, want kv_heads = 2 with"),
    "odd": ({"rope_dim": 3}, ValueError, "'rope_dim' is 3, want an even number of at most 6"),
    "wide": ({"rope_dim": 8}, ValueError, "'rope_dim' is 8, want an even number of at most 6"),
    "frequencies": ({"rope_frequencies": (1.0,)}, ValueError, "rope_dim / 2 = 2 numbers"),
    "sections": ({"mrope_sections": (1, 2, 1)}, ValueError, "'mrope_sections' is .* = 2"),
    "top_k": ({"top_k": 0}, ValueError, "'top_k' is 0"),
    "forced": ({"indexer": "mean", "local_blocks": 2}, ValueError, "'local_blocks' is 2, want 1"),
    "sinks": ({"indexer": None, "sink_blocks": 1}, ValueError, "'sink_blocks' is 1, want 0"),
    "factor": ({"rope_factor": float("nan")}, ValueError, "'rope_factor' is nan, want 0 or a"),
    "list": ({"rope_frequencies": [1.0, 0.1]}, ValueError, "'rope_frequencies' is .* want a tuple"),
    "local": ({"local_blocks": -1}, ValueError, "'local_blocks' is -1"),
    "gate": ({"gate": 1}, TypeError, "'gate' is 1"),
    "dtype": ({"dtype": "int32"}, ValueError, "'dtype' is 'int32', want"),
    "query_chunk": ({"query_chunk": 0}, ValueError, "'query_chunk' is 0"),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_wrong_fields(name: str) -> None:
    change, error, message = WRONG_FIELDS[name]
    with pytest.raises(error, match=f"^GroupedConfig: argument .*{message}"):
        dataclasses.replace(GROUPED, **change)


def test_wrong_arguments(rng: np.random.Generator) -> None:
    module, dense = layer(rng, GROUPED), layer(rng, LAYERS["grouped"])
    mean, x = layer(rng, MEAN), hidden(rng)
    lists, one = jnp.zeros((B, T, 2, 3), jnp.int32), jnp.zeros((B, T, 3), jnp.int32)
    calls: tuple[tuple[Any, type[Exception], str], ...] = (
        (lambda: module(x, indices=one), ValueError, r"'indices' has shape .*\[B, T, G, K\]"),
        (lambda: module(x, indices=lists[:, :, :1]), ValueError, "'indices' has shape .*G=2"),
        (lambda: mean(x, indices=lists), ValueError, r"'indices' has shape .*\[B, T, K\]"),
        (lambda: module(x, indices=lists * 1.0), TypeError, "'indices' has dtype float32"),
        (
            lambda: module(x, indices=lists, sparse=False),
            ValueError,
            "'indices' is given, .* sparse=F",
        ),
        (lambda: dense(x, indices=one), ValueError, "'indices' is given, .* with indexer=None"),
        (lambda: module(x[..., 1:]), ValueError, r"'x' has shape \(2, 29, 15\).*M=16"),
        (lambda: module(x, positions=one), ValueError, "'positions' has shape"),
        (lambda: module(x, segment_ids=one), ValueError, "'segment_ids' has shape"),
        (lambda: module(x, sparse=1), TypeError, "'sparse' is 1"),
    )
    for call, error, message in calls:
        with pytest.raises(error, match=f"^GroupedAttention: argument {message}"):
            call()
    for kind, config in (("shared", LAYERS["grouped"]), ("none", GROUPED)):
        with pytest.raises(ValueError, match=f"argument 'indexer_type' is '{kind}', expected one"):
            nn.GroupedAttention(config, kind, rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument 'config' is CompressedConfig, want GroupedConf"):
        nn.GroupedAttention(LAYERS["selected"], rngs=nnx.Rngs(0))  # type: ignore[arg-type]


def test_wrong_caches(rng: np.random.Generator) -> None:
    module, mean, x = layer(rng, GROUPED), layer(rng, MEAN), hidden(rng)
    cache, pooled = module.init_cache(B, 32), mean.init_cache(B, 32)
    paged = module.init_cache(B, 32, page_size=8)
    half = cache.k.data.astype(jnp.bfloat16)
    one = cache._replace(k=dataclasses.replace(cache.k, data=half))
    calls: tuple[tuple[Any, Any, type[Exception], str], ...] = (
        (module, tuple(cache), TypeError, "'cache' is tuple, want GroupedCache"),
        (module, module.init_cache(3, 32), ValueError, "'cache.k.lengths' has shape .*B=2"),
        (module, cache._replace(v=paged.v), TypeError, "'cache.v' is PagedCache, want FlatCache"),
        (module, one, TypeError, "'cache.k.data' has dtype bfloat16, want float32"),
        (module, cache._replace(index_k=None), ValueError, "'cache.index_k' is 'None', want given"),
        (module, pooled, ValueError, "'cache.open_block' is 'given', want None"),
        (mean, cache, ValueError, "'cache.open_block' is 'None', want given"),
        (mean, pooled._replace(index_k=cache.index_k), ValueError, "'cache.index_k' has shape"),
    )
    for made, wrong, error, message in calls:
        with pytest.raises(error, match=f"^GroupedAttention.decode: argument {message}"):
            made.decode(x, wrong)
    init = "^GroupedAttention.init_cache: argument "
    for options, message in (
        ({"page_size": 6}, "'page_size' is 6, want a multiple of .* block_size = 4"),
        ({"num_pages": 3}, "'num_pages' is 3, want None without 'page_size'"),
        ({"max_rollback": -1}, "'max_rollback' is -1"),
    ):
        with pytest.raises(ValueError, match=init + message):
            mean.init_cache(B, 32, **options)
    with pytest.raises(ValueError, match=r"GroupedCache.with_page_table: the cache is flat"):
        cache.with_page_table(jnp.zeros((B, 4), jnp.int32))
    with pytest.raises(ValueError, match=r"GroupedCache.with_lengths: argument 'lengths' has sha"):
        cache.with_lengths(jnp.zeros(3, jnp.int32))
