"""`examples/own_decoder.py`: our attention layers in a decoder outside the package."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from support.marks import slow

from jax_dsa.training import INDEXER
from jax_dsa.training.data import load_corpus

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "own_decoder.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_decoder", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text("to sleep: perchance to dream " * 60)
    return folder


@pytest.mark.parametrize("model", [slow("glm"), slow("v4")])
def test_training_in_both_stages(example, text, tmp_path, model):
    setting = example.MODELS[model](False)
    setting = dataclasses.replace(setting, seq_len=48, batch=2, steps=10, dense_steps=3)
    corpus = load_corpus(text, tmp_path / "run")
    before = nnx.split(example.Decoder(setting.layers, rngs=nnx.Rngs(0)))[1]
    trainer, history = example.train(setting, corpus)
    assert history.shape == (10, 2) and np.isfinite(history).all()
    assert history[-1, 0] < history[0, 0] - 0.3
    selecting = [i for i, (c, kind) in enumerate(setting.layers) if kind == "full" and c.top_k]
    changes: dict[int, list[float]] = {}
    for (path, new), (_, old) in zip(
        nnx.to_flat_state(trainer.params), nnx.to_flat_state(before), strict=True
    ):
        if INDEXER(path, new):
            changes.setdefault(path[1], []).append(float(np.abs(new[...] - old[...]).max()))
    assert sorted(changes) == selecting
    assert all(max(largest) > 1e-4 for largest in changes.values())


@pytest.mark.slow
def test_command_line(example, text, tmp_path, capsys, monkeypatch):
    small = dataclasses.replace(example.v4(False), seq_len=40, batch=2)
    monkeypatch.setitem(example.MODELS, "v4", lambda large: small)
    argv = ["--model", "v4", "--steps", "2", "--dense-steps", "1", "--data", str(text)]
    assert example.main([*argv, "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "v4, " in out and "with selected keys, " in out and "nan" not in out


@pytest.mark.parametrize("model", ["glm", "v4"])
def test_large_settings_have_sizes_that_kernels_cover(example, model):
    setting = example.MODELS[model](True)
    assert setting.seq_len == (32768 if model == "v4" else 8192)
    shapes = nnx.eval_shape(lambda: example.Decoder(setting.layers, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(shapes)
    tokens = jax.ShapeDtypeStruct((1, setting.seq_len), np.int32)
    logits, found = jax.eval_shape(lambda p, t: nnx.merge(graph, p)(t), params, tokens)
    assert logits.shape == (1, setting.seq_len, 257)
    dims = {c.head_dim if model == "v4" else c.kv_rank + c.rope_dim for c, _ in setting.layers}
    assert dims <= {512, 576} and len(found) == 4
