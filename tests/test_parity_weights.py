"""Configurations and weights of `transformers`, from memory and files; needs the extra `parity`."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.hf_layers import DENSE, assert_close, load
from support.parity import (
    BATCH,
    MODELS,
    SIZES,
    fill,
    hf_config,
    our_layers,
    stack,
    tensors,
    torch,
    transformers,
)

from jax_dsa import nn

save_file = pytest.importorskip("safetensors.numpy", reason="needs the extra 'parity'").save_file
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra 'parity'")


@pytest.mark.parametrize("kind", MODELS)
def test_saved_weights_equal_loaded_weights(kind: str, tmp_path: pathlib.Path) -> None:
    """The weights come from arrays, and in bfloat16 from a file."""
    layers = stack(kind)[2]
    fill(kind, layers, 0)
    for i, (module, layer) in enumerate(zip(our_layers(kind), layers, strict=True)):
        want, prefix = tensors(layer), f"model.layers.{i}.self_attn."
        got = nn.save_hf(load(kind, module, want))
        assert {n for n in got if kind not in DENSE or "indexer." not in n} == want.keys()
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x)
        half = {prefix + name: x.bfloat16().contiguous() for name, x in layer.state_dict().items()}
        safetensors_torch.save_file(half, tmp_path / f"model-{i}.safetensors")
    for i, (module, layer) in enumerate(zip(our_layers(kind), layers, strict=True)):
        prefix = f"model.layers.{i}.self_attn."
        got = nn.save_hf(load(kind, module, tmp_path, prefix), prefix, dtype=jnp.bfloat16)
        for name, x in layer.state_dict().items():
            np.testing.assert_array_equal(got[prefix + name], x.bfloat16().float().numpy())


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0},
        {"factor": 2048.0, "original_max_position_embeddings": 512, "attention_factor": 1.0},
        {"factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 20.0},
        {"factor": 4.0, "original_max_position_embeddings": 100, "truncate": False},
    ],
)
def test_yarn_at_the_models_sizes(rope: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **rope}
    if "mscale" in rope:
        rope["mscale_all_dim"] = 1.0
    config = transformers.DeepseekV32Config(num_hidden_layers=1, rope_parameters=rope)
    modeling = transformers.models.deepseek_v32.modeling_deepseek_v32
    with torch.device("meta"):
        scale = modeling.DeepseekV32Attention(config, 0).scaling
    rotary = modeling.DeepseekV32RotaryEmbedding(config)
    (layer,) = nn.from_hf(config.to_dict())
    np.testing.assert_allclose(layer.config.rope_frequencies, rotary.inv_freq, rtol=1e-5)
    np.testing.assert_allclose(layer.config.rope_factor, rotary.attention_scaling, rtol=1e-6)
    np.testing.assert_allclose(layer.config.scale, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ("glm_moe_dsa", {"index_topk_freq": 3}),
        ("glm_moe_dsa", {"index_topk_pattern": "FFSSFSSS"}),
        ("mistral_large4", {"index_topk_freq": 2}),
        ("mistral_large4", {"no_rope_layer_interval": 3}),
        ("glm5_next", {}),
        ("glm5_next", {"layer_types": None, "index_kpool_always_select_tail": False}),
        ("hy_v4", {}),
        ("deepseek_v4", {"compress_ratios": [0, 0, 4, 128, 4, 128, 4, 4, 0]}),
    ],
)
def test_layers_that_transformers_derives(kind: str, fields: dict[str, Any]) -> None:
    model = MODELS[kind]
    own = ("indexer_types", "no_rope_layers", "kv_source_layers", "layer_types", "compress_rates")
    plain = {**SIZES, **{name: x for name, x in model.config.items() if name not in own}}
    plain |= {"num_hidden_layers": 8, "attention_bias": False, "rms_norm_eps": 1e-6, **fields}
    if kind == "deepseek_v4":
        plain |= {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
    config = type(hf_config(kind))(**copy.deepcopy(plain))
    assert nn.from_hf({**plain, "model_type": config.model_type}) == nn.from_hf(config)


def test_a_published_checkpoint(tmp_path: pathlib.Path) -> None:
    """The published names of DeepSeek-V4's weights differ from those of `transformers`' modules."""
    config = hf_config("deepseek_v4")
    config.n_routed_experts = config.n_shared_experts = config.num_experts_per_tok = 1
    config.moe_intermediate_size = 8
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    for i, (module, layer) in enumerate(
        zip(our_layers("deepseek_v4"), model.model.layers, strict=True)
    ):
        got = nn.save_hf(nn.load_hf(module, tmp_path, f"model.layers.{i}.attn."))
        for name, x in tensors(layer.self_attn).items():
            np.testing.assert_array_equal(got[name], x)


def test_a_model_from_files(tmp_path: pathlib.Path) -> None:
    """Loads two blocks of DeepSeek-V3.2 with YaRN from files into a `DecoderLM`."""
    config = hf_config("deepseek_v32")
    config.first_k_dense_replace, config.mlp_layer_types = 2, ["dense"] * 2
    torch.manual_seed(0)
    want = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in want.parameters():
        with torch.no_grad():
            p.add_(torch.randn_like(p), alpha=0.1)
    want.save_pretrained(tmp_path)
    attention = nn.from_hf(transformers.AutoConfig.from_pretrained(tmp_path))[0].config
    model = nn.DecoderLM(
        nn.DecoderConfig(attention, SIZES["vocab_size"], 2, SIZES["intermediate_size"]),
        rngs=nnx.Rngs(0),
    )
    files = nn.SafeTensors(tmp_path)
    model.embed.embedding.set_value(jnp.asarray(files["model.embed_tokens.weight"]))
    model.norm.scale.set_value(jnp.asarray(files["model.norm.weight"]))
    model.head.kernel.set_value(jnp.asarray(files["lm_head.weight"].T))
    for i, block in enumerate(model.blocks):
        name = f"model.layers.{i}."
        nn.load_hf(block.attention, files, f"{name}self_attn.")
        block.attention_norm.scale.set_value(jnp.asarray(files[f"{name}input_layernorm.weight"]))
        block.mlp_norm.scale.set_value(jnp.asarray(files[f"{name}post_attention_layernorm.weight"]))
        gate, up, down = (files[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
        block.mlp.gate_up.kernel.set_value(jnp.concatenate([gate, up], 1))
        block.mlp.down.kernel.set_value(jnp.asarray(down))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (BATCH, 77)).astype(np.int32)
    selections: list[Any] = []
    for layer in want.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda m, i, o: selections.append(o.numpy()))
    with torch.no_grad():
        logits = want(torch.tensor(tokens, dtype=torch.long)).logits
    # A tie in the first layer could change the scores of the second one, so the selections of
    # `transformers` are replayed.
    got, found = jax.jit(lambda t, s: model(t, indices=s))(tokens, selections)
    assert_close(got, logits, "deepseek_v32 logits of two blocks")
    own, again = jax.jit(lambda t: model(t))(tokens)
    same = np.ones(tokens.shape, bool)
    for recorded, other in zip(found, again, strict=True):
        ours, theirs = (np.sort(np.asarray(x.indices), -1) for x in (other, recorded))
        same &= (ours == theirs).all(-1)
    assert same.mean() > 0.9
    assert_close(np.asarray(own)[same], logits.numpy()[same], "deepseek_v32 logits of two blocks")


def test_a_dense_model_becomes_a_sparse_one_of_transformers(tmp_path: pathlib.Path) -> None:
    """The sparse model's files, read by `transformers`, compute the dense model's attention."""
    config = hf_config("deepseek_v3")
    config.first_k_dense_replace = config.num_hidden_layers
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    dense.save_pretrained(tmp_path / "dense")
    sizes = {"top_k": 512, "index_heads": 4, "index_dim": 16}
    layers, sparse = nn.sparse_from_hf(tmp_path / "dense", rngs=nnx.Rngs(0), **sizes)
    weights = dict(nn.SafeTensors(tmp_path / "dense"))
    for i, layer in enumerate(layers):
        weights |= nn.save_hf(layer, f"model.layers.{i}.self_attn.")
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(sparse))
    save_file(weights, tmp_path / "sparse" / "model.safetensors")
    tokens = torch.arange(2 * 40).reshape(2, 40) % SIZES["vocab_size"]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "sparse", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert_close(
            model(tokens).logits, dense(tokens).logits, "deepseek_v3 logits of the sparse model"
        )
