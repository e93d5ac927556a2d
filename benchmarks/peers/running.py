"""Runs, compares and times the calls of other libraries."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.bench.external import ExternalCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax_dsa.bench.case import Case


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        name: The name as its project writes it.
        module: The module that has to be importable.
        calls: Functions of a case and its arguments, by the `kind` of case.
        torch: Whether the functions take PyTorch tensors, one for each array of the case. A
            backward pass then also gets the results of sparse attention and their cotangent:
            `(case, *tensors, out, lse, dout)`, and returns the gradients.
        prepare: Functions `(case, *tensors)`, by `kind`, that return the tuple of arguments that
            the call takes instead of the tensors. Their time does not count.
    """

    name: str
    module: str
    calls: Mapping[str, Callable[..., Any]]
    torch: bool = False
    prepare: Mapping[str, Callable[..., tuple]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call(ExternalCall):
    """A library's function for one case."""

    function: Callable[..., Any]
    uses_torch: bool
    prepare: Callable[..., tuple] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def tensors(self, case: Case, key: jax.Array) -> tuple:
        args = jax.jit(case.make)(key)
        if case.diff:
            out, lse = jax.jit(functools.partial(case.call, return_lse=True))(*args)
            args = (*args, out, lse, jax.random.normal(key, out.shape, out.dtype))
        operands = tuple(map(_tensor, jax.block_until_ready(jax.tree.leaves(args))))
        if self.prepare is None:
            return operands
        import torch

        prepared = self.prepare(case, *operands)
        # When this function returns, JAX may reuse the memory of the operands. The kernels that
        # read them have to finish before.
        torch.cuda.synchronize()
        return prepared

    def torch_seconds(self, sets: Sequence[tuple], budget: float, rest: float) -> float:
        return torch_seconds(self.function, sets, budget, rest)

    def difference(self, case: Case, ours: Any, theirs: Any) -> float:
        return difference(case, ours, theirs)


def kind(case: Case) -> str:
    """Returns everything of a case except its sizes. Calls are chosen by it."""
    return " ".join(filter(None, (case.operator, case.step, case.dtype, case.note)))


def calls_for(case: Case, peers: Sequence[Peer]) -> dict[str, Call]:
    """Returns the calls that these libraries have for a case, by the libraries' names."""
    return {
        peer.name: Call(
            functools.partial(peer.calls[kind(case)], case),
            peer.torch,
            peer.prepare.get(kind(case)),
        )
        for peer in peers
        if kind(case) in peer.calls
    }


def _tensor(x: jax.Array) -> Any:
    import torch

    if x.dtype == jnp.float8_e4m3fn:  # Older versions of DLPack do not know this dtype.
        codes = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return torch.from_dlpack(codes.block_until_ready()).view(torch.float8_e4m3fn)
    return torch.from_dlpack(x)


def torch_seconds(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float = 0.3, rest: float = 0.0
) -> float:
    """Returns the seconds of one call of `fn`, a function of PyTorch tensors.

    The arguments are those of `timing.device_seconds`.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def calls() -> None:
        for args in sets:
            fn(*args)

    calls()  # The first call compiles.
    run = _captured(calls)

    def measure(count: int) -> float:
        time.sleep(rest)
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    measure(1)  # The first replay loads the graph.
    once = measure(1)
    count = max(3, min(1000, round(budget / once)))
    return statistics.median(measure(count) for _ in range(5)) / (count * len(sets))


def _captured(calls: Callable[[], None]) -> Callable[[], None]:
    """Returns `calls` as one CUDA graph, or unchanged if it cannot be captured."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        return calls
    return graph.replay


def difference(case: Case, ours: Any, theirs: Any) -> float:
    """Returns how much the results of a library differ from ours.

    For floats this is the largest absolute difference divided by our largest finite magnitude. For
    selections it is the fraction of rows whose sets of indices differ.
    """
    convert = CONVERTED.get(kind(case), lambda x: x)
    pairs = zip(jax.tree.leaves(convert(ours)), jax.tree.leaves(theirs), strict=True)
    return max(float(_difference(x, _array(y))) for x, y in pairs)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.from_dlpack(x.contiguous())


@jax.jit
def _difference(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    theirs = theirs.reshape(ours.shape)
    if jnp.issubdtype(ours.dtype, jnp.integer):
        return (jnp.sort(ours) != jnp.sort(theirs)).any(-1).mean()
    x, y = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    gap = jnp.where(x == y, 0.0, jnp.abs(x - y)).max()  # Infinities that are equal have no gap.
    return gap / jnp.abs(jnp.where(jnp.isfinite(x), x, 0.0)).max()


def _normalized(dist: jax.Array) -> jax.Array:
    """Returns the teacher over all heads from `attn_dist`'s result by head groups."""
    dist = dist.sum(1)
    return dist / dist.sum(-1, keepdims=True)


CONVERTED: dict[str, Callable[..., Any]] = {"attn_dist fwd bf16": _normalized}
"""Functions that convert our results, by `kind`, where libraries define the result differently."""
