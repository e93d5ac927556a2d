"""Configurations of layers with grouped heads, from those of `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax_dsa.nn.grouped_config import GroupedConfig
from jax_dsa.nn.hf_fields import Fields
from jax_dsa.nn.hf_rope import rope_parameters, rotation

if TYPE_CHECKING:
    from collections.abc import Sequence


def minimax_m3_configs(
    c: Fields, alpha: Sequence[float] | None, dtype: Any
) -> list[GroupedConfig | None]:
    """Returns the configurations of the layers of MiniMax-M3.

    Args:
        c: The configuration, with the indexer's fields in `sparse_attention_config` as published,
            or with the names that they have in `transformers`.
        alpha: `rope_alpha` of `from_hf`.
        dtype: Dtype of activations and caches.
    """
    published = "sparse_attention_config"
    sparse = c.inner(published) if c.get(published) is not None else Fields({}, c.name)
    dense, count = "full_attention", c.integer("num_hidden_layers")
    if c.get("layer_types") is not None:
        kinds = c.per_layer("layer_types")
    else:
        # 0 marks a dense layer.
        flags = sparse.get("sparse_attention_freq")
        used = sparse.optional("use_sparse_attention", True)
        sparse.option("use_sparse_attention", used, (True, False))
        flags = [0] * count if flags is None or not used else flags
        flags = c.per_layer(f"{published}.sparse_attention_freq", flags)
        for i, flag in enumerate(flags):
            c.option(f"sparse_attention_freq[{i}]", flag, (0, 1))
        kinds = ["minimax_m3_sparse" if flag else dense for flag in flags]
    for i, kind in enumerate(kinds):
        c.option(f"layer_types[{i}]", kind, (dense, "minimax_m3_sparse"))
    kind = sparse.optional("sparse_score_type", "max")
    sparse.option("sparse_score_type", kind, ("max",))
    # Switches that MiniMax's configurations may have, and their values in these layers.
    for name, value in {
        "attention_bias": False,
        "attention_output_gate": False,
        "use_gemma_norm": True,
        "use_qk_norm": True,
    }.items():
        c.option(name, c.optional(name, value), (value,))

    def size(name: str, flat: str, low: int = 1, default: int | None = None) -> int:
        """Returns a published field, or the one that `transformers` calls `flat`."""
        known = sparse if sparse.get(name) is not None else c
        return known.integer(name if known is sparse else flat, low, default)

    fields = _fields(c, alpha, dtype)
    indexer: dict[str, Any] = {}
    if any(kind != dense for kind in kinds):
        indexer = {
            "indexer": "max",
            "index_heads": size("sparse_num_index_heads", "index_n_heads"),
            "index_dim": size("sparse_index_dim", "index_head_dim"),
            "block_size": size("sparse_block_size", "index_block_size"),
            "top_k": size("sparse_topk_blocks", "index_topk_blocks"),
            "local_blocks": size("sparse_local_block", "index_local_blocks", 0, 1),
            "sink_blocks": size("sparse_init_block", "index_init_blocks", 0, 0),
        }
    return [
        c.built(GroupedConfig, **fields, **(indexer or {} if k != dense else {})) for k in kinds
    ]


_QSA = tuple(
    f"indexer_{x}" for x in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
)
"""The fields of an indexer of Qwen3.8, which are all given or all absent."""


def qwen4_exp_configs(
    c: Fields, alpha: Sequence[float] | None, dtype: Any
) -> list[GroupedConfig | None]:
    """Returns the configurations of the layers of Qwen3.8, None for those of linear attention.

    The arguments are those of `minimax_m3_configs`. By default every fourth layer has grouped
    heads, with an indexer if its fields are given.
    """
    linear, period = "linear_attention", c.integer("full_attention_interval", default=4)
    count = c.integer("num_hidden_layers")
    default = ["indexed_attention" if (i + 1) % period == 0 else linear for i in range(count)]
    kinds = c.per_layer("layer_types", c.optional("layer_types", default))
    for i, kind in enumerate(kinds):
        # The last three are names of one kind of layer.
        known = linear, "indexed_attention", "full_attention", "qwen_sparse_attention"
        c.option(f"layer_types[{i}]", kind, known)
    c.option("attn_output_gate", c.optional("attn_output_gate", True), (True,))
    fields = _fields(c, alpha, dtype) | {"gate": True, "bias": c.optional("attention_bias", False)}
    rope = rope_parameters(c)
    rope.option("mrope_interleaved", rope.optional("mrope_interleaved", True), (True,))
    sections = rope.get("mrope_section")
    fields["mrope_sections"] = tuple(sections) if isinstance(sections, list) else sections
    given = [name for name in _QSA if c.get(name) is not None]
    if given and len(given) < len(_QSA):
        missing = [name for name in _QSA if name not in given]
        raise KeyError(f"from_hf: {c.name} lacks the fields {missing} beside {given}")
    if given:
        c.option("indexer_kv_heads", c.integer("indexer_kv_heads"), (1,))
        budget, size = c.integer("indexer_budget"), c.integer("indexer_compress_ratio")
        if budget % size:
            raise ValueError(
                f"from_hf: 'indexer_budget' in {c.name} is {budget}, expected a multiple of "
                f"indexer_compress_ratio = {size}"
            )
        fields |= {
            "indexer": "mean",
            "index_heads": c.integer("indexer_n_heads"),
            "index_dim": c.integer("indexer_head_dim"),
            "block_size": size,
            "top_k": budget // size,
        }
    config = c.built(GroupedConfig, **fields)
    return [None if kind == linear else config for kind in kinds]


def _fields(c: Fields, alpha: Sequence[float] | None, dtype: Any) -> dict[str, Any]:
    """Returns the fields of `GroupedConfig` that both models have."""
    heads = c.integer("num_attention_heads")
    default = max(1, c.integer("hidden_size") // heads)
    dim = c.integer("head_dim", default=default)
    width = _rotary_width(c, dim)
    return {
        "model_dim": c.integer("hidden_size"),
        "num_heads": heads,
        "kv_heads": c.integer("num_key_value_heads"),
        "head_dim": dim,
        "rope_dim": width,
        "norm_eps": c.number("rms_norm_eps"),
        "dtype": dtype,
        **rotation(rope_parameters(c), width, alpha),
    }


def _rotary_width(c: Fields, head_dim: int) -> int:
    """Returns the number of rotary elements, which a configuration may give in two ways."""
    widths = {}
    if c.get("rotary_dim") is not None:
        widths["rotary_dim"] = c.integer("rotary_dim", 0)
    for place, fields in (("", c), ("rope_parameters.", rope_parameters(c))):
        if fields.get("partial_rotary_factor") is not None:
            factor = fields.number("partial_rotary_factor", most=1)
            widths[f"{place}partial_rotary_factor"] = int(head_dim * factor)
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{name} for {width}" for name, width in widths.items())
        raise ValueError(
            f"from_hf: {c.name} has {found} of {head_dim} elements, expected the same number of "
            f"rotary elements"
        )
    return next(iter(widths.values()), head_dim)
