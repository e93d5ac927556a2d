"""The results that the annotations of a pass declare, against those of its XLA implementation."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.registry import CASES

from jax_dsa import sparse_mla
from jax_dsa.bench.case import shrunk
from jax_dsa.bench.registry import OPERATORS
from jax_dsa.core import ffi, op
from jax_dsa.ops.sparse_mla import api

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the passes that were traced. Their declared results are compared."""
    names: set[str] = set()
    original = op._implementation

    def compared(self: Any, call: Any, options: Any, groups: Any, dims: Any, dtypes: Any) -> Any:
        names.add(self.name)
        shapes = dims.solve([x.shape for x in itertools.chain(*groups) if x is not None])[1]
        declared = zip(shapes, [jnp.dtype(d) for d in dtypes if d is not None], strict=True)
        traced = jax.eval_shape(lambda *xs: self.xla(options, *xs), *groups)
        present = [(y.shape, y.dtype) for y in traced if y is not None]
        assert list(declared) == present, self.name
        absent = [name for name, y in zip(traced._fields, traced, strict=True) if y is None]
        undeclared = [n for n, d in zip(traced._fields, dtypes, strict=True) if d is None]
        assert undeclared == absent, self.name
        return original(self, call, options, groups, dims, dtypes)

    monkeypatch.setattr(op, "_implementation", compared)
    yield names


def loss(case: Any, *args: Any) -> jax.Array:
    outputs = jax.tree.leaves(case.fn(*args))
    floats = [y for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((y.astype(jnp.float32).sum() for y in floats), start=jnp.float32(0))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_declared_results_are_those_of_xla(
    case: Any, checked: set[str], rng: np.random.Generator
) -> None:
    # No other test has this number of mapped calls, so nothing here is traced already.
    args = [jnp.stack([x] * 3) for x in case.make_args(rng)]
    jax.eval_shape(jax.vmap(case.fn), *args)
    if case.diff:
        grad = jax.grad(lambda *xs: loss(case, *xs), argnums=case.diff)
        jax.eval_shape(jax.vmap(grad), *args)
    assert checked


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_declared_results_of_what_the_kernels_take(operator: str, checked: set[str]) -> None:
    # The benchmark has the dtypes of the kernels. This scale is used nowhere else.
    for case in OPERATORS[operator](functools.partial(shrunk, 16)):
        args = jax.eval_shape(case.make, jax.random.key(0))
        fun = functools.partial(case.call, implementation=None)
        if case.diff:
            run = functools.partial(loss, SimpleNamespace(fn=fun))
            jax.eval_shape(jax.grad(run, argnums=case.diff), *args)
        else:
            jax.eval_shape(fun, *args)
    assert checked or operator == "copy"


def test_a_call_of_a_kernel_does_not_trace_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """With implementation="cuda", the shapes of the results come from the dims alone."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the XLA implementation was traced")

    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    for one in (api.FWD, api.BWD):
        monkeypatch.setattr(one, "xla", refuse)
    monkeypatch.setattr(api.cuda, "sums_by_rows", lambda *_: False)
    monkeypatch.setattr(api.cuda, "_workspace", lambda *_, **__: ())
    q, kv = jnp.ones((1, 23, 64, 576), jnp.bfloat16), jnp.ones((1, 29, 1, 576), jnp.bfloat16)
    indices = jnp.zeros((1, 23, 1, 64), jnp.int32)

    def total(q: jax.Array, kv: jax.Array) -> jax.Array:
        return sparse_mla(q, kv, indices, implementation="cuda").astype(jnp.float32).sum()

    dq, dkv = jax.eval_shape(jax.grad(total, argnums=(0, 1)), q, kv)
    assert (dq.shape, dq.dtype) == (q.shape, q.dtype)
    assert (dkv.shape, dkv.dtype) == (kv.shape, kv.dtype)
