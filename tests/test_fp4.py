"""FP4 fake quantisation: against an exhaustive search over all codes, and in the indexers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.marks import slow
from support.oracles import fp4 as oracle
from support.published_layers import COMPRESSED, SEGMENT_IDS, VARIANT, B, T, hidden, layer

from jax_dsa import nn

HALVES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # Midpoints of neighbouring codes.


def check(x: np.ndarray) -> np.ndarray:
    """Compares the quantised blocks [..., 32] with the oracle, including the signs of zeros."""
    got = np.asarray(jax.jit(nn.fake_quantize_fp4)(x))
    assert got.dtype == x.dtype
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        want = oracle.fake_quantize(x, float(ml_dtypes.finfo(x.dtype).max))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)]
    )
    return got


def test_oracle_has_the_values_of_e2m1():
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(codes, [*oracle.GRID, *-oracle.GRID])
    x = np.resize(codes, 32).astype(np.float32)
    np.testing.assert_array_equal(check(x[None])[0], x)


def test_every_bfloat16_as_the_maximum_of_a_block(rng):
    largest = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    ratios = np.concatenate([[1], HALVES / 6, HALVES[:6] / 4, rng.uniform(-1, 1, size=18)])
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = (largest.astype(np.float64)[:, None] * ratios).astype(ml_dtypes.bfloat16)
    finite = np.isfinite(blocks.astype(np.float64)).all(-1)
    assert finite.sum() == 2 * 255 * 128
    got = check(blocks)
    np.testing.assert_array_equal(np.isnan(got).all(-1), ~finite)
    np.testing.assert_array_equal(np.isfinite(got).all(-1), finite)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_ties_and_their_neighbours(dtype):
    """Checks every scale that the dtype has, and values next to the largest value of a scale."""
    info = ml_dtypes.finfo(dtype)
    low = max(-124, int(info.minexp) + 2)
    scales = 2.0 ** np.arange(low, int(info.maxexp) - 2)
    for change in (-1, 0, 1):
        half = HALVES.astype(dtype)
        bits = half.view(f"u{half.itemsize}") + np.array(change).astype(f"u{half.itemsize}")
        near = bits.view(dtype).astype(np.float64)
        row = np.concatenate([[6], near, -near, np.zeros(17)])
        check((row * scales[:, None]).astype(dtype))
    six = np.array(6, dtype).view(f"u{np.dtype(dtype).itemsize}")
    above = (six + six.dtype.type(1)).view(dtype)
    x = np.zeros((2, 32), dtype)
    x[0, :2], x[1, :2] = (6, 1.5), (above, 1.5)
    np.testing.assert_array_equal(check(x)[:, :2], [[6, 1.5], [6, 2]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_blocks_with_zeros_subnormals_and_infinities(rng, dtype):
    info = ml_dtypes.finfo(dtype)
    x = rng.normal(size=(8, 32)).astype(dtype)
    x[0] = 0
    x[1] = -np.zeros(32)
    x[2] = info.smallest_subnormal
    x[3, ::2] = np.asarray(info.smallest_normal) - np.asarray(info.smallest_subnormal)
    x[4, 7] = np.nan
    x[5, 31] = -np.inf
    x[6, 3] = info.max
    x[7] = info.max
    got = check(x)
    assert not got[:2].any() and np.signbit(got[1]).all()
    assert np.isnan(got[4:6]).all() and np.isfinite(got[[0, 1, 2, 3, 6, 7]]).all()
    if dtype != np.float16:  # Its subnormal numbers are normal in float32.
        assert not got[2].any()


def test_random_values(rng):
    x = rng.normal(size=(3, 500, 64)) * 2.0 ** rng.integers(-130, 120, size=(3, 500, 1))
    x = x.astype(np.float32)
    got = np.asarray(nn.fake_quantize_fp4(x)).reshape(3, 500, 2, 32)
    np.testing.assert_array_equal(
        got, oracle.fake_quantize(x.reshape(3, 500, 2, 32), float(np.finfo(np.float32).max))
    )


def test_gradients_pass_straight_through(rng):
    x, ct = (jnp.asarray(rng.normal(size=(5, 64)), jnp.bfloat16) for _ in range(2))
    _, pullback = jax.vjp(nn.fake_quantize_fp4, x)
    np.testing.assert_array_equal(pullback(ct)[0], ct)
    _, pushed = jax.jvp(nn.fake_quantize_fp4, (x,), (ct,))
    np.testing.assert_array_equal(pushed, ct)
    mapped = jax.vmap(nn.fake_quantize_fp4)(x)
    np.testing.assert_array_equal(mapped, nn.fake_quantize_fp4(x))
    assert nn.fake_quantize_fp4(jnp.zeros((0, 32))).shape == (0, 32)


def test_invalid_arguments_raise():
    for x in (jnp.zeros((2, 33)), jnp.zeros(32, jnp.int32), jnp.float32(1)):
        with pytest.raises(ValueError, match="fake_quantize_fp4: argument 'x' is"):
            nn.fake_quantize_fp4(x)
    for config in (VARIANT, COMPRESSED):
        with pytest.raises(ValueError, match="index_dim is 8, expected a multiple of 32"):
            dataclasses.replace(config, index_fp4=True)
        with pytest.raises(ValueError, match="index_dim is 12, expected a power of two"):
            dataclasses.replace(config, index_dim=12, index_hadamard=True)
    with pytest.raises(ValueError, match="index_fp8 and index_fp4 are True, expected at most one"):
        dataclasses.replace(VARIANT, index_dim=32, index_fp8=True, index_fp4=True)


@pytest.mark.parametrize("config", [VARIANT, slow(COMPRESSED)], ids=["latent", "compressed"])
def test_indexer_in_fp4(rng, config):
    """Queries and keys are FP4 values; packed documents, decoding and training work."""
    config = dataclasses.replace(config, index_dim=32, index_fp4=True, index_hadamard=True)
    module, x = layer(rng, config), hidden(rng)
    places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    graph, params = nnx.split(module)
    loss = jax.grad(lambda p: nnx.merge(graph, p)(x, segment_ids=SEGMENT_IDS)[1].kl)
    gradients = nnx.merge(graph, jax.jit(loss)(params)).indexer
    if isinstance(module, nn.DSAttention):
        inputs = module.indexer(x, x, places)
        q, k, key_weights = inputs.index_q, inputs.index_k, gradients.wk
        cache = nn.LayerCache.empty(config, B, T)
    else:
        q, _ = module.indexer(x, module.q_norm(module.wq_a(x)), places)
        k, key_weights = module.indexer.compressor(x, places, None), gradients.compressor.wkv
        cache = module.init_cache(B, T)
    for each in (q, k):
        blocks = np.asarray(each).reshape(-1, 32)
        quantized = oracle.fake_quantize(blocks, float(np.finfo(np.float32).max))
        np.testing.assert_array_equal(blocks, quantized)
    for weights in (gradients.wq, key_weights):
        assert np.abs(weights.kernel[...]).max() > 0
    want, aux = jax.jit(lambda x: module(x))(x)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    got, indices = [], []
    for chunk in (x[:, :20], *jnp.split(x[:, 20:], T - 20, axis=1)):
        y, cache, selected = step(chunk, cache)
        got.append(y)
        indices.append(selected)
    np.testing.assert_array_equal(jnp.concatenate(indices, 1), aux.indices)
    assert_matches(jnp.concatenate(got, 1), want, 1e-4)
