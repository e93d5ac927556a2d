"""The operations of modules are named after the modules' paths; names change nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import runpy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_dsa import nn, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ATTENTION = nn.AttentionConfig(
    model_dim=16,
    num_heads=2,
    q_rank=8,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    v_dim=4,
    index_heads=2,
    index_dim=8,
    index_rope_dim=4,
    top_k=3,
    gate=True,
)
COMPRESSED = nn.CompressedConfig(
    model_dim=16,
    num_heads=2,
    q_rank=8,
    head_dim=8,
    rope_dim=4,
    out_groups=1,
    out_rank=8,
    window=4,
    ratio=2,
    top_k=3,
    index_dim=8,
)
COMPRESSED_LAYER = nn.CompressedAttention(COMPRESSED, rngs=nnx.Rngs(0))
GROUPED = nn.GroupedConfig(
    model_dim=16,
    num_heads=4,
    kv_heads=2,
    head_dim=8,
    rope_dim=4,
    indexer="max",
    block_size=4,
    top_k=2,
    index_heads=2,
    index_dim=8,
    gate=True,
)
GROUPED_LAYERS = [
    nn.GroupedAttention(dataclasses.replace(GROUPED, indexer=kind), rngs=nnx.Rngs(0))
    for kind in ("max", "mean")
]


def decoder(**fields: Any) -> nn.DecoderLM:
    attention = dataclasses.replace(ATTENTION, **fields)
    config = nn.DecoderConfig(attention, vocab=11, num_layers=2, mlp_dim=32)
    return nn.DecoderLM(config, rngs=nnx.Rngs(0))


def gradient(model: nnx.Module, **options: Any) -> tuple[Callable[..., Any], Any]:
    """Returns the gradient of a loss with the indexers' losses, and the parameters."""
    graph, params = nnx.split(model)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    x = tokens if isinstance(model, nn.DecoderLM) else jnp.ones((1, 8, 16))

    def loss(params: Any) -> jax.Array:
        y, aux = nnx.merge(graph, params)(x, **options)
        layers = aux if isinstance(aux, list) else [aux]
        return jnp.square(y).mean() + sum(layer.kl for layer in layers)

    return jax.grad(loss), params


def dots(jaxpr: Any, outer: str = "") -> Iterator[str]:
    """Returns the names of all matrix products of a program."""
    for equation in jaxpr.eqns:
        name = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general":
            yield name
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from dots(inner, name)


NAMED = r"\b(blocks/\d\)*/(attention|mlp)|head|CompressedAttention|GroupedAttention)\b"


@pytest.mark.parametrize(
    "model, options",
    [
        (decoder(), {}),
        (decoder(), {"sparse": False}),
        (decoder(), {"remat_policy": training.remat_policy("selection")}),
        (decoder(fp8=True, query_chunk=4), {}),
        (COMPRESSED_LAYER, {}),
        (COMPRESSED_LAYER, {"sparse": False}),
        (GROUPED_LAYERS[0], {}),
        (GROUPED_LAYERS[1], {"sparse": False}),
    ],
    ids=["sparse", "dense", "remat", "fp8", "compressed", "compressed_dense", "max", "mean_dense"],
)
def test_every_product_of_a_gradient_has_a_name(model: nnx.Module, options: dict[str, Any]) -> None:
    program, params = gradient(model, **options)
    names = list(dots(jax.make_jaxpr(program)(params).jaxpr))
    assert len(names) > 25
    assert [name for name in names if not re.search(NAMED, name)] == []
    # Forward and backward pass of each projection have the path that the parameters have.
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear) and not isinstance(module, nn.Fp8Linear):
            projection = "/".join(map(str, path))
            plain = [name.replace("(", "").replace(")", "") for name in names]
            backward = [name for name in plain if projection in name and "transpose" in name]
            forward = [name for name in plain if projection in name and "transpose" not in name]
            assert forward and backward, projection


@pytest.mark.parametrize("model", [decoder(), COMPRESSED_LAYER], ids=["decoder", "compressed"])
def test_compiled_products_have_names(model: nnx.Module) -> None:
    """XLA drops the names of some products of operators, in the pass batch-dot-simplification."""
    program, params = gradient(model)
    text = jax.jit(program).lower(params).compile().as_text()
    assert text is not None
    names = re.findall(r" = \S+ dot\(.*op_name=\"([^\"]*)\"", text)
    assert len(names) > 15 and [name for name in names if not re.search(NAMED, name)] == []


def test_names_do_not_change_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program, params = gradient(decoder(), remat_policy=training.remat_policy("attention"))
    named = jax.jit(program).lower(params).as_text()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    program, params = gradient(decoder(), remat_policy=training.remat_policy("attention"))
    assert jax.jit(program).lower(params).as_text() == named


def test_flame_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawing of a profile takes the blocks together and leaves out loops."""
    folder = pathlib.Path(__file__).parent.parent / "docs"
    monkeypatch.syspath_prepend(str(folder))
    script = runpy.run_path(str(folder / "flame_graph.py"))
    times = {
        ("forward", "blocks", "0", "attention", "while", "body"): 2,
        ("forward", "blocks", "1", "attention"): 1,
        ("backward", "head"): 1,
    }
    titles = re.findall(r"<g><title>(.*?)</title>", script["flame_graph"](times))
    assert titles[:3] == ["forward, 75.0 %", "blocks, 75.0 %", "attention, 75.0 %"]
    assert titles[3:] == ["backward, 25.0 %", "head, 25.0 %"]


def test_children_are_named_after_their_attributes() -> None:
    """A module without a parent of ours has the name of its class, and a new child gets a name."""
    other, block = decoder().blocks
    assert block.attention.mla.wq_b.scope == "wq_b"
    # A function that is jitted with one block is not traced again for the other.
    assert nnx.graphdef(block) == nnx.graphdef(other)
    layer = nn.DSAttention(ATTENTION, rngs=nnx.Rngs(0))
    (name, *_) = dots(jax.make_jaxpr(layer)(jnp.ones((1, 8, 16))).jaxpr)
    assert name == "/DSAttention/mla/wq_a"
    block.attention = layer
    assert layer.scope == "attention"
    # The names are no part of the parameters.
    assert not any("scope" in path for path, _ in nnx.to_flat_state(nnx.state(block)))
