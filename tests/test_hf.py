"""Weights by their names in `transformers`: saving, loading, and files."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import write_safetensors
from support.published_layers import COMPRESSED, LAYERS, VARIANT, layer

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
    "best key": {
        "indexer.q_proj.weight": "index_q_proj.weight",
        "indexer.k_proj.weight": "index_k_proj.weight",
        "indexer.q_norm.weight": "index_q_norm.weight",
        "indexer.k_norm.weight": "index_k_norm.weight",
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
        weights["o_proj.weight"] = weights["o_proj.weight"].astype(jnp.float8_e4m3fn)
        weights["o_proj.weight_scale_inv"] = np.ones((2, 3), np.float32)
    elif defect == "scales of floats":
        weights["o_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    elif defect == "scale of a norm":
        weights["kv_a_layernorm.weight_scale_inv"] = np.ones((1, 1), np.float32)
    elif defect == "no scale":
        weights["o_proj.weight"] = weights["o_proj.weight"].astype(jnp.float8_e4m3fn)
    elif defect == "two scales":
        weights["o_proj.weight"] = weights["o_proj.weight"].astype(jnp.float8_e4m3fn)
        weights["o_proj.weight_scale_inv"] = weights["wo.qscale_weight"] = np.float32(1)
    elif defect == "twice":
        weights["wo.weight"] = weights["o_proj.weight"]
    elif defect == "integers":
        weights["o_proj.weight"] = weights["o_proj.weight"].astype(np.int8)
    elif defect == "FP8 sinks":
        weights["sinks"] = weights["sinks"].astype(jnp.float8_e4m3fn)
    elif defect == "no array":
        weights["o_proj.weight"] = object()
    elif defect == "overflow":
        weights["o_proj.weight"] = np.full((16, 14), 1e200)
    elif defect == "unknown":
        weights["q_b_proj.weight"] = weights["q_proj.weight"]
    return weights


@pytest.mark.parametrize(
    ("defect", "error", "message"),
    [
        ("missing", KeyError, r"'tensors' lacks \['a.o_proj.weight'\]"),
        ("shape", ValueError, r"'a.o_proj.weight' has shape \(16, 13\), expected \(16, 14\)"),
        ("size", ValueError, r"'a.kv_b_proj.weight' has shape \(25, 8\), expected \(26, 8\)"),
        ("scale", ValueError, r"'a.o_proj.weight_scale_inv' has shape \(2, 3\), expected \(1, 1\)"),
        ("scales of floats", ValueError, r"float32 and scales 'a.o_proj.weight_scale_inv', expect"),
        ("scale of a norm", ValueError, r"\['a.kv_a_layernorm.weight_scale_inv'\], for which"),
        ("no scale", ValueError, r"no scales, expected one of \['a.o_proj.weight_scale_inv', 'a.o"),
        ("two scales", ValueError, r"weight_scale_inv' and tensor 'a.wo.qscale_weight' are both"),
        ("twice", ValueError, r"'a.o_proj.weight' and tensor 'a.wo.weight' are both o_proj.weight"),
        ("integers", ValueError, r"'a.o_proj.weight' has dtype int8, expected bfloat16, float16"),
        ("FP8 sinks", ValueError, r"'a.sinks' has dtype float8_e4m3fn, expected bfloat16, float16"),
        ("no array", TypeError, r"tensor 'a.o_proj.weight' is object, expected an array"),
        ("overflow", ValueError, r"tensor 'a.o_proj.weight' as float32 overflows"),
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


class OwnAttention(nn.DSAttention):
    """A user's subclass."""


class OwnCompressedAttention(nn.CompressedAttention):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("kind", "config"), [(OwnAttention, VARIANT), (OwnCompressedAttention, COMPRESSED)]
)
def test_subclasses_of_the_layers(rng, kind, config):
    want = nn.save_hf(layer(rng, config))
    got = nn.save_hf(nn.load_hf(kind(config, rngs=nnx.Rngs(1)), want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_final_dot_of_a_prefix_may_be_absent(rng):
    module = layer(rng, VARIANT)
    weights = nn.save_hf(module, "layers.1")
    assert weights.keys() == nn.save_hf(module, "layers.1.").keys()
    others = {f"layers.10.{name}": x for name, x in nn.save_hf(module).items()}
    other = nn.load_hf(nn.DSAttention(VARIANT, rngs=nnx.Rngs(1)), {**weights, **others}, "layers.1")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(other), nnx.state(module))


@pytest.mark.parametrize("part", ["mla", "indexer"])
def test_a_part_of_a_layer_is_refused(rng, part):
    module = layer(rng, VARIANT)
    for function in (lambda m: nn.load_hf(m, nn.save_hf(module)), nn.save_hf):
        with pytest.raises(
            TypeError, match=r"_hf: argument 'module' is .*, expected a whole atten"
        ):
            function(getattr(module, part))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensors": [1]}, "argument 'tensors' is list, expected a mapping"),
        ({"tensors": {1: np.zeros(2)}}, "argument 'tensors' has the name 1, expected only strs"),
        ({"prefix": None}, "argument 'prefix' is NoneType, expected a str"),
    ],
)
def test_arguments_of_the_wrong_type(rng, arguments, message):
    module = layer(rng, VARIANT)
    with pytest.raises(TypeError, match=message):
        nn.load_hf(module, **{"tensors": nn.save_hf(module), **arguments})


