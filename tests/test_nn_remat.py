"""Rematerialisation of blocks, queries in chunks, and the order of gradients."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.decoders import CONFIG, DECODER, SEGMENT_IDS, SHARING, B, T, attention, decoder, hidden
from support.marks import slow
from support.transforms import executions

from jax_dsa import nn, training
from jax_dsa.training.remat import RESIDUALS, SELECTION, remat_policy


@pytest.mark.slow
def test_remat_of_shared_layers(rng):
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    graph, params = nnx.split(decoder(SHARING))

    def gradients(policy):
        def loss(params):
            logits, layers = nnx.merge(graph, params)(tokens, remat_policy=remat_policy(policy))
            return jnp.sin(logits).sum() + training.indexer_loss(layers)

        return jax.jit(jax.grad(loss))(params)

    assert_matches(gradients("full"), gradients("none"), 1e-5)


def test_remat_policies_keep_gradients_and_selection(rng):
    module, x = attention(), hidden(rng)
    graph, params = nnx.split(module)

    def run(params, x):
        y, aux = nnx.merge(graph, params)(jnp.sin(x))
        return jnp.sin(y).sum() + aux.kl, aux.indices

    def differentiated(policy):
        fn = jax.checkpoint(run, policy=remat_policy(policy))
        return jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(params, x)

    want, indices = differentiated("none")
    for policy in ("full", "selection"):
        got, again = differentiated(policy)
        assert_matches(got, want, 1e-5, policy)
        np.testing.assert_array_equal(again, indices)


@pytest.mark.parametrize(
    "name", ["some", None, ["selection"], jax.checkpoint_policies.dots_saveable]
)
def test_names_of_policies(name):
    with pytest.raises(ValueError, match=r"remat_policy: argument 'name' is .*, expected one of"):
        remat_policy(name)


def test_decoder_rematerialises_each_block():
    tokens = jnp.zeros((B, T), jnp.int32)
    graph, params = nnx.split(decoder())

    def blocks(policy):
        def loss(params):
            model = nnx.merge(graph, params)
            return model(tokens, remat_policy=remat_policy(policy))[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("prevent_cse=True")

    assert blocks("none") == 0 and blocks("selection") == DECODER.num_layers


def test_barriers_order_the_gradients_of_blocks():
    tokens = jnp.zeros((B, T), jnp.int32)
    graph, params = nnx.split(decoder(dataclasses.replace(DECODER, num_layers=3)))

    def loss(params):
        return nnx.merge(graph, params)(tokens)[0].sum()

    one = len(jax.tree.leaves(params["blocks"][0])) + 1  # Parameters and hidden states.
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    barriers = re.findall(r"= stablehlo.optimization_barrier (.*) :", text)
    # There is a barrier in each pass between every two of the three blocks.
    assert [line.count("%") for line in barriers].count(one) == 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        {"sinks": True, "gate": True, "log_scaling": True},
    ],
)
@pytest.mark.parametrize("stripes", [slow(1), 2])
def test_queries_in_chunks(rng, changes, stripes):
    x, ids = hidden(rng), nn.striped(SEGMENT_IDS, stripes)

    def run(**more):
        graph, params = nnx.split(attention(**changes, **more))

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def gradients(params, x, indices):
            module = nnx.merge(graph, params)
            y, aux = module(x, segment_ids=ids, stripes=stripes, indices=indices)
            return jnp.sin(y).sum() + 3 * aux.kl, (y, aux)

        fresh, (y, aux) = gradients(params, x, None)
        given, again = gradients(params, x, aux.indices[..., ::-1])
        return (y, aux, again), (fresh, given)

    want, want_grads = run()
    for chunk in (T // stripes // 3, T // stripes // 2, T // stripes, 5 * T):
        got, grads = run(query_chunk=chunk)
        assert_matches(got, want, 1e-5, f"chunks of {chunk}")
        assert_matches(grads, want_grads, 1e-4, f"gradients, chunks of {chunk}")


def test_query_chunks_must_divide_the_sequence(rng):
    with pytest.raises(ValueError, match=r"'x' has shape \[2, 12, 16\], expected T .*chunk = 5"):
        attention(query_chunk=5)(hidden(rng))
    with pytest.raises(ValueError, match=r"expected T / 2 stripes to be a multiple of .* = 4"):
        attention(query_chunk=4)(hidden(rng), stripes=2)


def test_query_chunks_reduce_memory():
    tokens = jnp.zeros((1, 512), jnp.int32)

    def temporary_bytes(chunk):
        wide = dataclasses.replace(CONFIG, num_heads=16, kv_rank=64, query_chunk=chunk)
        config = dataclasses.replace(DECODER, attention=wide, num_layers=1)
        graph, params = nnx.split(decoder(config))

        def loss(params):
            logits, layers = nnx.merge(graph, params)(
                tokens, remat_policy=remat_policy("selection")
            )
            return logits.sum() + layers[0].kl

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    # The queries, the outputs and their gradients. A chunk has an eighth of them.
    numbers = 512 * 16 * (2 * (64 + 4) + 2 * 64)
    assert temporary_bytes(None) - temporary_bytes(64) > 4 * numbers / 2


@pytest.mark.parametrize(
    ("policy", "once"),
    [("none", RESIDUALS), ("full", ()), ("selection", SELECTION), ("attention", RESIDUALS)],
)
@pytest.mark.parametrize("chunk", [None, slow(4)])
def test_values_that_remat_policies_save(rng, policy, once, chunk):
    module, x = attention(query_chunk=chunk), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.checkpoint, policy=remat_policy(policy))
    def run(params):
        y, aux = nnx.merge(graph, params)(jnp.sin(x))
        return jnp.sin(y).sum() + aux.kl

    program = str(jax.make_jaxpr(jax.grad(run))(params))
    for name in RESIDUALS:
        # A policy that saves nothing recomputes the block and then each chunk.
        times = (1,) if name in once else (2, 3) if chunk and not once else (2,)
        arrays = 2 if name == "dsa_lse" else 1  # max_logit and log_sum
        assert program.count(f"name[name={name}]") in [n * arrays for n in times], name


def recomputed_passes():
    """Returns what the table of docs/training.md says of each pass of the sparse stage."""
    page = (pathlib.Path(__file__).parent.parent / "docs" / "training.md").read_text()
    (policies,) = re.findall(r"^\| computed again \| (.*) \|$", page, re.M)
    rows = dict(re.findall(r"^\| `(\w+_fwd)` \| ((?:yes|no).*) \|$", page, re.M))
    return {
        policy.strip("`"): {name: cells.split(" | ")[i] for name, cells in rows.items()}
        for i, policy in enumerate(policies.split(" | "))
    }


@pytest.mark.parametrize(("policy", "recomputed"), recomputed_passes().items())
def test_the_table_of_what_is_recomputed(rng, policy, recomputed):
    module, x = attention(), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.checkpoint, policy=remat_policy(policy))
    def run(params):
        y, aux = nnx.merge(graph, params)(jnp.sin(x))
        return jnp.sin(y).sum() + aux.kl

    program = jax.make_jaxpr(jax.grad(run))(params).jaxpr
    assert len(recomputed) == 4
    for name, answer in recomputed.items():
        assert executions(program, name) == {"no": 1, "yes": 2}[answer], name


def test_policy_none_saves_everything():
    """The backward pass then contains no operation of the forward pass."""

    def loss(x):
        return jnp.sin(jnp.sin(x)).sum()

    kept = jax.checkpoint(loss, policy=remat_policy("none"))
    program = str(jax.make_jaxpr(jax.grad(kept))(jnp.ones(8)))
    assert program.count(" = sin ") == str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(8))).count(
        " = sin "
    )


@pytest.mark.parametrize(("policy", "times"), [("selection", 2), ("attention", 1), ("none", 1)])
def test_how_often_remat_computes_the_warm_up_loss(rng, policy, times):
    module, x = attention(), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.checkpoint, policy=remat_policy(policy))
    def run(params):
        return nnx.merge(graph, params)(jnp.sin(x), sparse=False)[1].kl

    program = jax.make_jaxpr(jax.grad(run))(params).jaxpr
    assert executions(program, "dense_indexer_kl_loss_fwd") == times
