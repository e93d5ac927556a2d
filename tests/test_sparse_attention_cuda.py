"""Tests the code around the sparse attention kernels, with XLA in place of the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention import cuda, xla
from jax_dsa.ops.sparse_attention.spec import Operands, Options

B, T, S, N, G, D, E, K = 2, 6, 37, 4, 2, 8, 16, 3
FORWARD, BACKWARD = "jax_dsa.sparse_attention_fwd.v1", "jax_dsa.sparse_attention_bwd.v1"
LARGEST = 2**31 - 1
GIVEN: list[dict[str, Any]] = []  # the arguments of the last request for workspaces


def call(target: str, operands: Any, avals: Any, **attributes: Any) -> Any:
    """Implements the FFI handlers by the XLA implementation and checks their operands."""
    x = Operands(**dict(zip(cuda.TAKES[:-1], operands, strict=False)))
    types = [np.bool_ if name == "tail_block" else np.int32 for name in attributes]
    assert [type(z) for z in attributes.values()] == [np.float32, *types[1:]]
    options = Options(**{name: z.item() for name, z in attributes.items()})
    *shapes, space = avals
    rest = operands[len(cuda.TAKES) - 1 :]
    results: Any
    if target == FORWARD:
        results = xla.sparse_attention_fwd(options, x._replace(sinks=rest[0]))
    else:
        assert target == BACKWARD
        dy = Results(rest[3], None, rest[4])  # type: ignore[arg-type]
        results = xla.sparse_attention_bwd(options, x, Results(*rest[:3]), dy)[:3]
    assert [(a.shape, a.dtype) for a in shapes] == [(y.shape, y.dtype) for y in results]
    assert space.dtype == jnp.uint8 and space.shape == (64 if target == FORWARD else 128,)
    return [*results, None]


def workspaces(**sizes: Any) -> tuple[int, int]:
    GIVEN[:] = [sizes]
    return 64, 128


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    extension = SimpleNamespace(sparse_attention_workspaces=workspaces)
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=lambda: extension))


def problem(rng: np.random.Generator, causal: bool, packed: bool, sinks: bool) -> Operands:
    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def integers(low: int, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

    return Operands(
        array(B, T, N, D),
        array(B, S, G, D),
        array(B, S, G, E),
        integers(-1, 11, B, T, G, K),
        positions=integers(0, S, B, T) if causal else None,
        starts=integers(0, 5, B, T) if packed else None,
        lengths=integers(0, S - 5, B, T) if packed else None,
        topk_length=integers(0, K + 1, B, T) if packed else None,
        sinks=jnp.asarray([[jnp.inf, -jnp.inf, 0.5, -1]] * B) if sinks else None,
    )


FORCED = Options(0.3, 4, sink_blocks=1, local_blocks=2)
TAIL = Options(0.3, 16, sink_blocks=LARGEST, tail_block=True)


@pytest.mark.parametrize(
    ("options", "causal", "packed", "sinks"),
    [
        (Options(0.3, 4), False, False, False),
        (FORCED, True, False, True),
        (TAIL, True, True, True),
        (Options(0.3, 1, local_blocks=LARGEST), True, True, False),
    ],
    ids=["plain", "forced", "packed", "all keys"],
)
def test_composition(
    options: Options,
    causal: bool,
    packed: bool,
    sinks: bool,
    rng: np.random.Generator,
    kernels: None,
) -> None:
    """Both passes agree with the XLA implementation, also where the handlers know no sinks."""
    x = problem(rng, causal, packed, sinks)
    y = xla.sparse_attention_fwd(options, x)
    assert_matches(cuda.sparse_attention_fwd(options, y, x), y, 1e-5)
    dy = Results(*(jnp.asarray(rng.normal(size=z.shape), jnp.float32) for z in y))
    want = xla.sparse_attention_bwd(options, x, y, dy)
    assert_matches(cuda.sparse_attention_bwd(options, want, x, y, dy), want, 1e-5)
    (sizes,) = GIVEN
    assert (sizes["causal"], sizes["packed"], sizes["slots"]) == (causal, packed, K)


def operands(**changes: Any) -> Operands:
    """Returns the shapes of a call, of which some are changed."""
    sizes = {"t": 64, "s": 4096, "n": 64, "g": 4, "d": 128, "e": 128, "k": 16} | changes
    t, s, n, g, d, e, k = (sizes[name] for name in "tsngdek")
    dtype = changes.get("dtype", jnp.bfloat16)
    shapes = (1, t, n, d), (1, s, g, d), (1, s, g, e)
    return Operands(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        jax.ShapeDtypeStruct((1, t, g, k), jnp.int32),
        positions=jax.ShapeDtypeStruct((1, t), jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "bfloat16 or float16, got float32"),
        ({"d": 264}, "multiples of 8 up to 256 for D and E, got D=264, E=128"),
        ({"e": 12}, "got D=128, E=12"),
        ({"t": 2**31 - 1}, "B * T and S up to 2147479551, got B=1, T=2147483647"),
        ({"n": 132}, "N // G up to 32, got N=132, G=4"),
        ({"k": 16383}, "up to 16384 slots, including forced blocks, got 16385"),
    ],
    ids=str,
)
def test_calls_that_the_kernels_do_not_cover(changes: dict[str, Any], reason: str) -> None:
    options = Options(0.3, 64, local_blocks=2)
    assert cuda.supports(options, operands()) is None
    assert reason in (cuda.supports(options, operands(**changes)) or "")
    assert "scale > 0, got -0.3" in (cuda.supports(Options(-0.3, 64), operands()) or "")


def test_forced_blocks_beyond_the_keys_take_no_slots() -> None:
    options = Options(0.3, 64, sink_blocks=10**9, local_blocks=10**9)
    assert cuda.supports(options, operands()) is None
