"""Random checkpoints and configurations: right values, or an error of ours and no change."""

from __future__ import annotations

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import quantized, write_safetensors
from support.published_configs import CONFIGS
from support.published_layers import LAYERS

from jax_dsa import nn
from jax_dsa.nn.hf_fp8 import SCALE_NAMES
from jax_dsa.nn.hf_names import hf_tensors

FLOATS = ("float32", "bfloat16", "float16", "float64")
CODES = ("float8_e4m3fn", "float8_e5m2")
BLOCKS = ((128, 128), (64, 64), (32, 32), (1, 32), (96, 8), (3, 5))


def as_bytes(x):
    """Returns the bytes of an array of one-byte numbers, in its shape."""
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape)


def random_checkpoint(rng, tensors, block):
    """Returns the arrays of a checkpoint, and the values that they stand for."""
    arrays, want = {}, {}
    for tensor in tensors:
        x, name = rng.normal(size=tensor.shape), tensor.name
        layer, _, last = name.rpartition(".")
        if last != "weight" or x.ndim != 2 or rng.random() < 0.5:
            arrays[name] = x.astype(jnp.dtype(rng.choice(FLOATS)))
            want[name] = arrays[name].astype(np.float32)
            continue
        one = rng.random() < 0.1
        kind = str(rng.choice(CODES))
        codes, scale, want[name] = quantized(rng, x, x.shape if one else block, jnp.dtype(kind))
        scale = scale.reshape(()) if one else scale
        scale = scale.astype(jnp.dtype(rng.choice([*FLOATS, "float8_e8m0fnu"])))
        if scale.itemsize == 1 and rng.random() < 0.5:
            scale = as_bytes(scale)
        if kind == "float8_e4m3fn" and rng.random() < 0.5:
            codes = as_bytes(codes)
        arrays[name], arrays[f"{layer}.{rng.choice(SCALE_NAMES)}"] = codes, scale
    return arrays, want


def damaged(rng, arrays):
    """Returns a checkpoint that no layer can be loaded from."""
    name = str(rng.choice(list(arrays)))
    x = arrays.pop(name)
    kind = rng.integers(4)
    if kind == 0:
        return arrays
    if kind == 1:
        return {**arrays, name: x, f"{name}.more": x}
    return {**arrays, name: x[None, None, None] if kind == 2 else x.astype(np.int64)}


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", ["latent", "pooled", "selected", "best key", "mean key"])
def test_random_checkpoints(kind, seed, tmp_path):
    config = LAYERS[kind]
    rng = np.random.default_rng(seed)
    module = nnx.eval_shape(lambda: nn.attention_layer(config, rngs=nnx.Rngs(0)))
    tensors = list(hf_tensors(module))
    block = BLOCKS[rng.integers(len(BLOCKS))]
    arrays, want = random_checkpoint(rng, tensors, block)
    broken = ("no", "damaged", "cut off")[seed % 3]
    if broken == "damaged":
        arrays = damaged(rng, arrays)
    arrays = {f"layers.3.{name}": x for name, x in arrays.items()}
    source, arguments = arrays, {"weight_block_size": block}
    if broken == "cut off" or rng.random() < 0.5:
        source, arguments = tmp_path, {}
        items, middle = list(arrays.items()), rng.integers(1, len(arrays))
        for name, part in (("a", items[:middle]), ("b", items[middle:])):
            write_safetensors(tmp_path / f"{name}.safetensors", dict(part))
        text = json.dumps({"quantization_config": {"weight_block_size": block}})
        (tmp_path / "config.json").write_text(text)
    if broken == "cut off":
        file = tmp_path / f"{rng.choice(['a', 'b'])}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: rng.integers(len(content))])
    if broken == "no":
        got = nn.save_hf(nn.load_hf(module, source, "layers.3", **arguments))
        jax.tree.map(np.testing.assert_array_equal, got, want)
        return
    old = {tensor.name: rng.normal(size=tensor.shape).astype(np.float32) for tensor in tensors}
    nn.load_hf(module, old)
    with pytest.raises((ValueError, KeyError), match=r"(load_hf|SafeTensors): "):
        nn.load_hf(module, source, "layers.3", **arguments)
    jax.tree.map(np.testing.assert_array_equal, nn.save_hf(module), old)


def places(value):
    """Returns every (container, key) in a configuration."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [x for key in keys for x in ((value, key), *places(value[key]))]


@pytest.mark.parametrize("kind", CONFIGS)
def test_random_fields_of_configurations(kind):
    """A damaged configuration is still one, or an error of ours says what is wrong with it."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        config = copy.deepcopy(CONFIGS[kind])
        found = places(config)
        value, key = found[rng.integers(len(found))]
        value[key] = (None, "a", -1, 0, [1], {}, 1.5, True)[rng.integers(8)]
        try:
            nn.from_hf(config)
        except (ValueError, TypeError, KeyError) as error:
            assert any(f"{x}: " in str(error) for x in ("from_hf", "Config")), error
