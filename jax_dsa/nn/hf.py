"""Loading and saving attention layers' weights in the format of `transformers`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.compressed import CompressedAttention
from jax_dsa.nn.grouped import GroupedAttention
from jax_dsa.nn.hf_fp8 import (
    SCALE_NAMES,
    BlockSize,
    checked_block_size,
    configured_block_size,
    dequantized,
    is_fp8,
)
from jax_dsa.nn.hf_names import INDEXER, Attention, HFTensor, hf_tensors, transformers_name
from jax_dsa.nn.safetensors import SafeTensors, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

Layer = TypeVar("Layer", DSAttention, CompressedAttention, GroupedAttention)


def load_hf(
    module: Layer,
    tensors: Mapping[str, Any] | str | os.PathLike[str],
    prefix: str = "",
    *,
    weight_block_size: Sequence[int] | None = None,
    new_indexer: bool = False,
) -> Layer:
    """Loads a checkpoint's weights into an attention layer, in place.

    Each parameter keeps its dtype and sharding. All values are computed before the first parameter
    is replaced, so an error leaves the module unchanged. Stored rotary frequencies
    (`rotary_emb.inv_freq`) are ignored, because the configuration determines them.

    FP8 weights (float8_e4m3fn, float8_e5m2, or the bytes of float8_e4m3fn as uint8) are multiplied
    by the scales of their blocks. The scales of a weight `x.weight` are called
    `x.weight_scale_inv`, `x.scale` or `x.qscale_weight`, and contain one number for each block, or
    one for the whole weight. They are floats, float8_e8m0fnu, or the bytes of these as uint8.

    Args:
        module: An attention layer. Its parameters may be abstract, from `nnx.eval_shape`.
        tensors: The layer's weights as a mapping of arrays, a safetensors file, or a directory of
            such files. The names are those of `transformers`, or the published names where
            `transformers` renames them. Files are read one tensor at a time.
        prefix: Prefix of the layer's names, for example "model.layers.3.self_attn.". The final dot
            may be absent.
        weight_block_size: Rows and columns of the blocks that share a scale. Default: the
            `quantization_config.weight_block_size` of a `config.json` beside the files, or
            128 x 128 without one.
        new_indexer: True loads the weights of a dense layer and leaves the indexer as it is. The
            checkpoint must have no weight of this layer's indexer.

    Returns:
        `module`.

    Raises:
        KeyError: If a weight is missing.
        OSError: If there is no such file.
        TypeError: If the module is no attention layer, for example only a part of one, or if an
            argument or a tensor has the wrong type.
        ValueError: If a weight has the wrong shape or dtype, the module has no parameter for it, an
            FP8 weight has no scales or scales of the wrong shape, a parameter's dtype cannot hold
            a value, or a file is broken. With `new_indexer`, if the checkpoint has weights of the
            indexer, or the module is a `CompressedAttention` or has no indexer that has values.

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
    _check_module("load_hf", module)
    prefix = _with_dot("load_hf", prefix)
    tensors = tensors_of(tensors)
    if new_indexer:
        _check_new_indexer(module)
    block = checked_block_size(weight_block_size, "argument 'weight_block_size'")
    values: list[tuple[Any, jax.Array]] = []
    for tensor, name, scale_name in _match(module, tensors, prefix, new_indexer):
        x = _weight(tensors, name, scale_name, tensor.shape, block)
        for param, new in zip(tensor.params, tensor.to_params(x), strict=True):
            values.append((param, _placed(new, param.get_value(), _label(tensors, name))))
    for param, value in values:
        param.set_value(value)
    return module


def save_hf(module: Attention, prefix: str = "", *, dtype: Any = None) -> dict[str, np.ndarray]:
    """Returns an attention layer's weights by their names in `transformers`.

    `load_hf` takes the result.

    Args:
        module: An attention layer.
        prefix: Prefix of the layer's names, for example "model.layers.3.self_attn.". The final dot
            may be absent.
        dtype: Dtype of the returned arrays, a float of at least 16 bits. Default: the parameters'
            own dtype.

    Returns:
        NumPy arrays by name.

    Raises:
        TypeError: If the module is no attention layer, if its parameters are abstract, or if an
            argument has the wrong type.
        ValueError: If `dtype` is no such float.
    """
    _check_module("save_hf", module)
    prefix = _with_dot("save_hf", prefix)
    if dtype is not None:
        dtype = Args("save_hf", "", np.empty(0), "K").dtype("dtype", dtype, FLOATS)
    weights = {}
    for tensor in hf_tensors(module):
        values = [param.get_value() for param in tensor.params]
        if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
            raise TypeError(
                f"save_hf: parameter {tensor.name!r} of argument 'module' is abstract, expected "
                f"values; load_hf gives it some"
            )
        x = tensor.from_params(*map(np.asarray, values))
        x = x if dtype is None else x.astype(dtype)
        weights[prefix + tensor.name] = np.ascontiguousarray(x)
    return weights


