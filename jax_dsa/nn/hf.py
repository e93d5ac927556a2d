"""Attention layers of published models: configurations and weights as `transformers` has them.

Attention and indexer only: experts, routers, hyper-connections and embeddings are the user's model.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.compressed import CompressedAttention, CompressedConfig, Compressor
from jax_dsa.nn.config import AttentionConfig, IndexerType
from jax_dsa.nn.rotary import yarn_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8_BLOCK = 128
"""Rows and columns that share a scale in checkpoints of FP8 weights."""


class HFLayer(NamedTuple):
    """One layer of a model: what a module is built of."""

    config: AttentionConfig | CompressedConfig
    """For `DSAttention`, or for `CompressedAttention`."""
    indexer_type: IndexerType
    kv_source: int
    """The layer whose keys it attends to: itself, or the earlier one whose `aux.kv` it takes."""


def from_hf(
    config: Any, *, rope_alpha: Sequence[float] | None = None, dtype: Any = jnp.float32
) -> tuple[HFLayer, ...]:
    """The attention layers of a model that `transformers` has a configuration of.

    Args:
        config: the configuration, or what its `to_dict` gives. Of a model with several parts it is
            the text model's that counts. Known are the model types `deepseek_v32`, `glm_moe_dsa`,
            `hy_v4`, `mistral_large4` and `deepseek_v4`.
        rope_alpha: a checkpoint's learnt logarithms of frequency factors, one for each rotary pair
            (Mistral's `rotary_emb.alpha`).
        dtype: of activations and caches.

    Raises:
        ValueError: the model type or its kind of rotary embedding is not known.
    """
    c = dict(config) if isinstance(config, Mapping) else config.to_dict()
    c = c.get("text_config", c)
    kind = c["model_type"]
    if kind not in _MODELS:
        raise ValueError(f"from_hf: model type is {kind!r}, want one of {tuple(_MODELS)}")
    return _MODELS[kind](c, rope_alpha, dtype)


def _mla(
    c: dict[str, Any], alpha: Sequence[float] | None, dtype: Any, **own: Any
) -> tuple[HFLayer, ...]:
    """Layers of multi-head latent attention; `own` are the model's own fields."""
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
        # Of these layers' norms; `rms_norm_eps` is the residual stream's.
        "norm_eps": 1e-6,
        "dtype": dtype,
        **_rotation(c["rope_parameters"], rope_dim, alpha),
        **own,
    }
    count = c["num_hidden_layers"]
    types = c.get("indexer_types") or ["full"] * count
    sources = c.get("kv_source_layers") or range(count)
    turned = c.get("no_rope_layers") or [1] * count
    layers = []
    for i, (kind, source, rotary) in enumerate(zip(types, sources, turned, strict=True)):
        layer = dict(fields, shares_keys=source != i)
        if not rotary:
            layer |= {"nope_dim": layer["nope_dim"] + rope_dim, "rope_dim": 0, "index_rope_dim": 0}
            layer |= {"rope_frequencies": None}
        layers.append(HFLayer(AttentionConfig(**layer), kind, source))
    return tuple(layers)


def _compressed(
    c: dict[str, Any], alpha: Sequence[float] | None, dtype: Any
) -> tuple[HFLayer, ...]:
    """Layers of DeepSeek-V4: their kind decides what they compress and which rotation they have."""
    layers = []
    for i, kind in enumerate(c["layer_types"]):
        alone = kind == "sliding_attention"
        indexed = kind == "compressed_sparse_attention"
        rope = c["rope_parameters"]["main" if alone else "compress"]
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
            ratio=None if alone else c["compress_rates"][kind],
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
    """YaRN's growth of the attention scores with a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale_factor(rope: dict[str, Any]) -> float:
    weight = rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not weight:
        return 1.0
    return _magnitude(rope["factor"], weight) ** 2


def _rotation(
    rope: dict[str, Any], width: int, alpha: Sequence[float] | None = None
) -> dict[str, Any]:
    """Fields of the configuration for a model's `rope_parameters`."""
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
        raise ValueError(f"from_hf: rope_type is {kind!r}, want 'default' or 'yarn'")
    if alpha is not None:
        frequencies = frequencies * np.exp(np.asarray(alpha, np.float64))
    return {
        "rope_base": base,
        "rope_frequencies": tuple(map(float, frequencies)),
        "rope_factor": 1.0 if factor is None else float(factor),
    }


class _Weight(NamedTuple):
    """One tensor of a checkpoint, and the parameters that it holds."""

    name: str
    params: tuple[nnx.Variable[Any], ...]
    ours: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    theirs: Callable[..., np.ndarray]


def _same(name: str, param: nnx.Variable[Any] | None) -> Iterator[_Weight]:
    if param is not None:
        yield _Weight(name, (param,), lambda x: (x,), lambda x: x)


