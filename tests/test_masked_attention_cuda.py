"""Tests the code around the masked attention kernels, with XLA in place of the kernels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow

from jax_dsa import make_block_mask, masked_attention
from jax_dsa.core import ffi
from jax_dsa.ops.block_mask import cuda as block_mask_cuda
from jax_dsa.ops.masked_attention import cuda, scores, xla
from jax_dsa.ops.masked_attention.api import BWD, FWD
from jax_dsa.ops.masked_attention.spec import Operands, Options, Results

B, T, S, N, G, D, E, W = 2, 6, 9, 4, 2, 8, 16, 7
OPTIONS = Options(0.3, None, "x", "x", "x", deterministic=False)
FORWARD, BACKWARD = "jax_dsa.masked_attention_fwd.v2", "jax_dsa.masked_attention_bwd.v2"
FIELDS = (
    "q", "k", "v", "starts", "ends", "q_segments", "kv_segments", "rows", "tiles", "bits", "bias",
)  # fmt: skip


def factors(heads: int, x: Operands) -> str:
    return "x" if heads == 1 else "(g m)" if heads == x.q.shape[2] else "g"


def call(
    target: str,
    operands: Any,
    avals: Any,
    scale: np.float32,
    softcap: np.float32,
    **backward: np.bool_,
) -> Any:
    """Implements the FFI handlers by the XLA implementation and checks their operands."""
    assert isinstance(scale, np.float32) and isinstance(softcap, np.float32)
    assert list(backward) == (["deterministic"] if target == BACKWARD else [])
    given = dict(zip(FIELDS, operands[: len(FIELDS)], strict=True))
    starts, ends = given["starts"], given["ends"]
    if starts is not None and ends is not None:
        assert starts.shape == ends.shape  # the handlers have one stride for both
    absent = dict.fromkeys(set(Operands._fields) - set(FIELDS))
    x = Operands(**given, **absent)
    heads = "x" if x.tiles is None else {1: "x", G: "g", N: "(g m)"}[x.tiles.shape[1]]
    own = dataclasses.replace(
        OPTIONS, scale=float(scale), softcap=float(softcap) or None, tile_heads=heads
    )
    keys = x.k.shape[1]
    if x.bias is not None:
        assert x.bias.shape[3] == -(-keys // 8) * 8
        own = dataclasses.replace(own, bias_heads=factors(x.bias.shape[1], x))
        x = x._replace(bias=x.bias[..., :keys])
    rest = operands[len(FIELDS) :]
    if target == FORWARD:
        results = xla.masked_attention_fwd(own, x._replace(sinks=rest[0]))
    else:
        assert target == BACKWARD
        y, dy = Results(*rest[:3]), Results(rest[3], None, rest[4])
        results = list(xla.masked_attention_bwd(own, x, y, dy))[:4]
        if x.bias is not None:
            results[3] = jnp.pad(results[3], [(0, 0)] * 3 + [(0, -keys % 8)], constant_values=9)
    *shapes, space = avals
    if target == BACKWARD and x.bias is None:
        assert shapes.pop() is None and results.pop() is None
        nothing = [None]
    else:
        nothing = []
    assert [(a.shape, a.dtype) for a in shapes] == [(y.shape, y.dtype) for y in results]
    assert space.dtype == jnp.uint8 and space.shape == (64 if target == FORWARD else 128,)
    return [*results, *nothing, None]


def compress_call(target: str, operands: Any, avals: Any, **lengths: np.generic) -> Any:
    """Implements the FFI handler that compresses masks: it makes bits for every tile."""
    assert target == "jax_dsa.block_mask_compress.v1"
    mask, starts, ends, _, _, rows, tiles, bits = operands
    (batch, heads, i, j), (*_, block_q, _) = (a.shape for a in avals)
    queries, keys = int(lengths["queries"]), int(lengths["keys"])
    visible = jnp.broadcast_to(mask[:, :, : queries or 1], (mask.shape[0], heads, queries, keys))
    for bound, inside in ((starts, jnp.greater_equal), (ends, jnp.less)):
        if bound is not None:
            visible &= inside(jnp.arange(keys), bound[:, None, :queries, None])
    if rows is not None:
        q, k = jnp.zeros((1, queries, heads, 1)), jnp.zeros((1, keys, heads, 1))
        x = problem_of(q=q, k=k, v=k, rows=rows, tiles=tiles, bits=bits)
        other = scores.Queries.of(x).visible(scores.Keys.of(x))
        assert other is not None
        visible &= scores.merge_heads(other)
    padding = ((0, 0), (0, 0), (0, i * block_q - queries), (0, j * 128 - keys))
    visible = jnp.pad(jnp.broadcast_to(visible, (batch, *visible.shape[1:])), padding)
    visible = visible.reshape(batch, heads, i, block_q, j, 128).swapaxes(3, 4)
    packed = jnp.packbits(visible, axis=-1, bitorder="little")
    slots = jnp.broadcast_to(jnp.arange(i * j, dtype=jnp.int32).reshape(i, j), avals[0].shape)
    return [slots, packed.reshape(avals[1].shape)]


def extension() -> SimpleNamespace:
    return SimpleNamespace(masked_attention_workspaces=lambda **_: (64, 128))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=extension))
    monkeypatch.setattr(block_mask_cuda, "ffi", SimpleNamespace(call=compress_call))


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


def qkv(rng: np.random.Generator, **sizes: int) -> tuple[jax.Array, ...]:
    b, t, s = (sizes.get(x, size) for x, size in (("b", B), ("t", T), ("s", S)))
    shapes = (b, t, N, D), (b, s, G, D), (b, s, G, E)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def problem_of(**given: Any) -> Operands:
    """Returns operands of which all that are not given are None."""
    return Operands(**(dict.fromkeys(Operands._fields) | given))


def problem(rng: np.random.Generator, **given: Any) -> Operands:
    q, k, v = qkv(rng)
    return problem_of(**({"q": q, "k": k, "v": v} | given))


def cotangents(rng: np.random.Generator, y: Results) -> Results:
    """Returns cotangents of the results; that of `max_logit` is None."""
    dy = Results(*(jnp.asarray(rng.normal(size=z.shape), jnp.float32) for z in y))
    return dy._replace(max_logit=None)


def both_ways(rng: np.random.Generator, options: Options, x: Operands) -> None:
    """Asserts that both passes agree with the XLA implementation."""
    y = xla.masked_attention_fwd(options, x)
    assert_matches(cuda.masked_attention_fwd(options, y, x), y, 1e-5)
    dy = cotangents(rng, y)
    want = xla.masked_attention_bwd(options, x, y, dy)
    assert_matches(cuda.masked_attention_bwd(options, want, x, y, dy), want, 1e-5)


def random_ranges(rng: np.random.Generator, starts: int, ends: int) -> dict[str, Any]:
    first = integers(rng, 0, S, starts, T)
    return {"starts": first, "ends": integers(rng, 0, S + 1, ends, T)}


def segments(rng: np.random.Generator) -> dict[str, Any]:
    return {"q_segments": integers(rng, 0, 2, B, T), "kv_segments": integers(rng, 0, 2, B, S)}


MASKS: dict[str, Any] = {
    "none": lambda rng: {},
    "ends": lambda rng: {"ends": integers(rng, 0, S + 1, B, T)},
    "starts": lambda rng: {"starts": integers(rng, 0, S, 1, T)},
    "shared ranges": lambda rng: random_ranges(rng, 1, 1),
    "shared starts": lambda rng: random_ranges(rng, 1, B),
    "shared ends": lambda rng: random_ranges(rng, B, 1),
    "segments": segments,
    "segments and ranges": lambda rng: segments(rng) | random_ranges(rng, B, B),
}


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
@pytest.mark.parametrize("mask", MASKS)
def test_composition(mask: str, kept: bool, rng: np.random.Generator, kernels: None) -> None:
    given = MASKS[mask](rng)
    if kept:
        indices = rng.integers(-1, S + 1, (B, G, W)).astype(np.int32)
        indices[0, 0] = (3, -(2**31), 3, S, 2**31 - 1, -1, 0)  # one key twice
        given["kv_indices"] = jnp.asarray(indices)
    options = dataclasses.replace(OPTIONS, softcap=2.0 if mask == "segments" else None)
    both_ways(rng, options, problem(rng, **given))


@pytest.mark.parametrize("heads", [1, G, N])
def test_composition_with_a_block_mask(heads: int, rng: np.random.Generator, kernels: None) -> None:
    blocks = make_block_mask(jnp.asarray(rng.random((1, heads, T, S)) < 0.6), block_q=4, block_k=8)
    rows = jnp.arange(T, dtype=jnp.int32)[None]
    factors = {1: "x", G: "g", N: "(g m)"}[heads]
    options = dataclasses.replace(OPTIONS, tile_heads=factors)
    both_ways(rng, options, problem(rng, rows=rows, tiles=blocks.tiles, bits=blocks.bits))


@pytest.mark.parametrize("beside", ["nothing", "ranges", "block mask"])
@pytest.mark.parametrize("rows", [1, T])
@pytest.mark.parametrize("heads", [1, G, N])
def test_composition_with_a_mask(
    heads: int, rows: int, beside: str, rng: np.random.Generator, kernels: None
) -> None:
    given: dict[str, Any] = {"mask": jnp.asarray(rng.random((B, heads, rows, S)) < 0.6)}
    if beside == "ranges":
        given |= random_ranges(rng, B, 1)
    elif beside == "block mask":
        blocks = make_block_mask(jnp.asarray(rng.random((1, 1, T, S)) < 0.6), block_q=4, block_k=8)
        given |= {"tiles": blocks.tiles, "bits": blocks.bits}
        given["rows"] = jnp.arange(T, dtype=jnp.int32)[None]
    options = dataclasses.replace(OPTIONS, mask_heads={1: "x", G: "g", N: "(g m)"}[heads])
    both_ways(rng, options, problem(rng, **given))


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
@pytest.mark.parametrize("rows", [1, T])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("heads", [1, G, N])
def test_composition_with_a_bias(
    heads: int, batch: int, rows: int, kept: bool, rng: np.random.Generator, kernels: None
) -> None:
    given: dict[str, Any] = random_ranges(rng, B, 1)
    given["bias"] = jnp.asarray(rng.normal(size=(batch, heads, rows, S)), jnp.float32)
    if kept:
        given["kv_indices"] = integers(rng, -1, S + 1, B, G, W)
    options = dataclasses.replace(OPTIONS, bias_heads={1: "x", G: "g", N: "(g m)"}[heads])
    both_ways(rng, options, problem(rng, **given))


def test_keys_that_are_not_kept_are_not_read(rng: np.random.Generator, kernels: None) -> None:
    x = problem(rng, kv_indices=jnp.asarray([[[3, 1, 3, -1], [S, 3, 1, 1]]] * B, jnp.int32))
    other = np.array([s not in (1, 3) for s in range(S)])[:, None, None]
    dirty = x._replace(k=jnp.where(other, jnp.nan, x.k), v=jnp.where(other, jnp.inf, x.v))
    y = xla.masked_attention_fwd(OPTIONS, x)
    got = cuda.masked_attention_fwd(OPTIONS, y, dirty)
    assert_matches(got, y, 1e-5)
    dy = y._replace(max_logit=None)
    grads = cuda.masked_attention_bwd(OPTIONS, x, dirty, y, dy)
    assert_matches(grads, xla.masked_attention_bwd(OPTIONS, x, y, dy), 1e-5)


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
def test_composition_with_sinks(kept: bool, rng: np.random.Generator, kernels: None) -> None:
    sinks = jnp.asarray(rng.normal(size=(B, N)), jnp.float32).at[0, :2].set([jnp.inf, -jnp.inf])
    given = {"ends": integers(rng, 0, S + 1, B, T), "sinks": sinks}
    if kept:
        given["kv_indices"] = integers(rng, -1, S + 1, B, G, W)
    both_ways(rng, OPTIONS, problem(rng, **given))


@pytest.mark.parametrize(
    ("b", "t", "s", "w"),
    [slow(0, T, S, W), slow(B, 0, S, W), (B, T, 0, W), slow(B, T, S, 0), (B, T, 0, None)],
)
def test_empty_axes(
    b: int, t: int, s: int, w: int | None, rng: np.random.Generator, kernels: None
) -> None:
    q, k, v = qkv(rng, b=b, t=t, s=s)
    kept = None if w is None else jnp.zeros((b, G, w), jnp.int32)
    ends = jnp.full((b, t), s, jnp.int32)
    ids = jnp.zeros((b, t), jnp.int32), jnp.zeros((b, s), jnp.int32)
    given = dict(zip(("q_segments", "kv_segments"), ids, strict=True))
    starts = jnp.zeros((1, t), jnp.int32)
    x = problem(rng, q=q, k=k, v=v, kv_indices=kept, starts=starts, ends=ends, **given)
    both_ways(rng, OPTIONS, x)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the extension is installed."""
    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    monkeypatch.setattr(ffi, "extension", extension)


