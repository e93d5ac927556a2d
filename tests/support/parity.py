"""Attention layers of `transformers` beside ours, with the same weights.

The layers of `transformers` run eagerly in float32; they need the extra `parity`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from flax import nnx

from jax_dsa import nn
from support.hf_layers import (
    DENSE,
    OFFSET_NORMS,
    compiled_layers,
    load,
    make_layers,
    specs_of,
)

torch = pytest.importorskip("torch", reason="needs the extra 'parity'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'parity'")

SLOW = pytest.mark.slow
SEEDS, BATCH = (0, 1, 2), 2
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 12,
    "vocab_size": 50,
    "intermediate_size": 40,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}


class Model(NamedTuple):
    """A model of `transformers` with a small configuration."""

    module: str
    """The module below `transformers.models`."""
    names: str
    """The prefix of the names of its classes."""
    config: dict[str, Any]
    """Fields of the configuration beside `SIZES`."""


MODELS = {
    "deepseek_v3": Model(
        "deepseek_v3",
        "DeepseekV3",
        {
            "q_lora_rank": 20,
            "v_head_dim": 12,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v2": Model(
        "deepseek_v2",
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "v_head_dim": 20,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "deepseek_v32": Model(
        "deepseek_v32",
        "DeepseekV32",
        {
            "q_lora_rank": 20,
            "v_head_dim": 12,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "glm_moe_dsa": Model(
        "glm_moe_dsa",
        "GlmMoeDsa",
        {
            "q_lora_rank": 20,
            "v_head_dim": 20,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "glm5_next": Model(
        "glm5_next",
        "Glm5NextText",
        {
            "q_lora_rank": 20,
            "v_head_dim": 20,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full", "shared", "full"],
            "index_kpool": 4,
            "pad_token_id": None,
        },
    ),
    "hy_v4": Model(
        "hy_v4",
        "HYV4",
        {
            "q_lora_rank": 20,
            "v_head_dim": 20,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "full", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Layers 1 and 3 have no RoPE. Layers 2 and 3 attend to the keys of layers 0 and 1.
    "mistral_large4": Model(
        "mistral_large4",
        "MistralLarge4Text",
        {
            "v_head_dim": 12,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
            "rope_parameters": {**YARN, "attention_factor": 1.0},
        },
    ),
    "deepseek_v4": Model(
        "deepseek_v4",
        "DeepseekV4",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 20,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 16,
            },
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 10,
            "index_topk": 5,
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k},
        },
    ),
    # Layer 0 is dense.
    "minimax_m3_vl": Model(
        "minimax_m3_vl",
        "MiniMaxM3VL",
        {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "rotary_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_block_size": 4,
            "index_topk_blocks": 5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "partial_rotary_factor": 0.4,
            },
        },
    ),
    "qwen4_exp": Model(
        "qwen4_exp",
        "Qwen4ExpText",
        {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "num_hidden_layers": 2,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_n_heads": 3,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 24,
            "indexer_compress_ratio": 4,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.4,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
}
WINDOW = MODELS["deepseek_v4"].config["sliding_window"]


def hf_config(kind: str) -> Any:
    """Returns the configuration of a model in `transformers`."""
    model = MODELS[kind]
    package = getattr(transformers.models, model.module)
    names = f"{model.names}TextConfig", f"{model.names}Config", f"{model.names[:-1]}Config"
    name = next(n for n in names if hasattr(package, n))
    sizes = {n: x for n, x in SIZES.items() if kind not in DENSE or not n.startswith("index_")}
    return getattr(package, name)(**{**sizes, **model.config})


@functools.cache
def stack(kind: str) -> tuple[Any, Any, list[Any], tuple[nn.HFLayer, ...]]:
    """Returns a model's configuration, rotary embedding and layers, and our layers' specs."""
    config, model = hf_config(kind), MODELS[kind]
    modeling = __import__(
        f"transformers.models.{model.module}.modeling_{model.module}", fromlist=["x"]
    )
    rotary = getattr(modeling, f"{model.names}RotaryEmbedding", lambda config: None)(config)
    alpha = None
    if hasattr(rotary, "alpha"):
        rotary.alpha.data += torch.linspace(-0.2, 0.3, len(rotary.alpha))
        alpha = rotary.alpha.tolist()
    layers = [
        getattr(modeling, f"{model.names}Attention")(config, i)
        for i in range(config.num_hidden_layers)
    ]
    return config, rotary, layers, specs_of(kind, config, rope_alpha=alpha)


@functools.cache
def our_layers(kind: str) -> list[Any]:
    """Returns our attention layers of a model."""
    return make_layers(stack(kind)[3])


def fill(kind: str, layers: list[Any], seed: int) -> None:
    """Fills the layers of a model with random weights, unlike those of an initialiser."""
    torch.manual_seed(seed)
    for layer in layers:
        for name, p in layer.named_parameters():
            with torch.no_grad():
                p.normal_(0, 0.3 if p.ndim == 1 else 1.5 * p.shape[-1] ** -0.5)
                is_norm = p.ndim == 1 and "norm" in name and name.endswith("weight")
                if is_norm and kind not in OFFSET_NORMS:
                    p.add_(1)
                if name.endswith("softmax_scaling.bias"):
                    p.add_(1)


def tensors(layer: Any) -> dict[str, np.ndarray]:
    """Returns a layer's weights as NumPy arrays."""
    return {name: x.numpy() for name, x in layer.state_dict().items()}