def _linear(name: str, layer: nnx.Linear | None) -> Iterator[_Weight]:
    if layer is not None:
        yield _Weight(f"{name}.weight", (layer.kernel,), lambda x: (x.T,), lambda x: x.T)
        yield from _same(f"{name}.bias", layer.bias)


def _norm(name: str, layer: nnx.RMSNorm | nnx.LayerNorm | None) -> Iterator[_Weight]:
    if layer is not None:
        yield from _same(f"{name}.weight", layer.scale)
        yield from _same(f"{name}.bias", getattr(layer, "bias", None))


def _compressor(name: str, compressor: Compressor | None) -> Iterator[_Weight]:
    if compressor is not None:
        yield from _linear(f"{name}.kv_proj", compressor.wkv)
        yield from _linear(f"{name}.gate_proj", compressor.wg)
        yield from _same(f"{name}.position_bias", compressor.position_bias)
        yield from _norm(f"{name}.kv_norm", compressor.norm)


def _weights(module: DSAttention | CompressedAttention) -> Iterator[_Weight]:
    """All that `module` holds."""
    return _mla_weights(module) if isinstance(module, DSAttention) else _v4_weights(module)


def _v4_weights(module: CompressedAttention) -> Iterator[_Weight]:
    c, indexer = module.config, module.indexer
    yield from _linear("q_a_proj", module.wq_a)
    yield from _norm("q_a_norm", module.q_norm)
    yield from _linear("q_b_proj", module.wq_b)
    yield from _linear("kv_proj", module.wkv)
    yield from _norm("kv_norm", module.kv_norm)
    yield _Weight(
        "o_a_proj.weight",
        (module.wo_a,),
        lambda x: (x.reshape(c.out_groups, c.out_rank, -1).swapaxes(1, 2),),
        lambda x: x.swapaxes(1, 2).reshape(c.out_groups * c.out_rank, -1),
    )
    yield from _linear("o_b_proj", module.wo_b)
    yield from _same("sinks", module.sinks)
    yield from _compressor("compressor", module.compressor)
    if indexer is not None:
        yield from _compressor("compressor.indexer", indexer.compressor)
        yield from _linear("compressor.indexer.q_b_proj", indexer.wq)
        yield from _linear("compressor.indexer.scorer.weights_proj", indexer.weights)


