"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

BOS = 256
"""The token between files; tokens 0..255 are bytes."""
VOCAB = 257

_VALIDATION_SHARE = 20  # one file in this many
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    # Not prose: tables of numbers, generated text, and the test suite, which many machines do not
    # have.
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token streams of the two halves of the split, each file preceded by `BOS`."""

    train: np.ndarray
    validation: np.ndarray
    files: tuple[int, int]
    """How many files are in each half."""


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads every Python source below `root`, by default the running interpreter's standard
    library.

    A file is in the validation half if a checksum of its path says so: the split is the same on
    every run, and does not change for the other files when one is added.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    halves: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for path in _sources(root):
        name = path.relative_to(root).as_posix()
        text = np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16)
        half = zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0
        halves[half].append(np.concatenate([np.array([BOS], np.uint16), text]))
    if not halves[0] or not halves[1]:
        raise FileNotFoundError(f"load_corpus: too few Python sources below {root} to split")
    train, validation = (np.concatenate(half) for half in halves)
    return Corpus(train, validation, (len(halves[0]), len(halves[1])))


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts)
        if not folders & _SKIPPED and not path.name.startswith("_sysconfigdata"):
            yield path


class Batches:
    """Windows of `length` tokens in an order shuffled anew for every epoch.

    A pure function of `seed` and the batch's number: whoever stores the number can go on from
    there.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch_size: int, seed: int) -> None:
        self.tokens, self.length, self.batch_size, self.seed = tokens, length, batch_size, seed
        self.windows = len(tokens) // length
        if self.windows < batch_size:
            raise ValueError(
                f"Batches: {len(tokens)} tokens make {self.windows} windows of {length}, "
                f"want at least batch_size = {batch_size}"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __getitem__(self, number: int) -> np.ndarray:
        """Batch `number`, int32 [batch_size, length]."""
        first = number * self.batch_size
        rows = [self._window(first + row) for row in range(self.batch_size)]
        return np.stack(rows).astype(np.int32)

    def _window(self, number: int) -> np.ndarray:
        epoch, position = divmod(number, self.windows)
        if self._order[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.windows)
            self._order = (epoch, order)
        start = self._order[1][position] * self.length
        return self.tokens[start : start + self.length]


def validation_batches(
    tokens: np.ndarray, length: int, batch_size: int, sequences: int
) -> list[np.ndarray]:
    """Up to `sequences` windows spread evenly over `tokens`, in int32 batches."""
    windows = len(tokens) // length
    sequences = min(sequences, windows) // batch_size * batch_size
    if sequences == 0:
        raise ValueError(
            f"validation_batches: {len(tokens)} tokens make {windows} windows of {length}, "
            f"want at least batch_size = {batch_size}"
        )
    starts = np.arange(sequences) * windows // sequences * length
    picked = np.stack([tokens[s : s + length] for s in starts]).astype(np.int32)
    return list(picked.reshape(-1, batch_size, length))
