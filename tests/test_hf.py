"""Weights by their names in `transformers`: saving, loading, and files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.models import LAYERS, VARIANT, layer

from jax_dsa import nn

PUBLISHED = {
    "latent": {
        "q_proj.weight": "wq.weight",
        "kv_a_proj_with_mqa.weight": "wkv_a_with_mqa.weight",
        "kv_a_layernorm.weight": "kv_a_norm.weight",
        "kv_b_proj.weight": "wkv_b.weight",
        "o_proj.weight": "wo.weight",
        "softmax_scaling.scale": "ssmax_scaling.s",
        "indexer.softmax_scaling.bias": "indexer.ssmax_scaling.b",
        "gate_proj.weight": "linear_gate.weight",
        "sinks": "learnable_sink_param",
    },
    "selected": {
        "sinks": "attn_sink",
        "q_a_proj.weight": "wq_a.weight",
        "q_a_norm.weight": "q_norm.weight",
        "q_b_proj.weight": "wq_b.weight",
        "kv_proj.weight": "wkv.weight",
        "o_a_proj.weight": "wo_a.weight",
        "o_b_proj.weight": "wo_b.weight",
        "compressor.kv_proj.weight": "compressor.wkv.weight",
        "compressor.gate_proj.weight": "compressor.wgate.weight",
        "compressor.position_bias": "compressor.ape",
        "compressor.kv_norm.weight": "compressor.norm.weight",
        "compressor.indexer.kv_proj.weight": "indexer.compressor.wkv.weight",
        "compressor.indexer.position_bias": "indexer.compressor.ape",
        "compressor.indexer.kv_norm.weight": "indexer.compressor.norm.weight",
        "compressor.indexer.q_b_proj.weight": "indexer.wq_b.weight",
        "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_loading_weights_by_their_published_names(rng, kind):
    module = layer(rng, LAYERS[kind])
    weights, renamed = nn.save_hf(module), PUBLISHED[kind]
    assert set(renamed) <= set(weights)
    other = type(module)(LAYERS[kind], rngs=nnx.Rngs(1))
    nn.load_hf(other, {renamed.get(name, name): x for name, x in weights.items()})
    jax.tree.map(np.testing.assert_array_equal, nnx.state(other), nnx.state(module))


@pytest.mark.parametrize("kind", LAYERS)
def test_saved_weights_can_be_loaded(rng, kind):
    module = layer(rng, LAYERS[kind])
    other = type(module)(LAYERS[kind], rngs=nnx.Rngs(1))
    weights = nn.save_hf(module, "model.layers.7.self_attn.")
    assert len(weights) == len({*weights})
    nn.load_hf(other, weights, "model.layers.7.self_attn.")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(other), nnx.state(module))


def write_safetensors(path, tensors):
    """Writes a safetensors file: the length of the header, the header, the data."""
    header, start, blobs = {}, 0, []
    names = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    for name, x in tensors.items():
        blobs.append(np.ascontiguousarray(x).tobytes())
        end = start + len(blobs[-1])
        entry = {"dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": [start, end]}
        header[name], start = entry, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def test_loading_files_onto_a_mesh(rng, tmp_path):
    module = layer(rng, VARIANT)
    weights = nn.save_hf(module, "a.", dtype=jnp.bfloat16)
    items = list(weights.items())
    write_safetensors(tmp_path / "model-1.safetensors", dict(items[:5]))
    write_safetensors(tmp_path / "model-2.safetensors", dict(items[5:]))
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("n"))
    other = nn.DSAttention(VARIANT, rngs=nnx.Rngs(1))
    other.mla.w_uk.set_value(jax.device_put(other.mla.w_uk.get_value(), split))
    nn.load_hf(other, tmp_path, "a.")
    assert other.mla.w_uk.get_value().sharding == split
    assert other.mla.w_uk.get_value().dtype == jnp.float32
    for name, x in nn.save_hf(other, "a.").items():
        np.testing.assert_array_equal(x, weights[name].astype(np.float32))
    abstract = nnx.eval_shape(lambda: nn.DSAttention(VARIANT, rngs=nnx.Rngs(1)))
    nn.load_hf(abstract, tmp_path, "a.")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(abstract), nnx.state(other))


def test_fp8_weights_are_scaled_by_block(rng):
    config = dataclasses.replace(VARIANT, model_dim=300, bias=False)
    module = nn.DSAttention(config, rngs=nnx.Rngs(0))
    weights = nn.save_hf(module)
    name = "o_proj.weight"
    rows, columns = weights[name].shape
    assert rows == 300 and columns < 128
    scale = rng.uniform(0.5, 2, size=(3, 1)).astype(np.float32)
    weights[name] = weights[name].astype(jnp.float8_e4m3fn)
    want = weights[name].astype(np.float32) * np.repeat(scale, 128, 0)[:rows]
    nn.load_hf(module, {**weights, f"{name}_scale_inv": scale})
    np.testing.assert_array_equal(nn.save_hf(module)[name], want)


def corrupted(weights, defect):
    """Returns a layer's weights with a defect in a tensor that is loaded after others."""
    weights = dict(weights)
    if defect == "missing":
        del weights["o_proj.weight"]
    elif defect == "shape":
        weights["o_proj.weight"] = weights["o_proj.weight"][:, 1:]
    elif defect == "size":  # It cannot be reshaped to the heads.
        weights["kv_b_proj.weight"] = weights["kv_b_proj.weight"][1:]
    elif defect == "scale":
        weights["o_proj.weight_scale_inv"] = np.ones((2, 1), np.float32)
    elif defect == "unknown":
        weights["q_b_proj.weight"] = weights["q_proj.weight"]
    return weights


@pytest.mark.parametrize(
    ("defect", "error", "message"),
    [
        ("missing", KeyError, r"'tensors' lacks \['a.o_proj.weight'\]"),
        ("shape", ValueError, r"'a.o_proj.weight' has shape \(16, 13\), expected \(16, 14\)"),
        ("size", ValueError, r"'a.kv_b_proj.weight' has shape \(25, 8\), expected \(26, 8\)"),
        ("scale", ValueError, r"weight_scale_inv' has shape \(2, 1\), expected \(1, 1\)"),
        ("unknown", ValueError, r"has \['a.q_b_proj.weight'\], for which the module has no"),
    ],
)
def test_weights_that_do_not_fit_leave_the_module_unchanged(rng, defect, error, message):
    weights = corrupted(nn.save_hf(layer(rng, VARIANT)), defect)
    module = nn.DSAttention(VARIANT, rngs=nnx.Rngs(1))
    before = jax.tree.map(np.array, nnx.state(module))
    with pytest.raises(error, match=message):
        nn.load_hf(module, {f"a.{name}": x for name, x in weights.items()}, "a.")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), before)


def test_unknown_model_type_raises():
    with pytest.raises(ValueError, match="model_type is 'llama', expected one of"):
        nn.from_hf({"model_type": "llama"})