def _mla_weights(module: DSAttention) -> Iterator[_Weight]:
    c, mla, indexer = module.config, module.mla, module.indexer
    yield from _linear("q_a_proj", mla.wq_a)
    yield from _norm("q_a_layernorm", mla.q_norm)
    yield from _linear("q_proj" if mla.wq_a is None else "q_b_proj", mla.wq_b)
    yield from _linear("kv_a_proj_with_mqa", mla.wkv_a)
    yield from _norm("kv_a_layernorm", mla.kv_norm)
    yield from _linear("o_proj", mla.wo)
    yield from _linear("gate_proj", mla.wg)
    yield from _same("sinks", mla.sinks)

    def halves(x: np.ndarray) -> tuple[np.ndarray, ...]:
        x = x.reshape(c.num_heads, c.nope_dim + c.v_dim, c.kv_rank).swapaxes(1, 2)
        return x[..., : c.nope_dim], x[..., c.nope_dim :]

    def joined(w_uk: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
        return np.concatenate([w_uk, w_uv], axis=-1).swapaxes(1, 2).reshape(-1, c.kv_rank)

    yield _Weight("kv_b_proj.weight", (mla.w_uk, mla.w_uv), halves, joined)
    scales = [("softmax_scaling", mla.q_scale)]
    if indexer is not None:
        scales.append(("indexer.softmax_scaling", indexer.q_scale))
        yield from _norm("indexer.q_input_norm", indexer.q_norm)
        yield from _linear("indexer.wq_b", indexer.wq)
        yield from _linear("indexer.wk", indexer.wk)
        yield from _norm("indexer.k_norm", indexer.k_norm)
        yield from _linear("indexer.weights_proj", indexer.weights)
    for name, scale in scales:
        if scale is not None:
            yield from _same(f"{name}.scale", scale.scale)
            yield from _same(f"{name}.bias", scale.bias)


# How checkpoints are published, where `transformers` renames them: patterns, and its own names.
_PUBLISHED: dict[type, tuple[tuple[str, str], ...]] = {
    DSAttention: (
        (r"^linear_gate\.", "gate_proj."),
        (r"^learnable_sink_param$", "sinks"),
        (r"^wq\.", "q_proj."),
        (r"^wkv_a_with_mqa\.", "kv_a_proj_with_mqa."),
        (r"^kv_a_norm\.", "kv_a_layernorm."),
        (r"^wkv_b\.", "kv_b_proj."),
        (r"^wo\.", "o_proj."),
        (r"\bssmax_scaling\.s$", "softmax_scaling.scale"),
        (r"\bssmax_scaling\.b$", "softmax_scaling.bias"),
    ),
    CompressedAttention: (
        (r"^attn_sink$", "sinks"),
        (r"^wq_a\.", "q_a_proj."),
        (r"^q_norm\.", "q_a_norm."),
        (r"^wq_b\.", "q_b_proj."),
        (r"^wo_a\.", "o_a_proj."),
        (r"^wo_b\.", "o_b_proj."),
        (r"^indexer\.compressor\.", "compressor.indexer."),
        (r"^indexer\.wq_b\.", "compressor.indexer.q_b_proj."),
        (r"^indexer\.weights_proj\.", "compressor.indexer.scorer.weights_proj."),
        (r"\bwkv\.", "kv_proj."),
        (r"\bwgate\.", "gate_proj."),
        (r"\bnorm\.", "kv_norm."),
        (r"\bape$", "position_bias"),
    ),
}

Attention = TypeVar("Attention", DSAttention, CompressedAttention)


def load_hf(
    module: Attention, tensors: Mapping[str, Any] | str | pathlib.Path, prefix: str = ""
) -> Attention:
    """`module` with a checkpoint's weights, each in its parameter's dtype and sharding.

    Args:
        module: an attention layer; its parameters are replaced in place. They may be abstract, from
            `nnx.eval_shape`.
        tensors: the layer's weights by the names of `transformers` or, where it renames them, as
            they are published, as arrays; or a safetensors file, or a directory of them, of which
            each tensor is read when it is its turn. FP8 weights come with their scales of 128 x 128
            blocks (`weight_scale_inv`).
        prefix: of the layer's names, for example "model.layers.3.self_attn.".

    Returns:
        `module`.

    Raises:
        KeyError: a weight is missing.
        ValueError: a weight has another shape, or there is one that the module does not know.
    """
    if not isinstance(tensors, Mapping):
        tensors = SafeTensors(tensors)
    names = {}
    for name in tensors:
        if name.startswith(prefix):
            renamed = name[len(prefix) :]
            for pattern, ours in _PUBLISHED[type(module)]:
                renamed = re.sub(pattern, ours, renamed)
            names[renamed] = name
    for weight in _weights(module):
        if weight.name not in names:
            raise KeyError(f"load_hf: tensor {prefix + weight.name!r} is missing")
        name = names.pop(weight.name)
        x = np.asarray(tensors[name])
        scale = names.pop(f"{weight.name}_scale_inv", None)
        parts = weight.ours(x if scale is None else _scaled(x, tensors[scale]))
        for param, part in zip(weight.params, parts, strict=True):
            old = param.get_value()
            if part.shape != old.shape:
                raise ValueError(
                    f"load_hf: tensor {name!r} gives a shape of {part.shape}, want {old.shape}"
                )
            param.set_value(jax.device_put(part.astype(old.dtype), getattr(old, "sharding", None)))
    if names:
        raise ValueError(f"load_hf: the module has no place for {sorted(names.values())}")
    return module


def save_hf(
    module: DSAttention | CompressedAttention, prefix: str = "", *, dtype: Any = None
) -> dict[str, np.ndarray]:
    """The weights of `module` by the names of `transformers`, in `dtype` or as they are: what
    `load_hf` takes.
    """
    found = {}
    for weight in _weights(module):
        x = weight.theirs(*(np.asarray(param.get_value()) for param in weight.params))
        found[prefix + weight.name] = np.ascontiguousarray(x if dtype is None else x.astype(dtype))
    return found


def _scaled(x: np.ndarray, scale: Any) -> np.ndarray:
    """FP8 weights times the scales of their blocks."""
    rows, columns = x.shape
    wide = np.asarray(scale, np.float32).repeat(FP8_BLOCK, 0)[:rows].repeat(FP8_BLOCK, 1)
    return x.astype(np.float32) * wide[:, :columns]


_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
}


class SafeTensors(Mapping[str, np.ndarray]):
    """The tensors of a safetensors file, or of a directory with several, mapped into memory."""

    def __init__(self, path: str | pathlib.Path) -> None:
        path = pathlib.Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        self._places: dict[str, tuple[pathlib.Path, int, dict[str, Any]]] = {}
        for file in files:
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            header.pop("__metadata__", None)
            self._places |= {name: (file, 8 + size, entry) for name, entry in header.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, which is read from the file where it is used."""
        file, start, entry = self._places[name]
        first, last = entry["data_offsets"]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        raw = np.memmap(file, np.uint8, "r", start + first, (last - first,))
        return raw.view(dtype).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        """The tensors' names."""
        return iter(self._places)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._places)
