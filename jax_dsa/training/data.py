"""Text as tokens: a folder of it, or what every machine has, the sources of Python's standard
library.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import os
import platform
import shutil
import sysconfig
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jax_dsa.core.extras import needs_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BOS = 256
"""The token between files; tokens 0..255 are bytes."""
VOCAB = 257
HALVES = ("train", "validation")
_BLOCK = 2**22

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
    """Token streams of the two halves of the split, each file preceded by the token `bos`.

    They may lie in files that are mapped into memory: only what is used is read.
    """

    train: np.ndarray
    validation: np.ndarray
    files: tuple[int, int]
    """How many files are in each half."""
    name: str
    vocab: int = VOCAB
    size: int | None = None
    """Bytes of text in both halves; None where tokens are bytes."""
    tokenizer: Path | None = None
    """File of the tokenizer, or None where tokens are bytes."""

    @property
    def bos(self) -> int:
        """The token that begins a file: the vocabulary's last one."""
        return self.vocab - 1

    @property
    def bytes_per_token(self) -> float:
        """Of text, with one for the beginning of a file."""
        tokens = len(self.train) + len(self.validation)
        return 1.0 if self.size is None else (self.size + sum(self.files)) / tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens, whatever the text's name."""
        halves = self.train, self.validation
        digest = hashlib.sha256(b"".join(hashlib.sha256(half.data).digest() for half in halves))
        tokens = sum(len(half) for half in halves)
        return f"{sum(self.files)} files, {tokens} tokens, sha256 {digest.hexdigest()[:16]}"


def load_corpus(
    root: Path | None, folder: Path, *, vocab: int = VOCAB, packages: bool = False
) -> Corpus:
    """Turns every text file below the folder `root`, by default the running interpreter's standard
    library, into tokens.

    Text is what has no byte 0, in any encoding. Links are skipped, and so are hidden files and
    folders, `__pycache__`, and what lies below `folder`; of the standard library, all that is not
    source.

    A file is in the validation half if a checksum of its path says so: the split is the same on
    every run, and does not change for the other files when one is added, unless there are so few
    that none would validate.

    Tokens are bytes or, with another `vocab`, those of a byte-level BPE tokenizer of that size
    trained on the training half. They are written to `folder`/corpus, block by block, and used
    again while no file changes.

    `packages` is for a folder of installed Python packages: only their `.py` files count, of files
    that share most of their lines only the first, and a package, which is what the folder itself
    holds, validates as a whole or not at all. About a twentieth of the text does.
    """
    if root is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"the standard library of Python {platform.python_version()}"
        paths = list(_sources(root))
    else:
        name = str(root)
        paths = [p for p in _files(root, folder) if not packages or p.suffix == ".py"]
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    source = hashlib.sha256(json.dumps([str(root), vocab, packages, stats]).encode()).hexdigest()
    target = folder / "corpus"
    facts = target / "facts.json"
    if not facts.exists() or json.loads(facts.read_text())["source"] != source:
        _write_corpus(root, paths, target, vocab, source, packages)
    known = json.loads(facts.read_text())
    train, validation = (np.memmap(target / half, _dtype(vocab), "r") for half in HALVES)
    return Corpus(
        train,
        validation,
        files=(known["files"][0], known["files"][1]),
        name=name,
        vocab=vocab,
        size=None if vocab == VOCAB else known["size"],
        tokenizer=None if vocab == VOCAB else target / "tokenizer.json",
    )