def tensors_of(tensors: Any) -> Mapping[str, Any]:
    """Returns the checkpoint that `load_hf`'s argument `tensors` stands for.

    Raises:
        OSError: If there is no such file.
        TypeError: If the argument is neither a mapping nor a path.
        ValueError: If a file is broken.
    """
    if isinstance(tensors, str | os.PathLike):
        return SafeTensors(pathlib.Path(tensors))
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"load_hf: argument 'tensors' is {type(tensors).__name__}, expected a mapping of "
            f"arrays, or the path of a file or directory"
        )
    return tensors


def _check_module(op: str, module: Any) -> None:
    if not isinstance(module, Attention):
        raise TypeError(
            f"{op}: argument 'module' is {type(module).__name__}, expected a whole attention "
            f"layer, a DSAttention, CompressedAttention or GroupedAttention"
        )


def _check_new_indexer(module: Attention) -> None:
    """Raises ValueError unless the module has a lightning indexer with values."""
    indexer = None if isinstance(module, CompressedAttention) else module.indexer
    if indexer is None:
        raise ValueError(
            f"load_hf: argument 'module' is a {type(module).__name__} without a lightning indexer, "
            f"expected one with new_indexer=True"
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(indexer))):
        raise ValueError(
            "load_hf: the indexer of argument 'module' is abstract, expected values with "
            "new_indexer=True, because the checkpoint gives it none"
        )


def _with_dot(op: str, prefix: Any) -> str:
    """Returns the prefix of a layer's names with its final dot."""
    if not isinstance(prefix, str):
        raise TypeError(f"{op}: argument 'prefix' is {type(prefix).__name__}, expected a str")
    return f"{prefix}." if prefix and not prefix.endswith(".") else prefix


def _label(tensors: Mapping[str, Any], name: str) -> str:
    """Returns what a message calls a tensor, with the file that it comes from."""
    where = f" in {tensors.file(name)}" if isinstance(tensors, SafeTensors) else ""
    return f"tensor {name!r}{where}"


def _match(
    module: Attention,
    tensors: Mapping[str, Any],
    prefix: str,
    new_indexer: bool,
) -> list[tuple[HFTensor, str, str | None]]:
    """Matches the tensors of a module with the names in a checkpoint.

    Returns:
        The module's tensors, each with its name in `tensors` and, if there are some, that of its
        scales; without those of the indexer if `new_indexer` is True.

    Raises:
        KeyError: If a tensor is missing.
        ValueError: If the module has no parameter for a tensor, two tensors are the same parameter
            or both are its scales, or the checkpoint has the weights of an indexer although
            `new_indexer` is True.
    """
    names: dict[str, str] = {}
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(
                f"load_hf: argument 'tensors' has the name {name!r}, expected only strs as names"
            )
        if name.startswith(prefix):
            own = transformers_name(module, name[len(prefix) :])
            if own == "rotary_emb.inv_freq":
                continue
            if own in names:
                raise _twice(tensors, own, [names[own], name])
            names[own] = name
    source = tensors.path if isinstance(tensors, SafeTensors) else "argument 'tensors'"
    expected = list(hf_tensors(module))
    if new_indexer:
        expected = [tensor for tensor in expected if not tensor.name.startswith(INDEXER)]
        if indexer := sorted(name for own, name in names.items() if own.startswith(INDEXER)):
            raise ValueError(
                f"load_hf: {source} has the weights {indexer} of an indexer, expected none with "
                f"new_indexer=True; without it, load_hf loads a layer with its indexer"
            )
    if missing := [tensor.name for tensor in expected if tensor.name not in names]:
        hint = _hint(module, tensors, prefix, names, missing)
        raise KeyError(f"load_hf: {source} lacks {[prefix + name for name in missing]}{hint}")
    found = []
    for tensor in expected:
        name, scales = names.pop(tensor.name), []
        layer, _, last = tensor.name.rpartition(".")
        if last == "weight" and len(tensor.shape) == 2:
            scales = [names.pop(s) for s in (f"{layer}.{n}" for n in SCALE_NAMES) if s in names]
        if len(scales) > 1:
            raise _twice(tensors, f"the scales of {tensor.name}", scales)
        found.append((tensor, name, scales[0] if scales else None))
    if names:
        raise ValueError(
            f"load_hf: {source} has {sorted(names.values())}, for which the module has no "
            f"parameter; does its configuration belong to this checkpoint?"
        )
    return found


