"""Turns text into token streams and batches.

The text is any folder of files. By default it is the sources of Python's standard library, which
every machine has.
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
"""The token that precedes each file; tokens 0..255 are bytes."""
VOCAB = 257
HALVES = ("train", "validation")
_BLOCK = 2**22  # bytes read at a time

_VALIDATION_FRACTION = 20  # one file in this many is for validation
_SKIPPED_SOURCES = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    # These folders hold tables of numbers, generated text, and the test suite, which many machines
    # do not have.
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
}


class RunError(ValueError):
    """Raised if a run cannot start or resume as requested. The message is meant for the user."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token streams for training and validation, in which the token `bos` precedes each file.

    The streams may be memory-mapped files, so that only the parts that are used are read.

    Attributes:
        train: The tokens for training.
        validation: The tokens for validation.
        files: Number of files for training and for validation.
        name: Name of the text, for messages and plots.
        vocab: Number of tokens in the vocabulary.
        size: Bytes of text in both streams; None if tokens are bytes.
        tokenizer: File of the tokenizer, or None if tokens are bytes.
    """

    train: np.ndarray
    validation: np.ndarray
    files: tuple[int, int]
    name: str
    vocab: int = VOCAB
    size: int | None = None
    tokenizer: Path | None = None

    @property
    def bos(self) -> int:
        """The token that precedes each file: the vocabulary's last one."""
        return self.vocab - 1

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of text per token. The start of a file counts as one byte."""
        tokens = len(self.train) + len(self.validation)
        return 1.0 if self.size is None else (self.size + sum(self.files)) / tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """A description with a checksum of the tokens. It does not depend on the corpus's name."""
        halves = self.train, self.validation
        digest = hashlib.sha256(b"".join(hashlib.sha256(half.data).digest() for half in halves))
        tokens = sum(len(half) for half in halves)
        return f"{sum(self.files)} files, {tokens} tokens, sha256 {digest.hexdigest()[:16]}"


def load_corpus(
    root: Path | None, folder: Path, *, vocab: int = VOCAB, packages: bool = False
) -> Corpus:
    """Returns the text files below a folder as token streams.

    A file is text if it contains no byte 0; the encoding does not matter. Symbolic links, hidden
    files and folders, `__pycache__`, and everything below `folder` are skipped. Of the standard
    library only source files are used.

    A checksum of a file's path decides whether the file is for training or for validation, about
    one in twenty for validation. The split is therefore the same in every run, and adding a file
    does not move other files, unless there are too few files to have any for validation.

    The tokens are written block by block to `folder`/corpus, and reused until a file changes.

    Args:
        root: Folder of text. Default: the standard library of the running interpreter.
        folder: Folder of the run, where the tokens are stored.
        vocab: Size of the vocabulary. With the default 257, tokens are bytes. With any larger size,
            a byte-level BPE tokenizer of that size is trained on the training files.
        packages: Whether `root` is a folder of installed Python packages. Then only `.py` files
            are used. Of files that share most of their lines only the first is kept. Each package,
            which is an entry of `root`, is either all training or all validation text, about a
            twentieth of the text for validation.

    Returns:
        The corpus, whose streams are memory-mapped.

    Raises:
        RunError: If there are too few files to split, or if `vocab` is smaller than 257.
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
    """Writes the folder `target`, which gets its final name only when it is complete."""
    texts = [path for path in paths if all(b"\0" not in block for block in _blocks(path))]
    if packages:
        texts = _distinct(texts)
    validation = (_validation_packages if packages else _validation_files)(root, texts)
    train = [path for path in texts if path not in validation]
    if not train or not validation:
        raise RunError(
            f"load_corpus: too few text files below {root} to split into training and validation: "
            f"found {len(texts)}, expected at least 2"
        )
    new = target.with_suffix(".tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    encode = _as_bytes if vocab == VOCAB else _train_encoder(train, vocab, new / "tokenizer.json")
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


def _validation_files(root: Path, paths: list[Path]) -> set[Path]:
    """Returns the validation files, chosen by a checksum of their paths."""
    checksums = [_checksum(path.relative_to(root)) % _VALIDATION_FRACTION for path in paths]
    lowest = min(checksums, default=0)  # 0 unless there are few files
    return {path for path, checksum in zip(paths, checksums) if checksum == lowest}


def _validation_packages(root: Path, paths: list[Path]) -> set[Path]:
    """Returns the files of the validation packages.

    The packages are taken in the order of a checksum of their names, as many as fit into a
    twentieth of the text.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for path in paths:
        sizes[path.relative_to(root).parts[0]] += path.stat().st_size
    left, held = sizes.total() / _VALIDATION_FRACTION, set()
    for package in sorted(sizes, key=lambda name: _checksum(Path(name))):
        if sizes[package] <= left:
            held.add(package)
            left -= sizes[package]
    return {path for path in paths if path.relative_to(root).parts[0] in held}


