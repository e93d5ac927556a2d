"""What every operator is made of: `Pass` (one direction of one operator) and `differentiable` (the
two joined).

public function -> checks -> differentiable -> Pass: vmap -> mesh -> dispatch -> CUDA kernel | XLA
implementation
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax

from jax_dsa.core import batching, compat, ffi, partition
from jax_dsa.core.derivative import differentiable, in_plain_xla, no_second_derivative

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax_dsa.core.checks import Implementation

__all__ = ["Pass", "differentiable"]

Outputs = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One pass of an operator, that vmaps and shards, on a CUDA kernel or on the XLA
    implementation.

    Attributes:
        name: operator and direction, as in the FFI target and in error messages: "sparse_mla_fwd".
        dims: the axes of every operand and result (see `partition`), or a function of the options
            that gives them. The first axis of each is the batch axis "b", which vmap folds into; an
            operand may have 1 there.
        reference: the XLA implementation: `(options, *operands) -> tuple`, operands and results may
            be None.
        shardable: the factors of `dims` that may be sharded. Each result is the sum over those it
            lacks.
        shared: operands whose batch axis of 1 the implementations broadcast themselves, for arrays
            too large to repeat. A result with the same dims is that operand's gradient and has its
            batch axis.
        kernel: the CUDA kernel, if there is one.
    """

    name: str
    dims: str | Callable[[Any], str]
    reference: Callable[..., Outputs]
    shardable: str = "b t g m"
    shared: tuple[int, ...] = ()
    kernel: ffi.Kernel | None = None

    def __call__(
        self,
        options: Any,
        *operands: jax.Array | None,
        implementation: Implementation | None = None,
    ) -> Outputs:
        if implementation == "cuda":
            self._require_kernel(options, operands)
        present = tuple(x is not None for x in operands)
        built = _built(self, options, implementation, present, in_plain_xla())
        return built(*(x for x in operands if x is not None))

    def _require_kernel(self, options: Any, operands: Sequence[jax.Array | None]) -> None:
        """Raises unless the kernel can run this call: who asks for an implementation gets it or an
        error.
        """
        loaded, why = ffi.status()
        if self.kernel is None:
            why = "it has no CUDA kernel yet"
        elif loaded:
            why = self.kernel.supported(options, *operands) or ""
        if why:
            raise NotImplementedError(
                f"{self.name}: implementation='cuda' is not available here: {why}; "
                f"implementation='xla' covers this call"
            )


def _dispatch(
    self: Pass, options: Any, implementation: Implementation | None
) -> Callable[..., Outputs]:
    """The pass on local, fully batched arrays: the kernel where there is one for the call, else the
    XLA implementation.
    """

    def xla(*operands: Any) -> Outputs:
        return self.reference(options, *operands)

    def cuda(kernel: ffi.Kernel, *operands: Any) -> Outputs:
        outs = jax.eval_shape(xla, *operands)
        avals = [None if o is None else compat.out_aval(o.shape, o.dtype, *operands) for o in outs]
        return kernel.call(options, operands, avals)

    def call(*operands: Any) -> Outputs:
        kernel = self.kernel
        if implementation == "xla" or kernel is None or not ffi.status()[0]:
            return xla(*operands)
        if implementation == "cuda":
            return cuda(kernel, *operands)
        if kernel.supported(options, *operands) is not None:
            return xla(*operands)
        return jax.lax.platform_dependent(
            *operands, cuda=functools.partial(cuda, kernel), default=xla
        )

    return call


@functools.lru_cache(maxsize=1024)
def _built(
    self: Pass,
    options: Any,
    implementation: Implementation | None,
    present: tuple[bool, ...],
    plain: bool,
) -> Callable[..., Outputs]:
    dims = self.dims if isinstance(self.dims, str) else self.dims(options)
    operand_axes, result_axes = partition.parse(dims)
    if len(present) != len(operand_axes):
        raise TypeError(f"{self.name}: {len(present)} operands for dims '{dims}'")
    kept = [i for i, p in enumerate(present) if p]
    position = {operand: arg for arg, operand in enumerate(kept)}
    local = _dispatch(self, options, implementation)

    # jit keeps one trace for the shapes, the partitioner and the lowering to share.
    @jax.jit
    def with_nones(*args: jax.Array) -> Outputs:
        given = iter(args)
        return local(*(next(given) if p else None for p in present))

    axes = [operand_axes[i] for i in kept]
    shared = [i for i in self.shared if present[i]]
    mirrors = [
        next((position[i] for i in shared if operand_axes[i] == r), None) for r in result_axes
    ]
    ranks = [len(a) for a in axes]
    fold = functools.partial(
        batching.folded, ranks=ranks, shared=[position[i] for i in shared], mirrors=mirrors
    )
    if plain:
        return fold(with_nones)
    shardable = frozenset(self.shardable.split())
    op = jax.custom_jvp(
        batching.batched(fold(partition.partitioned(with_nones, (axes, result_axes), shardable)))
    )
    op.defjvp(no_second_derivative(self.name.rsplit("_", 1)[0]))
    return op