def test_saving_what_cannot_be_loaded_raises(rng):
    abstract = nnx.eval_shape(lambda: nn.DSAttention(VARIANT, rngs=nnx.Rngs(1)))
    with pytest.raises(TypeError, match=r"parameter 'q_proj.weight' of .* is abstract"):
        nn.save_hf(abstract)
    with pytest.raises(ValueError, match="argument 'dtype' is 'float8_e4m3fn', want bfloat16"):
        nn.save_hf(layer(rng, VARIANT), dtype=jnp.float8_e4m3fn)


def test_a_parameter_in_float16_refuses_larger_values(rng):
    module = layer(rng, VARIANT)
    sinks = module.mla.sinks
    sinks.set_value(sinks.get_value().astype(jnp.float16))
    weights = nn.save_hf(module)
    nn.load_hf(module, {**weights, "sinks": np.full(2, -np.inf, np.float32)})
    with pytest.raises(ValueError, match="tensor 'sinks' as float16 overflows"):
        nn.load_hf(module, {**weights, "sinks": np.full(2, 7e4, np.float32)})
    assert np.isneginf(sinks.get_value()).all()


def test_hints_about_missing_weights(rng):
    """A hint is given only if its reason explains all missing weights."""
    module = layer(rng, VARIANT)
    weights = nn.save_hf(module, "a.")
    indexer = [name for name in weights if ".indexer." in name]

    def message(tensors, prefix="a"):
        with pytest.raises(KeyError, match="load_hf: argument 'tensors' lacks") as error:
            nn.load_hf(module, tensors, prefix)
        return str(error.value)

    def without(*names):
        return {name: x for name, x in weights.items() if name not in names}

    assert "with new_indexer=True" in message(without(*indexer))
    for names in (indexer[:1], indexer[1:], [*indexer, "a.o_proj.weight"], ["a.o_proj.weight"]):
        text = message(without(*names))
        assert all(repr(name) in text for name in names)
        assert "new_indexer" not in text and "prefix" not in text
    first, second, *_ = weights
    text = message(weights, "model.layers.0")
    assert f"begin with prefix = 'model.layers.0.'? It has [{first!r}, {second!r}]" in text
    text = message(weights, "")
    assert f"begin with prefix = ''? It has [{first!r}, {second!r}]" in text


def test_a_shard_that_is_not_there_is_named(rng, tmp_path):
    """The index may have the published names."""
    module = layer(rng, VARIANT)
    weights = {
        name: "model-2.safetensors"
        if "o_proj" in name or "indexer" in name
        else "model-1.safetensors"
        for name in nn.save_hf(module, "a.")
    }
    renamed = {name.replace("o_proj", "wo"): file for name, file in weights.items()}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": renamed}))
    first = {name: x for name, x in nn.save_hf(module, "a.").items() if weights[name][6] == "1"}
    write_safetensors(tmp_path / "model-1.safetensors", first)
    absent = tmp_path / "model-2.safetensors"
    with pytest.raises(KeyError, match=rf"o_proj.* the files \['{absent}'\] of this checkpoint do"):
        nn.load_hf(module, tmp_path, "a")
    files = nn.SafeTensors(tmp_path)
    assert "a.wo.weight" not in files and files.keys() == first.keys()
    with pytest.raises(KeyError, match=f"lacks tensor 'a.wo.weight': its file {absent} does not"):
        files["a.wo.weight"]
    with pytest.raises(KeyError, match="lacks tensor 'b'\""):
        files["b"]


def test_messages_name_the_file(rng, tmp_path: pathlib.Path):
    module = layer(rng, VARIANT)
    weights = nn.save_hf(module, "a.")
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {**weights, "a.wo.weight": weights["a.o_proj.weight"]})
    with pytest.raises(ValueError, match=rf"o_proj.weight' in {file} and tensor 'a.wo.weight' in"):
        nn.load_hf(module, tmp_path, "a.")
    del weights["a.o_proj.weight"]
    write_safetensors(file, weights)
    with pytest.raises(KeyError, match=rf"{file} lacks \['a.o_proj.weight'\]"):
        nn.load_hf(module, file, "a.")
