"""Sparse layers from checkpoints of models with dense multi-head latent attention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core.checks import Args
from jax_dsa.nn.arguments import check_type
from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.hf import load_hf, tensors_of
from jax_dsa.nn.hf_config import DENSE_MODELS, layers_of
from jax_dsa.nn.hf_fields import Fields, read_fields
from jax_dsa.nn.hf_fp8 import configured_block_size
from jax_dsa.nn.indexer import LightningIndexer

_INDEXER_FIELDS = ("index_topk", "index_n_heads", "index_head_dim")
"""The fields of a sparse model's configuration that describe its indexers."""

_DENSE_FIELDS = ("auto_map", "quantization_config", "rope_interleave")
"""Fields that do not hold for the sparse model: its code, its float weights, its rotary layout."""


def sparse_hf_config(
    config: Any, *, top_k: int = 2048, index_heads: int = 64, index_dim: int = 128
) -> dict[str, Any]:
    """Returns the configuration of a dense model with indexers added to all layers.

    The result is the `config.json` for weights from `save_hf`, and `from_hf` takes it. These fields
    are new: `index_topk`, `index_n_heads` and `index_head_dim`; `model_type`, "deepseek_v32"; and
    `architectures`, ["DeepseekV32ForCausalLM"]. These are dropped: `auto_map` (the dense model's
    code), `quantization_config` (the weights are floats) and `rope_interleave` (always True). All
    others are copied. `torch_dtype` or `dtype` among them should be that of the saved weights.

    Args:
        config: The dense model's configuration, in any form that `from_hf` takes. The model types
            `deepseek_v3`, `deepseek_v2` and `kimi_k2` are supported. If it contains a
            `text_config`, the result has only the fields of that one.
        top_k: K, number of keys that a query selects.
        index_heads: J, number of the indexer's heads.
        index_dim: C, width of the indexer's queries and keys; at least `qk_rope_head_dim`.

    Raises:
        KeyError: If the configuration lacks a field.
        OSError: If there is no such file.
        TypeError: If the configuration is no configuration, or a field has the wrong type.
        ValueError: If the model type is another one or the model has indexers, if
            `rope_interleave` is False, or if a field or an argument has a wrong value.

    Examples:
        >>> from jax_dsa import nn
        >>> dense = {
        ...     "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64,
        ...     "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
        ...     "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
        ...     "attention_bias": False, "rope_theta": 10000.0,
        ... }
        >>> sparse = nn.sparse_hf_config(dense, top_k=8, index_heads=2, index_dim=16)
        >>> sparse["model_type"], sparse["index_topk"]
        ('deepseek_v32', 8)
        >>> nn.from_hf(sparse)[1].config.top_k
        8
    """
    c = _sparse_fields(
        "sparse_hf_config", read_fields("sparse_hf_config", config), top_k, index_heads, index_dim
    )
    layers_of(c)  # Rejects wrong values.
    return dict(c)


