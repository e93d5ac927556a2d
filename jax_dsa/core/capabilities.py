"""Which kernels are available here, and why not the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_dsa.core import compat, ffi
from jax_dsa.core.op import Pass, passes
from jax_dsa.version import __version__


@dataclasses.dataclass(frozen=True)
class Capability:
    """What there is for one pass of one operator. The XLA implementation always is.

    Attributes:
        name: operator and pass, "quantize_fp8".
        cuda: whether its CUDA kernel can run here.
        why: if not, the reason; if so, what the kernel covers.
    """

    name: str
    cuda: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What runs here. `print` shows it in words.

    Attributes:
        cuda: "" if CUDA kernels can run here, else the reason why none can.
        passes: every pass of every operator.
    """

    cuda: str
    passes: tuple[Capability, ...]

    def __str__(self) -> str:
        kinds = sorted({d.device_kind for d in jax.devices()})
        lines = [
            f"jax_dsa {__version__}, JAX {compat.VERSION}, on {len(jax.devices())} x "
            f"{', '.join(kinds)}",
            f"CUDA kernels: {f'no, because {self.cuda}' if self.cuda else 'yes'}",
            "XLA implementations: yes, for every operator",
            "",
        ]
        width = max(len(p.name) for p in self.passes)
        for p in self.passes:
            # One reason for all need not be said for each.
            said = "" if p.why == self.cuda else f" ({p.why})"
            lines.append(f"{p.name:<{width}}  {f'CUDA{said}' if p.cuda else f'XLA only{said}'}")
        return "\n".join(lines)


def _why_no_cuda() -> str:
    """Why no kernel can run here; "" if kernels can."""
    loaded, why = ffi.status()
    if not loaded:
        return why
    if all(d.platform != "gpu" for d in jax.devices()):
        return "JAX sees no NVIDIA GPU (pip install 'jax_dsa[cuda13]' brings its CUDA build)"
    return ""


def capabilities() -> Capabilities:
    """Which CUDA kernels are available here and why the others are not.

    Asks JAX for its devices, so that it starts the backend.

    Examples:
        >>> import jax_dsa
        >>> {p.name for p in jax_dsa.capabilities().passes} >= {"topk_fwd", "sparse_mla_fwd"}
        True
    """
    here = _why_no_cuda()

    def one(p: Pass[Any, Any, Any]) -> Capability:
        if p.kernel is None:
            return Capability(p.name, False, "no CUDA kernel yet")
        return Capability(p.name, not here, here or p.kernel.limits)

    return Capabilities(here, tuple(one(p) for p in passes()))
