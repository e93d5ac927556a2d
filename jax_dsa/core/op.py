"""`Pass`, one direction (forward or backward) of one operator.

`differentiable` joins the two passes of an operator. A call goes through these layers:

public function -> checks -> differentiable -> Pass: vmap -> mesh -> CUDA kernel | XLA
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core import batching, compat, ffi, partition
from jax_dsa.core.derivative import differentiable, no_second_derivative
from jax_dsa.core.spec import Signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.core.call import Call
    from jax_dsa.core.spec import Dims

__all__ = ["Pass", "differentiable", "passes"]

O = TypeVar("O")
P = ParamSpec("P")
R = TypeVar("R")

_passes: dict[str, Pass[Any, Any, Any]] = {}


def passes() -> tuple[Pass[Any, Any, Any], ...]:
    """Returns every pass of every operator, sorted by name."""
    return tuple(_passes[name] for name in sorted(_passes))


class Pass(Generic[O, P, R]):
    """One pass of an operator. It supports vmap and meshes, and runs a CUDA kernel or XLA.

    Attributes:
        name: operator and direction, as "sparse_mla_fwd". Compiled programs and profiles show it.
        xla: the XLA implementation, `(options, *groups) -> results`. Its annotations are the
            specification of the pass (see `spec`). The first axis of every operand and result is
            the batch axis "b", into which vmap folds its axes. An operand may have length 1 there.
        kernel: the CUDA kernel, or None.
        shardable: the factors that may be sharded. A result is the sum over those that it lacks.
        shard_queries_on_idle_axes: whether mesh axes that shard no operand split the queries, after
            which the results are exchanged. This is worthwhile if computing the results takes
            longer than exchanging them.
        signature: the operands and results, read off the annotations of `xla`.
    """

    def __init__(
        self,
        name: str,
        xla: Callable[Concatenate[O, P], R],
        *,
        kernel: ffi.Kernel | None = None,
        shardable: str = "b t g m",
        shard_queries_on_idle_axes: bool = False,
    ) -> None:
        self.name = name
        self.xla = xla
        self.kernel = kernel
        self.shardable = frozenset(shardable.split())
        self.shard_queries_on_idle_axes = shard_queries_on_idle_axes
        self.signature = Signature.of(xla)
        _passes[name] = self

    def __call__(self, call: Call, options: O, *groups: P.args, **_: P.kwargs) -> R:
        signature = self.signature
        operands = list(itertools.chain(*groups))
        present = tuple([x is not None for x in operands])
        dtypes = signature.dtypes(options, operands)
        prefer_query_sharding = self._kernel_prefers_query_sharding(call, options, groups)
        built = _built(self, call, options, present, dtypes, prefer_query_sharding)
        outs = iter(built(*[x for x in operands if x is not None]))
        results: list[Any] = []
        for field, dtype in zip(signature.result_fields, dtypes, strict=True):
            y = None if dtype is None else next(outs)
            if field.remat and y is not None:
                y = checkpoint_name(y, field.remat)
            results.append(y)
        return signature.results(*results)

    def _kernel_prefers_query_sharding(self, call: Call, options: O, groups: Any) -> bool:
        """Returns whether the kernel runs this call and prefers query sharding to head sharding.

        Raises:
            NotImplementedError: the user asked for the kernel, and it cannot run this call. A user
                who names an implementation gets it or an error.
        """
        kernel = self.kernel
        if call.implementation in ("xla", "plain"):
            return False
        if call.implementation is None and (kernel is None or kernel.prefer_query_sharding is None):
            return False
        loaded, why = ffi.status()
        reason: str | None = why
        if kernel is None:
            reason = "it has no CUDA kernel yet"
        elif loaded:
            reason = kernel.unsupported_reason(options, *groups)
            if reason is None:
                prefer = kernel.prefer_query_sharding
                return prefer is not None and prefer(options, *groups)
        if call.implementation == "cuda":
            raise NotImplementedError(
                f"{call.op}: implementation='cuda' is not available here for the pass "
                f"{self.name}: {reason}; implementation='xla' covers this call"
            )
        return False


@functools.lru_cache(maxsize=1024)
def _built(
    self: Pass[Any, Any, Any],
    call: Call,
    options: Any,
    present: tuple[bool, ...],
    dtypes: tuple[Any, ...],
    prefer_query_sharding: bool,
) -> Callable[..., list[Any]]:
    """Returns the pass as a function of the operands that are present.

    The operands may have any number of axes in front of their own. The function returns the results
    that are present, those with a dtype.
    """
    signature = self.signature
    dims = signature.dims(options, present, [dtype is not None for dtype in dtypes])
    kept = [i for i, is_present in enumerate(present) if is_present]
    shared = frozenset([n for n, i in enumerate(kept) if signature.operands[i].shared])

    def local(*args: jax.Array) -> list[jax.Array]:
        rank = args[0].ndim - len(dims.operands[0])
        lead, batch, folded = batching.fold(args, rank, shared)
        arrays = iter(folded)
        operands = iter([next(arrays) if is_present else None for is_present in present])
        groups = [g(*itertools.islice(operands, len(g._fields))) for g in signature.groups]
        run = _implementation(self, call, options, groups, dims, dtypes)
        outs = [y for y in run(*groups) if y is not None]
        if not lead:
            return outs
        sizes = [None if i is None else args[i].shape[rank] for i in dims.copied]
        return [batching.unfold(y, lead, batch, n) for y, n in zip(outs, sizes, strict=True)]

    declared = partition.Declared(
        dims, self.shardable, self.shard_queries_on_idle_axes, prefer_query_sharding
    )
    if call.implementation == "plain":
        return partition.partitioned(local, declared, plain=True)
    local.__name__ = self.name  # Compiled programs and profiles call the pass by this name.
    # jit keeps one trace for the partitioner and the lowering to share.
    routed = partition.partitioned(jax.jit(local), declared)
    op = jax.custom_jvp(batching.batched(routed))
    op.defjvp(no_second_derivative(call.op))
    return op


def _implementation(
    self: Pass[Any, Any, Any],
    call: Call,
    options: Any,
    groups: list[Any],
    dims: Dims,
    dtypes: tuple[Any, ...],
) -> Callable[..., Any]:
    """Returns what computes the pass on local, fully batched arrays.

    This is the kernel if one exists and supports the call, else the XLA implementation.
    """
    xla: Any = functools.partial(self.xla, options)
    kernel = self.kernel
    if call.implementation in ("xla", "plain") or kernel is None or not ffi.status()[0]:
        return xla
    if call.implementation is None and kernel.unsupported_reason(options, *groups) is not None:
        return xla
    shapes = iter(dims.solve([x.shape for x in itertools.chain(*groups) if x is not None])[1])
    avals = [None if d is None else jax.ShapeDtypeStruct(next(shapes), d) for d in dtypes]
    cuda = functools.partial(kernel.run, options, self.signature.results(*avals))
    if call.implementation == "cuda":
        return cuda

    @functools.wraps(self.xla)
    def default(*groups: Any) -> Any:
        # Constant results, such as those of empty rows, have to be typed like the kernel's.
        return compat.match_vary(xla(*groups), *itertools.chain(*groups))

    return functools.partial(jax.lax.platform_dependent, cuda=cuda, default=default)
