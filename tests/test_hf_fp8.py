"""FP8 weights of checkpoints: names, dtypes and layouts of their scales."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import expanded, quantized, write_safetensors
from support.published_layers import GROUPED, VARIANT

from jax_dsa import nn
from jax_dsa.nn.hf_names import hf_tensors

CONFIG = nn.AttentionConfig(
    model_dim=256,
    num_heads=2,
    q_rank=192,
    kv_rank=16,
    nope_dim=8,
    rope_dim=4,
    v_dim=8,
    index_heads=2,
    index_dim=32,
    index_rope_dim=4,
    top_k=4,
)
NAME = "q_a_proj.weight"  # 192 x 256


def abstract(config=CONFIG):
    """Returns a layer whose parameters have no values yet."""
    return nnx.eval_shape(lambda: nn.attention_layer(config, rngs=nnx.Rngs(0)))


def random_weights(rng, config=CONFIG):
    """Returns a layer's weights by name."""
    tensors = hf_tensors(abstract(config))
    return {x.name: rng.normal(size=x.shape).astype(np.float32) for x in tensors}


@pytest.fixture(name="weights")
def _weights(rng):
    return random_weights(rng)


def loaded(weights, **arguments):
    """Returns what `load_hf` makes of the weight `NAME`."""
    return nn.save_hf(nn.load_hf(abstract(), weights, **arguments))[NAME]


def assert_refused(weights, message, config=CONFIG, **arguments):
    """Checks that an error names the reason, and that the module stays as it was."""
    module = nn.load_hf(abstract(config), random_weights(np.random.default_rng(1), config))
    before = jax.tree.map(np.array, nnx.state(module))
    with pytest.raises(ValueError, match=message):
        nn.load_hf(module, weights, **arguments)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), before)


def test_blocks_of_128_are_the_default(rng, weights):
    """The last block of a column is smaller."""
    codes, scale, want = quantized(rng, weights[NAME], (128, 128))
    got = loaded({**weights, NAME: codes, f"{NAME}_scale_inv": scale})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "block", [(64, 64), (32, 32), (1, 32), (96, 80), (100, 7), (192, 1), (7, 2**40)]
)
def test_block_sizes_that_are_given(rng, weights, block, tmp_path):
    codes, scale, want = quantized(rng, weights[NAME], block)
    weights = {**weights, NAME: codes, f"{NAME}_scale_inv": scale}
    np.testing.assert_array_equal(loaded(weights, weight_block_size=block), want)
    write_safetensors(tmp_path / "model.safetensors", weights)
    text = json.dumps({"text_config": {"quantization_config": {"weight_block_size": block}}})
    (tmp_path / "config.json").write_text(text)
    np.testing.assert_array_equal(loaded(tmp_path), want)
    np.testing.assert_array_equal(loaded(tmp_path / "model.safetensors"), want)
    # The argument counts more than the file.
    other = (block[0] + 32, block[1] * 2)
    assert_refused(tmp_path, "for the .* blocks of a weight", weight_block_size=other)


@pytest.mark.parametrize(
    "grid", [(2, 3), (8, 6), (6, 8), (3, 4), (192, 8), (1, 1), (2,), (192,), (2, 2, 1), (0, 2)]
)
def test_scales_of_other_blocks_are_refused(weights, grid):
    codes = weights[NAME].astype(ml_dtypes.float8_e4m3fn)
    broken = {**weights, NAME: codes, f"{NAME}_scale_inv": np.ones(grid, np.float32)}
    shape = ", ".join(map(str, grid))
    message = rf"'{NAME}_scale_inv' has shape \({shape},?\), expected \(2, 2\) for the 128 x 128"
    assert_refused(broken, f"{message} .* pass weight_block_size")


