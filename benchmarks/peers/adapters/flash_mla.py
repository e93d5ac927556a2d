"""Calls of FlashMLA."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.bench.case import Case


def sparse(case: Case, q: Any, kv: Any, indices: Any) -> Any:
    from flash_mla import flash_mla_sparse_fwd as call

    return call(q[0], kv[0], indices[0], q.shape[3] ** -0.5, **_for_hopper(call))[0]


def sparse_decode(case: Case, q: Any, records: Any, indices: Any) -> Any:
    from flash_mla import flash_mla_with_kvcache as call

    options = {"is_fp8_kvcache": True, "indices": indices, **_for_hopper(call)}
    return call(q, records, None, None, 512, _schedule(case.label), **options)[0]


def sparse_decode_operands(
    case: Case, q: Any, records: Any, lengths: Any, indices: Any
) -> tuple[Any, Any, Any]:
    """Returns the cache as pages of 64 records, and indices into the records of all requests."""
    import torch

    batch, capacity = records.shape[:2]
    first = capacity * torch.arange(batch, dtype=torch.int32, device=q.device)
    indices = torch.where(indices < 0, -1, indices + first[:, None, None, None])
    return q, records.reshape(-1, 64, 1, records.shape[3]), indices[:, :, 0].contiguous()


def decode(case: Case, q: Any, pages: Any, table: Any, lengths: Any) -> Any:
    from flash_mla import flash_mla_with_kvcache as call

    options = {"is_fp8_kvcache": False, **_for_hopper(call)}
    return call(q, pages, table, lengths, 512, _schedule(case.label), **options)[0]


def decode_operands(case: Case, q: Any, kv: Any, plan: Any = None) -> tuple[Any, Any, Any, Any]:
    """Returns the cache as pages of 64 keys, request after request. `plan` is ours."""
    import torch

    batch, keys = kv.shape[:2]
    count = {"dtype": torch.int32, "device": q.device}
    table = torch.arange(batch * keys // 64, **count).reshape(batch, -1)
    return q, kv.reshape(-1, 64, 1, kv.shape[3]), table, torch.full((batch,), keys, **count)


@functools.cache
def _schedule(label: str) -> Any:
    """Returns how the keys of a case's requests are split among the SMs.

    A model computes this once per step for all of its layers, so it is cached by case.
    """
    from flash_mla import get_mla_metadata

    return get_mla_metadata()[0]


def _for_hopper(call: Callable[..., Any]) -> dict[str, Any]:
    """Returns the option that selects Hopper's kernels. Only SGLang's build of FlashMLA has it."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(call).parameters else {}
