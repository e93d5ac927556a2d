"""Random checkpoints and what may be wrong with them."""

from __future__ import annotations

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from support.checkpoints import quantized, write_safetensors

from jax_dsa import nn
from jax_dsa.nn.hf_fp8 import SCALE_NAMES
from jax_dsa.nn.hf_names import HFTensor, transformers_name

if TYPE_CHECKING:
    from fuzz.draw import Draw

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ((128, 128), (64, 64), (32, 32), (1, 32), (96, 8), (3, 5), (1, 1))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"

# Patterns of names in `transformers`, and the replacements that give published names.
_LATENT = (
    (r"^gate_proj\.", "linear_gate."),
    (r"^sinks$", "learnable_sink_param"),
    (r"^q_proj\.", "wq."),
    (r"^kv_a_proj_with_mqa\.", "wkv_a_with_mqa."),
    (r"^kv_a_layernorm\.", "kv_a_norm."),
    (r"^kv_b_proj\.", "wkv_b."),
    (r"^o_proj\.", "wo."),
    (r"softmax_scaling\.scale$", "ssmax_scaling.s"),
    (r"softmax_scaling\.bias$", "ssmax_scaling.b"),
)
_COMPRESSED = (
    (r"^sinks$", "attn_sink"),
    (r"^q_a_proj\.", "wq_a."),
    (r"^q_a_norm\.", "q_norm."),
    (r"^q_b_proj\.", "wq_b."),
    (r"^o_a_proj\.", "wo_a."),
    (r"^o_b_proj\.", "wo_b."),
    (r"^compressor\.indexer\.scorer\.weights_proj\.", "indexer.weights_proj."),
    (r"^compressor\.indexer\.q_b_proj\.", "indexer.wq_b."),
    (r"^compressor\.indexer\.", "indexer.compressor."),
    (r"\bkv_proj\.", "wkv."),
    (r"\bgate_proj\.", "wgate."),
    (r"\bcompressor\.kv_norm\.", "compressor.norm."),
    (r"position_bias$", "ape"),
)


def published_name(module: Any, name: str) -> str:
    """Returns the published name of a tensor that is called `name` in `transformers`."""
    published = name
    for pattern, replacement in _LATENT if isinstance(module, nn.DSAttention) else _COMPRESSED:
        published = re.sub(pattern, replacement, published)
    assert transformers_name(module, published) == name, (published, name)
    return published


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array of one-byte numbers, in its shape."""
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape)


def random_tensors(
    r: Draw, module: Any, tensors: list[HFTensor], block: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Returns the arrays of a checkpoint, the values of its weights, and the weights' scales."""
    arrays, want, scales, published = {}, {}, {}, r.one(0.0, 0.5, 1.0)
    for tensor in tensors:
        x, name = r.rng.normal(size=tensor.shape), tensor.name
        if r.chance(published):
            name = published_name(module, name)
        layer, _, last = name.rpartition(".")
        if last != "weight" or x.ndim != 2 or r.chance():
            arrays[name] = x.astype(jnp.dtype(r.one(*FLOATS)))
            want[tensor.name] = arrays[name].astype(np.float32)
            continue
        whole, kind = r.chance(0.1), r.one("float8_e4m3fn", "float8_e5m2")
        codes, scale, want[tensor.name] = quantized(
            r.rng, x, x.shape if whole else block, jnp.dtype(kind)
        )
        scale = scale.reshape(r.one((), (1,))) if whole else scale
        scale = scale.astype(jnp.dtype(r.one(*FLOATS, "float8_e8m0fnu")))
        scale = as_bytes(scale) if scale.itemsize == 1 and r.chance() else scale
        codes = as_bytes(codes) if kind == "float8_e4m3fn" and r.chance() else codes
        scales[name] = f"{layer}.{r.one(*SCALE_NAMES)}"
        arrays[name], arrays[scales[name]] = codes, scale
    return arrays, want, scales


