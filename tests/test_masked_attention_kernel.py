"""The masked attention kernels against the XLA implementation in float32, and numpy in float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches
from support.oracles import masked_attention as oracle

from jax_dsa import make_block_mask, masked_attention, masked_attention_varlen

pytestmark = pytest.mark.gpu

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
    """q, k and v."""
    shapes = (b, t, n, d), (b, s, g, d), (b, s, g, d if e is None else e)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def bias_for(rng: np.random.Generator, arrays: Arrays, b: int, h: int, t: int) -> jax.Array:
    """[b, h, t, S], with -inf here and there."""
    bias = rng.standard_normal((b, h, t, arrays[1].shape[1]), np.float32)
    return jnp.asarray(np.where(rng.random(bias.shape) < 0.05, -np.inf, bias), arrays[0].dtype)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


class Run(NamedTuple):
    """What a call gives, and gradients."""

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
    """A call, and the gradients of a loss in which out and lse both count. All arrays are
    arguments: of large constants XLA folds for minutes what it can.
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


SIZES = [1, 62, 213, 8193]


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("t", SIZES)
def test_sizes(t: int, s: int, causal: bool, rng: np.random.Generator) -> None:
    """A causal query of many for one key sees it; of one for many it sees the first."""
    compare(inputs(rng, b=1 if t * s > 10**7 else 2, t=t, s=s), is_causal=causal)


DIMS = [
    (64, 64), (96, 96), (128, 128), (192, 128), (256, 256),
    (8, 8), (72, 40), (40, 72), (128, 64), (64, 128), (200, 136), (128, 256),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "e"), DIMS)
def test_dims(d: int, e: int, dtype: Any, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=213, s=300, d=d, e=e, dtype=dtype), is_causal=True)


@pytest.mark.parametrize(("n", "g"), [(1, 1), (5, 5), (6, 2), (32, 8), (16, 1)])
def test_heads(n: int, g: int, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=150, s=213, n=n, g=g), is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"softcap": 50.0, "scale": 0.5}, {"scale": -0.1}, {"scale": 0.0}],
    ids=str,
)
def test_scores(options: dict[str, Any], dtype: Any, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=213, d=128, dtype=dtype), is_causal=True, **options)


