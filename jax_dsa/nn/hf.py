"""Loading and saving attention layers' weights in the format of `transformers`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.compressed import CompressedAttention
from jax_dsa.nn.hf_names import HFTensor, hf_tensors, transformers_name
from jax_dsa.nn.safetensors import SafeTensors

FP8_BLOCK = 128
"""Rows, and columns, that share a scale in checkpoints of FP8 weights."""

Attention = TypeVar("Attention", DSAttention, CompressedAttention)


def load_hf(
    module: Attention, tensors: Mapping[str, Any] | str | pathlib.Path, prefix: str = ""
) -> Attention:
    """Loads a checkpoint's weights into an attention layer, in place.

    Each parameter keeps its dtype and sharding. Names and shapes are checked before the first
    parameter is replaced, so a checkpoint that does not fit leaves the module unchanged.

    Args:
        module: An attention layer. Its parameters may be abstract, from `nnx.eval_shape`.
        tensors: The layer's weights as a mapping of arrays, a safetensors file, or a directory of
            such files. The names are those of `transformers`, or the published names where
            `transformers` renames them. Files are read one tensor at a time. FP8 weights need the
            scales of their 128 x 128 blocks (`weight_scale_inv`).
        prefix: Prefix of the layer's names, for example "model.layers.3.self_attn.".

    Returns:
        `module`.

    Raises:
        KeyError: If a weight is missing.
        ValueError: If a weight has the wrong shape, or the module has no parameter for it.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = nn.AttentionConfig(
        ...     model_dim=16, num_heads=2, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4,
        ...     index_heads=2, index_dim=8, index_rope_dim=4, top_k=3,
        ... )
        >>> layer, other = (nn.DSAttention(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> weights = nn.save_hf(layer, "layers.0.")
        >>> other = nn.load_hf(other, weights, "layers.0.")
        >>> bool((other.mla.wo.kernel[...] == layer.mla.wo.kernel[...]).all())
        True
    """
    if not isinstance(tensors, Mapping):
        tensors = SafeTensors(tensors)
    found = _match(module, tensors, prefix)
    for tensor, name, scale_name in found:
        x = np.asarray(tensors[name])
        if scale_name is not None:
            x = _dequantized(x, tensors[scale_name])
        for param, value in zip(tensor.params, tensor.to_params(x), strict=True):
            old = param.get_value()
            sharding = getattr(old, "sharding", None)
            param.set_value(jax.device_put(value.astype(old.dtype), sharding))
    return module


def save_hf(
    module: DSAttention | CompressedAttention, prefix: str = "", *, dtype: Any = None
) -> dict[str, np.ndarray]:
    """Returns an attention layer's weights by their names in `transformers`.

    `load_hf` takes the result.

    Args:
        module: An attention layer.
        prefix: Prefix of the layer's names, for example "model.layers.3.self_attn.".
        dtype: Dtype of the returned arrays. Default: the parameters' own dtype.

    Returns:
        NumPy arrays by name.
    """
    weights = {}
    for tensor in hf_tensors(module):
        x = tensor.from_params(*(np.asarray(param.get_value()) for param in tensor.params))
        x = x if dtype is None else x.astype(dtype)
        weights[prefix + tensor.name] = np.ascontiguousarray(x)
    return weights


def _match(
    module: DSAttention | CompressedAttention, tensors: Mapping[str, Any], prefix: str
) -> list[tuple[HFTensor, str, str | None]]:
    """Matches the tensors of a module with those of a checkpoint and checks the shapes.

    Returns:
        The module's tensors, each with its name in `tensors` and, if it is FP8, that of its scales.

    Raises:
        KeyError: If a tensor is missing.
        ValueError: If a tensor has the wrong shape, or the module has no parameter for it.
    """
    names = {
        transformers_name(module, name[len(prefix) :]): name
        for name in tensors
        if name.startswith(prefix)
    }
    expected = list(hf_tensors(module))
    missing = [prefix + tensor.name for tensor in expected if tensor.name not in names]
    if missing:
        raise KeyError(
            f"load_hf: argument 'tensors' lacks {missing}; do the names begin with prefix = "
            f"{prefix!r}?"
        )
    found = []
    for tensor in expected:
        name = names.pop(tensor.name)
        scale_name = names.pop(f"{tensor.name}_scale_inv", None)
        _check_shape(name, tensors[name], tensor.shape)
        if scale_name is not None:
            blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
            _check_shape(scale_name, tensors[scale_name], blocks)
        found.append((tensor, name, scale_name))
    if names:
        raise ValueError(
            f"load_hf: argument 'tensors' has {sorted(names.values())}, for which the module has "
            f"no parameter; does its configuration belong to this checkpoint?"
        )
    return found


def _check_shape(name: str, x: Any, expected: tuple[int, ...]) -> None:
    if (shape := tuple(np.shape(x))) != expected:
        raise ValueError(
            f"load_hf: tensor {name!r} has shape {shape}, expected {expected} because of the "
            f"module's configuration"
        )


def _dequantized(x: np.ndarray, scale: Any) -> np.ndarray:
    """Returns FP8 weights times the scales of their blocks, in float32."""
    rows, columns = x.shape
    scale = np.asarray(scale, np.float32)
    scale = scale.repeat(FP8_BLOCK, 0)[:rows].repeat(FP8_BLOCK, 1)[:, :columns]
    return x.astype(np.float32) * scale
