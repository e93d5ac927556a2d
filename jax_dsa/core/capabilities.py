"""Which kernels are available on this machine, and why the others are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_dsa.core import compat, ffi
from jax_dsa.core.op import Pass, passes
from jax_dsa.version import __version__


@dataclasses.dataclass(frozen=True)
class Capability:
    """The availability of the CUDA kernel of one pass. The XLA implementation is always available.

    Attributes:
        name: operator and pass, as "topk_fwd".
        cuda: whether the CUDA kernel can run here, on every GPU of this process.
        why: the reason if it cannot; otherwise the calls that the kernel covers.
        tiers: the tiers of the kernels that these GPUs run: "hopper", "portable", or both if the
            GPUs differ. Without a GPU, and if `cuda` is False, there are none.
    """

    name: str
    cuda: bool
    why: str
    tiers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The kernels that can run on this machine. `print` shows them as a table.

    Attributes:
        cuda: "" if CUDA kernels can run here, otherwise the reason why none can.
        passes: the availability of every pass of every operator.
    """

    cuda: str
    passes: tuple[Capability, ...]

    def __str__(self) -> str:
        kinds = sorted({d.device_kind for d in jax.devices()})
        yes = f"yes, on compute capability {', '.join(map(ffi.gpu_name, ffi.gpus()))}"
        if not self.cuda and ffi.portable_tier_forced():
            yes += ", portable ones only (JAX_DSA_TIER)"
        lines = [
            f"jax_dsa {__version__}, JAX {compat.VERSION}, on {len(jax.devices())} x "
            f"{', '.join(kinds)}",
            f"CUDA kernels: {f'no, because {self.cuda}' if self.cuda else yes}",
            "XLA implementations: yes, for every operator",
            "",
        ]
        width = max(len(p.name) for p in self.passes)
        for p in self.passes:
            # A reason that holds for all passes is shown once, above.
            note = "" if p.why == self.cuda else f" ({p.why})"
            lines.append(f"{p.name:<{width}}  {' and '.join(p.tiers) or 'XLA only'}{note}")
        return "\n".join(lines)


def _why_no_cuda() -> str:
    """Returns the reason why no kernel can run here, "" if kernels can."""
    loaded, why = ffi.status()
    if not loaded:
        return why
    if all(d.platform != "gpu" for d in jax.devices()):
        return "JAX sees no NVIDIA GPU (pip install 'jax_dsa[cuda13]' brings its CUDA build)"
    return ""


def capabilities() -> Capabilities:
    """Returns which CUDA kernels are available on this machine and why the others are not.

    The function asks JAX for its devices, which starts the backend.

    Examples:
        >>> import jax_dsa
        >>> {p.name for p in jax_dsa.capabilities().passes} >= {"topk_fwd", "sparse_mla_fwd"}
        True
    """
    here = _why_no_cuda()

    def one(p: Pass[Any, Any, Any]) -> Capability:
        if p.kernel is None:
            return Capability(p.name, False, "no CUDA kernel yet")
        if here:
            return Capability(p.name, False, here)
        tiers = {gpu: p.kernel.tier_on(gpu) for gpu in ffi.gpus()}
        others = ", ".join(ffi.gpu_name(gpu) for gpu, tier in tiers.items() if tier is None)
        if others:
            return Capability(p.name, False, f"no CUDA kernel yet for compute capability {others}")
        found = tuple(sorted({tier for tier in tiers.values() if tier is not None}))
        return Capability(p.name, True, p.kernel.limits, found)

    return Capabilities(here, tuple(one(p) for p in passes()))
