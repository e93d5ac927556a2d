"""The examples that train without the trainer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.scripts import load_script

from jax_dsa import nn


@pytest.mark.slow
def test_own_training_loop(monkeypatch):
    found = load_script("examples/own_loop.py", monkeypatch).main(
        ["--steps", "8", "--length", "32"]
    )
    (first, kl), (last, last_kl) = found[0], found[-1]
    assert len(found) == 8 and last < first - 0.5 and last_kl < kl


@pytest.mark.slow
def test_a_dense_checkpoint_becomes_sparse(tmp_path, capsys, monkeypatch):
    module = load_script("examples/dense_to_sparse.py", monkeypatch)
    command = ["--checkpoint", str(tmp_path / "dense"), "--output", str(tmp_path / "sparse")]
    command += ["--dense-steps", "20", "--warmup-steps", "8", "--sparse-steps", "8"]
    dense, untrained, warm, sparse = module.main(command).values()
    assert 0 < dense < 4 and dense != untrained and untrained != warm and sparse < warm
    assert "training a dense model" in capsys.readouterr().out
    again, *_ = module.main(command).values()  # from the checkpoint
    assert again == dense and "training a dense model" not in capsys.readouterr().out

    files = nn.SafeTensors(tmp_path / "sparse")
    model = module.decoder(json.loads((tmp_path / "sparse" / "config.json").read_text()))
    assert nn.from_hf(tmp_path / "sparse")[0].config == model.config.attention
    module.load_rest(model, files)
    for i, block in enumerate(model.blocks):
        nn.load_hf(block.attention, files, f"model.layers.{i}.self_attn.")
    weights = module.weights_of(model)
    assert weights.keys() == files.keys()
    for name, x in files.items():
        np.testing.assert_array_equal(weights[name], x)
