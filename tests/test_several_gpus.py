"""The kernels on two GPUs, sharded by batch, queries or heads, give the results of one GPU."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import assert_matches

from jax_dsa import (
    attn_dist,
    indexer_logits,
    indexer_topk,
    masked_attention,
    sparse_attention,
    sparse_mla,
)
from jax_dsa.training.config import PRESETS
from jax_dsa.training.mesh import make_mesh, shardings
from jax_dsa.training.steps import Program

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus]

B, T, S, N, D, K, J, C = 2, 66, 500, 128, 576, 192, 64, 128


def attend(q: jax.Array, kv: jax.Array, indices: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the output, lse and the gradients."""

    def loss(q: jax.Array, kv: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.cos(lse).sum(), (out, lse)

    grads, outs = jax.grad(loss, argnums=(0, 1), has_aux=True)(q, kv)
    return *outs, *grads


def distribution(q: jax.Array, kv: jax.Array, indices: jax.Array) -> tuple[jax.Array, ...]:
    lse = jnp.full(q.shape[:3], 5.0)
    return (attn_dist(q, kv, indices, lse, head_group=64, implementation="cuda"),)


def select(q: jax.Array, k: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    def loss(q: jax.Array, k: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        indices, values = indexer_topk(q, k, weights, K, implementation="cuda")
        return jnp.sin(values / 30).sum(), (indices, values)

    grads, outs = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, weights)
    return *outs, *grads


def score(q: jax.Array, k: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    return (indexer_logits(q, k, weights, implementation="cuda"),)


def attend_to_all(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the output, lse and the gradients of causal attention, whose mask depends on where a
    shard of the queries begins.
    """

    def loss(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = masked_attention(*arrays, is_causal=True, return_lse=True, implementation="cuda")
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.cos(lse).sum(), (out, lse)

    grads, outs = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return *outs, *grads


def attend_to_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, indices: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the output, lse and the gradients of causal attention to blocks."""

    def loss(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        options: Any = {"block_size": 64, "is_causal": True, "local_blocks": 1}
        out, lse = sparse_attention(
            *arrays, indices, **options, return_lse=True, implementation="cuda"
        )
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.cos(lse).sum(), (out, lse)

    grads, outs = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return *outs, *grads


def block_inputs(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    q, k, v = head_inputs(rng)
    return q, k, v, jnp.asarray(rng.integers(-1, S // 64, (B, 4 * T, 4, 3)), jnp.int32)


def head_inputs(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    shapes = (B, 4 * T, 16, 128), (B, S, 4, 128), (B, S, 4, 64)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def attention_inputs(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    q = jnp.asarray(rng.standard_normal((B, T, N, D)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((B, S, 1, D)), jnp.bfloat16)
    return q, kv, jnp.asarray(rng.integers(-5, S, (B, T, 1, K)), jnp.int32)


def indexer_inputs(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    q = jnp.asarray(rng.standard_normal((B, T, J, C)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((B, S, C)), jnp.bfloat16)
    return q, k, jnp.asarray(rng.standard_normal((B, T, J)), jnp.float32)


BATCH, QUERIES = (P("x"),) * 3, (P(None, "x"), P(), P(None, "x"))
ROUTES = {
    "sparse_mla-batch": (attend, attention_inputs, BATCH),
    "sparse_mla-queries": (attend, attention_inputs, QUERIES),
    "sparse_mla-heads": (attend, attention_inputs, (P(None, None, "x"), P(), P())),
    "attn_dist-batch": (distribution, attention_inputs, BATCH),
    "attn_dist-queries": (distribution, attention_inputs, QUERIES),
    "attn_dist-heads": (distribution, attention_inputs, (P(None, None, "x"), P(), P())),
    "masked_attention-batch": (attend_to_all, head_inputs, BATCH),
    "masked_attention-queries": (attend_to_all, head_inputs, (P(None, "x"), P(), P())),
    "masked_attention-heads": (attend_to_all, head_inputs, (P(None, None, "x"),) * 3),
    "masked_attention-query heads": (attend_to_all, head_inputs, (P(None, None, "x"), P(), P())),
    "sparse_attention-batch": (attend_to_blocks, block_inputs, (P("x"),) * 4),
    "sparse_attention-queries": (
        attend_to_blocks,
        block_inputs,
        (P(None, "x"), P(), P(), P(None, "x")),
    ),
    "sparse_attention-heads": (attend_to_blocks, block_inputs, (P(None, None, "x"),) * 4),
    "indexer_logits-batch": (score, indexer_inputs, BATCH),
    "indexer_logits-queries": (score, indexer_inputs, QUERIES),
    "indexer_topk-batch": (select, indexer_inputs, BATCH),
    "indexer_topk-queries": (select, indexer_inputs, QUERIES),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("route", ROUTES)
def test_two_gpus(route: str, axis_type: Any, rng: np.random.Generator) -> None:
    devices = [d for d in jax.devices() if d.platform == "gpu"][:2]
    if len(devices) < 2:
        pytest.skip("one GPU")
    call: Callable[..., tuple[jax.Array, ...]]
    call, make, specs = ROUTES[route]
    host = make(rng)
    want = jax.jit(call)(*host)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=devices)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(host, specs, strict=True)
        ]
        compiled = jax.jit(call).lower(*args).compile()
        gathers = re.findall(r"= (.*) all-gather", compiled.as_text())
        gathered = re.findall(r"bf16(\[[\d,]+\])", " ".join(gathers))
        # In Explicit mode replicated keys and values have replicated gradients by their types.
        whole = route.endswith("query heads") and axis_type is AxisType.Explicit
        assert sorted(gathered) == ([f"[{B},{S},4,128]", f"[{B},{S},4,64]"] if whole else [])
        got = compiled(*args)
    # Two GPUs add the sums over heads or queries in another order.
    assert_matches(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), tol=8e-3)


def test_a_training_step_needs_no_more_memory_per_gpu_on_two_gpus() -> None:
    """XLA overlaps communication with other work, and could keep every layer's arrays for that."""
    devices = [d for d in jax.devices() if d.platform == "gpu"][:2]
    if len(devices) < 2:
        pytest.skip("one GPU")

    def temporaries(number: int) -> int:
        config = PRESETS["h200"]()
        config = dataclasses.replace(config, batch_size=config.batch_size * number)
        program = Program(config, make_mesh({"data": number}, devices))
        tokens = program.place(np.zeros((config.batch_size, config.seq_len + 1), np.int32))
        state, rates = jax.eval_shape(program._initial_state), program._rates(config.sparse_start)
        places = shardings(state, program.mesh)
        learners = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            (state.backbone, state.indexer),
            (places.backbone, places.indexer),
        )
        with jax.set_mesh(program.mesh):
            compiled = program._sparse.lower(*learners, tokens, rates).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2) < 1.25 * temporaries(1)