class Mask(NamedTuple):
    """Arrays and options of the call, and what they are to the oracle."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    visible: dict[str, Any]


CAUSAL = {"is_causal": True}
RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}
WINDOW = {"local_window_size": (40, 17)}
LEFT = {"local_window_size": (30, 0), **RIGHT}
PLAIN = {"dense": {}, "causal": CAUSAL, "bottom right": RIGHT, "window": WINDOW, "left": LEFT}
# Heads and batch entries of the map, its blocks, and what comes with it.
MAPS: dict[str, Any] = {
    "map": (1, 1, (128, 128), {}),
    "map of the groups, causal": ("g", 1, (128, 128), RIGHT),
    "map of each head": ("n", 1, (64, 256), {}),
    "map of each entry, window": (1, "b", (40, 128), WINDOW),
    "map of everything": ("n", "b", (128, 128), CAUSAL),
}
MASKS = [
    *PLAIN, *MAPS,
    "lengths", "lengths, bottom right", "lengths, window",
    "segments", "segments of both", "documents", "everything",
]  # fmt: skip


def random_map(rng: np.random.Generator, *shape: int, blocks: tuple[int, int]) -> np.ndarray:
    """A third of the tiles empty, a third full, and a third partial."""
    rows, columns = (-(-size // block) for size, block in zip(shape[2:], blocks, strict=True))
    kind = rng.integers(0, 3, (*shape[:2], rows, columns))
    kind = np.repeat(np.repeat(kind, blocks[0], 2), blocks[1], 3)[:, :, : shape[2], : shape[3]]
    return np.where(kind == 2, rng.random(shape) < 0.5, kind == 1)


def mask_of(name: str, rng: np.random.Generator, arrays: Arrays) -> Mask:
    (b, t, n), (s, g) = arrays[0].shape[:3], arrays[1].shape[1:3]
    sizes = {"b": b, "n": n, "g": g, 1: 1}
    if name in PLAIN:
        return Mask({}, PLAIN[name], PLAIN[name])
    if name in MAPS:
        heads, batch, blocks, options = MAPS[name]
        mask = random_map(rng, sizes[batch], sizes[heads], t, s, blocks=blocks)
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
    more = mask_of("map of each head", rng, arrays)
    options = LEFT | {"local_window_size": (150, 20)}
    return Mask(
        own.arrays | more.arrays | lengths, options, own.visible | more.visible | lengths | options
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=300, s=450, d=128)
    mask = mask_of(name, rng, arrays)
    compare(arrays, mask.arrays, **mask.options)


@pytest.mark.parametrize("name", MASKS)
def test_what_nothing_sees_reaches_nothing(name: str, rng: np.random.Generator) -> None:
    """NaN in keys that no query of their group sees, and in queries that see no key."""
    q, k, v = inputs(rng, t=150, s=300)
    mask = mask_of(name, rng, (q, k, v))
    g, shape = k.shape[2], (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    seen = oracle.counts(shape, g, **mask.visible) > 0
    alive = seen.any(3).swapaxes(1, 2)[..., None]
    used = seen.reshape(shape[0], g, -1, *shape[2:]).any((2, 3)).swapaxes(1, 2)[..., None]
    dirty = jnp.where(alive, q, jnp.nan), jnp.where(used, k, jnp.nan), jnp.where(used, v, jnp.inf)
    want = run("cuda", q.dtype, (q, k, v), mask.arrays, **mask.options)
    got = run("cuda", q.dtype, dirty, mask.arrays, **mask.options)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert_matches(got.gradients, want.gradients, tol=8e-3)
    dead, (dq, dk, dv) = ~alive[..., 0], got.gradients
    assert np.all(np.asarray(got.out)[dead] == 0) and np.all(np.asarray(got.lse)[dead] == -np.inf)
    assert np.all(np.isfinite(np.asarray(got.lse)[~dead])) and np.all(np.asarray(dq)[dead] == 0)
    for grad in (dk, dv):
        assert np.all(np.asarray(grad)[~used[..., 0]] == 0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "name", ["causal", "lengths, window", "segments", "map of the groups, causal"]
)
def test_against_float64(name: str, softcap: float | None, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=62, s=100)
    mask = mask_of(name, rng, arrays)
    numbers = [np.asarray(x, np.float64) for x in arrays]
    scale, shape = 0.2, (2, 4, 62, 100)
    count = oracle.counts(shape, 2, **mask.visible)
    out, lse, _ = oracle.attention(*numbers, None, count, scale, softcap)
    dout, dlse = 3 * np.cos(3 * out), np.where(np.isfinite(lse), -np.sin(lse), 0)
    grads = oracle.gradients(*numbers, None, count, scale, softcap, dout, dlse)[:3]
    options = mask.options | {"scale": scale, "softcap": softcap}
    got = run("cuda", jnp.bfloat16, arrays, mask.arrays, **options)
    low = run("xla", jnp.bfloat16, arrays, mask.arrays, **options)
    assert_as_good_as(got.out, low.out, out, what="out")
    assert_matches(np.asarray(got.lse, np.float64), lse, tol=2e-5, what="lse")
    for name, *three in zip("qkv", got.gradients, low.gradients, grads, strict=True):
        assert_as_good_as(*three, factor=4.0, what=f"d{name}")


@pytest.mark.parametrize("name", ["dense", "causal", "map of each head"])
@pytest.mark.parametrize("rows", [False, True], ids=["a row", "rows"])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 2, 4])
def test_biases(h: int, b: int, rows: bool, name: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=300, s=269, d=128)
    mask = mask_of(name, rng, arrays)
    bias = bias_for(rng, arrays, b, h, 300 if rows else 1)
    compare((*arrays, bias), mask.arrays, **mask.options)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (72, 128), (192, 128), (256, 256)])
def test_biases_of_dims(
    d: int, e: int, dtype: Any, softcap: float | None, rng: np.random.Generator
) -> None:
    arrays = inputs(rng, t=150, s=200, d=d, e=e, dtype=dtype)
    for heads in (1, 4):
        bias = bias_for(rng, arrays, 2, heads, 150)
        compare((*arrays, bias), is_causal=True, softcap=softcap, scale=-0.1)


@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 213), (62, 8193), (8193, 62)])
def test_sizes_of_biases(t: int, s: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, b=1, t=t, s=s)
    for rows in {1, t}:
        compare((*arrays, bias_for(rng, arrays, 1, 4, rows)))


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("name", ["causal", "lengths", "map of everything", "everything"])
def test_biases_of_what_nothing_sees(name: str, rows: int, rng: np.random.Generator) -> None:
    """They may be NaN, and their gradients are 0."""
    arrays = inputs(rng, t=150, s=300)
    mask = mask_of(name, rng, arrays)
    seen = oracle.counts((2, 4, 150, 300), 2, **mask.visible) > 0
    if rows == 1:
        seen = seen.any(2, keepdims=True)
    bias = bias_for(rng, arrays, 2, 4, rows)
    dirty = jnp.where(seen, bias, jnp.nan)
    want, got = (run("cuda", bias.dtype, (*arrays, x), mask.arrays, **mask.options)
                 for x in (bias, dirty))  # fmt: skip
    np.testing.assert_array_equal(got.out, want.out)
    assert_matches(got.gradients, want.gradients, tol=8e-3)
    assert np.all(np.asarray(got.gradients[3])[~seen] == 0)


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("h", [1, 2, 4])
def test_biases_of_kept_keys(h: int, rows: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=500)
    masks = {"kv_indices": integers(rng, -5, 505, 2, 2, 62)}
    for b in (1, 2):
        compare((*arrays, bias_for(rng, arrays, b, h, rows)), masks, **RIGHT)


@pytest.mark.parametrize("empty", ["b", "t", "s"])
def test_biases_of_empty_axes(empty: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, **({"b": 2, "t": 3, "s": 5, "n": 4} | {empty: 0}))
    for rows in {1, arrays[0].shape[1]}:
        bias = bias_for(rng, arrays, 1, 4, rows)
        got = run("cuda", bias.dtype, (*arrays, bias))
        assert got.gradients[3].shape == bias.shape
        assert not np.asarray(got.gradients[3], np.float32).any()


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("w", [1, 62, 300])
def test_kept_keys(w: int, g: int, rng: np.random.Generator) -> None:
    """In any order, some twice, some no keys; NaN in those that are not kept."""
    q, k, v = inputs(rng, t=150, s=500, g=g)
    kept = rng.integers(0, 498, (2, g, w)).astype(np.int32)
    bad = rng.random(kept.shape) < 0.2
    kept[bad] = rng.choice([INT_MIN, -1, 500, INT_MAX], bad.sum())
    listed = (kept[..., None] == np.arange(500)).any(2).swapaxes(1, 2)[..., None]
    ids = integers(rng, 0, 2, 2, 150), integers(rng, 0, 2, 2, 500)
    clean, dirty = ((q, *(jnp.where(listed, x, y) for x in (k, v))) for y in (0, jnp.nan))
    masks = {"kv_indices": jnp.asarray(kept)}
    compare(clean, masks)
    compare(clean, masks, **RIGHT)
    compare(clean, masks | {"segment_ids": ids}, local_window_size=(200, 100), softcap=5.0)
    got, want = (run("cuda", q.dtype, x, masks, **RIGHT) for x in (dirty, clean))
    np.testing.assert_array_equal(got.out, want.out)
    assert_matches(got.gradients, want.gradients, tol=8e-3)


@pytest.mark.parametrize("options", [{}, CAUSAL, RIGHT, WINDOW], ids=str)
def test_packed_sequences(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Of very different lengths, some of none, with padding around them."""
    q, k, v = (x[0] for x in inputs(rng, b=1, t=1500, s=1700))
    cu_q = jnp.asarray([3, 4, 4, 300, 1000, 1001, 1490], jnp.int32)
    cu_k = jnp.asarray([0, 7, 9, 200, 200, 900, 1650], jnp.int32)
    masks = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    compare((q, k, v), masks, call=masked_attention_varlen, **options)
    blocks = make_block_mask(jnp.asarray(random_map(rng, 1, 4, 1500, 1700, blocks=(128, 128))))
    masks["block_mask"] = blocks
    compare((q, k, v), masks, call=masked_attention_varlen, **options)


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
@pytest.mark.parametrize("empty", ["b", "t", "s", "n", "w"])
def test_empty_axes(empty: str, kept: bool, rng: np.random.Generator) -> None:
    arrays = inputs(rng, **({"b": 2, "t": 3, "s": 5, "n": 4} | {empty: 0} if empty != "w" else {}))
    width = 0 if empty == "w" else 3
    masks: dict[str, Any] = {"key_value_seq_lengths": integers(rng, 0, 9, arrays[0].shape[0])}
    if kept:
        masks["kv_indices"] = jnp.zeros((arrays[0].shape[0], 2, width), jnp.int32)
    elif empty == "w":
        masks["key_value_seq_lengths"] = jnp.zeros(2, jnp.int32)
    got = run("cuda", jnp.bfloat16, arrays, masks, is_causal=True)
    assert [x.shape for x in got.gradients] == [x.shape for x in arrays]
    assert not any(np.asarray(x, np.float32).any() for x in (got.out, *got.gradients))
    assert np.all(np.asarray(got.lse) == -np.inf)


