"""Names and layouts of attention layers' weights in checkpoints of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.compressed import CompressedAttention
from jax_dsa.nn.compressor import Compressor

INDEXER = "indexer."
"""What the names of the indexer's tensors of `DSAttention` begin with."""


class HFTensor(NamedTuple):
    """One tensor of a checkpoint and the parameters whose values it holds.

    Attributes:
        name: The tensor's name in `transformers`, without the layer's prefix.
        params: The parameters.
        to_params: Returns the parameters' values, views of the tensor where possible.
        from_params: Returns the tensor for the parameters' values.
    """

    name: str
    params: tuple[nnx.Variable[Any], ...]
    to_params: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    from_params: Callable[..., np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a checkpoint."""
        empty = (np.empty(param.get_value().shape, np.int8) for param in self.params)
        return self.from_params(*empty).shape


def _same(name: str, param: nnx.Variable[Any] | None) -> Iterator[HFTensor]:
    if param is not None:
        yield HFTensor(name, (param,), lambda x: (x,), lambda x: x)


def _linear(name: str, layer: nnx.Linear | None) -> Iterator[HFTensor]:
    if layer is not None:
        yield HFTensor(f"{name}.weight", (layer.kernel,), lambda x: (x.T,), lambda x: x.T)
        yield from _same(f"{name}.bias", layer.bias)


def _norm(name: str, layer: nnx.RMSNorm | nnx.LayerNorm | None) -> Iterator[HFTensor]:
    if layer is not None:
        yield from _same(f"{name}.weight", layer.scale)
        yield from _same(f"{name}.bias", getattr(layer, "bias", None))


def _compressor(name: str, compressor: Compressor | None) -> Iterator[HFTensor]:
    if compressor is not None:
        yield from _linear(f"{name}.kv_proj", compressor.wkv)
        yield from _linear(f"{name}.gate_proj", compressor.wg)
        yield from _same(f"{name}.position_bias", compressor.position_bias)
        yield from _norm(f"{name}.kv_norm", compressor.norm)


def hf_tensors(module: DSAttention | CompressedAttention) -> Iterator[HFTensor]:
    """Iterates over the checkpoint tensors of an attention layer."""
    return _mla_tensors(module) if isinstance(module, DSAttention) else _v4_tensors(module)


def _v4_tensors(module: CompressedAttention) -> Iterator[HFTensor]:
    c, indexer = module.config, module.indexer
    yield from _linear("q_a_proj", module.wq_a)
    yield from _norm("q_a_norm", module.q_norm)
    yield from _linear("q_b_proj", module.wq_b)
    yield from _linear("kv_proj", module.wkv)
    yield from _norm("kv_norm", module.kv_norm)
    yield HFTensor(
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


def _mla_tensors(module: DSAttention) -> Iterator[HFTensor]:
    c, mla, indexer = module.config, module.mla, module.indexer
    yield from _linear("q_a_proj", mla.wq_a)
    yield from _norm("q_a_layernorm", mla.q_norm)
    yield from _linear("q_proj" if mla.wq_a is None else "q_b_proj", mla.wq_b)
    yield from _linear("kv_a_proj_with_mqa", mla.wkv_a)
    yield from _norm("kv_a_layernorm", mla.kv_norm)
    yield from _linear("o_proj", mla.wo)
    yield from _linear("gate_proj", mla.wg)
    yield from _same("sinks", mla.sinks)

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        x = x.reshape(c.num_heads, c.nope_dim + c.v_dim, c.kv_rank).swapaxes(1, 2)
        return x[..., : c.nope_dim], x[..., c.nope_dim :]

    def joined(w_uk: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
        return np.concatenate([w_uk, w_uv], axis=-1).swapaxes(1, 2).reshape(-1, c.kv_rank)

    yield HFTensor("kv_b_proj.weight", (mla.w_uk, mla.w_uv), split, joined)
    scales = [("softmax_scaling", mla.q_scale)]
    if indexer is not None:
        scales.append(("indexer.softmax_scaling", indexer.q_scale))
        yield from _norm("indexer.q_input_norm", indexer.q_norm)
        yield from _linear("indexer.wq_b", indexer.wq)
        yield from _linear("indexer.wk", indexer.wk)
        yield from _norm("indexer.k_norm", indexer.k_norm)
        yield from _linear("indexer.weights_proj", indexer.weights)
        yield from _same("indexer.index_kpool_compress_ape", indexer.position_bias)
        if indexer.wg is not None:
            gate = "indexer.index_kpool_compress_gate"
            yield HFTensor(gate, (indexer.wg.kernel,), lambda x: (x.T,), lambda x: x.T)
    for name, scale in scales:
        if scale is not None:
            yield from _same(f"{name}.scale", scale.scale)
            yield from _same(f"{name}.bias", scale.bias)


# Names under which checkpoints are published, where `transformers` renames them when it loads them:
# patterns of published names, and the replacements that give the names in `transformers`.
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


def transformers_name(module: DSAttention | CompressedAttention, name: str) -> str:
    """Returns the name in `transformers` of a tensor that may have its published name.

    Args:
        module: The layer that the tensor belongs to.
        name: The tensor's name without the layer's prefix.
    """
    rules = next(rules for kind, rules in _PUBLISHED.items() if isinstance(module, kind))
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