def sparse_from_hf(
    config: Any,
    tensors: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    rngs: nnx.Rngs,
    top_k: int = 2048,
    index_heads: int = 64,
    index_dim: int = 128,
    prefix: str = "model.layers.{}.self_attn.",
    dtype: Any = jnp.float32,
) -> tuple[list[DSAttention], dict[str, Any]]:
    """Returns sparse attention layers with the weights of a dense model, and their configuration.

    Each layer has the dense layer's weights and a new indexer. With `sparse=False` it computes what
    the dense layer computes. Its indexer knows nothing yet: train it with `aux.kl` and
    `sparse=False` (the warm-up) before the layer attends with `sparse=True`.

    For layers that need a sharding or are parts of a model, use the functions of which this one
    consists: `sparse_hf_config`, `from_hf` and `load_hf(..., new_indexer=True)`.

    Args:
        config: The dense model's configuration, as in `sparse_hf_config`.
        tensors: The dense model's weights, as in `load_hf`; they may be in FP8, in blocks of the
            configuration's `quantization_config.weight_block_size`. Default: the files in the
            directory that `config` is the path of.
        rngs: Random streams that initialise the indexers.
        top_k: K, number of keys that a query selects.
        index_heads: J, number of the indexer's heads.
        index_dim: C, width of the indexer's queries and keys; at least `qk_rope_head_dim`.
        prefix: Prefix of a layer's names, with "{}" in the place of the layer's number.
        dtype: Dtype of activations and caches; parameters are float32.

    Returns:
        The layers, and the dictionary that `sparse_hf_config` returns. `save_hf` returns the
        layers' weights under the names that belong to it.

    Raises:
        KeyError: If the configuration lacks a field, or a weight is missing.
        OSError: If there is no such file.
        TypeError: If an argument, a field or a tensor has the wrong type.
        ValueError: As in `sparse_hf_config` and `load_hf`, and if the checkpoint has any weight of
            an indexer.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = {
        ...     "model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": 16,
        ...     "num_attention_heads": 2, "q_lora_rank": None, "kv_lora_rank": 8,
        ...     "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        ...     "attention_bias": False, "rope_theta": 10000.0,
        ... }
        >>> shapes = {
        ...     "q_proj": (16, 16), "kv_a_proj_with_mqa": (12, 16), "kv_a_layernorm": (8,),
        ...     "kv_b_proj": (16, 8), "o_proj": (16, 8),
        ... }
        >>> dense = {
        ...     f"model.layers.0.self_attn.{name}.weight": np.ones(shape, np.float32)
        ...     for name, shape in shapes.items()
        ... }
        >>> (layer,), sparse = nn.sparse_from_hf(
        ...     config, dense, rngs=nnx.Rngs(0), top_k=3, index_heads=2, index_dim=8
        ... )
        >>> y, aux = layer(jnp.ones((1, 5, 16)), sparse=False)
        >>> saved = nn.save_hf(layer, "model.layers.0.self_attn.")
        >>> dense.keys() < saved.keys()
        True
    """
    check_type("sparse_from_hf", "rngs", rngs, nnx.Rngs)
    if not isinstance(prefix, str) or prefix.count("{}") != 1:
        raise ValueError(
            f"sparse_from_hf: argument 'prefix' is {prefix!r}, expected a str with one '{{}}' in "
            f"the place of the layer's number"
        )
    dense = read_fields("sparse_from_hf", config)
    if tensors is None:
        if not isinstance(config, str | os.PathLike) or not os.path.isdir(config):
            raise TypeError(
                "sparse_from_hf: argument 'tensors' is None, expected the weights because "
                "argument 'config' is not the path of a directory"
            )
        tensors = config
    tensors = tensors_of(tensors)
    c = _sparse_fields("sparse_from_hf", dense, top_k, index_heads, index_dim)
    block = configured_block_size(dense, dense.name)
    layers = []
    for i, spec in enumerate(layers_of(c, dtype=dtype)):
        assert isinstance(spec.config, AttentionConfig)
        # Abstract parameters, because each of them gets a value from the checkpoint.
        layer = nnx.eval_shape(lambda config=spec.config: DSAttention(config, rngs=nnx.Rngs(0)))
        layer.indexer = LightningIndexer(spec.config, rngs=rngs)
        load_hf(
            layer,
            tensors,
            prefix.replace("{}", str(i)),
            weight_block_size=block,
            new_indexer=True,
        )
        layers.append(layer)
    return layers, dict(c)


def _sparse_fields(op: str, c: Fields, top_k: int, index_heads: int, index_dim: int) -> Fields:
    """Returns the sparse model's configuration for a dense model's.

    Args:
        op: Name of the public function, for messages.
        c: The dense model's configuration.
        top_k: K, number of selected keys.
        index_heads: J, number of the indexer's heads.
        index_dim: C, width of the indexer's queries and keys.

    Raises:
        KeyError: If the configuration has no model type.
        TypeError: If a size is no int.
        ValueError: If the model is no dense one or has rotary elements in halves, or a size is
            below 1.
    """
    kind = c["model_type"]
    if kind not in DENSE_MODELS:
        raise ValueError(
            f"{op}: model_type in {c.name} is {kind!r}, expected a dense model, one of "
            f"{DENSE_MODELS}; from_hf and load_hf load a model that has indexers"
        )
    if known := [name for name in _INDEXER_FIELDS if c.get(name) is not None]:
        raise ValueError(
            f"{op}: {c.name} has the fields {known} of a model with indexers, expected a dense "
            f"model; from_hf and load_hf load a sparse one, of model_type 'deepseek_v32'"
        )
    if not c.optional("rope_interleave", True):
        raise ValueError(
            f"{op}: 'rope_interleave' in {c.name} is False, expected True, because 'deepseek_v32' "
            f"rotates pairs of neighbours; reorder the rotary rows of the weights of queries and "
            f"keys from halves to pairs"
        )
    args = Args(op, "", np.empty(0), "K")
    kept = {name: value for name, value in c.items() if name not in _DENSE_FIELDS}
    sparse = {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_topk": args.integer("top_k", top_k, 1),
        "index_n_heads": args.integer("index_heads", index_heads, 1),
        "index_head_dim": args.integer("index_dim", index_dim, 1),
    }
    return Fields({**kept, **sparse}, c.name)
