"""Corpora, tokenizers and batches."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import sysconfig

import numpy as np
import pytest
from support.training import CONFIG

from jax_dsa.training import data
from jax_dsa.training import trainer as trainer_module
from jax_dsa.training.data import BOS, Batches, RunError, load_corpus, to_text, validation_batches


@pytest.mark.parametrize("library", [True, False])
def test_files_are_split_by_path(tmp_path, monkeypatch, library):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    root = None if library else tmp_path
    load = functools.partial(load_corpus, root, tmp_path / "run")
    for i in range(60):
        (tmp_path / f"sub{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"sub{i % 3}" / f"m{i}.py").write_text(f"x = {i}\n")
    skipped = tmp_path / ("tests" if library else ".git")
    skipped.mkdir()
    (skipped / "skipped.py").write_text("nothing")
    first = load()
    assert sum(first.files) == 60 and min(first.files) > 0
    both = np.concatenate([first.train, first.validation])
    assert (both == BOS).sum() == 60 and both.dtype == np.uint16
    (tmp_path / "sub0" / "new.py").write_text("y = 0\n")
    again = load()
    old, new = (sorted(bytes(c.validation.astype(np.uint8)).split(b"\0")) for c in (first, again))
    assert set(old) <= set(new)  # Adding a file moves no other file.
    assert first.fingerprint != again.fingerprint
    with pytest.raises(RunError, match="too few text files below"):
        load_corpus(skipped, tmp_path / "other")


def texts(corpus):
    """Returns the texts of the training files and of the validation files."""
    streams = (corpus.train, corpus.validation)
    files = [np.split(stream, np.flatnonzero(stream == BOS))[1:] for stream in streams]
    return [[bytes(file[1:].astype(np.uint8)) for file in stream] for stream in files]


def test_binary_and_hidden_files_are_skipped(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.rst").write_text("größer")
    (tmp_path / "b").write_bytes(b"\xff latin")
    (tmp_path / "c.txt").write_text("")
    for i in range(8):
        (tmp_path / f"d{i}.txt").write_text(f"d{i}")
    wanted = ["größer".encode(), b"\xff latin", b"", *(b"d%d" % i for i in range(8))]
    alone = load_corpus(tmp_path, tmp_path / "runs")
    (tmp_path / "picture.png").write_bytes(b"PNG\0\1")
    (tmp_path / "link.txt").symlink_to(tmp_path / "d1.txt")
    for folder in (".hidden", "__pycache__", "runs"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "metrics.csv").write_text("skipped")
    (tmp_path / ".hidden.txt").write_text("skipped")
    found = load_corpus(tmp_path, tmp_path / "runs")
    train, validation = texts(found)
    assert sorted(train + validation) == sorted(wanted)
    # One in twenty would be none, yet at least one file is for validation.
    assert found.files == (len(train), len(validation)) and min(found.files) > 0
    assert found.fingerprint == alone.fingerprint and found.name == str(tmp_path)
    moved = dataclasses.replace(found, train=found.validation, validation=found.train)
    assert moved.fingerprint != found.fingerprint


def test_file_names_need_not_be_utf8(tmp_path):
    for name in (b"a", b"b", b"caf\xe9"):
        (pathlib.Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))).write_text("text")
    assert sum(load_corpus(tmp_path, tmp_path / "run").files) == 3


def test_a_package_is_either_training_or_validation_text(tmp_path):
    """Of files that are nearly equal, one is kept."""
    rng = np.random.default_rng(0)
    site, lines = tmp_path / "site", lambda: [f"x{n} = {n}" for n in rng.integers(0, 2**40, 40)]
    for i in range(60):
        (site / f"p{i}").mkdir(parents=True)
        for name in "ab":
            (site / f"p{i}" / f"{name}.py").write_text("\n".join(lines()))
    text = (site / "p7" / "a.py").read_text().splitlines()
    (site / "p7" / "b.py").write_text("\n".join([*text[:35], "  ", *lines()[:5]]))  # a copy
    (site / "p8" / "b.py").write_text("\n".join([*text[:10], *lines()]))  # shares a few lines
    (site / "notes.txt").write_text("no source")
    found = load_corpus(site, tmp_path / "run", packages=True)
    assert sum(found.files) == 119
    files = {path.read_bytes(): path.parent.name for path in site.rglob("*.py")}
    train, validation = ({files[text] for text in half} for half in texts(found))
    assert train.isdisjoint(validation) and len(train) + len(validation) == 60
    assert 1 <= len(validation) <= 3  # a twentieth of the text
    assert load_corpus(site, tmp_path / "run").files != found.files


def write_texts(folder, count=30, words=400):
    rng = np.random.default_rng(0)
    folder.mkdir()
    names = ["alpha", "größe", "gamma", "delta"]
    for i in range(count):
        lines = [" ".join(rng.choice(names, 8)) for _ in range(words // 8)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


def test_tokens_are_written_once_and_in_blocks(tmp_path, monkeypatch):
    """They are written again only if a file has changed."""
    write_texts(tmp_path / "texts")
    load = functools.partial(load_corpus, tmp_path / "texts")
    whole = load(tmp_path / "whole")
    monkeypatch.setattr(data, "_BLOCK", 100)
    blocks = list(data._blocks(tmp_path / "texts" / "0.txt"))
    assert all(block.endswith(b"\n") for block in blocks[:-1]) and len(blocks) > 5
    assert b"".join(blocks) == (tmp_path / "texts" / "0.txt").read_bytes()
    by_blocks = load(tmp_path / "blocks")
    assert by_blocks.fingerprint == whole.fingerprint and isinstance(by_blocks.train, np.memmap)
    monkeypatch.setattr(data, "_write_corpus", None)
    assert load(tmp_path / "blocks").fingerprint == whole.fingerprint
    (tmp_path / "texts" / "0.txt").write_text("other")
    with pytest.raises(TypeError):
        load(tmp_path / "blocks")


def test_a_tokenizer_is_trained_on_the_text(tmp_path):
    pytest.importorskip("tokenizers")
    write_texts(tmp_path / "texts")
    load = functools.partial(load_corpus, tmp_path / "texts")
    found, plain = load(tmp_path / "run", vocab=300), load(tmp_path / "bytes")
    assert found.vocab == 300 and found.bos == 299 and found.files == plain.files
    assert len(found.train) < len(plain.train) / 4
    size = len(plain.train) + len(plain.validation)
    read = found.bytes_per_token * (len(found.train) + len(found.validation))
    assert round(read) == size and plain.bytes_per_token == 1
    starts = [np.flatnonzero(half.validation == half.bos) for half in (found, plain)]
    for first, other in zip(*starts, strict=True):
        said = to_text(found.validation[first:], found.bos, found.tokenizer)
        assert said == to_text(plain.validation[other:]) and "größe" in said
    again = load(tmp_path / "again", vocab=300)
    assert again.fingerprint == found.fingerprint != plain.fingerprint
    with pytest.raises(RunError, match="vocab' is 256, expected at least 257"):
        load(tmp_path / "small", vocab=256)
    with pytest.raises(
        RunError, match="a vocabulary of 300 tokens, expected that of the model, 257"
    ):
        trainer_module.Trainer(CONFIG, found, tmp_path / "run")


def test_the_default_is_the_standard_library(tmp_path):
    found = load_corpus(None, tmp_path)
    assert found.files[0] > 100 and found.files[1] > 5 and len(found.train) > 2e6
    assert platform.python_version() in found.name


def test_batches_are_a_function_of_their_number():
    stream = np.arange(100, dtype=np.uint16)
    batches = Batches(stream, 7, 4, seed=1)  # 14 windows
    rows = np.concatenate([batches[i] for i in range(7)])  # two epochs
    for epoch in (rows[:14], rows[14:]):
        assert sorted(epoch[:, 0]) == list(range(0, 98, 7))
    assert (rows[:14] != rows[14:]).any()
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(7))
    fresh = Batches(stream, 7, 4, seed=1)
    for i in (5, 0, 3):
        np.testing.assert_array_equal(fresh[i], rows[4 * i : 4 * i + 4])
    assert (Batches(stream, 7, 4, seed=2)[0] != rows[:4]).any()
    some = fresh.rows(2, [1, 3])
    np.testing.assert_array_equal(some[[1, 3]], fresh[2][[1, 3]])
    assert (some[[0, 2]] == 0).all()
    with pytest.raises(ValueError, match="expected at least batch_size = 15"):
        Batches(stream, 7, 15, seed=1)


def test_validation_batches():
    stream = np.arange(100, dtype=np.uint16)
    batches = validation_batches(stream, 10, 2, 5)
    np.testing.assert_array_equal(np.concatenate(batches)[:, 0], [0, 20, 50, 70])
    assert len(validation_batches(stream, 10, 2, 1000)) == 5
    with pytest.raises(ValueError, match="expected at least batch_size = 11"):
        validation_batches(stream, 10, 11, 11)


def test_text_ends_at_the_end_of_its_file():
    a, b = b"ab"
    for tokens, text in (
        ((BOS, a, b, BOS, a, BOS), "ab"),
        ((a, BOS, b, BOS), "a"),
        ((a, 10, 7, b), "a\n\ufffdb"),
        ((), ""),
    ):
        assert to_text(np.array(tokens, np.int32)) == text
