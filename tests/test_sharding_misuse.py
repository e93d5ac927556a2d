"""Arrays of one call on two Explicit meshes: the operator names both arguments and the way out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from support.cases.registry import CASES
from support.decoders import CONFIG, DECODER
from support.meshes import mesh_of, on

import jax_dsa
from jax_dsa import nn

WANT = r"is on the mesh \{'y': 2\}, want the mesh \{'x': 2\} of .*; move .* to one mesh with jax"
SEVERAL = [case for case in CASES if len(next(iter(case.specs.values()))) > 1]


@pytest.fixture
def meshes(cpus: list[jax.Device]) -> list[Mesh]:
    return [mesh_of("explicit-of-types", (2,), (name,), cpus[:2])[0] for name in "xy"]


@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
def test_operators(case: Any, rng: np.random.Generator, meshes: list[Mesh]) -> None:
    one, other = meshes
    host = jax.tree.map(np.asarray, case.make_args(rng))
    args = [on(one, host[0], PartitionSpec()), on(other, host[1], PartitionSpec()), *host[2:]]
    for call in (case.fn, jax.jit(case.fn)):
        with pytest.raises(ValueError, match=rf"\w+: argument '[\w.]+' {WANT}"):
            call(*args)


def test_the_current_mesh(meshes: list[Mesh]) -> None:
    rows = on(meshes[1], jnp.ones((2, 8)), PartitionSpec("y"))
    message = f"topk: argument 'x' {WANT.replace('of .*', 'of jax.set_mesh')}"
    with jax.set_mesh(meshes[0]), pytest.raises(ValueError, match=message):
        jax_dsa.topk(rows, 2)


@pytest.mark.parametrize("name", ["DSAttention", "DSAttention.decode", "DecoderLM"])
def test_modules(name: str, meshes: list[Mesh]) -> None:
    """The parameters are on another mesh than the input."""
    one, other = meshes
    x: Any = jnp.ones((2, 3, CONFIG.model_dim))
    module: Any = nn.DSAttention(CONFIG, rngs=nnx.Rngs(0))
    if name == "DecoderLM":
        x, module = jnp.zeros((2, 3), jnp.int32), nn.DecoderLM(DECODER, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    moved = nnx.merge(graph, on(other, params, PartitionSpec()))
    decode = [moved.init_cache(2, 8)] if name.endswith("decode") else []
    with pytest.raises(ValueError, match=rf"^{name}: parameter '[\w.]+' {WANT}"):
        (moved.decode if decode else moved)(on(one, x, PartitionSpec("x")), *decode)


def test_parameters_without_a_mesh(meshes: list[Mesh]) -> None:
    """The two ways out that the page on troubleshooting names; without them, JAX raises."""
    mesh, _ = meshes
    graph, params = nnx.split(nn.DSAttention(CONFIG, rngs=nnx.Rngs(0)))
    x = on(mesh, jnp.ones((2, 3, CONFIG.model_dim)), PartitionSpec("x"))
    gradient = jax.jit(jax.grad(lambda params: nnx.merge(graph, params)(x)[0].sum()))
    with pytest.raises(Exception, match="Contracting dimensions are sharded and it is ambiguous"):
        gradient.eval_shape(params)
    placed = gradient.eval_shape(on(mesh, params, PartitionSpec()))
    with jax.set_mesh(mesh):
        entered = gradient.eval_shape(params)
    assert jax.tree.map(jnp.shape, placed) == jax.tree.map(jnp.shape, entered)
