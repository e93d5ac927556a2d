"""Reverse mode of an operator: `differentiable` joins its two passes.

A custom JVP does the work of `jax.custom_vjp`. Its tangents come from one linear primitive that
only its transpose can evaluate. The difference is in the error messages: forward mode and gradients
of gradients raise an error that names the operator and the alternative, whereas `jax.custom_vjp`
can only say that it does not support them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_dsa.core import compat
from jax_dsa.core.deferred import materialize
from jax_dsa.core.spec import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax_dsa.core.call import Call

O = TypeVar("O")
X = TypeVar("X", bound=tuple)
Y = TypeVar("Y", bound=tuple)


def _refuse(name: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: {what} not supported by the operator's own rules; the XLA implementation "
        f"supports it as plain JAX, inside `with jax_dsa.plain_xla():`"
    )


# The operands are the arrays that the backward pass reads, then one tangent for every float operand
# of the operator. The parameters are the operator's name; `transpose(saved, cotangents)`, which
# returns the cotangents of the tangents; the number `saved` of arrays that the backward pass reads;
# and the avals of the outputs' tangents.
_tangent_p = Primitive("jax_dsa_tangent")
_tangent_p.multiple_results = True


def _forward_mode(*_: Any, name: str, **__: Any) -> NoReturn:
    _refuse(name, "forward-mode differentiation is")


def no_second_derivative(name: str) -> Callable[..., NoReturn]:
    """Returns a JVP rule that raises. The steps of the backward pass have this rule."""
    return lambda *_: _refuse(name, "a gradient of a gradient is")


def _transpose(
    cts: Sequence[Any], *args: Any, name: str, transpose: Any, saved: int, avals: Any
) -> list[Any]:
    del name, avals
    grads = transpose(list(args[:saved]), [ad.instantiate_zeros(ct) for ct in cts])
    tangents = args[saved:]
    return [None] * saved + [
        g if ad.is_undefined_primal(t) else None for g, t in zip(grads, tangents, strict=True)
    ]


def _batched(
    args: Sequence[Any], dims: Sequence[Any], *, name: str, transpose: Any, saved: int, avals: Any
) -> tuple[list[Any], list[int]]:
    size, sharding, axis = next(
        (x.shape[d], jax.typeof(x).sharding, d)
        for x, d in zip(args, dims, strict=True)
        if d is not None
    )
    names = sharding.spec[axis]

    def shard(x: jax.Array) -> jax.Array:
        return compat.shard_first(x, sharding.mesh, names)

    # Map all tangents. The cotangent of an unmapped tangent would have to be summed here.
    def mapped(x: Any, d: Any) -> jax.Array:
        x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return shard(x)

    tangents = [mapped(x, d) for x, d in zip(args[saved:], dims[saved:], strict=True)]
    each = jax.vmap(transpose, in_axes=(list(dims[:saved]), 0))
    outs = _tangent_p.bind(
        *args[:saved],
        *tangents,
        name=name,
        transpose=lambda saved, cts: each(saved, [shard(ct) for ct in cts]),
        saved=saved,
        avals=tuple(compat.mapped_aval(a, size, names) for a in avals),
    )
    return outs, [0] * len(outs)


_tangent_p.def_impl(_forward_mode)
_tangent_p.def_abstract_eval(lambda *_, avals, **__: avals)
mlir.register_lowering(_tangent_p, _forward_mode)
ad.primitive_jvps[_tangent_p] = lambda *_, name, **__: no_second_derivative(name)()
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batched


def _is_float(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def _fit_cotangent(ct: jax.Array | None, primal: Any) -> jax.Array:
    """Returns `ct` with the type of the aval `primal`.

    The type includes the dtype, a batch axis that was broadcast, and the mesh axes that the array
    varies over or is sharded over.
    """
    if ct is None:
        ct = jnp.zeros(primal.shape, primal.dtype)
    axes = tuple(sorted(compat.varying_axes(ct) - compat.varying_axes(primal)))
    ct = jax.lax.psum(ct, axes) if axes else ct
    if ct.shape != primal.shape:  # The pass broadcast a batch axis of 1.
        ct = ct.sum(0, keepdims=True)
    ct = compat.match_vary(compat.saturated(ct, primal.dtype), primal)
    # An array from before the mesh was set has no sharding on it.
    fits = primal.sharding.mesh.empty or jax.typeof(ct).sharding == primal.sharding
    return ct if fits else jax.reshard(ct, primal.sharding)


def _guarded(name: str, saved: Any, operands: Any) -> Any:
    """Returns `saved`, and raises if it is differentiated, because it counts as a constant."""
    guard = jax.custom_jvp(lambda saved, operands: saved)
    guard.defjvp(no_second_derivative(name))
    return guard(saved, operands)


def _all(operands: tuple, results: tuple) -> tuple[tuple, ...]:
    return operands, results


def differentiable(
    name: str,
    fwd: Callable[[Call, O, X], Y],
    bwd: Callable[..., Any],
    residuals: Callable[[X, Y], tuple[tuple, ...]] = _all,
) -> Callable[[Call, O, X], Y]:
    """Joins two passes into one differentiable operator `(call, options, operands) -> results`.

    Args:
        name: the operator's name in compiled programs and profiles.
        fwd: the forward pass, on a named tuple of operands, some of which may be `Deferred`.
        bwd: the backward pass `(call, options, *residuals, cotangents) -> gradients`. The
            cotangents are a tuple like the results, with None for a result that is an integer, is
            absent or is marked CONSTANT. The gradients have the names of their operands.
        residuals: returns the named tuples that the backward pass reads; by default the operands
            and the results.
    """

    # The forward pass runs on constants. `attached` then gives its float outputs their tangents.
    # Integer outputs are not passed through it, because a JVP rule cannot name the type of their
    # tangents inside shard_map.
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def attached(static: Any, operands: Any, saved: Any, outputs: Any) -> Any:
        return outputs

    @attached.defjvp
    def _(static: Any, primals: Any, tangents: Any) -> Any:
        (call, options, moving, results), (operands, kept, outputs) = static, primals
        inputs = [i for i, x in enumerate(operands) if _is_float(x)]
        names = operands._fields
        avals = [jax.typeof(operands[i]) for i in inputs]
        saved, tree = jax.tree.flatten(kept)

        def transpose(saved: Any, cts: Any) -> list[jax.Array]:
            by_index = dict(zip(moving, cts, strict=True))
            cotangents = results(*(by_index.get(i) for i in range(len(results._fields))))
            grads = bwd(call, options, *jax.tree.unflatten(tree, saved), cotangents)
            by_name = grads._asdict()
            return [
                _fit_cotangent(by_name.get(names[i]), a) for i, a in zip(inputs, avals, strict=True)
            ]

        # With a guard each, a remat policy that keeps `saved` need not run the forward pass again.
        saved, outputs = (_guarded(call.op, x, operands) for x in (saved, outputs))
        moved = _tangent_p.bind(
            *saved,
            *(tangents[0][i] for i in inputs),
            name=call.op,
            transpose=transpose,
            saved=len(saved),
            avals=tuple(jax.typeof(y) for y in outputs),
        )
        return outputs, moved

    def core(call: Call, options: O, operands: X) -> Y:
        operands = materialize(operands)
        if call.implementation == "plain":
            return fwd(call, options, operands)
        results = fwd(call, options, jax.lax.stop_gradient(operands))
        moving = tuple(
            [
                i
                for i, (f, y) in enumerate(zip(fields(type(results)), results, strict=True))
                if _is_float(y) and not f.constant
            ]
        )
        static = (call, options, moving, type(results))
        kept = residuals(jax.lax.stop_gradient(operands), results)
        floats = attached(static, operands, kept, [results[i] for i in moving])
        by_index = dict(zip(moving, floats, strict=True))
        return type(results)(*(by_index.get(i, y) for i, y in enumerate(results)))

    core.__name__ = name
    # Without this jit, an operator that is called outside of jit would be traced in every call.
    return jax.jit(core, static_argnums=(0, 1))