def causal_bias(length: int, past: int = 0, window: int | None = None) -> Any:
    """Returns the causal mask as a bias; with a window, for the keys that the cache still holds."""
    mask = torch.ones(length, past + length, dtype=torch.bool).tril(past)
    if window is not None:
        mask = mask.triu(past + 1 - window)[:, max(past - window + 1, 0) :]
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return bias[None, None].expand(BATCH, 1, -1, -1)


def run_hf(
    kind: str, inputs: Any, *, past: int = 0, cache: Any = None, places: Any = None
) -> tuple[list, list]:
    """Runs the layers of `transformers`, each on inputs of its own.

    Args:
        kind: The model.
        inputs: Hidden states of each layer.
        past: Number of tokens in the cache.
        cache: The cache of all layers.
        places: Rotary positions of Qwen3.8, [3, B, T], unlike those of a text.

    Returns:
        The outputs and the selections of all layers.
    """
    config, rotary, layers, _ = stack(kind)
    length = inputs[0].shape[1]
    positions = torch.arange(past, past + length)[None].expand(BATCH, -1)
    compressed = kind == "deepseek_v4"
    if compressed:
        names = ("main", "compress")
        rotations: Any = {name: rotary(inputs[0], positions, layer_type=name) for name in names}
    else:
        # A layer of Qwen3.8 rotates pools that begin in the cache, too.
        rotated = torch.arange(past + length)[None] if kind == "qwen4_exp" else positions
        rotated = rotated.expand(BATCH, -1) if places is None else places
        rotations = None if rotary is None else rotary(inputs[0], rotated)
    pool = getattr(config, "index_kpool", None)
    mask = causal_bias(length, past, WINDOW if compressed else None)
    if pool is not None:  # This layer only takes the mask of padding.
        mask = torch.ones(BATCH, length, dtype=torch.bool)
    outs, selections, selected = [], [], None
    extra: dict[str, Any] = {}
    if kind == "mistral_large4":
        extra["shared_kv_states"] = {}
    for layer, x in zip(layers, inputs, strict=True):
        found: list[Any] = []
        hook = None
        indexer = getattr(layer.compressor if compressed else layer, "indexer", None)
        if indexer is not None:
            hook = indexer.register_forward_hook(lambda m, i, o, found=found: found.append(o))
        if kind not in (*DENSE, *OFFSET_NORMS, "deepseek_v32", "deepseek_v4"):
            extra["prev_topk_indices"] = selected
        out, *_ = layer(
            x,
            position_embeddings=rotations,
            attention_mask=mask,
            position_ids=positions,
            **{"cache" if kind in OFFSET_NORMS else "past_key_values": cache},
            **extra,
        )
        if hook is not None:
            hook.remove()
            selected = found[0]
        outs.append(out)
        has_no_selection = selected is None or kind in DENSE or (compressed and indexer is None)
        picked = None if has_no_selection else selected.int().numpy()
        if kind in OFFSET_NORMS:
            picked = None if indexer is None else blocks_of(config, found[0])
        if pool is not None and picked is not None:  # Tokens of pools, then the tail.
            pools = min(config.index_topk, past + length) // pool
            picked = picked[..., : pools * pool : pool] // pool
        selections.append(picked)
    return outs, selections


def blocks_of(config: Any, selected: Any) -> np.ndarray:
    """Returns the selected blocks of MiniMax-M3 or Qwen3.8, -1 in empty slots."""
    if selected.dtype != torch.bool:  # [B, G, T, K]
        return selected.transpose(1, 2).int().numpy()
    mask, size = selected[:, 0].numpy(), config.indexer_compress_ratio  # of tokens, [B, T, S]
    pools = mask.shape[2] // size
    whole = mask[..., : pools * size].reshape(*mask.shape[:2], pools, size).all(-1)
    blocks = np.full((*mask.shape[:2], config.indexer_budget // size), -1, np.int32)
    for b, t in np.ndindex(*mask.shape[:2]):
        found = np.flatnonzero(whole[b, t])
        blocks[b, t, : len(found)] = found
    return blocks


@functools.cache
def compiled(kind: str) -> tuple[Any, Any]:
    """Returns a model's `compiled_layers`."""
    return compiled_layers(stack(kind)[3])


def filled(kind: str, seed: int) -> Any:
    """Fills the layers of `transformers` and returns the same parameters for our layers."""
    _, _, layers, _ = stack(kind)
    fill(kind, layers, seed)
    for module, layer in zip(our_layers(kind), layers, strict=True):
        load(kind, module, tensors(layer))
    return nnx.split(our_layers(kind))[1]