def shaped(t: int, d: int, e: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Returns q, k and v. Each test uses another length, so that no trace is found in a cache."""
    shapes = (1, t, 4, d), (1, t, 2, d), (1, t, 2, e)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def traced(arrays: tuple[Any, ...], **options: Any) -> str:
    """Returns the jaxpr of the forward and backward pass."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return masked_attention(q, k, v, **options).astype(jnp.float32).sum()

    return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_supported_calls_run_on_the_kernels(dtype: Any, loaded: None) -> None:
    for options in ({}, {"is_causal": True, "softcap": 30.0}, {"implementation": "cuda"}):
        text = traced(shaped(20, 64, 128, dtype), **options)
        assert FORWARD in text and BACKWARD in text


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernel_gets_the_deterministic_flag(deterministic: bool, loaded: None) -> None:
    text = traced(shaped(21, 64, 64), deterministic=deterministic)
    assert FORWARD in text
    call = text[: text.index(BACKWARD)].rindex("ffi_call[")
    assert f"('deterministic', {np.bool_(deterministic)!r})" in text[call : text.index(BACKWARD)]


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": jnp.float32}, "bfloat16 or float16, got float32"),
    "D 12": ({"d": 12}, "multiples of 8 up to 256 for D and E, got D=12, E=64"),
    "E 264": ({"e": 264}, "got D=64, E=264"),
    "many queries": ({"t": 2**31 - 1}, "T and S up to"),
    "small blocks": (
        {"bits": jax.ShapeDtypeStruct((1, 1, 1, 128, 8), jnp.uint8)},
        "block_k is a multiple of 128, got 64",
    ),
    "mask and kept keys": (
        {
            "mask": jax.ShapeDtypeStruct((1, 1, 1, 20), bool),
            "kv_indices": jax.ShapeDtypeStruct((1, 1, 4), jnp.int32),
        },
        "'mask' or 'kv_indices'",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_calls(name: str) -> None:
    given, why = UNSUPPORTED[name]
    given = {"t": 20, "d": 64, "e": 64, "dtype": jnp.bfloat16} | given
    q, k, v = shaped(*(given.pop(n) for n in ("t", "d", "e")), given.pop("dtype"))
    x = problem_of(**({"q": q, "k": k, "v": v} | given))
    for kernel in (FWD.kernel, BWD.kernel):
        assert kernel is not None
        assert why in (kernel.unsupported_reason(OPTIONS, x) or "")


@pytest.mark.parametrize(
    ("shape", "kept", "covered"),
    [
        ((2, 4, 20, 20), False, True),
        ((1, 4, 20, 20), False, False),
        ((1, 4, 20, 20), True, True),  # XLA sums over the batch
        ((2, 2, 20, 20), True, False),
        ((2, 4, 1, 20), False, False),
    ],
)
def test_support_of_deterministic_bias_gradients(
    shape: tuple[int, ...], kept: bool, covered: bool
) -> None:
    q, k = (jax.ShapeDtypeStruct((2, 20, n, 64), jnp.bfloat16) for n in (4, 2))
    bias = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((2, 2, 3), jnp.int32) if kept else None
    given = {"q": q, "k": k, "v": k, "bias": bias, "kv_indices": indices}
    x = problem_of(**given)
    assert FWD.kernel is not None and BWD.kernel is not None
    options = dataclasses.replace(OPTIONS, deterministic=True)
    assert FWD.kernel.unsupported_reason(options, x) is None
    assert (BWD.kernel.unsupported_reason(options, x) is None) == covered


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
def test_lowers_for_a_gpu(kept: bool) -> None:
    """Lowering works without a GPU if the extension is built."""
    pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    indices = jnp.zeros((1, 2, 3), jnp.int32) if kept else None

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = masked_attention(q, k, v, is_causal=True, kv_indices=indices, implementation="cuda")
        return out.astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shaped(23, 64, 64))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert FORWARD in text and BACKWARD in text
