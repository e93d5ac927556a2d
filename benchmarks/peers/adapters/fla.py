"""Calls of flash-linear-attention's kernels for the selected branch of NSA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dsa.bench.case import Case


def sparse(case: Case, q: Any, k: Any, v: Any, indices: Any) -> Any:
    from fla.ops.nsa.parallel import parallel_nsa_fwd

    return parallel_nsa_fwd(q, k, v, indices, **_options(case))[0]


def sparse_backward(
    case: Case, q: Any, k: Any, v: Any, indices: Any, out: Any, lse: Any, dout: Any
) -> Any:
    from fla.ops.nsa.parallel import parallel_nsa_bwd

    return parallel_nsa_bwd(q, k, v, out, lse, dout, indices, **_options(case))


def _options(case: Case) -> dict[str, Any]:
    counts = {"block_counts": case.dims["K"], "block_size": case.dims["b"]}
    return {**counts, "scale": case.dims["D"] ** -0.5}
