"""Text as bytes: a folder of it, or what every machine has, the sources of Python's standard
library.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
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
_SKIPPED_SOURCES = {
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


class RunError(ValueError):
    """A run that cannot begin, or go on, as asked; the message is for whoever asked."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token streams of the two halves of the split, each file preceded by `BOS`."""

    train: np.ndarray
    validation: np.ndarray
    files: tuple[int, int]
    """How many files are in each half."""
    name: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same text, whatever its name."""
        halves = self.train, self.validation
        digest = hashlib.sha256(b"".join(hashlib.sha256(half.data).digest() for half in halves))
        tokens = sum(len(half) for half in halves)
        return f"{sum(self.files)} files, {tokens} tokens, sha256 {digest.hexdigest()[:16]}"


def load_corpus(root: Path | None = None, *, exclude: Path | None = None) -> Corpus:
    """Reads every text file below the folder `root`, by default the running interpreter's standard
    library.

    Text is what has no byte 0, in any encoding. Links are skipped, and so are hidden files and
    folders, `__pycache__`, and what lies below `exclude`; of the standard library, all that is not
    source.

    A file is in the validation half if a checksum of its path says so: the split is the same on
    every run, and does not change for the other files when one is added, unless there are so few
    that none would validate.
    """
    if root is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"the standard library of Python {platform.python_version()}"
        paths = _sources(root)
    else:
        name = str(root)
        paths = _files(root, exclude)
    files: list[tuple[int, np.ndarray]] = []
    start = np.array([BOS], np.uint16)
    for path in paths:
        text = path.read_bytes()
        if b"\0" not in text:
            checksum = zlib.crc32(path.relative_to(root).as_posix().encode()) % _VALIDATION_SHARE
            files.append((checksum, np.concatenate([start, np.frombuffer(text, np.uint8)])))
    lowest = min((checksum for checksum, _ in files), default=0)  # 0, unless files are few
    validation = [tokens for checksum, tokens in files if checksum == lowest]
    train = [tokens for checksum, tokens in files if checksum != lowest]
    if not train:
        raise RunError(f"load_corpus: too few text files below {root} to split: got {len(files)}")
    counts = len(train), len(validation)
    return Corpus(np.concatenate(train), np.concatenate(validation), counts, name)


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts)
        if not folders & _SKIPPED_SOURCES and not path.name.startswith("_sysconfigdata"):
            yield path


def _files(root: Path, exclude: Path | None) -> Iterator[Path]:
    excluded = None if exclude is None else exclude.resolve()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if hidden or path.is_symlink() or not path.is_file():
            continue
        if excluded is None or not path.resolve().is_relative_to(excluded):
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
            raise RunError(
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
        raise RunError(
            f"validation_batches: {len(tokens)} tokens make {windows} windows of {length}, "
            f"want at least batch_size = {batch_size}"
        )
    starts = np.arange(sequences) * windows // sequences * length
    picked = np.stack([tokens[s : s + length] for s in starts]).astype(np.int32)
    return list(picked.reshape(-1, batch_size, length))