@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_transposed_scales_are_refused(rng, size):
    config = dataclasses.replace(CONFIG, q_rank=64)
    weights = random_weights(rng, config)
    codes, scale, _ = quantized(rng, weights[NAME], (size, size))
    broken = {**weights, NAME: codes, f"{NAME}_scale_inv": scale.T}
    message = f"'{NAME}_scale_inv' has shape"
    assert_refused(broken, message, config, weight_block_size=(size, size))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "qscale_weight"])
def test_one_scale_for_a_weight(weights, shape, suffix):
    codes = weights[NAME].astype(ml_dtypes.float8_e4m3fn)
    name = NAME.replace("weight", suffix)
    got = loaded({**weights, NAME: codes, name: np.full(shape, 0.375, np.float32)})
    np.testing.assert_array_equal(got, codes.astype(np.float32) * np.float32(0.375))


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize(
    "scales", ["float32", "bfloat16", "float16", "float64", "float8_e8m0fnu", "bytes"]
)
@pytest.mark.parametrize("codes", ["float8_e4m3fn", "float8_e5m2", "bytes"])
def test_dtypes_of_codes_and_scales(rng, weights, codes, scales, from_file, tmp_path):
    kind = jnp.dtype("float8_e4m3fn" if codes == "bytes" else codes)
    x, scale, want = quantized(rng, weights[NAME], (128, 128), kind)
    x = x.view(np.uint8) if codes == "bytes" else x
    scale = scale.astype(jnp.dtype("float8_e8m0fnu" if scales == "bytes" else scales))
    scale = scale.view(np.uint8) if scales == "bytes" else scale
    weights = {**weights, NAME: x, f"{NAME}_scale_inv": scale}
    if from_file:
        write_safetensors(tmp_path / "model.safetensors", weights)
        weights = tmp_path
    np.testing.assert_array_equal(loaded(weights), want)


def test_the_bytes_of_scales_at_both_ends(weights):
    """Byte 0 is 2^-127, byte 254 is 2^127, and byte 255 is NaN."""
    codes = np.full((192, 256), 0.5, ml_dtypes.float8_e4m3fn)
    scale = np.array([[0, 1], [254, 127]], np.uint8)
    weights = {**weights, NAME: codes, "q_a_proj.scale": scale}
    want = 0.5 * expanded(np.exp2(scale.astype(np.float64) - 127), (128, 128), codes.shape)
    np.testing.assert_array_equal(loaded(weights), want.astype(np.float32))
    scale[1, 0] = 255
    assert_refused(weights, r"'q_a_proj.scale' has nan at \(1, 0\), expected finite scales")
    scale[1, 0], codes[190, 0] = 254, 448
    assert_refused(weights, f"'{NAME}' times its scales overflows")


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.bool_, ml_dtypes.float8_e4m3fn])
def test_scales_of_another_dtype(weights, dtype):
    codes = weights[NAME].astype(ml_dtypes.float8_e4m3fn)
    broken = {**weights, NAME: codes, f"{NAME}_scale_inv": np.ones((2, 2), dtype)}
    assert_refused(broken, f"'{NAME}_scale_inv' has dtype {np.dtype(dtype)}, expected one of flo")


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.uint8])
def test_codes_without_scales(weights, kind, tmp_path):
    codes = {**weights, NAME: weights[NAME].astype(kind)}
    name = np.dtype(kind).name
    assert_refused(codes, f"'{NAME}' has dtype {name} and no scales, expected one of .*_scale_inv")
    file = tmp_path / "model-00001-of-00002.safetensors"
    write_safetensors(file, codes)
    assert_refused(file, f"'{NAME}' in {file} has dtype {name} and no scales")