def _hint(
    module: Attention,
    tensors: Mapping[str, Any],
    prefix: str,
    names: Mapping[str, str],
    missing: Sequence[str],
) -> str:
    """Returns what a message adds about missing tensors: why they are, or nothing.

    Args:
        module: The layer.
        tensors: The checkpoint.
        prefix: Prefix of the layer's names.
        names: The checkpoint's names with this prefix, by their names in `transformers`.
        missing: The missing tensors' names in `transformers`.
    """
    if isinstance(tensors, SafeTensors):
        absent = {
            transformers_name(module, name.removeprefix(prefix)): str(file)
            for name, file in tensors.absent().items()
            if name.startswith(prefix)
        }
        if files := sorted({absent[name] for name in missing if name in absent}):
            return f"; the files {files} of this checkpoint do not exist"
    expected = {tensor.name for tensor in hf_tensors(module)}
    if not expected & names.keys():
        examples = [*names.values(), *tensors][:2]
        return f"; do the names begin with prefix = {prefix!r}? It has {examples}"
    indexer = {name for name in expected if name.startswith(INDEXER)}
    if set(missing) == indexer and not any(name.startswith(INDEXER) for name in names):
        return "; load the layer of a dense model with new_indexer=True"
    return ""


def _twice(tensors: Mapping[str, Any], own: str, names: list[str]) -> ValueError:
    """Returns the error for several tensors that are the same one of the module."""
    both = " and ".join(_label(tensors, name) for name in names)
    return ValueError(f"load_hf: {both} are both {own} of the module, expected one of them")


def _weight(
    tensors: Mapping[str, Any],
    name: str,
    scale_name: str | None,
    shape: tuple[int, ...],
    block: BlockSize | None,
) -> np.ndarray:
    """Returns the values of a weight: floats as they are stored, FP8 times its scales.

    Args:
        tensors: The checkpoint.
        name: The weight's name in it.
        scale_name: The name of its scales, if there are some.
        shape: The shape that the module expects.
        block: The user's `weight_block_size`.

    Raises:
        TypeError: If the weight or its scales are no array.
        ValueError: If the shape is another one, the dtype is neither a float nor FP8, or the scales
            are missing, of the wrong shape, or given for a weight that is not FP8.
    """
    x, label = _array(tensors, name), _label(tensors, name)
    if x.shape != shape:
        raise ValueError(
            f"load_hf: {label} has shape {x.shape}, expected {shape} because of the module's "
            f"configuration"
        )
    if scale_name is None and x.dtype in FLOATS:
        return x
    if scale_name is None and is_fp8(x) and name.endswith(".weight"):
        layer = name.removesuffix("weight")
        raise ValueError(
            f"load_hf: {label} has dtype {x.dtype} and no scales, expected one of "
            f"{[layer + scale for scale in SCALE_NAMES]} beside it; is it in another file?"
        )
    if scale_name is None or not is_fp8(x):
        scales = "" if scale_name is None else f" and scales {scale_name!r}"
        names = ", ".join(np.dtype(dtype).name for dtype in FLOATS)
        raise ValueError(
            f"load_hf: {label} has dtype {x.dtype}{scales}, expected {names}, or FP8 with scales"
        )
    if block is None and isinstance(tensors, SafeTensors):
        block = _published_block_size(tensors)
    scale_label = _label(tensors, scale_name)
    weight = dequantized(x, _array(tensors, scale_name), block, scale_label)
    _check_no_overflow(x, weight, f"{label} times its scales")
    return weight


def _array(tensors: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns a tensor as a NumPy array."""
    x = tensors[name]
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        array, reason = np.asarray(None), f" ({error})"
    else:
        reason = ""
    if array.dtype == object:
        raise TypeError(
            f"load_hf: {_label(tensors, name)} is {type(x).__name__}, expected an array that NumPy "
            f"can read{reason}"
        )
    return array


def _published_block_size(tensors: SafeTensors) -> BlockSize | None:
    """Returns the `weight_block_size` of a `config.json` beside the files, if there is one."""
    folder = tensors.path if tensors.path.is_dir() else tensors.path.parent
    file = folder / "config.json"
    if not file.exists():
        return None
    config = read_json("load_hf", file)
    for level in (config, config.get("text_config")):
        if isinstance(level, Mapping) and isinstance(level.get("quantization_config"), Mapping):
            return configured_block_size(level, str(file))
    return None


def _placed(value: np.ndarray, old: Any, label: str) -> jax.Array:
    """Returns a parameter's new value, with the dtype and the sharding of its old value."""
    # The cast copies, so the parameter does not alias the file or the caller's array.
    with np.errstate(over="ignore"):
        cast = value.astype(old.dtype)
    _check_no_overflow(value, cast, f"{label} as {jnp.dtype(old.dtype).name}")
    return jax.device_put(cast, getattr(old, "sharding", None))


def _check_no_overflow(exact: np.ndarray, value: np.ndarray, label: str) -> None:
    """Rejects infinities that are not in the checkpoint."""
    if np.isinf(value).any() and (np.isinf(value) & ~np.isinf(exact)).any():
        raise ValueError(f"load_hf: {label} overflows, expected finite numbers")
