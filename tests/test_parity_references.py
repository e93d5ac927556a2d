"""Attention layers against results of `transformers` that tests/references holds.

The files make a small part of tests/test_parity.py run where torch and `transformers` are not
installed. `support.write_parity_references` writes them and describes their contents.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support.hf_layers import (
    DENSE,
    assert_close,
    compiled_layers,
    decode_ours,
    empty_caches,
    make_layers,
    run_ours,
    same_selection,
    specs_of,
)
from support.parity_references import (
    FOLDER,
    LENGTH,
    inputs,
    kept_columns,
    kept_numbers,
    weight,
)

from jax_dsa import nn

KINDS = (
    *("deepseek_v32", "glm_moe_dsa", "glm5_next", "hy_v4", "mistral_large4", "deepseek_v4"),
    *("minimax_m3_vl", "qwen4_exp"),
)
every_model = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def model(kind: str) -> tuple[Any, Any, Any, Any]:
    """Returns a model's file, our layers' specs, graph and parameters."""
    with np.load(FOLDER / f"{kind}.npz") as file:
        wanted = dict(file)
    alpha = wanted["rope_alpha"].tolist() if "rope_alpha" in wanted else None
    specs = specs_of(kind, json.loads(str(wanted["config"])), rope_alpha=alpha)
    layers = make_layers(specs)
    for i, layer in enumerate(layers):
        names = nn.save_hf(layer)
        nn.load_hf(layer, {name: weight(kind, i, name, x.shape) for name, x in names.items()})
    return wanted, specs, *nnx.split(layers)


def layer_inputs(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs of all layers, and the cotangents of their outputs."""
    wanted, specs, _, _ = model(kind)
    return inputs(len(specs), wanted["outputs"].shape[1], specs[0].config.model_dim)


def test_every_model_has_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.npz")} == {*KINDS, *DENSE}


@every_model
def test_outputs_and_gradients(kind: str) -> None:
    wanted, specs, graph, params = model(kind)
    x, cotangents = layer_inputs(kind)
    forward, replayed = compiled_layers(specs)
    _, indices, scores = forward(params, list(x))
    selections = [wanted.get(f"selection {i}") for i in range(len(specs))]
    selections = [None if s is None else s.astype(np.int32) for s in selections]
    outs, (d_params, d_inputs) = replayed(params, list(x), selections, list(cotangents))
    gradients = nnx.merge(graph, d_params)
    last = None
    for i, selection in enumerate(selections):
        what, want = f"{kind} layer {i}", wanted["outputs"][i]
        last = last if scores[i] is None else scores[i]
        if selection is not None:
            same = same_selection(indices[i], selection, last, f"{what} selection")
            assert same.mean() > 0.9, what
        assert_close(kept_columns(outs[i]), want, f"{what} output")
        want = wanted["input_gradients"][i]
        assert_close(kept_columns(d_inputs[i]), want, f"{what} gradient of the input")
        for name, got in nn.save_hf(gradients[i]).items():
            key = f"gradient {i} {name}"
            if key in wanted:
                assert_close(kept_numbers(got), wanted[key], f"{what} gradient of {name}")
            else:  # The indexer gets its gradients from its own loss.
                assert not np.any(got), f"{what} {name}"


@pytest.mark.parametrize("kind", DENSE)
def test_layers_with_new_indexers_compute_dense_attention(kind: str) -> None:
    wanted, specs, graph, params = model(kind)
    x, cotangents = layer_inputs(kind)

    @jax.jit
    def dense(params: Any, inputs: Any) -> Any:
        def loss(params: Any, inputs: Any) -> Any:
            outs, _ = run_ours(specs, nnx.merge(graph, params), inputs, sparse=False)
            return sum((o * c).sum() for o, c in zip(outs, cotangents, strict=True)), outs

        return jax.grad(loss, (0, 1), has_aux=True)(params, inputs)

    (d_params, d_inputs), outs = dense(params, list(x))
    for i, gradients in enumerate(nnx.merge(graph, d_params)):
        what, want = f"{kind} layer {i}", wanted["input_gradients"][i]
        assert_close(kept_columns(outs[i]), wanted["outputs"][i], f"{what} dense output")
        assert_close(kept_columns(d_inputs[i]), want, f"{what} dense gradient of the input")
        for name, got in nn.save_hf(gradients).items():
            if not name.startswith("indexer."):
                want = wanted[f"gradient {i} {name}"]
                assert_close(kept_numbers(got), want, f"{what} dense gradient of {name}")


@every_model
def test_decoding_from_an_empty_cache(kind: str) -> None:
    """One token at a time. The rows match those of `transformers` where the selections do."""
    wanted, specs, graph, params = model(kind)
    x, _ = layer_inputs(kind)
    batch = x.shape[1]

    @jax.jit
    def decoded(params: Any, inputs: Any, caches: Any) -> Any:
        def step(caches: Any, tokens: Any) -> Any:
            modules = nnx.merge(graph, params)
            outs, caches, selections = decode_ours(specs, modules, list(tokens), caches)
            return caches, (outs, selections)

        return jax.lax.scan(step, caches, inputs)[1]

    tokens = np.moveaxis(x, 2, 0)[:, :, :, None]
    outs, selections = decoded(params, tokens, empty_caches(specs, batch, LENGTH + 3))
    for i in range(len(specs)):
        same = np.ones((batch, LENGTH), bool)
        if f"selection {i}" in wanted:
            ours = np.moveaxis(np.asarray(selections[i])[:, :, 0], 0, 1)
            theirs = wanted[f"selection {i}"]
            for b, t in np.ndindex(same.shape):
                # There may be a list for each KV head.
                lists = (np.atleast_2d(x[b, t]).tolist() for x in (ours, theirs))
                same[b, t] = all({*x} - {-1} <= {*y} for x, y in zip(*lists, strict=True))
        assert same.mean() > 0.9, f"{kind} layer {i}"
        got = kept_columns(np.moveaxis(np.asarray(outs[i])[:, :, 0], 0, 1))
        assert_close(got[same], wanted["outputs"][i][same], f"{kind} layer {i} decoded")
