"""The examples that train without the trainer, and the one that serves requests."""

from __future__ import annotations

import collections
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


def test_the_decoder_of_a_checkpoint_has_its_epsilon(monkeypatch):
    module = load_script("examples/dense_to_sparse.py", monkeypatch)
    config = {**module.DENSE, "hidden_size": 16, "intermediate_size": 16, "rms_norm_eps": 0.25}
    model = module.decoder(nn.sparse_hf_config(config, **module.INDEXER))
    block = model.blocks[-1]
    residual = [model.norm, block.attention_norm, block.mlp_norm]
    assert [norm.epsilon for norm in residual] == [0.25] * 3
    assert block.attention.mla.kv_norm.epsilon == block.attention.indexer.k_norm.epsilon == 1e-6


@pytest.mark.slow
def test_continuous_batching(capsys, monkeypatch):
    """Requests begin and end without a new program. There is one for each number of tokens."""
    traced, decode = collections.Counter(), nn.DecoderLM.decode

    def counted(self, tokens, *args, **options):
        traced[tokens.shape] += 1
        return decode(self, tokens, *args, **options)

    monkeypatch.setattr(nn.DecoderLM, "decode", counted)
    module = load_script("examples/serve.py", monkeypatch)
    requests = module.main([])
    assert len(requests) == 8 and all(len(r.tokens) == r.steps for r in requests)
    assert traced == {(3, 1): 1, (3, 8): 1, (3, 24): 1, (1, 1): 1}
    out = capsys.readouterr().out
    assert "8 requests in 3 slots, 12 pages of 8 tokens for 192 places" in out
    assert "tokens/s" in out and "equal those of decoding one request at a time" in out
    with pytest.raises(SystemExit):
        module.main(["--pages", "2"])