def _checksum(path: Path) -> int:
    return zlib.crc32(os.fsencode(path.as_posix()))  # File names need not be UTF-8.


def _distinct(paths: list[Path]) -> list[Path]:
    """Returns the files that share at most half of their runs of five lines with earlier files."""
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
    """Yields the file in blocks that end at a line's end, unless a line is longer than a block."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block + (file.readline(_BLOCK) if len(block) == _BLOCK else b"")


def _as_bytes(block: bytes) -> np.ndarray:
    return np.frombuffer(block, np.uint8)


def _train_encoder(files: list[Path], vocab: int, path: Path) -> Callable[[bytes], np.ndarray]:
    """Trains a tokenizer on the files, stores it at `path`, and returns its encoding function."""
    if vocab < VOCAB:
        raise RunError(
            f"load_corpus: argument 'vocab' is {vocab}, expected at least {VOCAB}: 256 bytes and "
            f"the token that precedes each file"
        )
    with needs_extra("tokenizers", __name__):
        from tokenizers import ByteLevelBPETokenizer
    texts = (block.decode("utf-8", "replace") for file in files for block in _blocks(file))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocab - 1, show_progress=False)
    trained.save(str(path))
    return lambda block: np.array(trained.encode(block.decode("utf-8", "replace")).ids)


def decode(tokens: np.ndarray, tokenizer: Path | None) -> str:
    """Returns the text of tokens other than `bos`. Without a tokenizer, tokens are bytes."""
    numbers = [int(t) for t in tokens]
    if tokenizer is None:
        return bytes(numbers).decode("utf-8", "replace")
    with needs_extra("tokenizers", __name__):
        from tokenizers import Tokenizer
    return Tokenizer.from_file(str(tokenizer)).decode(numbers)


def to_text(tokens: np.ndarray, bos: int = BOS, tokenizer: Path | None = None) -> str:
    """Returns the first file in `tokens` as printable text.

    Args:
        tokens: Token numbers, one-dimensional. A leading `bos` is skipped, and the text ends before
            the next one.
        bos: The token that precedes each file.
        tokenizer: File of the tokenizer, or None if tokens are bytes.

    Returns:
        The text. Characters that are neither printable nor a newline or tab become U+FFFD.
    """
    body = tokens[1:] if len(tokens) and tokens[0] == bos else tokens
    ends = np.flatnonzero(body == bos)
    body = body[: ends[0]] if len(ends) else body
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decode(body, tokenizer)
    )


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
    """Batches of windows of a token stream, in an order that is shuffled for every epoch.

    A batch is a pure function of `seed` and the batch's number, so a run can resume from the number
    alone.

    Args:
        tokens: The token stream.
        length: Tokens per window.
        batch_size: Windows per batch.
        seed: Seed of the shuffling.

    Raises:
        RunError: If the stream has fewer windows than one batch needs.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch_size: int, seed: int) -> None:
        self.tokens, self.length, self.batch_size, self.seed = tokens, length, batch_size, seed
        self.windows = len(tokens) // length
        if self.windows < batch_size:
            raise RunError(
                f"Batches: {len(tokens)} tokens make {self.windows} windows of {length}, "
                f"expected at least batch_size = {batch_size}"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __getitem__(self, number: int) -> np.ndarray:
        """Returns batch `number`, int32 [batch_size, length]."""
        return self.rows(number, range(self.batch_size))

    def rows(self, number: int, rows: Iterable[int]) -> np.ndarray:
        """Returns batch `number` with only these rows read; all other rows are 0."""
        batch = np.zeros((self.batch_size, self.length), np.int32)
        for row in rows:
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
    """Returns windows that are spread evenly over a token stream.

    Args:
        tokens: The token stream.
        length: Tokens per window.
        batch_size: Windows per batch.
        sequences: The largest number of windows; rounded down to whole batches.

    Returns:
        Batches, int32 [batch_size, length].

    Raises:
        RunError: If the stream has fewer windows than one batch needs.
    """
    windows = len(tokens) // length
    sequences = min(sequences, windows) // batch_size * batch_size
    if sequences == 0:
        raise RunError(
            f"validation_batches: {len(tokens)} tokens make {windows} windows of {length}, "
            f"expected at least batch_size = {batch_size}"
        )
    starts = np.arange(sequences) * windows // sequences * length
    picked = np.stack([tokens[s : s + length] for s in starts]).astype(np.int32)
    return list(picked.reshape(-1, batch_size, length))