def test_transforms(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, b=6, t=100, s=130, d=128)
    lengths = integers(rng, 0, 131, 6)

    def gradients(q: Any, k: Any, v: Any, lengths: Any, fn: Any = lambda f: f) -> Any:
        @fn
        def attend(q: Any, k: Any, v: Any) -> Any:
            masks = {"is_causal": True, "key_value_seq_lengths": lengths}
            return masked_attention(q, k, v, **masks, implementation="cuda")

        def loss(*arrays: Any) -> tuple[Any, Any]:
            out = attend(*arrays)
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    grads, out = jax.jit(gradients)(q, k, v, lengths)
    routes = {
        "eager": gradients(q, k, v, lengths),
        "remat": jax.jit(functools.partial(gradients, fn=jax.checkpoint))(q, k, v, lengths),
        "vmap without a batch axis": jax.jit(jax.vmap(gradients))(q, k, v, lengths),
    }
    pairs = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v, lengths)]
    nested = jax.jit(jax.vmap(jax.vmap(gradients)))(*pairs)
    routes["nested vmap"] = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), nested)
    for name, (other_grads, other_out) in routes.items():
        np.testing.assert_array_equal(other_out, out, err_msg=name)
        assert_matches(other_grads, grads, tol=8e-3, what=name)
    # Keys that all share have one gradient, the sum.
    shared = jax.jit(jax.vmap(gradients, in_axes=(0, None, None, 0)))(q, k[0], v[0], lengths)
    tiled = (jnp.tile(x[:1], (6, 1, 1, 1)) for x in (k, v))
    assert_matches(shared, jax.jit(jax.vmap(gradients))(q, *tiled, lengths), tol=8e-3)


