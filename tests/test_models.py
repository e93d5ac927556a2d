"""Attention layers of published models: variants of `DSAttention`, and compressed attention.

These tests need no other library; `test_parity.py` compares the layers with `transformers`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.marks import slow
from support.published_layers import (
    COMPRESSED,
    LAYERS,
    PACKED,
    SEGMENT_IDS,
    VARIANT,
    B,
    M,
    T,
    hidden,
    layer,
)
from support.scripts import load_script

from jax_dsa import nn
from jax_dsa.nn import compressed

# Layers that compress keys and select from them, and those with blocks, do what others do.
ONE_KIND = pytest.mark.parametrize(
    "kind",
    [kind if kind in ("selected", "mean key") else slow(kind) for kind in LAYERS],
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_documents_do_not_see_each_other(rng, kind):
    graph, params = nnx.split(layer(rng, LAYERS[kind]))
    x = hidden(rng)

    def packed(params, x):
        y, aux = nnx.merge(graph, params)(x, segment_ids=SEGMENT_IDS)
        return (jnp.sin(y) ** 2).sum(), (y, aux.lse)

    def alone(params, x):
        module, total, found = nnx.merge(graph, params), 0.0, []
        for b, row in enumerate(PACKED):
            start = 0
            for _, length in row:
                y, aux = module(x[b : b + 1, start : start + length])
                total += (jnp.sin(y) ** 2).sum()
                found.append((b, start, y, aux.lse))
                start += length
        return total, found

    (loss, both), grads = jax.jit(jax.value_and_grad(packed, (0, 1), has_aux=True))(params, x)
    (want, found), want_grads = jax.jit(jax.value_and_grad(alone, (0, 1), has_aux=True))(params, x)
    assert_matches(loss, want, 1e-5)
    assert_matches(grads, want_grads, 1e-4)
    for b, start, *own in found:
        for got, each in zip(both, own, strict=True):
            assert_matches(got[int(b), int(start) : int(start) + each.shape[1]], each[0], 1e-5)


@ONE_KIND
def test_decoding_in_chunks(rng, kind):
    module, x = layer(rng, LAYERS[kind]), hidden(rng)
    want, aux = jax.jit(lambda x: module(x))(x)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    for chunks in ((T,), (9, 1, 1, 1, 17)):
        if kind == "latent":
            cache = nn.LayerCache.empty(module.config, B, T + 2)
        else:
            cache = module.init_cache(B, T + 2)
        start, got, selections = 0, [], []
        for n in chunks:
            y, cache, indices = step(x[:, start : start + n], cache)
            start += n
            got.append(y)
            selections.append(indices)
        assert_matches(jnp.concatenate(got, 1), want, 1e-4)
        if aux.indices is not None and kind != "all":
            np.testing.assert_array_equal(jnp.concatenate(selections, 1), aux.indices)


@pytest.mark.parametrize("kind", LAYERS)
def test_replaying_a_recorded_selection(rng, kind):
    module, x = layer(rng, LAYERS[kind]), hidden(rng)
    run = jax.jit(lambda x, indices: module(x, indices=indices))
    want, aux = run(x, None)
    again, replayed = run(x, aux.indices)
    assert_matches(again, want, 1e-5)
    assert (aux.kl is None) == (module.indexer is None)
    if aux.kl is not None:
        assert_matches(replayed.kl, aux.kl, 1e-4)
        other = run(x, jnp.zeros_like(aux.indices).at[..., 1:].set(-1))
        assert np.abs(other[0] - want).max() > 1e-3


@pytest.mark.parametrize("kind", ["latent", "selected", "best key", "mean key"])
def test_the_indexer_loss_trains_only_the_indexer(rng, kind):
    graph, params = nnx.split(layer(rng, LAYERS[kind]))
    x = hidden(rng)

    def gradients(of):
        def loss(params, x):
            return of(*nnx.merge(graph, params)(x))

        grads, dx = jax.jit(jax.grad(loss, (0, 1)))(params, x)
        flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(grads)}
        return {name: bool(np.any(np.asarray(v[...]))) for name, v in flat.items()}, dx

    own, dx = gradients(lambda y, aux: aux.kl)
    assert not np.any(dx)
    main, _ = gradients(lambda y, aux: jnp.sin(y).sum())
    assert any(name.startswith("indexer") for name in own)
    for name in own:
        # A parameter of the indexer may have zero gradient: shifting all keys changes no softmax.
        assert own[name] <= name.startswith("indexer") and main[name] != name.startswith("indexer")
    assert sum(own.values()) >= 4


@pytest.mark.slow
def test_warm_up_of_compressed_attention(rng):
    """Checks the warm-up against the sparse stage with all keys selected, and its loss.

    The loss is the KL divergence of the indexer's softmax from the mean of the heads' softmax, both
    over the compressed keys only.
    """
    module, x = layer(rng, dataclasses.replace(COMPRESSED, top_k=T // 4)), hidden(rng)
    (want, aux), (got, dense) = (
        jax.jit(lambda x, s=s: module(x, segment_ids=SEGMENT_IDS, sparse=s))(x)
        for s in (True, False)
    )
    assert_matches((got, dense.lse), (want, aux.lse), 1e-5)
    places = jnp.broadcast_to(jnp.arange(T), (B, T))
    q, _, latent = module._project(x, places)
    plain = module(x, sparse=False)[1].kl
    keys = module.compressor(x, places, None)
    scores = np.asarray(jnp.einsum("btnd,bsd->btns", q, keys)) * COMPRESSED.head_dim**-0.5
    index_q, weights = module.indexer(x, latent, places)
    index_k = module.indexer.compressor(x, places, None)
    logits = np.einsum(
        "btj,btjs->bts", weights, np.maximum(np.einsum("btjc,bsc->btjs", index_q, index_k), 0)
    )
    total, rows = 0.0, 0
    for b, t in np.ndindex(B, T):
        n = (t + 1) // 4
        if n:
            p = np.exp(scores[b, t, :, :n] - scores[b, t, :, :n].max(-1, keepdims=True))
            p = (p / p.sum(-1, keepdims=True)).mean(0)
            i = logits[b, t, :n] - logits[b, t, :n].max()
            total += (p * (np.log(p) - i + np.log(np.exp(i).sum()))).sum()
            rows += 1
    np.testing.assert_allclose(plain, total / rows, rtol=1e-3)
    with pytest.raises(ValueError, match="'indices' is given, expected None with sparse=False"):
        module(x, indices=aux.indices, sparse=False)


@pytest.mark.slow
def test_warm_up_in_chunks(rng, monkeypatch):
    """The chunks have 5 queries, and there is a remainder."""
    graph, params = nnx.split(layer(rng, COMPRESSED))
    x = hidden(rng)

    def run():
        def loss(params, x):
            y, aux = nnx.merge(graph, params)(x, segment_ids=SEGMENT_IDS, sparse=False)
            return jnp.sin(y).sum() + aux.kl, (y, aux.lse)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    want, calls = run(), []
    monkeypatch.setattr(compressed, "chunk_length", lambda *_: calls.append(5) or 5)
    assert_matches(run(), want, 1e-5)
    assert calls


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("kind", ["selected", "pooled"])
def test_no_array_of_queries_times_compressed_keys(kind, sparse):
    """Checks a layer's forward and backward pass, with the indexer's loss, in both stages."""
    length = 16384
    make = nn.CompressedAttention if kind == "selected" else nn.DSAttention
    graph, params = nnx.split(nnx.eval_shape(lambda: make(LAYERS[kind], rngs=nnx.Rngs(0))))

    def loss(params, x):
        y, aux = nnx.merge(graph, params)(x, sparse=sparse)
        return jnp.sin(y).sum() + aux.kl

    x = jax.ShapeDtypeStruct((1, length, M), jnp.float32)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
    pairs = length * (length // 4)
    sizes = {
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    }
    assert length * M in sizes and max(sizes) < pairs
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * pairs


@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "tokens"])
def test_compressed_attention_on_an_explicit_mesh(rng, axis):
    graph, params = nnx.split(layer(rng, COMPRESSED))
    x, ids = hidden(rng)[:, :24], SEGMENT_IDS[:, :24]

    @jax.jit
    def run(params, x, ids):
        y, aux = nnx.merge(graph, params)(x, segment_ids=ids)
        return y, aux.indices, aux.kl

    want = run(params, x, ids)
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("b",), axis_types=axes, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        everywhere, split = (
            jax.sharding.PartitionSpec(),
            jax.sharding.PartitionSpec(*(None,) * axis, "b"),
        )
        params = jax.tree.map(lambda p: jax.device_put(p, everywhere), params)
        got = run(params, jax.device_put(x, split), jax.device_put(ids, split))
    assert got[0].sharding.spec[axis] == "b"
    assert_matches(got, want, 1e-5)


# Layers of sizes that the kernels of all their operators cover.
KERNELS = {
    "latent": dataclasses.replace(
        VARIANT,
        **{"kv_rank": 512, "nope_dim": 32, "rope_dim": 64, "index_rope_dim": 32, "v_dim": 32},
        **{"num_heads": 8, "index_heads": 8, "index_dim": 64, "top_k": 64, "index_fp4": True},
        rope_frequencies=None,
        index_rope_last=False,
    ),
    "selected": dataclasses.replace(
        COMPRESSED,
        **{"num_heads": 8, "head_dim": 512, "rope_dim": 64, "window": 64, "top_k": 64},
        **{"index_heads": 8, "index_dim": 64, "index_fp4": True, "index_hadamard": True},
    ),
}
KERNELS["all"] = dataclasses.replace(
    KERNELS["selected"], ratio=16, overlap=False, top_k=None, index_fp4=False
)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KERNELS)
def test_layers_on_kernels(rng, kind, monkeypatch):
    """The kernels' error in bfloat16 is about that of the XLA implementation in bfloat16.

    All runs use one selection, because rounding may change which keys are selected.
    """
    module, x = layer(rng, KERNELS[kind]), hidden(rng, 1, 600, M)
    params = nnx.split(module)[1]

    def run(dtype, indices):
        graph = nnx.graphdef(
            nnx.eval_shape(
                lambda: type(module)(
                    dataclasses.replace(KERNELS[kind], dtype=dtype), rngs=nnx.Rngs(0)
                )
            )
        )

        def loss(params, x):
            y, aux = nnx.merge(graph, params)(x, indices=indices)
            y = y.astype(jnp.float32)
            return jnp.sin(y).sum() + (0 if aux.kl is None else aux.kl), (y, aux.lse, aux.indices)

        (_, found), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
        return found[:2], jax.tree.leaves(grads), found[2]

    monkeypatch.setenv("JAX_DSA_IMPL", "xla")
    *exact, indices = run(jnp.float32, None)
    *rounded, _ = run(jnp.bfloat16, indices)
    monkeypatch.delenv("JAX_DSA_IMPL")
    *got, _ = run(jnp.bfloat16, indices)
    for arrays in zip(*map(jax.tree.leaves, (exact, rounded, got)), strict=True):
        want, xla, kernel = (np.asarray(a, np.float64) for a in arrays)
        error = np.abs(xla - want).max()
        assert np.abs(kernel - want).max() <= 3 * error + 1e-3 * np.abs(want).max()


def test_attention_to_another_layers_keys(rng):
    source = nn.DSAttention(VARIANT, rngs=nnx.Rngs(0))
    module = nn.DSAttention(dataclasses.replace(VARIANT, shares_keys=True), rngs=nnx.Rngs(0))
    x, y = hidden(rng), hidden(rng)
    assert module.mla.wkv_a is None and module.mla.kv_norm is None
    _, aux = source(x)
    for sparse in (True, False):
        out, found = module(y, kv=aux.kv, sparse=sparse)
        assert_matches(found.kv, aux.kv)
        loss = lambda kv, s=sparse: jnp.sin(module(y, kv=kv, sparse=s)[0]).sum()  # noqa: E731
        gradient = jax.grad(loss)(aux.kv)
        assert np.abs(gradient).max() > 1e-3
    first = nn.LayerCache.empty(VARIANT, B, T)
    second = nn.LayerCache.empty(module.config, B, T)
    assert second.kv is None
    want, _ = module(y, kv=aux.kv)
    _, first, _ = source.decode(x, first)
    got, _, _ = module.decode(y, second, kv=first.kv)
    assert_matches(got, want, 1e-4)
    with pytest.raises(ValueError, match="'kv' is None, expected another layer's keys"):
        module(y)
    with pytest.raises(ValueError, match="'kv' is given, expected None"):
        source(x, kv=aux.kv)
    assert out.shape == y.shape


def test_sinks_in_both_forms(rng):
    module, x = layer(rng, dataclasses.replace(VARIANT, top_k=T)), hidden(rng)
    assert_matches(module(x)[0], module(x, sparse=False)[0], 1e-4)
    without = dataclasses.replace(VARIANT, top_k=T, sinks=False)
    plain = nn.load_hf(
        nn.DSAttention(without, rngs=nnx.Rngs(1)),
        {name: w for name, w in nn.save_hf(module).items() if name != "sinks"},
    )
    assert np.abs(plain(x)[0] - module(x)[0]).max() > 1e-3


def test_decoder_replays_selections(rng):
    attention = dataclasses.replace(VARIANT, q_rank=12)
    config = nn.DecoderConfig(
        attention, vocab=11, num_layers=3, mlp_dim=24, indexer_types=("full", "shared")
    )
    model = nn.DecoderLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    run = jax.jit(lambda t, s: model(t, indices=s))
    want, found = run(tokens, None)
    recorded = [aux.indices for aux in found]
    got, again = run(tokens, recorded)
    assert_matches(got, want, 1e-5)
    assert [aux.kl is None for aux in again] == [False, True, False]
    step = jax.jit(lambda t, cache: model.decode(t, cache, return_indices=True))
    cache, rolled = model.init_cache(B, T), []
    for chunk in (tokens[:, :20], *jnp.split(tokens[:, 20:], T - 20, axis=1)):
        _, cache, indices = step(chunk, cache)
        rolled.append(indices)
    for selections, aux in zip(zip(*rolled), found, strict=True):
        np.testing.assert_array_equal(jnp.concatenate(selections, 1), aux.indices)
    first = jnp.zeros_like(recorded[0]).at[..., 1:].set(-1)
    _, mixed = run(tokens, [first, None, None])
    np.testing.assert_array_equal(mixed[1].indices, mixed[0].indices)
    assert np.abs(run(tokens, [first, None, None])[0] - want).max() > 1e-3


BENCHMARKED = {
    "tiny": COMPRESSED,
    "latent": VARIANT,
    "pooled": LAYERS["pooled"],
    **{x: LAYERS[x] for x in ("best key", "mean key")},
}


@pytest.mark.slow
def test_benchmark_of_layers(tmp_path, monkeypatch):
    benchmark = load_script("benchmarks/models.py", monkeypatch)
    monkeypatch.setattr(benchmark, "GROUPS", (BENCHMARKED,))
    benchmark.main(
        ["--tokens", str(T), "--only", "|".join(BENCHMARKED), "--csv", str(tmp_path / "x.csv")]
    )
    with (tmp_path / "x.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [(r["layer"], r["step"]) for r in rows] == [
        (name, step) for name in BENCHMARKED for step in ("fwd", "fwd+bwd")
    ]
    assert all(float(r["milliseconds"]) > 0 and float(r["gib"]) > 0 for r in rows)
    # For each query: the number of keys that it attends to, and of those that its indexer scores.
    seen = {
        "tiny": [(min(t + 1, 6) + min((t + 1) // 4, 3), (t + 1) // 4) for t in range(T)],
        "latent": [(min(t + 1, 5), t + 1) for t in range(T)],
        "pooled": [(4 * min((t + 1) // 4, 3) + (t + 1) % 4, (t + 1) // 4) for t in range(T)],
        "best key": [(4 * min(t // 4, 2) + t % 4 + 1, t + 1) for t in range(T)],
    }
    seen["mean key"] = seen["pooled"]
    # The numbers that take part in a pair of a query and a key, in attention and in the indexer.
    pair = {"tiny": 4 * (8 + 8), "latent": 2 * (12 + 8), "pooled": 2 * (8 + 8)}
    pair |= {"best key": 4 * (8 + 8), "mean key": 4 * (8 + 8)}
    index = dict.fromkeys(pair, 3 * 8) | {"best key": 2 * 6, "mean key": 3 * 6}
    for name, config in benchmark.GROUPS[0].items():
        made = benchmark.Layer(config, T)
        weights = sum(x.size for x in jax.tree.leaves(made.shapes) if len(x.shape) > 1)
        want = T * weights + sum(pair[name] * n + index[name] * s for n, s in seen[name])
        assert made.operations("fwd") == 2 * want
        assert made.operations("fwd+bwd") > 2 * made.operations("fwd")


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match=r"rope_frequencies has 2 numbers, expected .* = 1"):
        dataclasses.replace(VARIANT, rope_dim=2)
    with pytest.raises(ValueError, match="rope_dim is 12, expected an even number of at most 8"):
        dataclasses.replace(COMPRESSED, rope_dim=12)
    with pytest.raises(ValueError, match="num_heads is 4, expected a multiple of out_groups = 3"):
        dataclasses.replace(COMPRESSED, out_groups=3)
    with pytest.raises(ValueError, match="ratio is None, expected an int because overlap or top_k"):
        dataclasses.replace(COMPRESSED, ratio=None)
    with pytest.raises(ValueError, match="'frequencies' has 2 numbers, expected 4"):
        nn.rope(jnp.zeros((1, 1, 8)), jnp.zeros((1, 1), jnp.int32), frequencies=(1.0, 0.1))
