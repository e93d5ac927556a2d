"""Sparse layers from checkpoints of dense models."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import quantized, write_safetensors
from support.published_configs import CONFIGS, SIZES, YARN
from support.published_layers import COMPRESSED, VARIANT

from jax_dsa import nn
from jax_dsa.nn.hf_config import DENSE_MODELS

PREFIX = "model.layers.{}.self_attn."
INDEXER = {"top_k": 4, "index_heads": 2, "index_dim": 16}
CONFIG = {
    **{name: x for name, x in SIZES.items() if not name.startswith("index_")},
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", **YARN},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]},
}
LITE = {**CONFIG, "q_lora_rank": None, "rope_scaling": None}


def dense_weights(config, prefix=PREFIX, seed=0):
    """Returns random weights of a dense model, by their names in `transformers`."""
    rng, c = np.random.default_rng(seed), types.SimpleNamespace(**config)
    heads, rank = c.num_attention_heads, c.q_lora_rank
    shapes = {
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "kv_a_layernorm": (c.kv_lora_rank,),
        "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj": (c.hidden_size, heads * c.v_head_dim),
    }
    width = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if rank is None:
        shapes |= {"q_proj": (width, c.hidden_size)}
    else:
        shapes |= {"q_a_proj": (rank, c.hidden_size), "q_a_layernorm": (rank,)}
        shapes |= {"q_b_proj": (width, rank)}
    return {
        f"{prefix.format(i)}{name}.weight": rng.normal(size=shape).astype(np.float32)
        for i in range(c.num_hidden_layers)
        for name, shape in shapes.items()
    }


def write_model(folder, config, weights):
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", weights)


def saved(layers, prefix=PREFIX):
    """Returns the weights of all layers."""
    return {
        name: x
        for i, layer in enumerate(layers)
        for name, x in nn.save_hf(layer, prefix.format(i)).items()
    }


def without_indexers(weights):
    return {name: x for name, x in weights.items() if ".indexer." not in name}


@pytest.mark.parametrize("config", [CONFIG, LITE], ids=["latent queries", "plain queries"])
def test_a_dense_model_becomes_sparse_and_is_saved(config, tmp_path):
    want = dense_weights(config)
    frequencies = {PREFIX.format(0) + "rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_model(tmp_path, config, {**want, **frequencies})
    layers, sparse = nn.sparse_from_hf(tmp_path, rngs=nnx.Rngs(0), **INDEXER)
    weights = saved(layers)
    jax.tree.map(np.testing.assert_array_equal, without_indexers(weights), want)
    first, second = (layer.indexer.wk.kernel.get_value() for layer in layers)
    assert first.std() > 0 and not np.array_equal(first, second)
    again, _ = nn.sparse_from_hf(config, want, rngs=nnx.Rngs(0), **INDEXER)
    jax.tree.map(np.testing.assert_array_equal, saved(again), weights)

    folder = tmp_path / "sparse"
    folder.mkdir()
    write_model(folder, sparse, weights)
    loaded = [
        nn.load_hf(nn.DSAttention(spec.config, rngs=nnx.Rngs(i)), folder, PREFIX.format(i))
        for i, spec in enumerate(nn.from_hf(folder))
    ]
    jax.tree.map(np.testing.assert_array_equal, saved(loaded), weights)
    assert loaded[1].config == layers[1].config


def test_the_configuration_of_the_sparse_model():
    sparse = nn.sparse_hf_config(CONFIG, top_k=np.int64(4), index_heads=2, index_dim=16)
    added = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    changed = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    removed = {"auto_map": None, "quantization_config": None}
    assert {**CONFIG, **removed} | sparse == {**CONFIG, **removed, **added, **changed}
    assert not removed.keys() & sparse.keys()
    assert json.loads(json.dumps(sparse)) == sparse
    published = {**CONFIGS["deepseek_v32 as published"], "index_topk": 4, "num_hidden_layers": 2}
    assert nn.from_hf(sparse) == nn.from_hf(published)
    for kind in DENSE_MODELS:
        assert nn.sparse_hf_config({**CONFIG, "model_type": kind}, **INDEXER) == sparse
    (first, *_) = nn.from_hf(nn.sparse_hf_config(CONFIG))
    assert (first.config.top_k, first.config.index_heads, first.config.index_dim) == (2048, 64, 128)


@pytest.mark.parametrize("block", [(16, 16), (8, 32)])
@pytest.mark.parametrize("source", ["files", "arrays", "arrays of a part"])
def test_fp8_weights(rng, source, block, tmp_path):
    codes, want = {}, {}
    prefix = PREFIX if source != "arrays of a part" else f"language_model.{PREFIX}"
    for name, x in dense_weights(CONFIG, prefix).items():
        if x.ndim == 1:
            codes[name] = want[name] = x
        else:
            codes[name], codes[f"{name}_scale_inv"], want[name] = quantized(rng, x, block)
    config = {**CONFIG, "quantization_config": {"weight_block_size": block}}
    if source == "arrays of a part":
        quantization = {"quantization_config": config.pop("quantization_config")}
        config = {"model_type": "kimi_k25", "text_config": config, **quantization}
    if source == "files":
        write_model(tmp_path, config, codes)
    arguments = (tmp_path,) if source == "files" else (config, codes)
    layers, _ = nn.sparse_from_hf(*arguments, rngs=nnx.Rngs(0), prefix=prefix, **INDEXER)
    jax.tree.map(np.testing.assert_array_equal, without_indexers(saved(layers, prefix)), want)


def sparse_weights():
    layers, _ = nn.sparse_from_hf(CONFIG, dense_weights(CONFIG), rngs=nnx.Rngs(0), **INDEXER)
    return saved(layers)


@pytest.mark.parametrize("kept", ["1.self_attn.indexer.k_norm.bias", "indexer"])
def test_indexers_in_the_checkpoint_are_not_replaced(kept, tmp_path):
    weights = {n: x for n, x in sparse_weights().items() if ".indexer." not in n or kept in n}
    write_model(tmp_path, CONFIG, weights)
    with pytest.raises(
        ValueError, match=r"self_attn.indexer.k_norm.bias'.*\] of an indexer, expec"
    ):
        nn.sparse_from_hf(tmp_path, rngs=nnx.Rngs(0), **INDEXER)


def test_missing_weights_are_named(tmp_path):
    weights = dense_weights(CONFIG)
    del weights[PREFIX.format(1) + "o_proj.weight"]
    write_model(tmp_path, CONFIG, weights)
    message = rf"{tmp_path} lacks \['model.layers.1.self_attn.o_proj.weight'\]"
    with pytest.raises(KeyError, match=message):
        nn.sparse_from_hf(tmp_path, rngs=nnx.Rngs(0), **INDEXER)
    with pytest.raises(
        KeyError, match=r"lacks .*do the names begin with prefix = 'layers.0.attn.'"
    ):
        nn.sparse_from_hf(tmp_path, rngs=nnx.Rngs(0), prefix="layers.{}.attn", **INDEXER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "deepseek_v32"},
            "is 'deepseek_v32', expected a dense model, one of .*load",
        ),
        ({"model_type": "llama"}, "model_type in .* is 'llama', expected a dense model, one of"),
        ({"index_topk": 8}, r"has the fields \['index_topk'\] of a model with indexers, expected"),
        ({"rope_interleave": False}, "'rope_interleave' in .* is False, expected True"),
    ],
)
def test_configurations_of_other_models(fields, message, tmp_path):
    config = {**CONFIG, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path):
        with pytest.raises(ValueError, match=f"sparse_hf_config: .*{message}"):
            nn.sparse_hf_config(source, **INDEXER)
        with pytest.raises(ValueError, match=f"sparse_from_hf: .*{message}"):
            nn.sparse_from_hf(source, {}, rngs=nnx.Rngs(0), **INDEXER)


def test_a_missing_field_is_named_with_its_file(tmp_path):
    config = {name: x for name, x in CONFIG.items() if name != "kv_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for function in (nn.sparse_hf_config, lambda x: nn.sparse_from_hf(x, {}, rngs=nnx.Rngs(0))):
        with pytest.raises(KeyError, match=rf"{tmp_path}.* lacks the field 'kv_lora_rank'"):
            function(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"tensors": None},
            TypeError,
            "sparse_from_hf: argument 'tensors' is None, expected the w",
        ),
        ({"rngs": 0}, TypeError, "sparse_from_hf: argument 'rngs' is int, want Rngs"),
        ({"prefix": "a."}, ValueError, "sparse_from_hf: argument 'prefix' is 'a.', expected a str"),
        ({"top_k": 0}, ValueError, "sparse_from_hf: argument 'top_k' is 0, want int in 1"),
        ({"index_heads": 2.0}, TypeError, "sparse_from_hf: argument 'index_heads' is .*, want an"),
        ({"index_dim": 4}, ValueError, "index_rope_dim is 8, expected at most index_dim = 4"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    given = {"tensors": dense_weights(CONFIG), "rngs": nnx.Rngs(0), **INDEXER, **arguments}
    with pytest.raises(error, match=message):
        nn.sparse_from_hf(CONFIG, **given)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sparse_from_hf: cannot read '.*nowhere'"):
        nn.sparse_from_hf(tmp_path / "nowhere", rngs=nnx.Rngs(0))
    with pytest.raises(FileNotFoundError, match=r"sparse_hf_config: cannot read '.*nowhere'"):
        nn.sparse_hf_config(tmp_path / "nowhere")


def test_a_dense_checkpoint_names_the_way_to_load_it():
    with pytest.raises(
        ValueError, match=r"is 'deepseek_v3', expected .*; sparse_from_hf gives a de"
    ):
        nn.from_hf(CONFIG)
    config = nn.from_hf(nn.sparse_hf_config(CONFIG, **INDEXER))[0].config
    module = nn.DSAttention(config, rngs=nnx.Rngs(0))
    with pytest.raises(
        KeyError, match=r"lacks .*indexer.wk.weight'.*; load the layer of a dense m"
    ):
        nn.load_hf(module, dense_weights(CONFIG), PREFIX.format(0))


def test_new_indexer_leaves_the_indexer_and_failed_modules_unchanged():
    config = nn.from_hf(nn.sparse_hf_config(CONFIG, **INDEXER))[0].config
    module = nn.DSAttention(config, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.state(module))
    weights = dense_weights(CONFIG)
    name = PREFIX.format(0) + "o_proj.weight"
    with pytest.raises(ValueError, match=f"{name}' has shape"):
        wrong = {**weights, name: weights[name][1:]}
        nn.load_hf(module, wrong, PREFIX.format(0), new_indexer=True)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), before)
    nn.load_hf(module, weights, PREFIX.format(0), new_indexer=True)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module.indexer), before["indexer"])
    np.testing.assert_array_equal(nn.save_hf(module, PREFIX.format(0))[name], weights[name])


def test_new_indexer_needs_an_indexer():
    shared = nn.DSAttention(VARIANT, "shared", rngs=nnx.Rngs(0))
    compressed = nn.CompressedAttention(COMPRESSED, rngs=nnx.Rngs(0))
    for module in (shared, compressed):
        with pytest.raises(ValueError, match="without a lightning indexer, expected one"):
            nn.load_hf(module, nn.save_hf(module), new_indexer=True)
    abstract = nnx.eval_shape(lambda: nn.DSAttention(VARIANT, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="the indexer of argument 'module' is abstract"):
        nn.load_hf(abstract, {}, new_indexer=True)