def damaged(
    r: Draw, module: Any, arrays: dict[str, Any], scales: dict[str, str], *, in_file: bool
) -> dict[str, Any]:
    """Returns a checkpoint that no layer can be loaded from."""
    name = r.one(*(n for n in arrays if n not in scales.values()))
    x, rest = arrays[name], {n: x for n, x in arrays.items() if n != name}
    kinds: list[dict[str, Any]] = [
        rest,
        {**arrays, f"{name}.more": x},
        {**rest, name: x[None, None, None]},
        {**rest, name: x.astype(np.int64)},
        {**rest, name: np.concatenate([np.atleast_1d(x)] * 2)},
        {**rest, name: np.full(x.shape, 1e300)},
    ]
    other = published_name(module, transformers_name(module, name))
    if other != name:
        kinds.append({**arrays, other: x})
    for weight, scale in scales.items():
        y = np.asarray(arrays[scale]).astype(np.float32)
        without = {n: x for n, x in arrays.items() if n != scale}
        layer, _, last = scale.rpartition(".")
        second = f"{layer}.{r.one(*(s for s in SCALE_NAMES if s != last))}"
        largest = np.full(arrays[weight].shape, 448.0).astype(jnp.float8_e4m3fn)
        kinds += [
            without,
            {**arrays, scale: np.full(y.shape, r.one(np.nan, np.inf, -np.inf), np.float32)},
            {**arrays, scale: y.astype(np.int64)},
            {**arrays, scale: np.ones((2, 2, 2, *y.shape), np.float32)},
            {**arrays, scale: np.full(y.shape, 3e38, np.float32), weight: largest},
            {**arrays, second: y},
        ]
        if y.ndim == 2 and y.shape[0] != y.shape[1]:
            kinds.append({**arrays, scale: y.T})
    if not in_file:
        odd = (None, "text", [[1.0], [2.0, 3.0]], object(), {1: 2}, 1 + 2j, np.datetime64("2026"))
        kinds += [{**rest, name: r.one(*odd)}, {**arrays, r.one(1, None, b"q", (1,)): x}]
    return kinds[r.rng.integers(len(kinds))]


def write(r: Draw, folder: pathlib.Path, arrays: dict[str, Any], block: Any) -> pathlib.Path:
    """Writes a checkpoint to one or two files with a `config.json`, and returns the folder."""
    items = list(arrays.items())
    middle = int(r.rng.integers(0, len(items)))
    for name, part in (("a", items[:middle]), ("b", items[middle:])):
        if part:
            write_safetensors(folder / f"{name}.safetensors", dict(part))
    config = {"quantization_config": {"weight_block_size": block}}
    config = r.one(config, {"text_config": config})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def break_files(r: Draw, folder: pathlib.Path) -> bool:
    """Damages one file of a checkpoint. Returns whether it cannot be loaded any more."""
    file = r.one(*sorted(folder.glob("*.safetensors")))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    kind = int(r.rng.integers(10))
    if kind == 0:
        file.write_bytes(content[: r.rng.integers(len(content))])
    elif kind == 1:
        file.write_bytes(POINTER)
    elif kind == 2:
        file.write_bytes(b"")
    elif kind == 3:
        file.write_bytes(bytes(r.rng.integers(0, 256, r.rng.integers(8, 99)).tolist()))
    elif kind == 4:
        (folder / "c.safetensors").write_bytes(content)
    elif kind == 5:
        file.unlink()
        file.mkdir()
    elif kind in (6, 7):
        header = json.loads(content[8 : 8 + length])
        name = r.one(*header)
        odd = (None, "F32", "F4", -1, 2**70, 1.5, [], [1, 2], [[1]], {}, True, [0, 2**70], [-1, 4])
        if kind == 6 or not isinstance(header[name], dict):
            header[name] = r.one(*odd)
        else:
            header[name][r.one("dtype", "shape", "data_offsets")] = r.one(*odd)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    elif kind == 8:
        position = int(r.rng.integers(8 + length))
        flipped = content[position] ^ (1 << int(r.rng.integers(8)))
        file.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
    else:
        size = r.one(None, 3, [1], [0, 128], ["a", 2], [1.5, 2], {}, "128", [128, 128, 128], True)
        config = {"quantization_config": {"weight_block_size": size}}
        text = json.dumps(
            r.one(config, [], 3, {"quantization_config": r.one(3, None, [])})
        ).encode()
        (folder / "config.json").write_bytes(r.one(text, text[:-1], b"", POINTER, b"\xff\xfe{"))
    return kind in range(6)
