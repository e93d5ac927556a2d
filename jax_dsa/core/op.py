"""What every operator is made of: `Pass`, one direction of one operator, which `differentiable`
joins with the other.

public function -> checks -> differentiable -> Pass: vmap -> mesh -> CUDA kernel | XLA
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core import batching, ffi, partition
from jax_dsa.core.derivative import differentiable, no_second_derivative
from jax_dsa.core.spec import Signature, fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.core.call import Call

__all__ = ["Pass", "differentiable", "passes"]

O = TypeVar("O")
P = ParamSpec("P")
R = TypeVar("R")

_passes: dict[str, Pass[Any, Any, Any]] = {}


def passes() -> tuple[Pass[Any, Any, Any], ...]:
    """Every pass of every operator, by name."""
    return tuple(_passes[name] for name in sorted(_passes))


class Pass(Generic[O, P, R]):
    """One pass of an operator. It vmaps and shards, and runs on a CUDA kernel or on the XLA
    implementation.

    Attributes:
        name: operator and direction: "sparse_mla_fwd". The pass has it in compiled programs and in
            profiles.
        xla: the XLA implementation: `(options, *groups) -> results`. Its annotations are the
            specification of the pass (see `spec`). The first axis of every operand and result is
            the batch axis "b", which vmap folds into; an operand may have 1 there.
        kernel: the CUDA kernel, if there is one.
        shardable: the factors that may be sharded. Each result is the sum over those it lacks.
        shard_queries_on_idle_axes: whether mesh axes that shard no operand split the queries, after
            which the results are exchanged. This pays where the work outweighs its results.
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
        operands = list(itertools.chain(*groups))
        if call.implementation == "cuda":
            self._require_kernel(call, options, groups)
        present = tuple([x is not None for x in operands])
        built = _built(
            self, call, options, present, self._prefer_query_sharding(call, options, groups)
        )
        outs = built(*[x for x in operands if x is not None])
        results = self.signature.results
        for i, field in enumerate(fields(results)):
            if field.remat and outs[i] is not None:
                outs[i] = checkpoint_name(outs[i], field.remat)
        return results(*outs)

    def _prefer_query_sharding(self, call: Call, options: O, groups: Any) -> bool:
        """Whether the call has a kernel that would rather have all heads of some queries."""
        kernel = self.kernel
        if kernel is None or kernel.prefer_query_sharding is None or not ffi.status()[0]:
            return False
        if (
            call.implementation in ("xla", "plain")
            or kernel.unsupported_reason(options, *groups) is not None
        ):
            return False
        return kernel.prefer_query_sharding(options, *groups)

    def _require_kernel(self, call: Call, options: O, groups: Any) -> None:
        """Raises unless the kernel can run this call: a user who names an implementation gets it or
        an error.
        """
        loaded, why = ffi.status()
        if self.kernel is None:
            why = "it has no CUDA kernel yet"
        elif loaded:
            why = self.kernel.unsupported_reason(options, *groups) or ""
        if why:
            raise NotImplementedError(
                f"{call.op}: implementation='cuda' is not available here for the pass "
                f"{self.name}: {why}; implementation='xla' covers this call"
            )


@functools.lru_cache(maxsize=1024)
def _built(
    self: Pass[Any, Any, Any],
    call: Call,
    options: Any,
    present: tuple[bool, ...],
    prefer_query_sharding: bool,
) -> Callable[..., list[Any]]:
    """The pass for the operands that are `present`, with any number of axes in front of theirs."""
    signature = self.signature
    kept = [i for i, p in enumerate(present) if p]
    axes = [signature.operands[i].axes_with(options) for i in kept]
    shared = frozenset([n for n, i in enumerate(kept) if signature.operands[i].shared])
    result_axes = []
    mirrors = []  # of a gradient, which argument it belongs to, if that is shared
    for f, i in zip(fields(signature.results), signature.mirrors, strict=True):
        mine = kept.index(i) if i in kept else None
        # The gradient of an absent operand is absent too.
        result_axes.append(f.axes_with(options) if mine is None else axes[mine])
        mirrors.append(mine if mine in shared else None)
    first_rank = len(axes[0])

    def local(*args: jax.Array) -> list[jax.Array | None]:
        own = args[0].ndim - first_rank
        lead, batch, folded = batching.fold(args, own, shared)
        given = iter(folded)
        operands = iter([next(given) if p else None for p in present])
        groups = [g(*itertools.islice(operands, len(g._fields))) for g in signature.groups]
        outs = _implementation(self, call, options, groups)(*groups)
        if not lead:
            return list(outs)
        sizes = [None if m is None else args[m].shape[own] for m in mirrors]
        return [batching.unfold(y, lead, batch, n) for y, n in zip(outs, sizes, strict=True)]

    declared = partition.Declared(
        axes, result_axes, self.shardable, self.shard_queries_on_idle_axes, prefer_query_sharding
    )
    if call.implementation == "plain":
        return partition.partitioned(local, declared, plain=True)
    local.__name__ = self.name  # what compiled programs and profiles call it
    # jit keeps one trace for the shapes, the partitioner and the lowering to share.
    routed = partition.partitioned(jax.jit(local), declared)
    op = jax.custom_jvp(batching.batched(routed))
    op.defjvp(no_second_derivative(call.op))
    return op


def _implementation(
    self: Pass[Any, Any, Any], call: Call, options: Any, groups: list[Any]
) -> Callable[..., Any]:
    """What computes the pass on local, fully batched arrays: the kernel where there is one for the
    call, else the XLA implementation.
    """
    xla: Any = functools.partial(self.xla, options)
    kernel = self.kernel
    if call.implementation in ("xla", "plain") or kernel is None or not ffi.status()[0]:
        return xla
    if call.implementation is None and kernel.unsupported_reason(options, *groups) is not None:
        return xla
    # One trace for the results' shapes and for the branch of other platforms.
    xla = jax.jit(functools.update_wrapper(xla, self.xla))
    cuda = functools.partial(kernel.run, options, jax.eval_shape(xla, *groups))
    if call.implementation == "cuda":
        return cuda
    return functools.partial(jax.lax.platform_dependent, cuda=cuda, default=xla)
