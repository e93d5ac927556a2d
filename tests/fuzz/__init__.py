"""Random calls of every operator, compared with float64.

The fuzzer finds wrong values, wrong gradients, crashes, and misuse that is not refused.
`python -m fuzz --help` in the folder `tests` explains how to run it.

A case is an operator, a kind and a seed, which determine it. A few seeds in a row share a
configuration (shapes, dtypes, options) and with it a compiled program. `operators` draws calls and
computes the expected results, `kinds` runs and checks a call, and `misuse` makes mistakes in one.
`programs` has schedules of caches and checkpoint loaders, whose cases consist of many calls.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

# Meshes need eight CPU devices. Without its newest emitters XLA compiles in half the time. Flags
# that are already there, such as those of pytest, count.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

from fuzz import kinds
from fuzz.draw import Call, Draw

GENERATORS: dict[str, Callable[[Draw, Draw], Call]] = {}
for _path in sorted((pathlib.Path(__file__).parent / "operators").glob("*.py")):
    GENERATORS |= importlib.import_module(f"fuzz.operators.{_path.stem}").GENERATORS
PROGRAMS: dict[str, Callable[[Any, Draw, Draw], None]] = {}
for _path in sorted((pathlib.Path(__file__).parent / "programs").glob("*.py")):
    _module = importlib.import_module(f"fuzz.programs.{_path.stem}")
    PROGRAMS |= getattr(_module, "PROGRAMS", {})
ALL = (*GENERATORS, *PROGRAMS)
WITHOUT_GRADIENT = {
    *("FlatCache.append", "FlatCache.update", "PagedCache.append", "PagedCache.update"),
    *("HTreeCache.append", "htree_decode", "htree_select", "make_block_mask", "quantize_fp8"),
    *("attention_probs", "block_tokens", "block_topk", "topk_indices", "topk_mask"),
}
WITH_KERNEL = (
    *("topk", "indexer_logits", "indexer_topk", "sparse_mla", "sparse_mla_decode", "attn_dist"),
    *("dsa_attention", "quantize_fp8", "dequantize_fp8"),
    *("masked_attention", "masked_attention_varlen", "mqa_decode"),
    *("sparse_attention", "sparse_attention_varlen", "sparse_attention_decode"),
    *("fp8_matmul", "fp8_linear", "indexer_kl_loss", "dense_indexer_kl_loss", "htree_attention"),
)
KINDS = {kind.__name__: kind for kind in kinds.KINDS}
SHARING = {kind.__name__: count for kind, count in kinds.KINDS.items()}
RIGHT = ("passed", "refused", "no kernel")
TIME_LIMIT = 120.0  # s for one case

# The number of cases of each kind that an operator has in a round.
ROUND = {"value": 12, "gradient": 6, "vmap": 4, "edge": 4, "misuse": 10}
ROUND |= {"mesh": 3, "mesh_gradient": 3}
PROGRAM_ROUND = {"program": 50}
KERNEL_ROUND = {"kernel": 60, "kernel_gradient": 40}


@dataclasses.dataclass(frozen=True)
class Case:
    """A random call and how it is checked."""

    operator: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.operator} {self.kind} {self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the configuration."""
        return self.operator, self.kind, self.seed // SHARING[self.kind]

    def draw(self, sample: int = 0) -> tuple[Call, Draw, Draw]:
        """Draws the call.

        Args:
            sample: Different samples have the same configuration and different contents.

        Returns:
            The call, and the generators of its configuration and of its contents.
        """
        config = Draw(*self.key)
        contents = Draw(self.operator, self.kind, self.seed, sample)
        call = GENERATORS[self.operator](config, contents)
        return call, config, contents

    def program(self) -> Callable[[Any, Draw, Draw], None]:
        """Returns the program that the case runs."""
        return PROGRAMS[self.operator]

    def compiled(self, run: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """Returns `run`, compiled once per configuration and `name`."""
        if any(key[0] != self.key for key in _compiled):
            _compiled.clear()
        return _compiled.setdefault((self.key, name), jax.jit(run))

    def run(self) -> str:
        """Runs the case and returns "passed", "refused" or "no kernel", or else what is wrong."""
        try:
            x64 = self.kind != "program" and self.draw()[0].x64
            with kinds.time_limit(TIME_LIMIT), jax.enable_x64(x64):
                return KINDS[self.kind](self)
        except Exception as e:
            text = " ".join(str(e).split())
            return f"{self}: {type(e).__name__}: {text[:500]}"


_compiled: dict[Any, Callable[..., Any]] = {}


def _round(operator: str, kernels: bool) -> dict[str, int]:
    return KERNEL_ROUND if kernels else PROGRAM_ROUND if operator in PROGRAMS else ROUND


def cases(
    calls: int, seed: int = 0, operators: tuple[str, ...] = (), kernels: bool = False
) -> Iterator[Case]:
    """Yields cases of the operators in rounds.

    Args:
        calls: The number of cases.
        seed: The first seed.
        operators: The operators' names. Default: all.
        kernels: Compares kernels with the XLA implementations, which needs a GPU.
    """
    plan = [
        (operator, kind, count)
        for operator in operators or (WITH_KERNEL if kernels else ALL)
        for kind, count in _round(operator, kernels).items()
        if "gradient" not in kind or operator not in WITHOUT_GRADIENT
    ]
    for number in itertools.count():
        for operator, kind, count in plan:
            for i in range(min(count, calls)):
                yield Case(operator, kind, seed + number * count + i)
            calls -= count
            if calls <= 0:
                return