def test_forward_repeats_itself(rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=1000, s=1000, d=128)
    mask = mask_of("everything", rng, arrays)
    first = run("cuda", jnp.bfloat16, arrays, mask.arrays, **mask.options)
    for _ in range(5):
        again = run("cuda", jnp.bfloat16, arrays, mask.arrays, **mask.options)
        np.testing.assert_array_equal(again.out, first.out)
        np.testing.assert_array_equal(again.lse, first.lse)


def test_in_a_replayed_program(rng: np.random.Generator) -> None:
    """XLA records programs into CUDA graphs and replays them: new inputs must give new results,
    and the kernels' tickets must start anew.
    """

    def step(q: Any, k: Any, v: Any, ends: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            masks = {"is_causal": True, "key_value_seq_lengths": ends}
            out = masked_attention(q, k, v, **masks, implementation="cuda")
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    program = jax.jit(step)
    for _ in range(6):
        args = (*inputs(rng, t=300, s=300), integers(rng, 0, 301, 2))
        (grads, out), (want_grads, want) = program(*args), step(*args)
        np.testing.assert_array_equal(out, want)
        assert_matches(grads, want_grads, tol=8e-3)  # sums in any order


@pytest.mark.parametrize(
    ("d", "e", "options"),
    [
        (64, 64, {"is_causal": True}),
        (128, 128, {}),
        (192, 128, {"is_causal": True}),  # two warpgroups add to one part of dq
        (256, 256, {"is_causal": True}),
        (128, 128, {"is_causal": True, "local_window_size": (300, 0)}),
    ],
    ids=["D64", "dense", "D192", "D256", "window"],
)
def test_deterministic_gradients_have_the_same_bits_in_100_runs(
    d: int, e: int, options: dict[str, Any], rng: np.random.Generator
) -> None:
    arrays = inputs(rng, t=2100, s=2100, d=d, e=e)

    @jax.jit
    def gradients(arrays: Arrays) -> Arrays:
        def loss(*arrays: jax.Array) -> jax.Array:
            out = masked_attention(*arrays, **options, deterministic=True, implementation="cuda")
            return jnp.sin(out.astype(jnp.float32) * 3).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    first = gradients(arrays)
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, gradients(arrays), first)


