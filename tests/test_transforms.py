"""Every operator under JAX's transforms, against single calls and against plain autodiff."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.registry import CASES, one_fast
from support.compare import assert_matches
from support.transforms import executions, grad, loss, outputs

import jax_dsa
from jax_dsa.core.call import in_plain_xla
from jax_dsa.core.op import passes
from jax_dsa.training.remat import remat_policy

ALL = pytest.mark.parametrize("case", one_fast(CASES))
DIFFERENTIABLE = pytest.mark.parametrize("case", one_fast(c for c in CASES if c.diff))
# All operators share the machinery behind the transforms, so three of them represent the others in
# `make test`.
THREE = ("masked_attention", "sparse_mla", "topk")
SOME_FAST = pytest.mark.parametrize("case", one_fast(CASES, THREE))
SOME_DIFFERENTIABLE = pytest.mark.parametrize("case", one_fast((c for c in CASES if c.diff), THREE))


def stacked(fn: Any, samples: list[tuple]) -> Any:
    return jax.tree.map(lambda *ys: jnp.stack(ys), *[fn(*s) for s in samples])


def two_samples(case: Any, rng: np.random.Generator) -> tuple[tuple, tuple]:
    return case.make_args(rng), case.make_args(rng)


@SOME_FAST
def test_jit(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    assert_matches(jax.jit(lambda *a: outputs(case, *a))(*args), outputs(case, *args))


@DIFFERENTIABLE
def test_grad_matches_plain_autodiff(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    got = grad(case)(*args)
    with jax_dsa.plain_xla():
        want = jax.jit(grad(case))(*args)
    assert_matches(got, want)
    assert any(np.abs(np.asarray(g, np.float64)).max() > 0 for g in got)


@SOME_FAST
def test_vmap_of_each_argument(case: Any, rng: np.random.Generator) -> None:
    first, second = two_samples(case, rng)
    for i in range(len(first)):
        samples = [first, (*first[:i], second[i], *first[i + 1 :])]
        mapped = (*first[:i], jnp.stack([first[i], second[i]]), *first[i + 1 :])
        axes = [0 if j == i else None for j in range(len(first))]
        got = jax.jit(jax.vmap(lambda *a: outputs(case, *a), axes))(*mapped)
        assert_matches(got, stacked(lambda *a: outputs(case, *a), samples), what=f"argument {i}")


@pytest.mark.slow
@ALL
def test_nested_vmap(case: Any, rng: np.random.Generator) -> None:
    first, second = two_samples(case, rng)
    n = len(first)
    outer = [0 if i == 0 else None for i in range(n)]
    inner = [-1 if i == n - 1 else None for i in range(n)]
    mapped = list(first)
    samples = [[first, first], [first, first]]
    if n == 1:
        outer, inner = [0], [-1]
        both = jnp.stack([first[0], second[0]])
        mapped[0] = jnp.stack([both, both[::-1]], axis=-1)
        samples = [[first, second], [second, first]]
    else:
        mapped[0] = jnp.stack([first[0], second[0]])
        mapped[-1] = jnp.stack([first[-1], second[-1]], axis=-1)
        samples = [
            [(a, *first[1:-1], z) for z in (first[-1], second[-1])] for a in (first[0], second[0])
        ]
    fn = lambda *a: outputs(case, *a)  # noqa: E731
    got = jax.jit(jax.vmap(jax.vmap(fn, inner), outer))(*mapped)
    want = jax.tree.map(lambda *ys: jnp.stack(ys), *[stacked(fn, row) for row in samples])
    assert_matches(got, want)


@DIFFERENTIABLE
def test_vmap_of_grad_and_grad_of_vmap(case: Any, rng: np.random.Generator) -> None:
    samples = list(two_samples(case, rng))
    both = tuple(jnp.stack(xs) for xs in zip(*samples, strict=True))
    want = stacked(grad(case), samples)
    assert_matches(jax.jit(jax.vmap(grad(case)))(*both), want, what="vmap(grad)")
    # The mapped axis may follow the batch axis; the gradients then have it there as well.
    total = lambda *a: jax.vmap(lambda *s: loss(case, *s), 1)(*a).sum()  # noqa: E731
    moved = [jnp.moveaxis(x, 0, 1) for x in both]
    got = jax.jit(jax.grad(total, argnums=case.diff))(*moved)
    got = jax.tree.map(lambda g: jnp.moveaxis(g, 1, 0), got)
    assert_matches(got, want, what="grad(vmap)")
    if len(both) == 1:
        return
    # The gradient of an unmapped argument is the sum over the mapped axis.
    i = case.diff[-1]
    shared = (*both[:i], samples[0][i], *both[i + 1 :])
    axes = [None if j == i else 0 for j in range(len(both))]
    total = lambda *a: jax.vmap(lambda *s: loss(case, *s), axes)(*a).sum()  # noqa: E731
    singles = [(*s[:i], samples[0][i], *s[i + 1 :]) for s in samples]
    want_sum = sum(grad(case)(*s)[-1] for s in singles)
    assert_matches(jax.jit(jax.grad(total, argnums=i))(*shared), want_sum, what="unmapped argument")


@SOME_DIFFERENTIABLE
def test_jacrev(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    i = case.diff[0]

    def two_losses(x: jax.Array) -> jax.Array:
        value = loss(case, *args[:i], x, *args[i + 1 :])
        return jnp.stack([value, 2 * value])  # exact in FP8, too

    want = grad(case)(*args)[0]
    assert_matches(jax.jit(jax.jacrev(two_losses))(args[i]), jnp.stack([want, 2 * want]))


@SOME_DIFFERENTIABLE
def test_remat(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    want = grad(case)(*args)
    for policy in (None, remat_policy("attention")):
        fn = jax.checkpoint(lambda *a: loss(case, *a), policy=policy)
        assert_matches(jax.jit(jax.grad(fn, argnums=case.diff))(*args), want, what=str(policy))


@DIFFERENTIABLE
def test_saved_residuals_are_not_computed_again(case: Any, rng: np.random.Generator) -> None:
    """The policy saves every result that an operator names, so each such pass runs once."""

    def total(*args: Any) -> Any:
        # The derivative of a sum needs none of the terms, unlike that of `loss`.
        floats = [y for y in outputs(case, *args) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(y.astype(jnp.float32).sum() for y in floats)

    fn = jax.checkpoint(total, policy=remat_policy("attention"))
    program = jax.make_jaxpr(jax.grad(fn, argnums=case.diff))(*case.make_args(rng)).jaxpr
    for one in passes():
        if any(field.remat for field in one.signature.result_fields):
            assert executions(program, one.name) <= 1, one.name


@pytest.mark.slow
@DIFFERENTIABLE
def test_scan(case: Any, rng: np.random.Generator) -> None:
    samples = list(two_samples(case, rng))
    both = tuple(jnp.stack(xs) for xs in zip(*samples, strict=True))

    def total(*stack: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, a: (c + loss(case, *a), None), jnp.float32(0), stack)[0]

    got = jax.jit(jax.grad(total, argnums=case.diff))(*both)
    assert_matches(got, stacked(grad(case), samples))


@DIFFERENTIABLE
def test_an_unsupported_transform_names_the_way_out(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    i = case.diff[0]
    one = lambda x: loss(case, *args[:i], x, *args[i + 1 :])  # noqa: E731
    for transform in (
        lambda: jax.jvp(one, (args[i],), (args[i],)),
        lambda: jax.jvp(jax.jit(one), (args[i],), (args[i],)),
        lambda: jax.grad(lambda x: jax.grad(one)(x).astype(jnp.float32).sum())(args[i]),
    ):
        with pytest.raises(NotImplementedError, match=r"XLA implementation.*plain_xla"):
            transform()


def test_plain_xla_ends_with_its_block() -> None:
    with jax_dsa.plain_xla():
        with jax_dsa.plain_xla():
            pass
        assert in_plain_xla()
    with pytest.raises(ZeroDivisionError), jax_dsa.plain_xla():
        1 / 0  # noqa: B018
    assert not in_plain_xla()


@SOME_FAST
def test_export(case: Any, rng: np.random.Generator) -> None:
    args = case.make_args(rng)
    program = jax.jit(lambda *a: outputs(case, *a))
    exported = jax.export.export(program, disabled_checks=jax_dsa.export_checks())(*args)
    again = jax.export.deserialize(exported.serialize())
    assert_matches(tuple(again.call(*args)), outputs(case, *args))


@pytest.mark.parametrize("case", one_fast([c for c in CASES if c.diff], ("mqa_decode",)))
def test_gradients_of_an_empty_batch(case: Any, rng: np.random.Generator) -> None:
    args = tuple(x[:0] if x.shape[:1] == (8,) else x for x in case.make_args(rng))
    grads = jax.eval_shape(grad(case), *args)
    assert [g.shape for g in grads] == [args[i].shape for i in case.diff]


@ALL
def test_empty_batch(case: Any, rng: np.random.Generator) -> None:
    args = tuple(x[:0] if x.shape[:1] == (8,) else x for x in case.make_args(rng))
    want = [(y.shape, y.dtype) for y in outputs(case, *case.make_args(rng))]
    got = [(y.shape, y.dtype) for y in outputs(case, *args)]
    assert got == [((0, *s[1:]) if s[:1] == (8,) else s, d) for s, d in want]
