"""Configurations of published models' attention layers, from those of `transformers`.

Only attention and indexer are covered. Experts, routers, hyper-connections and embeddings belong to
the user's model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_dsa.nn.compressed_config import CompressedConfig
from jax_dsa.nn.config import AttentionConfig, IndexerType
from jax_dsa.nn.rotary import yarn_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence


class HFLayer(NamedTuple):
    """The arguments from which one attention layer of a model is built."""

    config: AttentionConfig | CompressedConfig
    """An `AttentionConfig` for `DSAttention`, a `CompressedConfig` for `CompressedAttention`."""
    indexer_type: IndexerType
    """Second argument of `DSAttention`."""
    kv_source: int
    """Number of the layer whose keys this one attends to: its own number, or that of an earlier
    layer, whose `aux.kv` it takes as `kv`."""


def from_hf(
    config: Any, *, rope_alpha: Sequence[float] | None = None, dtype: Any = jnp.float32
) -> tuple[HFLayer, ...]:
    """Returns the attention layers of a model, from its configuration in `transformers`.

    Args:
        config: The configuration, or the dictionary that its `to_dict` returns. If it contains a
            `text_config`, that one counts. The model types `deepseek_v32`, `glm_moe_dsa`, `hy_v4`,
            `mistral_large4` (by its `text_config`) and `deepseek_v4` are supported.
        rope_alpha: The checkpoint's learnt logarithms of frequency factors, one per rotary pair
            (Mistral's `rotary_emb.alpha`).
        dtype: Dtype of activations and caches.

    Returns:
        One `HFLayer` per layer of the model.

    Raises:
        KeyError: If the configuration lacks a field.
        ValueError: If the model type or its type of rotary embedding is not supported.

    Examples:
        >>> from jax_dsa import nn
        >>> layers = nn.from_hf({
        ...     "model_type": "glm_moe_dsa", "num_hidden_layers": 2,
        ...     "indexer_types": ["full", "shared"], "hidden_size": 64, "num_attention_heads": 4,
        ...     "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
        ...     "qk_rope_head_dim": 8, "v_head_dim": 16, "attention_bias": False,
        ...     "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
        ...     "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        ... })
        >>> [(layer.indexer_type, layer.config.top_k) for layer in layers]
        [('full', 8), ('shared', 8)]
    """
    c = dict(config) if isinstance(config, Mapping) else config.to_dict()
    c = c.get("text_config", c)
    kind = c["model_type"]
    if kind not in _MODELS:
        raise ValueError(f"from_hf: model_type is {kind!r}, expected one of {tuple(_MODELS)}")
    return _MODELS[kind](c, rope_alpha, dtype)


def _mla(
    c: dict[str, Any], alpha: Sequence[float] | None, dtype: Any, **own: Any
) -> tuple[HFLayer, ...]:
    """Returns layers of multi-head latent attention.

    Args:
        c: The configuration as a dictionary.
        alpha: `rope_alpha` of `from_hf`.
        dtype: Dtype of activations and caches.
        **own: Fields of `AttentionConfig` that are particular to the model type.
    """
    heads, rope_dim = c["num_attention_heads"], c["qk_rope_head_dim"]
    fields = {
        "model_dim": c["hidden_size"],
        "num_heads": heads,
        "q_rank": c.get("q_lora_rank"),
        "kv_rank": c["kv_lora_rank"],
        "nope_dim": c["qk_nope_head_dim"],
        "rope_dim": rope_dim,
        "v_dim": c["v_head_dim"],
        "index_heads": c["index_n_heads"],
        "index_dim": c["index_head_dim"],
        "index_rope_dim": rope_dim,
        "top_k": c["index_topk"],
        "bias": c["attention_bias"],
        "scale_factor": _scale_factor(c["rope_parameters"]),
        # `transformers` fixes the epsilon of these layers' norms. `rms_norm_eps` is that of the
        # residual stream's norms.
        "norm_eps": 1e-6,
        "dtype": dtype,
        **_rotation(c["rope_parameters"], rope_dim, alpha),
        **own,
    }
    count = c["num_hidden_layers"]
    types = c.get("indexer_types") or ["full"] * count
    sources = c.get("kv_source_layers") or range(count)
    # 1 marks a layer with RoPE, despite the name.
    has_rope = c.get("no_rope_layers") or [1] * count
    layers = []
    for i, (kind, source, rotary) in enumerate(zip(types, sources, has_rope, strict=True)):
        layer = dict(fields, shares_keys=source != i)
        if not rotary:
            layer |= {"nope_dim": layer["nope_dim"] + rope_dim, "rope_dim": 0, "index_rope_dim": 0}
            layer |= {"rope_frequencies": None}
        layers.append(HFLayer(AttentionConfig(**layer), kind, source))
    return tuple(layers)


def _compressed(
    c: dict[str, Any], alpha: Sequence[float] | None, dtype: Any
) -> tuple[HFLayer, ...]:
    """Returns layers of DeepSeek-V4, whose type decides how they compress and rotate keys."""
    layers = []
    for i, kind in enumerate(c["layer_types"]):
        window_only = kind == "sliding_attention"
        indexed = kind == "compressed_sparse_attention"
        rope = c["rope_parameters"]["main" if window_only else "compress"]
        width = int(c["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        config = CompressedConfig(
            model_dim=c["hidden_size"],
            num_heads=c["num_attention_heads"],
            q_rank=c["q_lora_rank"],
            head_dim=c["head_dim"],
            rope_dim=width,
            out_groups=c["o_groups"],
            out_rank=c["o_lora_rank"],
            window=c["sliding_window"],
            ratio=None if window_only else c["compress_rates"][kind],
            overlap=indexed,
            top_k=c["index_topk"] if indexed else None,
            index_heads=c["index_n_heads"],
            index_dim=c["index_head_dim"],
            norm_eps=c["rms_norm_eps"],
            dtype=dtype,
            **_rotation(rope, width, alpha),
        )
        layers.append(HFLayer(config, "full", i))
    return tuple(layers)


_MODELS: dict[str, Callable[[dict[str, Any], Any, Any], tuple[HFLayer, ...]]] = {
    "deepseek_v32": _mla,
    "deepseek_v4": _compressed,
    "glm_moe_dsa": lambda c, a, d: _mla(c, a, d, index_rope_layout="interleaved"),
    "hy_v4": lambda c, a, d: _mla(
        *(c, a, d),
        rope_layout="half",
        index_rope_last=True,
        index_norm_eps=c["rms_norm_eps"],
        sinks=True,
        gate=True,
    ),
    "mistral_large4_text": lambda c, a, d: _mla(
        *(c, a, d),
        q_rank=None,
        index_rope_layout="interleaved",
        norm_eps=c["rms_norm_eps"],
        index_norm_eps=1e-6,
        log_scaling=True,
    ),
}


def _magnitude(factor: float, weight: float) -> float:
    """Returns YaRN's factor for attention scores in a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale_factor(rope: dict[str, Any]) -> float:
    """Returns `AttentionConfig.scale_factor` for a model's `rope_parameters`."""
    weight = rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not weight:
        return 1.0
    return _magnitude(rope["factor"], weight) ** 2


def _rotation(
    rope: dict[str, Any], width: int, alpha: Sequence[float] | None = None
) -> dict[str, Any]:
    """Returns the rotary fields of a layer's configuration for a model's `rope_parameters`."""
    kind, base = rope["rope_type"], float(rope["rope_theta"])
    factor = rope.get("attention_factor")
    if kind == "default":
        frequencies = base ** (-np.arange(0, width, 2) / width)
    elif kind == "yarn":
        stretch = rope["factor"]
        names = ("beta_fast", "beta_slow", "truncate")
        options: dict[str, Any] = {k: rope[k] for k in names if rope.get(k) is not None}
        length = rope["original_max_position_embeddings"]
        frequencies = np.asarray(
            yarn_frequencies(width, base=base, factor=stretch, original_length=length, **options)
        )
        own, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        if factor is None and own and all_dims:
            factor = _magnitude(stretch, own) / _magnitude(stretch, all_dims)
        elif factor is None:
            factor = _magnitude(stretch, 1.0)
    else:
        raise ValueError(f"from_hf: rope_type is {kind!r}, expected 'default' or 'yarn'")
    if alpha is not None:
        frequencies = frequencies * np.exp(np.asarray(alpha, np.float64))
    return {
        "rope_base": base,
        "rope_frequencies": tuple(map(float, frequencies)),
        "rope_factor": 1.0 if factor is None else float(factor),
    }
