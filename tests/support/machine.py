"""Simulated machines: the CUDA extension with chosen GPUs."""

from __future__ import annotations

Gpu = tuple[int, int]


class Extension:
    """An extension module on a machine with GPUs of these compute capabilities."""

    def __init__(
        self, *gpus: Gpu, driver: int = 13000, tiers: tuple[str, ...] = ("hopper", "portable")
    ) -> None:
        self.compute_capabilities = lambda: list(gpus)
        self.cuda_versions = lambda: (13000, driver)
        self.tiers = lambda: tiers
        self.force_portable_tier = lambda forced: None
        self.topk_workspace_bytes = lambda **_: 0