@pytest.mark.parametrize("segmented", [False, True])
def test_deterministic_gradients_are_right(segmented: bool, rng: np.random.Generator) -> None:
    """Where items follow each other in any order: random ranges, empty rows, segments."""
    arrays = inputs(rng, t=613, s=613, d=128)
    options: dict[str, Any] = {"is_causal": True, "deterministic": True}
    masks = {"mask": jnp.asarray(rng.random((1, 2, 613, 613)) < 0.02)}
    if segmented:
        masks["segment_ids"] = integers(rng, 0, 3, 2, 613)
    got = run("cuda", jnp.bfloat16, arrays, masks, **options)
    low, exact = (run("xla", x, arrays, masks, **options) for x in (jnp.bfloat16, jnp.float32))
    for three in zip(got.gradients, low.gradients, exact.gradients, strict=True):
        assert_as_good_as(*three, factor=4.0)


def test_more_than_2_31_key_elements() -> None:
    """The last queries' window, at the far end of the keys; as in those keys alone."""
    keys, part = 2**24 + 2**13, 1024
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, n, 1, 128), jnp.bfloat16)
        for i, n in enumerate((200, keys, keys))
    )
    options = {"local_window_size": (300, 0), **RIGHT}
    got = run("cuda", q.dtype, (q, k, v), **options)
    want = run("cuda", q.dtype, (q, k[:, -part:], v[:, -part:]), **options)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert_matches(got.gradients[0], want.gradients[0], tol=8e-3)
    for have, wanted in zip(got.gradients[1:], want.gradients[1:], strict=True):
        np.testing.assert_array_equal(have[:, -part:], wanted)
        assert not jnp.any(have[:, :-part])


def test_more_than_2_31_query_elements() -> None:
    queries, part = 2**17 + 2**11, 1024
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, queries, n, 128), jnp.bfloat16)
        for i, n in enumerate((128, 1, 1))
    )
    options = {"local_window_size": (100, 0), "is_causal": True}
    out, lse = masked_attention(q, k, v, **options, return_lse=True, implementation="cuda")
    last = (x[:, -part:] for x in (q, k, v))
    want, want_lse = masked_attention(*last, **options, return_lse=True, implementation="cuda")
    whole = part - 128  # the first ones' windows reach out of the part
    np.testing.assert_array_equal(out[:, -whole:], want[:, -whole:])
    np.testing.assert_array_equal(lse[:, -whole:], want_lse[:, -whole:])


def test_what_the_kernel_does_not_cover(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=3, s=8)
    mask = jnp.ones((1, 1, 1, 8), bool)
    blocks = make_block_mask(mask, shape=(1, 1, 3, 8), block_k=64)
    for arrays, given in (
        ([x.astype(jnp.float32) for x in (q, k, v)], {}),
        ((q[..., :12], k[..., :12], v), {}),
        ((q, k, v), {"block_mask": blocks}),
    ):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            masked_attention(*arrays, **given, implementation="cuda")
