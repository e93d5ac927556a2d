"""Configurations of published models' attention layers, from those of `transformers`.

Only attention and indexer are covered. Experts, routers, hyper-connections and embeddings belong to
the user's model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.nn.compressed_config import CompressedConfig
from jax_dsa.nn.config import AttentionConfig, IndexerType
from jax_dsa.nn.hf_fields import Fields, read_fields
from jax_dsa.nn.rotary import yarn_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence


DENSE_MODELS = ("deepseek_v3", "deepseek_v2", "kimi_k2")
"""The types of models whose attention is that of `deepseek_v32` without indexers."""


class HFLayer(NamedTuple):
    """The arguments from which one attention layer of a model is built.

    Attributes:
        config: An `AttentionConfig` for `DSAttention`, a `CompressedConfig` for
            `CompressedAttention`. None if `jax_dsa.nn` has no such attention, as for the layers of
            linear attention in GLM-5.3-Flash; the layer's other fields then mean nothing.
        indexer_type: Second argument of `DSAttention`.
        kv_source: Number of the layer whose keys this one attends to: its own number, or that of an
            earlier layer, whose `aux.kv` it takes as `kv`.
    """

    config: AttentionConfig | CompressedConfig | None
    indexer_type: IndexerType
    kv_source: int


def from_hf(
    config: Any, *, rope_alpha: Sequence[float] | None = None, dtype: Any = jnp.float32
) -> tuple[HFLayer, ...]:
    """Returns the attention layers of a model, from its configuration in `transformers`.

    As in `transformers`, `rms_norm_eps` belongs to the norms of the residual stream, and so to your
    model (`DecoderConfig.norm_eps`). In attention it holds for the norms of DeepSeek-V4, for the
    norms of the latents of Mistral-Large-4 and GLM-5.3-Flash and for the indexer of Hy4; all others
    have 1e-6.

    Args:
        config: The configuration, the dictionary that its `to_dict` returns, or a published
            `config.json`: its dictionary, its path, or the path of its directory. If it contains a
            `text_config`, that one counts. The model types `deepseek_v32`, `glm_moe_dsa`,
            `glm5_next`, `hy_v4`, `mistral_large4` (by its `text_config`) and `deepseek_v4` are
            supported. For a dense model, pass the result of `sparse_hf_config`.
        rope_alpha: The checkpoint's learnt logarithms of frequency factors, one per rotary pair
            (Mistral's `rotary_emb.alpha`).
        dtype: Dtype of activations and caches.

    Returns:
        One `HFLayer` per layer of the model, so that the index is the layer's number.

    Raises:
        KeyError: If the configuration lacks a field.
        OSError: If there is no such file.
        TypeError: If the configuration is no configuration, or a field has the wrong type.
        ValueError: If the model type or its type of rotary embedding is not supported, if a field
            has a wrong value, or if the file is no JSON file.

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
    return layers_of(read_fields("from_hf", config), rope_alpha, dtype)


def layers_of(
    fields: Fields, rope_alpha: Sequence[float] | None = None, dtype: Any = jnp.float32
) -> tuple[HFLayer, ...]:
    """Returns what `from_hf` returns for these fields."""
    Args("from_hf", "", np.empty(0), "K").dtype("dtype", dtype, FLOATS)
    kind = fields["model_type"]
    if kind not in tuple(_MODELS):
        hint = "; sparse_from_hf gives a dense model indexers" if kind in DENSE_MODELS else ""
        raise ValueError(f"from_hf: model_type is {kind!r}, expected one of {tuple(_MODELS)}{hint}")
    return _MODELS[kind](fields, rope_alpha, dtype)


def _mla(
    c: Fields,
    alpha: Sequence[float] | None,
    dtype: Any,
    *,
    indexer_frequency: int = 1,
    **own: Any,
) -> tuple[HFLayer, ...]:
    """Returns layers of multi-head latent attention.

    Args:
        c: The configuration.
        alpha: `rope_alpha` of `from_hf`.
        dtype: Dtype of activations and caches.
        indexer_frequency: The model type's default of `index_topk_freq`.
        **own: Fields of `AttentionConfig` that are particular to the model type.
    """
    rope_dim, rope = c.integer("qk_rope_head_dim"), _rope_parameters(c)
    fields = {
        **_mla_sizes(c),
        "rope_dim": rope_dim,
        "index_rope_dim": rope_dim,
        "scale_factor": _scale_factor(rope),
        # `transformers` fixes the epsilon of these layers' norms. `rms_norm_eps` is that of the
        # residual stream's norms.
        "norm_eps": 1e-6,
        "dtype": dtype,
        **_rotation(rope, rope_dim, alpha),
        **own,
    }
    count = c.integer("num_hidden_layers")
    types = _indexer_types(c, indexer_frequency)
    sources = c.per_layer("kv_source_layers", c.optional("kv_source_layers", range(count)))
    # 1 marks a layer with RoPE, despite the name.
    has_rope = c.per_layer("no_rope_layers", c.optional("no_rope_layers", [1] * count))
    layers = []
    for i, (kind, source, rotary) in enumerate(zip(types, sources, has_rope, strict=True)):
        c.option(f"kv_source_layers[{i}]", source, [i, *(j for j in range(i) if sources[j] == j)])
        layer = dict(fields, shares_keys=source != i)
        if not rotary:
            layer |= {"nope_dim": layer["nope_dim"] + rope_dim, "rope_dim": 0, "index_rope_dim": 0}
            layer |= {"rope_frequencies": None}
        layers.append(HFLayer(c.built(AttentionConfig, **layer), kind, source))
    return tuple(layers)


def _mla_sizes(c: Fields) -> dict[str, Any]:
    """Returns the fields of `AttentionConfig` that all models of this attention have."""
    return {
        "model_dim": c.integer("hidden_size"),
        "num_heads": c.integer("num_attention_heads"),
        "kv_rank": c.integer("kv_lora_rank"),
        "nope_dim": c.integer("qk_nope_head_dim"),
        "v_dim": c.integer("v_head_dim"),
        "index_heads": c.integer("index_n_heads"),
        "index_dim": c.integer("index_head_dim"),
        "top_k": c.integer("index_topk"),
        "bias": c["attention_bias"],
    }


def _glm5_next(c: Fields, alpha: Sequence[float] | None, dtype: Any) -> tuple[HFLayer, ...]:
    """Returns layers of GLM-5.3-Flash. By default every fourth one has sparse attention."""
    if alpha is not None:
        raise ValueError(
            f"from_hf: argument 'rope_alpha' has shape {np.shape(alpha)}, expected None, because "
            f"the layers of {c.name} have no rotary embedding"
        )
    count = c.integer("num_hidden_layers")
    default = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    kinds = c.per_layer("layer_types", c.optional("layer_types", default))
    for i, kind in enumerate(kinds):
        known = "linear_attention", "indexed_attention", "full_attention"
        c.option(f"layer_types[{i}]", kind, known)
    # `transformers` calls these layers by two names.
    is_sparse = [kind != "linear_attention" for kind in kinds]
    types = _indexer_types(c, 1, is_sparse)
    c.option("qk_rope_head_dim", c.integer("qk_rope_head_dim", 0), (0,))
    config = c.built(
        AttentionConfig,
        **_mla_sizes(c),
        q_rank=c.integer("q_lora_rank"),
        rope_dim=0,
        index_rope_dim=0,
        index_pool=c.integer("index_kpool"),
        index_tail=c.optional("index_kpool_always_select_tail", True),
        norm_eps=c.number("rms_norm_eps"),
        index_norm_eps=1e-6,
        dtype=dtype,
    )
    return tuple(
        HFLayer(config, types[i], i) if is_sparse[i] else HFLayer(None, "full", i)
        for i in range(count)
    )


def _mistral(c: Fields, alpha: Sequence[float] | None, dtype: Any) -> tuple[HFLayer, ...]:
    """Returns layers of Mistral-Large-4. By default every fourth one has no position."""
    period = c.integer("no_rope_layer_interval", default=4)
    has_rope = [int((i + 1) % period != 0) for i in range(c.integer("num_hidden_layers"))]
    c = Fields({**c, "no_rope_layers": c.optional("no_rope_layers", has_rope)}, c.name)
    return _mla(
        c,
        alpha,
        dtype,
        q_rank=None,
        index_rope_layout="interleaved",
        norm_eps=c.number("rms_norm_eps"),
        index_norm_eps=1e-6,
        log_scaling=True,
    )


def _indexer_types(
    c: Fields, frequency: int, is_sparse: Sequence[bool] | None = None
) -> list[IndexerType]:
    """Returns the layers' indexer types, which a configuration gives in one of three ways.

    These are a list of types, a pattern of F ("full") and S ("shared"), and a frequency. With the
    frequency f, every f-th layer is "full" from layer `index_skip_topk_offset` - 1 on. All layers
    before are "full" too.

    Args:
        c: The configuration.
        frequency: The default of `index_topk_freq`.
        is_sparse: Which layers have sparse attention. Other layers pass no selection on. Default:
            all.
    """
    field, types = "indexer_types", c.get("indexer_types")
    if types is None:
        field, types = "index_topk_pattern", c.get("index_topk_pattern")
        if isinstance(types, str):
            types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    if types is None:
        field = "index_topk_freq"
        period = max(c.integer(field, 0, default=frequency), 1)
        offset = c.integer("index_skip_topk_offset", 0, default=2)
        layers = range(c.integer("num_hidden_layers"))
        types = ["shared" if max(i - offset + 1, 0) % period else "full" for i in layers]
    types = c.per_layer(field, types)
    for i, kind in enumerate(types):
        c.option(f"{field}[{i}]", kind, ("full", "shared") if i else ("full",))
        if is_sparse is None or kind == "full" or not is_sparse[i] or is_sparse[i - 1]:
            continue
        raise ValueError(
            f"from_hf: {field} in {c.name} makes layer {i} 'shared', expected 'full' after layer "
            f"{i - 1}, which has no sparse attention and passes no selection on"
        )
    return types


_COMPRESSED_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""The layer types of DeepSeek-V4 by their published numbers of tokens per compressed key."""


def _compressed(c: Fields, alpha: Sequence[float] | None, dtype: Any) -> tuple[HFLayer, ...]:
    """Returns layers of DeepSeek-V4, whose type decides how they compress and rotate keys."""
    if c.get("layer_types") is not None:
        field, kinds = "layer_types", c.per_layer("layer_types")
    else:
        field, ratios = "compress_ratios", c.per_layer("compress_ratios")
        for i, ratio in enumerate(ratios):
            c.option(f"compress_ratios[{i}]", ratio, _COMPRESSED_TYPES)
        kinds = [_COMPRESSED_TYPES[ratio] for ratio in ratios]
    rates = {kind: ratio for ratio, kind in _COMPRESSED_TYPES.items()}
    rates |= c.inner("compress_rates") if c.get("compress_rates") is not None else {}
    layers = []
    for i, kind in enumerate(kinds):
        c.option(f"{field}[{i}]", kind, _COMPRESSED_TYPES.values())
        window_only = kind == "sliding_attention"
        indexed = kind == "compressed_sparse_attention"
        rope, width = _compressed_rope(c, window_only=window_only)
        config = c.built(
            CompressedConfig,
            model_dim=c.integer("hidden_size"),
            num_heads=c.integer("num_attention_heads"),
            q_rank=c.integer("q_lora_rank"),
            head_dim=c.integer("head_dim"),
            rope_dim=width,
            out_groups=c.integer("o_groups"),
            out_rank=c.integer("o_lora_rank"),
            window=c.integer("sliding_window"),
            ratio=None if window_only else rates[kind],
            overlap=indexed,
            top_k=c.integer("index_topk") if indexed else None,
            index_heads=c.integer("index_n_heads"),
            index_dim=c.integer("index_head_dim"),
            norm_eps=c.number("rms_norm_eps"),
            dtype=dtype,
            **_rotation(rope, width, alpha),
        )
        layers.append(HFLayer(config, "full", i))
    return tuple(layers)


def _compressed_rope(c: Fields, *, window_only: bool) -> tuple[Fields, int]:
    """Returns the `rope_parameters` of one of DeepSeek-V4's layers, and its rotary elements.

    As published, layers with a window only have the base `rope_theta`, and no YaRN. The others have
    the base `compress_rope_theta` and YaRN, whose attention factor is 1.
    """
    part = "main" if window_only else "compress"
    rope = _rope_parameters(c)
    if part in rope:
        rope = rope.inner(part)
    elif window_only:
        rope = Fields({"rope_type": "default", "rope_theta": c["rope_theta"]}, rope.name)
    else:
        own = {"rope_theta": c["compress_rope_theta"]}
        own |= {"attention_factor": rope.optional("attention_factor", 1.0)}
        rope = Fields({**rope, **own}, rope.name)
    for fields in (rope, c):
        if fields.get("partial_rotary_factor") is not None:
            return rope, int(c.integer("head_dim") * fields.number("partial_rotary_factor", most=1))
    return rope, c.integer("qk_rope_head_dim")


_MODELS: dict[str, Callable[[Fields, Any, Any], tuple[HFLayer, ...]]] = {
    # Dense models without a latent of the queries have q_lora_rank null.
    "deepseek_v32": lambda c, a, d: _mla(
        *(c, a, d), q_rank=None if c.get("q_lora_rank", 1) is None else c.integer("q_lora_rank")
    ),
    "deepseek_v4": _compressed,
    "glm_moe_dsa": lambda c, a, d: _mla(
        *(c, a, d), q_rank=c.integer("q_lora_rank"), index_rope_layout="interleaved"
    ),
    "glm5_next": _glm5_next,
    "glm5_next_text": _glm5_next,
    "hy_v4": lambda c, a, d: _mla(
        *(c, a, d),
        indexer_frequency=4,
        q_rank=c.integer("q_lora_rank"),
        rope_layout="half",
        index_rope_last=True,
        index_norm_eps=c.number("rms_norm_eps"),
        sinks=True,
        gate=True,
    ),
    "mistral_large4_text": _mistral,
}


def _rope_parameters(c: Fields) -> Fields:
    """Returns `rope_parameters`, which older configurations call `rope_scaling`.

    These have the base outside of it, as `rope_theta`, and the type as `type`.
    """
    field = "rope_parameters" if c.get("rope_parameters") is not None else "rope_scaling"
    rope = c.inner(field) if c.get(field) is not None else Fields({}, c.name)
    defaults = {"rope_type": rope.get("type", "default"), "rope_theta": c.get("rope_theta")}
    return Fields({**defaults, **rope}, rope.name)


def _magnitude(factor: float, weight: float) -> float:
    """Returns YaRN's factor for attention scores in a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale_factor(rope: Fields) -> float:
    """Returns `AttentionConfig.scale_factor` for a model's `rope_parameters`."""
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _rotation(rope: Fields, width: int, alpha: Sequence[float] | None = None) -> dict[str, Any]:
    """Returns the rotary fields of a layer's configuration for a model's `rope_parameters`."""
    kind, base = rope["rope_type"], float(rope.number("rope_theta", above=1))
    factor = 1.0
    if kind == "default":
        frequencies = base ** (-np.arange(0, width, 2) / width)
    elif kind == "yarn":
        stretch = rope.number("factor")
        options: dict[str, Any] = {
            name: rope.number(name)
            for name in ("beta_fast", "beta_slow")
            if rope.get(name) is not None
        }
        frequencies = np.asarray(
            yarn_frequencies(
                width,
                base=base,
                factor=stretch,
                original_length=rope.integer("original_max_position_embeddings"),
                truncate=bool(rope.optional("truncate", True)),
                **options,
            )
        )
        own, all_dims = (rope.number(n) if rope.get(n) else 0 for n in ("mscale", "mscale_all_dim"))
        if rope.get("attention_factor") is not None:
            factor = float(rope.number("attention_factor"))
        elif own and all_dims:
            factor = _magnitude(stretch, own) / _magnitude(stretch, all_dims)
        else:
            factor = _magnitude(stretch, 1.0)
    else:
        raise ValueError(
            f"from_hf: rope_type in {rope.name} is {kind!r}, expected 'default' or 'yarn'"
        )
    if alpha is not None:
        if np.shape(alpha) != frequencies.shape:
            raise ValueError(
                f"from_hf: argument 'rope_alpha' has shape {np.shape(alpha)}, expected "
                f"{frequencies.shape}, one number per rotary pair"
            )
        frequencies = frequencies * np.exp(np.asarray(alpha, np.float64))
    return {
        "rope_base": base,
        "rope_frequencies": tuple(map(float, frequencies)),
        "rope_factor": factor,
    }
