"""Loads random checkpoints and configurations: right values, or an error that names the reason."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fuzz.programs.checkpoints import (
    BLOCKS,
    FLOATS,
    POINTER,
    break_files,
    damaged,
    random_tensors,
    write,
)
from support.published_configs import CONFIGS
from support.published_layers import COMPRESSED, LAYERS, VARIANT

from jax_dsa import nn
from jax_dsa.nn.hf_names import hf_tensors

if TYPE_CHECKING:
    from fuzz.draw import Draw

PLAIN = dataclasses.replace(
    VARIANT, q_rank=10, bias=False, sinks=False, gate=False, log_scaling=False, model_dim=24
)
MODULES = {
    **LAYERS,
    "plain": PLAIN,
    "wide": dataclasses.replace(PLAIN, model_dim=130, q_rank=67, num_heads=3),
    "wide compressed": dataclasses.replace(COMPRESSED, model_dim=130, q_rank=67),
}
ERRORS = (ValueError, TypeError, KeyError, OSError, NotImplementedError)


@functools.cache
def module_of(name: str) -> Any:
    """Returns a layer, which later loads change."""
    config = MODULES[name]
    return nn.attention_layer(config, rngs=nnx.Rngs(0))


def assert_named(error: Exception, starts: tuple[str, ...], names: list[str]) -> None:
    """Asserts that an error is one of ours, and that its message names what is wrong."""
    text = f"{type(error).__name__}: {error}"
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        message = error.strerror
    assert isinstance(error, ERRORS), text
    assert message.startswith(starts), f"does not name the function: {text}"
    assert any(name in message for name in names), f"names none of {names}: {text}"


def load(case: Any, c: Draw, r: Draw) -> None:
    """Loads a checkpoint that is right or wrong in one way."""
    module = module_of(r.one(*MODULES))
    tensors = list(hf_tensors(module))
    block, prefix = r.one(*BLOCKS), r.one("", "layers.3", "layers.3.", "model.layers.1.self_attn")
    in_file, fault = r.chance(), r.one("none", "tensor", "file", "argument")
    arrays, want, scales = random_tensors(r, module, tensors, block)
    if fault == "tensor":
        arrays = damaged(r, module, arrays, scales, in_file=in_file)
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    source: Any = {start + n if isinstance(n, str) else n: x for n, x in arrays.items()}
    if prefix:  # Another layer of the same checkpoint.
        source["layers.33.wo.weight"] = np.zeros(3, np.int64)
    must_fail, options = fault in ("tensor", "argument"), {"weight_block_size": block}
    with tempfile.TemporaryDirectory() as name:
        if in_file or fault == "file":
            source, options = write(r, pathlib.Path(name), source, block), r.one({}, options)
            must_fail |= fault == "file" and break_files(r, source)
            source = r.one(source, str(source))
        if fault == "argument":
            source, prefix, options = wrong_argument(r, source, prefix, options, scales)
        before = nn.save_hf(module)
        try:
            nn.load_hf(module, source, prefix, **options)
        except Exception as error:
            if fault == "none":
                raise
            names = [
                "argument '",
                name,
                "/nowhere",
                "/tmp",
                *want,
                *map(str, arrays),
                "prefix",
                "missing",
            ]
            assert_named(error, ("load_hf: ", "SafeTensors: "), names)
            jax.tree.map(np.testing.assert_array_equal, nn.save_hf(module), before)
            return
    assert not must_fail, f"load_hf accepts a wrong checkpoint: {fault}"
    if fault == "none":
        save(r, module, want)


def save(r: Draw, module: Any, want: dict[str, np.ndarray]) -> None:
    """Compares what `save_hf` returns."""
    got = nn.save_hf(module)
    assert got.keys() == want.keys()
    jax.tree.map(np.testing.assert_array_equal, got, want)
    dtype, prefix = jnp.dtype(r.one(*FLOATS)), r.one("a", "a.")
    for name, x in nn.save_hf(module, prefix, dtype=dtype).items():
        np.testing.assert_array_equal(x, want[name.removeprefix("a.")].astype(dtype))
        assert x.dtype == dtype


def wrong_argument(
    r: Draw, source: Any, prefix: str, options: dict[str, Any], scales: dict[str, str]
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the arguments of `load_hf` with a wrong one."""
    sizes = (1, (1,), (0, 4), (4, -1), (2.0, 2), ("a", "b"), "ab", (True, 4), object(), (1, 2, 3))
    kind = r.rng.integers(4)
    if kind == 0:
        return source, r.one("layers.2.", "layers", None, 3, b"layers", ".", "layers.3.."), options
    if kind == 1:
        return r.one(None, 3, [1], object(), {}, {1}, "/nowhere", pathlib.Path("/tmp")), prefix, {}
    return source, prefix, {"weight_block_size": r.one(*sizes)}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) in a configuration."""
    keys: Any = value if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    return [x for key in keys for x in ((value, key), *places(value[key]))]


ODD = (None, "a", "", -1, 0, 1, 2, [1], [], {}, {"a": 1}, 1.5, True, 1e400, -1e400, 2**70, [None])


def configure(case: Any, c: Draw, r: Draw) -> None:
    """Reads a configuration with up to three wrong or missing fields, or a broken file."""
    kind = r.one(*CONFIGS)
    config = copy.deepcopy(CONFIGS[kind])
    changes, options = r.one(0, 1, 1, 2, 3), {}
    for _ in range(changes):
        if not (found := places(config)):
            break
        value, key = r.one(*found)
        if isinstance(value, dict) and r.chance(0.3):
            del value[key]
        else:
            value[key] = copy.deepcopy(r.one(*ODD))
    if r.chance(0.1):
        options = {r.one("rope_alpha", "dtype"): r.one(*ODD, jnp.bfloat16, np.zeros(3))}
    with tempfile.TemporaryDirectory() as name:
        source: Any = config
        if r.chance():
            source = pathlib.Path(name) / "config.json"
            text = json.dumps(config).encode()
            if r.chance(0.2):
                changes += 1
                text = r.one(text[: r.rng.integers(len(text))], POINTER, b"", b"\xff" + text, b"[]")
            source.write_bytes(text)
            source = r.one(source, str(source), source.parent)
        try:
            layers = nn.from_hf(source, **options)
        except Exception as error:
            if not changes and not options:
                raise
            kinds = "AttentionConfig: ", "CompressedConfig: ", "GroupedConfig: "
            starts = "from_hf: ", *kinds, "yarn_frequencies: "
            names = [name, "argument '", "field '", "Config: ", *map(str, config)]
            assert_named(error, starts, names)
            return
    build(r, r.one(*layers))


def build(r: Draw, layer: Any) -> None:
    """Builds a layer without values; a configuration that was accepted makes one."""
    config = layer.config
    if config is not None and r.chance(0.2):
        nnx.eval_shape(lambda: nn.attention_layer(config, layer.indexer_type, rngs=nnx.Rngs(0)))


PROGRAMS = {"load_hf": load, "from_hf": configure}
