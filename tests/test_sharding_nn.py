"""Layers and the decoder on meshes: values, gradients and decoding as on one device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from support.compare import assert_matches
from support.decoders import CONFIG, DECODER, SHARING
from support.meshes import MESHES, exchanged, mesh_of, on

from jax_dsa import nn

B, T = 4, 16
COMPRESSED = nn.CompressedConfig(
    **{"model_dim": CONFIG.model_dim, "num_heads": 4, "q_rank": 12, "head_dim": 8, "rope_dim": 4},
    **{"out_groups": 2, "out_rank": 6, "window": 5, "ratio": 4, "overlap": True, "top_k": 3},
    **{"index_heads": 2, "index_dim": 8},
)
POOLED = dataclasses.replace(CONFIG, rope_dim=0, index_rope_dim=0, top_k=6, index_pool=2)
GROUPED = nn.GroupedConfig(
    **{"model_dim": CONFIG.model_dim, "num_heads": 4, "kv_heads": 2, "head_dim": 8, "rope_dim": 4},
    **{"indexer": "max", "block_size": 4, "top_k": 2, "index_heads": 2, "index_dim": 8},
)
LAYERS = {
    "attention": CONFIG,
    "pooled": POOLED,
    "pooled in chunks": dataclasses.replace(POOLED, query_chunk=4),
    "chunks": dataclasses.replace(CONFIG, query_chunk=4),
    "chunks that devices do not divide": dataclasses.replace(CONFIG, query_chunk=1),
    "fp8": dataclasses.replace(CONFIG, fp8=True),
    "gate": dataclasses.replace(CONFIG, gate=True, q_rank=None),
    "compressed": COMPRESSED,
    "compressed without indexer": dataclasses.replace(COMPRESSED, top_k=None),
    "best key": GROUPED,
    "best key in chunks": dataclasses.replace(GROUPED, query_chunk=4),
    "mean key": dataclasses.replace(GROUPED, indexer="mean", gate=True),
}
SPECS = {
    "batch": PartitionSpec("data"),
    "sequence": PartitionSpec(None, "context"),
    "both": PartitionSpec("data", "context"),
}


def layer(config: Any) -> nnx.Module:
    return nn.attention_layer(config, rngs=nnx.Rngs(0))


FAST = [
    ("chunks", "both", "explicit-of-types"),
    ("pooled", "both", "explicit-of-types"),
    ("compressed", "batch", "explicit-of-types"),
    ("best key in chunks", "both", "explicit-of-types"),
    ("mean key", "both", "explicit-of-types"),
]


def layer_cases() -> list[Any]:
    """Returns layers, specs and kinds of meshes; the cases `FAST` are not marked slow."""
    return [
        pytest.param(
            *case,
            id="-".join(case),
            marks=[] if case in FAST else [pytest.mark.slow],
        )
        for case in itertools.product(LAYERS, SPECS, MESHES)
    ]


def documents(rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32)


@pytest.mark.parametrize(("name", "spec", "kind"), layer_cases())
def test_a_layer(
    name: str, spec: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The gradients include those of the parameters. The output is sharded like the input."""
    graph, params = nnx.split(layer(LAYERS[name]))
    x = rng.normal(size=(B, T, CONFIG.model_dim)).astype(np.float32)

    def loss(params: Any, x: jax.Array, ids: jax.Array) -> Any:
        y, aux = nnx.merge(graph, params)(x, segment_ids=ids)
        return jnp.sin(y).sum() + (0 if aux.kl is None else aux.kl), (y, aux.indices, aux.kl)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    args = x, documents(rng)
    want = jax.jit(step)(params, *args)
    mesh, context = mesh_of(kind, (2, 4), ("data", "context"), cpus)
    host = jax.tree.map(np.asarray, params)
    with context(mesh):
        got = jax.jit(step)(on(mesh, host, PartitionSpec()), *on(mesh, args, SPECS[spec]))
    # The gradients of FP8 weights reduce over tokens, which each device quantises with scales of
    # its own. They are as far from the float32 gradients as those of one device are.
    assert_matches(got, want, 0.1 if "fp8" in name else 1e-4)
    if kind != "auto":
        assert got[0][1][0].sharding.is_equivalent_to(on(mesh, x, SPECS[spec]).sharding, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding(name: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]) -> None:
    """The requests are sharded. A prefill of right-padded prompts precedes a decode step."""
    graph, params = nnx.split(layer(LAYERS[name]))
    x = rng.normal(size=(B, 7, CONFIG.model_dim)).astype(np.float32)
    module = layer(LAYERS[name])
    latent = isinstance(module, nn.DSAttention)
    cache = nn.LayerCache.empty(module.config, B, 8) if latent else module.init_cache(B, 8)

    @jax.jit
    def run(params: Any, x: jax.Array, cache: Any, counts: jax.Array) -> Any:
        module = nnx.merge(graph, params)
        first, cache, _ = module.decode(x[:, :6], cache, counts=counts)
        return first, module.decode(x[:, 6:], cache)

    counts = np.array([6, 3, 0, 5], np.int32)
    want = run(params, x, cache, counts)
    mesh, context = mesh_of(kind, (4,), ("data",), cpus[:4])
    host = jax.tree.map(np.asarray, (params, (x, cache, counts)))
    with context(mesh):
        placed = on(mesh, host[0], PartitionSpec()), *on(mesh, host[1], PartitionSpec("data"))
        assert_matches(run(*placed), want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(
    "config",
    [DECODER, SHARING, dataclasses.replace(SHARING, shared_teacher=True)],
    ids=["full", "shared", "shared-teacher"],
)
def test_decoder(
    config: Any,
    kind: str,
    spec: str,
    sparse: bool,
    rng: np.random.Generator,
    cpus: list[jax.Device],
) -> None:
    """The loss and the gradients do not change when tokens are sharded by batch and sequence."""
    tokens = rng.integers(0, DECODER.vocab, (B, T)).astype(np.int32)
    graph, params = nnx.split(nn.DecoderLM(config, rngs=nnx.Rngs(0)))

    def loss(params: Any, tokens: jax.Array, ids: jax.Array) -> jax.Array:
        logits, layers = nnx.merge(graph, params)(tokens, segment_ids=ids, sparse=sparse)
        return jnp.sin(logits).sum() + sum(x.kl for x in layers if x.kl is not None)

    step = jax.jit(jax.value_and_grad(loss))
    args = tokens, documents(rng)
    want = step(params, *args)
    mesh, context = mesh_of(kind, (2, 4), ("data", "context"), cpus)
    host = jax.tree.map(np.asarray, params)
    with context(mesh):
        placed = on(mesh, host, PartitionSpec()), *on(mesh, args, SPECS[spec])
        assert_matches(step(*placed), want)


def stripe_cases() -> list[Any]:
    """Returns kinds of meshes, chunks, and flags; one case on an Explicit mesh is fast."""
    flags = [False, True]
    fast = (CONFIG, "explicit", 2, True, True), (POOLED, "explicit", None, True, True)
    return [
        pytest.param(*case, marks=[] if case in fast else pytest.mark.slow)
        for case in itertools.product([CONFIG, POOLED], MESHES, [None, 2], flags, flags)
    ]


@pytest.mark.parametrize(("config", "kind", "chunk", "sparse", "packed"), stripe_cases())
def test_stripes(
    config: Any,
    kind: str,
    chunk: int | None,
    sparse: bool,
    packed: bool,
    rng: np.random.Generator,
    cpus: list[jax.Device],
) -> None:
    """Values, selection, loss and gradients are those of the sequence in order."""
    config = dataclasses.replace(config, query_chunk=chunk)
    graph, params = nnx.split(nn.DSAttention(config, rngs=nnx.Rngs(0)))
    x = rng.normal(size=(B, T, CONFIG.model_dim)).astype(np.float32)
    ids = documents(rng) if packed else None

    def loss(params: Any, x: jax.Array, ids: Any, stripes: int) -> Any:
        y, aux = nnx.merge(graph, params)(x, segment_ids=ids, stripes=stripes, sparse=sparse)
        return (jnp.sin(y) ** 2).sum() + aux.kl, (y, aux.lse, aux.indices, aux.kl)

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=3)
    (_, want), want_grads = run(params, x, ids, 1)
    mesh, context = mesh_of(kind, (4,), ("context",), cpus[:4])
    stored = on(
        mesh, jax.tree.map(lambda a: nn.striped(a, 4), (x, ids)), PartitionSpec(None, "context")
    )
    with context(mesh):
        host = on(mesh, jax.tree.map(np.asarray, params), PartitionSpec())
        (_, got), (got_params, got_x) = run(host, *stored, 4)
    *rows, kl = got
    rows = [nn.unstriped(np.asarray(a), 4) for a in rows if a is not None]
    assert_matches((*rows, kl), want, 1e-4)
    assert_matches((got_params, nn.unstriped(np.asarray(got_x), 4)), want_grads, 1e-4)


@pytest.mark.parametrize("kind", MESHES)
def test_striping_is_one_all_to_all(
    kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    x = rng.normal(size=(2, 32, 3)).astype(np.float32)
    mesh, context = mesh_of(kind, (4,), ("context",), cpus[:4])
    stored = on(mesh, x, PartitionSpec(None, "context"))
    for function in (nn.striped, nn.unstriped):
        with context(mesh):
            compiled = jax.jit(function, static_argnums=1).lower(stored, 4).compile()
            np.testing.assert_array_equal(compiled(stored), function(x, 4))
        text = compiled.as_text()
        assert not exchanged(text, "all-gather") and exchanged(text, "all-to-all")
