"""Random calls of every operator against float64: wrong values, wrong gradients, crashes, misuse
that passes.

`python -m fuzz --help`, in this folder's parent, says how to run it. A case is an operator, a kind
and a seed, and made from these alone; a few seeds in a row share a configuration (shapes, dtypes,
options), so that they share what is compiled. `operators` draws calls and knows what is right,
`kinds` what is done with a call, `misuse` how to spoil one.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fuzz import kinds
from fuzz.draw import Call, Draw

GENERATORS: dict[str, Callable[[Draw, Draw], Call]] = {}
for _path in sorted((pathlib.Path(__file__).parent / "operators").glob("*.py")):
    GENERATORS |= importlib.import_module(f"fuzz.operators.{_path.stem}").GENERATORS
WITHOUT_GRADIENT = {
    *("FlatCache.append", "FlatCache.update", "PagedCache.append", "PagedCache.update"),
    *("HTreeCache.append", "htree_decode", "htree_select", "make_block_mask", "quantize_fp8"),
    *("attention_probs", "topk_indices", "topk_mask"),
}
WITH_KERNEL = (
    *("topk", "indexer_logits", "indexer_topk", "sparse_mla", "sparse_mla_decode", "attn_dist"),
    *("dsa_attention", "quantize_fp8", "dequantize_fp8"),
    *("masked_attention", "masked_attention_varlen", "mqa_decode"),
    *("fp8_matmul", "fp8_linear", "indexer_kl_loss", "dense_indexer_kl_loss", "htree_attention"),
)
KINDS = {kind.__name__: kind for kind in kinds.KINDS}
SHARING = {kind.__name__: count for kind, count in kinds.KINDS.items()}
RIGHT = ("passed", "refused", "no kernel")
TIME_LIMIT = 120.0  # s for one case

# How many cases of each kind an operator has in a round.
ROUND = {"value": 12, "gradient": 6, "vmap": 4, "edge": 4, "misuse": 10}
KERNEL_ROUND = {"kernel": 60, "kernel_gradient": 40}


@dataclasses.dataclass(frozen=True)
class Case:
    """One case."""

    operator: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.operator} {self.kind} {self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        """The configuration."""
        return self.operator, self.kind, self.seed // SHARING[self.kind]

    def draw(self, sample: int = 0) -> tuple[Call, Draw, Draw]:
        """The call, one of several of the configuration, and what draws the configuration and the
        contents, for more of both.
        """
        config = Draw(*self.key)
        contents = Draw(self.operator, self.kind, self.seed, sample)
        call = GENERATORS[self.operator](config, contents)
        return call, config, contents

    def compiled(self, run: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """`run`, compiled once for the configuration; `name` tells it from others."""
        if any(key[0] != self.key for key in _compiled):
            _compiled.clear()
        return _compiled.setdefault((self.key, name), jax.jit(run))

    def run(self) -> str:
        """What came of it: "passed", "refused" where that is right, or what is wrong."""
        try:
            with kinds.time_limit(TIME_LIMIT), jax.enable_x64(self.draw()[0].x64):
                return KINDS[self.kind](self)
        except Exception as e:
            text = " ".join(str(e).split())
            return f"{self}: {type(e).__name__}: {text[:500]}"


_compiled: dict[Any, Callable[..., Any]] = {}


def cases(
    calls: int, seed: int = 0, operators: tuple[str, ...] = (), kernels: bool = False
) -> Iterator[Case]:
    """That many cases of all operators, or of some, in rounds; with seeds from `seed` on. On a GPU
    `kernels` compares kernels with the XLA implementations.
    """
    plan = [
        (operator, kind, count)
        for operator in operators or (WITH_KERNEL if kernels else GENERATORS)
        for kind, count in (KERNEL_ROUND if kernels else ROUND).items()
        if "gradient" not in kind or operator not in WITHOUT_GRADIENT
    ]
    for turn in itertools.count():
        for operator, kind, count in plan:
            for i in range(min(count, calls)):
                yield Case(operator, kind, seed + turn * count + i)
            calls -= count
            if calls <= 0:
                return
