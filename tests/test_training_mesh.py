"""Training on meshes of host devices, compared with training on one device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.compare import assert_matches
from support.marks import slow
from support.training import ATTENTION, CONFIG, MESH_CONFIG, STAGES, corpus

from jax_dsa import nn
from jax_dsa.training.data import Batches, RunError
from jax_dsa.training.mesh import AXES, annotate, make_mesh, shardings
from jax_dsa.training.steps import Program

MESHES = [
    *({axis: 2} for axis in AXES),
    *({a: 2, b: 2} for a, b in itertools.combinations(AXES, 2)),
    {"fsdp": 2, "context": 2, "tensor": 2},
]


@functools.cache
def program_on(*sizes, axis_type=AxisType.Auto):
    mesh = make_mesh({"data": 1} | dict(sizes))
    types = (axis_type,) * len(mesh.axis_names)
    return Program(MESH_CONFIG, Mesh(mesh.devices, mesh.axis_names, axis_types=types))


@functools.cache
def one_step(*sizes, axis_type=AxisType.Auto):
    """Losses and the state after the first step of each stage, from the first state."""
    program = program_on(*sizes, axis_type=axis_type)
    batch = Batches(corpus().train, MESH_CONFIG.seq_len + 1, MESH_CONFIG.batch_size, 0)[0]
    found = {}
    for stage, step in STAGES.items():
        state = program.init()._replace(step=jnp.asarray(step, jnp.int32))
        found[stage] = program.step(state, batch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize(
    "sizes", MESHES, ids=lambda sizes: "-".join(f"{a}{n}" for a, n in sizes.items())
)
def test_a_step_on_a_mesh_matches_a_step_on_one_device(sizes, axis_type):
    for stage, (state, losses) in one_step(*sizes.items(), axis_type=axis_type).items():
        want_state, want_losses = one_step()[stage]
        assert losses.keys() == want_losses.keys()
        assert_matches(losses, want_losses, 1e-5, stage)
        for name, got in state._asdict().items():
            want = getattr(want_state, name)
            if not hasattr(want, "opt"):
                np.testing.assert_array_equal(got, want)
                continue
            # The optimizer's moments compare the gradients. A parameter whose gradient is nothing
            # but rounding errors may move in any direction, by at most the learning rate.
            assert_matches(got.opt, want.opt, 1e-4, f"{stage} {name}", least=1e-3)
            for g, w in zip(*map(jax.tree.leaves, (got.params, want.params)), strict=True):
                off = np.abs(np.asarray(g) - np.asarray(w))
                assert off.mean() <= 1e-5 and off.max() <= 2 * MESH_CONFIG.learning_rate


@pytest.mark.parametrize(
    "sizes", [{"context": 2}, slow({"tensor": 2}), slow({"fsdp": 2, "data": 2})], ids=str
)
def test_selections_do_not_depend_on_the_mesh(sizes):
    batch = Batches(corpus().train, MESH_CONFIG.seq_len + 1, MESH_CONFIG.batch_size, 0)[0]
    chosen = []
    for program in (program_on(), program_on(*sizes.items(), axis_type=AxisType.Explicit)):
        state, stripes = program.init(), program.mesh.shape["context"]

        def select(backbone, indexer, batch, program=program, stripes=stripes):
            _, layers = program.logits(backbone, indexer, batch, sparse=True, stripes=stripes)
            return jnp.stack([layer.indices for layer in layers])

        with jax.set_mesh(program.mesh):
            placed = program.place(batch, stripes)
            found = jax.jit(select)(state.backbone.params, state.indexer.params, placed)
        chosen.append([nn.unstriped(np.asarray(x), stripes) for x in found])
    np.testing.assert_array_equal(*chosen)


SHARES = [slow("data", 1.0), slow("fsdp", 0.52), slow("tensor", 0.85)]


@pytest.mark.parametrize("axis, share", SHARES)
def test_parameters_and_optimizer_states_are_sharded(axis, share):
    """ "tensor" does not divide the 257 tokens of the embedding, half of all parameters here."""
    state = one_step((axis, 2))["sparse"][0]
    arrays = jax.tree.leaves((state.backbone, state.indexer, state.control))
    held = sum(x.addressable_shards[0].data.size for x in arrays)
    assert held <= share * sum(x.size for x in arrays)


def test_a_context_axis_gathers_only_keys():
    """Each layer gathers its keys once and reduce-scatters their gradients."""
    program = program_on(("context", 2))
    c, rows, layers = ATTENTION, (4, CONFIG.seq_len), MESH_CONFIG.model.num_layers
    state = program.init()
    batch = program.place(np.zeros((4, CONFIG.seq_len + 1), np.int32), stripes=2)
    with jax.set_mesh(program.mesh):
        args = state.backbone, state.indexer, batch, program._rates(0)
        text = program._sparse.lower(*args).compile().as_text()
    keys = [(*rows, 1, c.kv_rank + c.rope_dim), (*rows, c.index_dim)]
    for name, shapes in (
        ("all-gather", keys),
        ("reduce-scatter", [(s[0], s[1] // 2, *s[2:]) for s in keys]),
    ):
        found = re.findall(rf"= \w+\[([\d,]*)\]\S* {name}\(", text)
        want = sorted(",".join(map(str, shape)) for shape in shapes * layers)
        assert sorted(found) == want, name


@pytest.mark.slow
def test_parameters_are_gathered_after_rounding():
    """Parameters are float32; fsdp gathers the bfloat16 values that the layers multiply by."""
    attention = dataclasses.replace(ATTENTION, dtype=jnp.bfloat16)
    model = dataclasses.replace(MESH_CONFIG.model, attention=attention, num_layers=1)
    program = Program(
        dataclasses.replace(MESH_CONFIG, model=model), make_mesh({"data": 1, "fsdp": 2})
    )
    state = program.init()
    assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state))
    batch = program.place(np.zeros((4, CONFIG.seq_len + 1), np.int32))
    with jax.set_mesh(program.mesh):
        args = state.backbone, state.indexer, batch, program._rates(0)
        text = program._sparse.lower(*args).compile().as_text()
    # On a CPU the gathered values are rounded to bfloat16 and stored as float32.
    found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(%(\w+)", text)
    # The weights of the indexer's heads are used in float32, so they are not rounded.
    weights = f"{ATTENTION.model_dim},{ATTENTION.index_heads}"
    masters = {shape for shape, operand in found if operand.startswith("param")}
    assert len(found) > 8 and masters == {weights}


@pytest.mark.slow
def test_microbatches_make_the_same_step():
    config = dataclasses.replace(MESH_CONFIG, accumulate=2)
    batch = Batches(corpus().train, config.seq_len + 1, config.batch_size, 0)[0]
    for sizes in ({"data": 1}, {"data": 2}):
        program = Program(config, make_mesh(sizes))
        for stage, step in STAGES.items():
            state = program.init()._replace(step=jnp.asarray(step, jnp.int32))
            state, losses = program.step(state, batch)
            want, want_losses = one_step()[stage]
            assert_matches(losses, want_losses, 1e-5, stage)
            for name in ("backbone", "indexer", "control"):
                got, exact = getattr(state, name).opt, getattr(want, name).opt
                assert_matches(got, exact, 1e-4, f"{stage} {name}", least=1e-3)


def test_meshes_without_some_of_the_axes(cpus):
    """What they lack shards nothing. An axis of another name is refused."""
    model = nn.DecoderLM(MESH_CONFIG.model, rngs=nnx.Rngs(0))
    annotate(model)
    params = nnx.state(model, nnx.Param)
    mesh = jax.make_mesh((2,), ("fsdp",), devices=cpus[:2])
    found = jax.device_put(params, shardings(params, mesh))["blocks"][0]
    assert found["attention"]["mla"]["w_uk"][...].sharding.spec == P(None, "fsdp", None)
    other = jax.make_mesh((2,), ("batch",), devices=cpus[:2])
    assert all(x.is_fully_replicated for x in jax.tree.leaves(shardings(params, other)))
    assert Program(MESH_CONFIG, mesh).mesh.shape == {"fsdp": 2}
    with pytest.raises(RunError, match=r"'mesh' has the axes \('batch',\), expected .*make_mesh"):
        Program(MESH_CONFIG, other)


def test_sizes_that_do_not_fit_are_rejected():
    assert make_mesh().shape == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    assert make_mesh({"tensor": 4}).shape["data"] == 2
    for sizes, message in (
        ({"heads": 2}, "expected at least 1 for each of"),
        ({"fsdp": 0}, "expected at least 1 for each of"),
        ({"fsdp": 16}, "expected at most 8 devices"),
    ):
        with pytest.raises(RunError, match=message):
            make_mesh(sizes)
    for sizes, message in (
        ({"data": 8}, r"batch_size is 4, expected a multiple of data \* fsdp \* accum.* = 8"),
        ({"context": 5, "data": 1}, "seq_len is 24, expected a multiple of context = 5"),
        ({"tensor": 4}, "num_heads is 2, expected a multiple of tensor = 4"),
    ):
        with pytest.raises(RunError, match=message):
            Program(MESH_CONFIG, make_mesh(sizes))