@pytest.mark.parametrize("size", [0, [128], [128, 0], [128, 128, 1], [1.5, 2], "ab", [True, 1]])
def test_broken_block_sizes(weights, size, tmp_path):
    assert_refused(
        weights, r"argument 'weight_block_size' is .*, expected two", weight_block_size=size
    )
    codes = weights[NAME].astype(ml_dtypes.float8_e4m3fn)
    weights = {**weights, NAME: codes, f"{NAME}_scale_inv": np.ones((2, 2), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", weights)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"quantization_config": {"weight_block_size": size}}))
    assert_refused(tmp_path, rf"weight_block_size in {file} is .*, expected two ints")
    file.write_text("{")
    assert_refused(tmp_path, rf"the file of 1 bytes in {file} is not JSON")


def test_every_quantised_weight_of_a_layer_as_published(rng):
    """DeepSeek-V4's and Mistral's names, in blocks of 128 with a smaller last one."""
    compressed = nn.CompressedConfig(
        model_dim=144,
        num_heads=4,
        q_rank=132,
        head_dim=40,
        rope_dim=8,
        out_groups=2,
        out_rank=70,
        window=6,
        ratio=4,
        overlap=True,
        top_k=3,
        index_heads=2,
        index_dim=72,
    )
    latent = dataclasses.replace(VARIANT, model_dim=144)
    names = {
        "q_a_proj": "wq_a",
        "q_b_proj": "wq_b",
        "compressor.indexer.q_b_proj": "indexer.wq_b",
        "compressor.kv_proj": "compressor.wkv",
        "kv_proj": "wkv",
        "o_a_proj": "wo_a",
        "o_b_proj": "wo_b",
        "q_proj": "wq",
        "kv_a_proj_with_mqa": "wkv_a_with_mqa",
        "kv_b_proj": "wkv_b",
        "o_proj": "wo",
        "indexer.wq_b": "indexer.wq_b",
    }
    for config, suffix in ((compressed, "scale"), (latent, "qscale_weight")):
        want = random_weights(rng, config)
        published = {}
        for name, x in want.items():
            base = names.get(name.removesuffix(".weight"))
            if base is None:
                published[f"layers.3.attn.{name}"] = x
                continue
            codes, scale, want[name] = quantized(rng, x, (128, 128))
            published[f"layers.3.attn.{base}.weight"] = codes
            published[f"layers.3.attn.{base}.{suffix}"] = scale.astype(ml_dtypes.float8_e8m0fnu)
        assert sum(name.endswith(suffix) for name in published) >= 5
        got = nn.save_hf(nn.load_hf(abstract(config), published, "layers.3.attn"))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("kind", ["MiniMax-M3", "Qwen3.8"])
def test_weights_of_grouped_heads_as_published(rng, kind):
    """Blocks of 1 x 32 whose scales are bytes, and blocks of 128 x 128 across fused projections."""
    config = dataclasses.replace(GROUPED, model_dim=144)
    block, suffix = (1, 32), "weight_scale_inv"
    if kind == "Qwen3.8":
        config = dataclasses.replace(config, head_dim=40, index_dim=72, indexer="mean", gate=True)
        block = (128, 128)
    want, published = random_weights(rng, config), {}
    for name, x in want.items():
        own = f"layers.3.self_attn.{name}"
        if kind == "MiniMax-M3":
            own = own.replace("indexer.", "index_")
        if x.ndim == 1:
            published[own] = x
            continue
        codes, scale, want[name] = quantized(rng, x, block)
        if kind == "MiniMax-M3":
            scale = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
        published[own] = codes
        published[own.replace("weight", suffix)] = scale
    layer = nn.load_hf(abstract(config), published, "layers.3.self_attn", weight_block_size=block)
    jax.tree.map(np.testing.assert_array_equal, nn.save_hf(layer), want)
    rows = want["q_proj.weight"]
    if kind == "Qwen3.8":  # Each head has its query's rows, then those of its gate.
        rows = rows.reshape(4, 2, 40, 144)
        np.testing.assert_array_equal(layer.wg.kernel[...].T, rows[:, 1].reshape(160, 144))
        rows = rows[:, 0].reshape(160, 144)
    np.testing.assert_array_equal(layer.wq.kernel[...].T, rows)
