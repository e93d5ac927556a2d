"""Inputs, masks and comparisons for the tests of the masked attention kernels on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa import make_block_mask, masked_attention
from support.compare import assert_as_good_as, assert_matches

Arrays = tuple[jax.Array, ...]

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def inputs(
    rng: np.random.Generator,
    *,
    b: int = 2,
    t: int = 62,
    s: int = 213,
    n: int = 4,
    g: int = 2,
    d: int = 64,
    e: int | None = None,
    dtype: Any = jnp.bfloat16,
) -> Arrays:
    """Returns q, k and v."""
    shapes = (b, t, n, d), (b, s, g, d), (b, s, g, d if e is None else e)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def bias_for(rng: np.random.Generator, arrays: Arrays, b: int, h: int, t: int) -> jax.Array:
    """Returns a bias [b, h, t, S] with -inf at random places."""
    bias = rng.standard_normal((b, h, t, arrays[1].shape[1]), np.float32)
    return jnp.asarray(np.where(rng.random(bias.shape) < 0.05, -np.inf, bias), arrays[0].dtype)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


class Run(NamedTuple):
    """The results of a call, and gradients."""

    out: jax.Array
    lse: jax.Array
    gradients: Arrays


def run(
    implementation: str | None,
    dtype: Any,
    arrays: Arrays,
    masks: dict[str, Any] | None = None,
    call: Any = masked_attention,
    **options: Any,
) -> Run:
    """Runs a call and the gradients of a loss that depends on out and lse.

    All arrays are arguments of the jitted program, since XLA folds large constants for minutes.
    """

    @jax.jit
    def program(arrays: Arrays, masks: dict[str, Any]) -> Run:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            out, lse = call(
                *arrays, **masks, **options, return_lse=True, implementation=implementation
            )
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sin(out.astype(jnp.float32) * 3).sum() + jnp.cos(seen).sum(), (out, lse)

        each = tuple(range(len(arrays)))
        grads, outs = jax.grad(loss, argnums=each, has_aux=True)(*arrays)
        return Run(*outs, grads)

    return program(tuple(x.astype(dtype) for x in arrays), masks or {})


def compare(arrays: Arrays, masks: dict[str, Any] | None = None, **options: Any) -> None:
    """Asserts that the kernels are as accurate as the XLA implementation in the same dtype."""
    dtype = arrays[0].dtype
    got = run("cuda", dtype, arrays, masks, **options)
    low = run("xla", dtype, arrays, masks, **options)
    exact = run("xla", jnp.float32, arrays, masks, **options)
    assert got.out.dtype == dtype and got.lse.dtype == jnp.float32
    assert_as_good_as(got.out, low.out, exact.out, what="out")
    assert_matches(got.lse, exact.lse, tol=2e-5, what="lse")
    for i, grads in enumerate(zip(got.gradients, low.gradients, exact.gradients, strict=True)):
        assert grads[0].dtype == dtype
        assert_as_good_as(*grads, factor=4.0, what=f"gradient {i}")


class Mask(NamedTuple):
    """Arrays and options of a call, and the same for the oracle."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    visible: dict[str, Any]


CAUSAL = {"is_causal": True}

RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}

WINDOW = {"local_window_size": (40, 17)}

LEFT = {"local_window_size": (30, 0), **RIGHT}

PLAIN = {"dense": {}, "causal": CAUSAL, "bottom right": RIGHT, "window": WINDOW, "left": LEFT}

BLOCK_MASKS: dict[str, Any] = {
    "block mask": (1, 1, (128, 128), {}),
    "block mask per group, causal": ("g", 1, (128, 128), RIGHT),
    "block mask per head": ("n", 1, (64, 256), {}),
    "block mask per batch entry, window": (1, "b", (40, 128), WINDOW),
    "block mask per batch entry and head": ("n", "b", (128, 128), CAUSAL),
}

MASKS = [
    *PLAIN, *BLOCK_MASKS,
    "lengths", "lengths, bottom right", "lengths, window",
    "segments", "segments of both", "documents", "everything",
]  # fmt: skip


def random_tiles(rng: np.random.Generator, *shape: int, blocks: tuple[int, int]) -> np.ndarray:
    """Returns a mask whose tiles are empty, full or partial with equal probability."""
    rows, columns = (-(-size // block) for size, block in zip(shape[2:], blocks, strict=True))
    kind = rng.integers(0, 3, (*shape[:2], rows, columns))
    kind = np.repeat(np.repeat(kind, blocks[0], 2), blocks[1], 3)[:, :, : shape[2], : shape[3]]
    return np.where(kind == 2, rng.random(shape) < 0.5, kind == 1)


def mask_of(name: str, rng: np.random.Generator, arrays: Arrays) -> Mask:
    (b, t, n), (s, g) = arrays[0].shape[:3], arrays[1].shape[1:3]
    sizes = {"b": b, "n": n, "g": g, 1: 1}
    if name in PLAIN:
        return Mask({}, PLAIN[name], PLAIN[name])
    if name in BLOCK_MASKS:
        heads, batch, blocks, options = BLOCK_MASKS[name]
        mask = random_tiles(rng, sizes[batch], sizes[heads], t, s, blocks=blocks)
        made = make_block_mask(jnp.asarray(mask), block_q=blocks[0], block_k=blocks[1])
        return Mask({"block_mask": made}, options, {"mask": mask, **options})
    lengths = {"key_value_seq_lengths": jnp.asarray(rng.permutation([s - 50, 0, s])[:b], jnp.int32)}
    if name.startswith("lengths"):
        options = {"bottom right": RIGHT, "window": WINDOW}.get(name.partition(", ")[2], {})
        return Mask(lengths, options, lengths | options)
    if name == "segments of both":
        ids = integers(rng, 0, 3, b, t), integers(rng, -1, 2, b, s)
    else:
        q_ids = np.sort(rng.integers(0, 4, (b, t)))
        kv_ids = np.sort(rng.integers(1, 5, (b, s))) if name == "segments" else q_ids[:, :s]
        kv_ids = np.pad(kv_ids, [(0, 0), (0, s - kv_ids.shape[1])], constant_values=-1)
        ids = jnp.asarray(q_ids, jnp.int32), jnp.asarray(kv_ids, jnp.int32)
    own = Mask(
        {"segment_ids": ids},
        CAUSAL if name == "documents" else {},
        {"q_segments": ids[0], "kv_segments": ids[1]},
    )
    if name != "everything":
        return Mask(own.arrays, own.options, own.visible | own.options)
    more = mask_of("block mask per head", rng, arrays)
    options = LEFT | {"local_window_size": (150, 20)}
    return Mask(
        own.arrays | more.arrays | lengths, options, own.visible | more.visible | lengths | options
    )