def _write_corpus(
    root: Path, paths: list[Path], target: Path, vocab: int, source: str, packages: bool
) -> None:
    """Makes the folder `target`; it appears under its name only when complete."""
    texts = [path for path in paths if all(b"\0" not in block for block in _blocks(path))]
    if packages:
        texts = _distinct(texts)
    validation = (_held_out if packages else _drawn)(root, texts)
    train = [path for path in texts if path not in validation]
    if not train or not validation:
        raise RunError(f"load_corpus: too few text files below {root} to split: got {len(texts)}")
    new = target.with_suffix(".tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    encode = _bytes if vocab == VOCAB else _trained(train, vocab, new / "tokenizer.json")
    start = np.array([vocab - 1], _dtype(vocab))
    for half, files in zip(HALVES, (train, sorted(validation))):
        with (new / half).open("wb") as stream:
            for path in files:
                start.tofile(stream)
                for block in _blocks(path):
                    encode(block).astype(start.dtype).tofile(stream)
    size = sum(path.stat().st_size for path in texts)
    facts = {"source": source, "files": [len(train), len(validation)], "size": size}
    (new / "facts.json").write_text(json.dumps(facts))
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _drawn(root: Path, paths: list[Path]) -> set[Path]:
    """The files that validate, by a checksum of their paths."""
    checksums = [_checksum(path.relative_to(root)) % _VALIDATION_SHARE for path in paths]
    lowest = min(checksums, default=0)  # 0, unless files are few
    return {path for path, checksum in zip(paths, checksums) if checksum == lowest}


def _held_out(root: Path, paths: list[Path]) -> set[Path]:
    """The files of the packages that validate: in the order of a checksum of their names, as many
    as fit into their share of the text.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for path in paths:
        sizes[path.relative_to(root).parts[0]] += path.stat().st_size
    left, held = sizes.total() / _VALIDATION_SHARE, set()
    for package in sorted(sizes, key=lambda name: _checksum(Path(name))):
        if sizes[package] <= left:
            held.add(package)
            left -= sizes[package]
    return {path for path in paths if path.relative_to(root).parts[0] in held}


def _checksum(path: Path) -> int:
    return zlib.crc32(os.fsencode(path.as_posix()))  # a name need not be UTF-8


def _distinct(paths: list[Path]) -> list[Path]:
    """The files of which at most half is in earlier ones, by runs of five lines."""
    seen: set[int] = set()
    kept = []
    for path in paths:
        lines = [line for line in map(bytes.strip, path.read_bytes().splitlines()) if line]
        runs = {hash(tuple(lines[i : i + 5])) for i in range(max(1, len(lines) - 4))}
        if 2 * len(runs & seen) <= len(runs):
            seen |= runs
            kept.append(path)
    return kept


def _dtype(vocab: int) -> np.dtype:
    return np.min_scalar_type(vocab - 1)


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in pieces that end with a line, where its lines are shorter than a piece."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block + (file.readline(_BLOCK) if len(block) == _BLOCK else b"")


def _bytes(block: bytes) -> np.ndarray:
    return np.frombuffer(block, np.uint8)


def _trained(files: list[Path], vocab: int, path: Path) -> Callable[[bytes], np.ndarray]:
    """The encoding by a tokenizer trained on the files, which is stored at `path`."""
    if vocab < VOCAB:
        raise RunError(f"load_corpus: vocab is {vocab}, want at least {VOCAB}")
    with needs_extra("tokenizers", __name__):
        from tokenizers import ByteLevelBPETokenizer
    texts = (block.decode("utf-8", "replace") for file in files for block in _blocks(file))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocab - 1, show_progress=False)
    trained.save(str(path))
    return lambda block: np.array(trained.encode(block.decode("utf-8", "replace")).ids)


def decoded(tokens: np.ndarray, tokenizer: Path | None) -> str:
    """What tokens other than `bos` say; they are bytes if there is no tokenizer."""
    numbers = [int(t) for t in tokens]
    if tokenizer is None:
        return bytes(numbers).decode("utf-8", "replace")
    with needs_extra("tokenizers", __name__):
        from tokenizers import Tokenizer
    return Tokenizer.from_file(str(tokenizer)).decode(numbers)


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts)
        if not folders & _SKIPPED_SOURCES and not path.name.startswith("_sysconfigdata"):
            yield path


def _files(root: Path, exclude: Path) -> Iterator[Path]:
    excluded = exclude.resolve()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if hidden or path.is_symlink() or not path.is_file():
            continue
        if not path.resolve().is_relative_to(excluded):
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
        return self.rows(number, range(self.batch_size))

    def rows(self, number: int, wanted: Iterable[int]) -> np.ndarray:
        """Batch `number`, of which only the wanted rows are read; the others are 0."""
        batch = np.zeros((self.batch_size, self.length), np.int32)
        for row in wanted:
            batch[row] = self._window(number * self.batch_size + row)
        return batch

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
