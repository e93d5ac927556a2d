"""Token-by-token generation: the sampler, `examples/generate.py`, and decoding on kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.training import ATTENTION

from jax_dsa import nn, training
from jax_dsa.serving import pack_records, unpack_records
from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.config import settings
from jax_dsa.training.data import VOCAB, to_text
from jax_dsa.training.sampling import Stream

B = 2
DECODER = nn.DecoderConfig(ATTENTION, vocab=VOCAB, num_layers=2, mlp_dim=16)
CONFIG = dataclasses.replace(training.PRESETS["cpu"](), model=DECODER, seq_len=24, batch_size=2)
# A decoder of sizes that the kernels of all its operators cover.
LARGE = dataclasses.replace(
    DECODER,
    attention=nn.AttentionConfig(
        model_dim=256,
        num_heads=16,
        q_rank=128,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        index_heads=16,
        index_dim=64,
        index_rope_dim=32,
        top_k=128,
        dtype=jnp.bfloat16,
    ),
)
BOTH = pytest.mark.parametrize("page_size", [None, 4], ids=["flat", "paged"])


@functools.cache
def decoder(config=DECODER):
    return nn.DecoderLM(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).parent.parent / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@BOTH
def test_sampler_decodes_greedily(rng, page_size, monkeypatch):
    """The prompt has two whole chunks and a remainder."""
    monkeypatch.setattr(training.Sampler, "PREFILL", 3 * B)
    model = decoder()
    prompt = rng.integers(0, VOCAB, size=(B, 7)).astype(np.int32)
    sampler = training.Sampler(model, temperature=0)
    cache = model.init_cache(B, 12, page_size=page_size)
    token, stream = sampler.prefill(prompt, cache, jax.random.key(0))
    tokens = [token]
    for _ in range(4):
        token, stream = sampler.step(token, stream)
        tokens.append(token)
    seen = jnp.concatenate([prompt, *tokens], axis=1)
    logits, _ = jax.jit(lambda seen: model(seen[:, :-1]))(seen)
    np.testing.assert_array_equal(seen[:, 7:], logits[:, 6:].argmax(-1))
    np.testing.assert_array_equal(stream.cache.layers[0].lengths, [11] * B)
    for wrong in (prompt[:, :0], prompt[0]):
        with pytest.raises(ValueError, match=r"Sampler.prefill: argument 'prompt' has shape \("):
            sampler.prefill(wrong, cache, jax.random.key(0))


def test_wrong_arguments_of_a_sampler():
    model, prompt, key = decoder(), jnp.ones((B, 2), jnp.int32), jax.random.key(0)
    sampler, cache = training.Sampler(model), model.init_cache(B, 8)
    stream = Stream(cache, key)
    for arguments, message in (
        (([[1, 2]], cache, key), "'prompt' is list, want an array"),
        ((prompt, stream, key), "'cache' is Stream, want DecoderCache"),
        ((prompt, cache, 0), "'key' is int, want a random key, such as jax.random.key"),
    ):
        with pytest.raises(TypeError, match=f"^Sampler.prefill: argument {message}"):
            sampler.prefill(*arguments)
    for arguments, counts, message in (
        ((prompt, cache), None, "'stream' is DecoderCache, want Stream, which the last call"),
        (([[1]], stream), None, "'tokens' is list, want an array"),
        ((prompt, stream), [1] * B, "'counts' is list, want an array"),
    ):
        with pytest.raises(TypeError, match=f"^Sampler.step: argument {message}"):
            sampler.step(*arguments, counts=counts)
    with pytest.raises(TypeError, match=r"^generate: argument 'key' is int, want a random key"):
        training.generate(model, prompt, 2, 0)


def test_sampler_does_not_round_weights_of_fp8_layers():
    """Rounding to bfloat16 before the quantisation to FP8 would change the codes."""
    attention = dataclasses.replace(ATTENTION, fp8=True, dtype=jnp.bfloat16)
    model = decoder(dataclasses.replace(DECODER, attention=attention, num_layers=1))
    sampler = training.Sampler(model)
    rounded = nnx.merge(sampler._graph, sampler._params).blocks[0].attention
    assert rounded.mla.wo.kernel[...].dtype == jnp.float32
    assert rounded.mla.w_uk[...].dtype == jnp.bfloat16


def test_flat_cache_has_no_page_table():
    cache = decoder().init_cache(B, 8)
    with pytest.raises(ValueError, match=r"DecoderCache.with_page_table: the cache is flat"):
        cache.with_page_table(jnp.zeros((B, 2), jnp.int32))


def test_sampler_uses_a_new_key_for_each_token():
    model = decoder()
    sampler = training.Sampler(model, temperature=1e6)
    prompt = np.zeros((B, 1), np.int32)
    key = jax.random.key(0)
    token, stream = sampler.prefill(prompt, model.init_cache(B, 16), key)
    assert not key.is_deleted()  # Only the cache is donated.
    drawn = []
    for _ in range(8):
        drawn.append(np.asarray(token))
        token, stream = sampler.step(token, stream)
    drawn = np.concatenate(drawn, axis=1)
    assert (drawn != drawn[:, :1]).any(1).all() and (drawn[0] != drawn[1]).any()


@BOTH
@pytest.mark.parametrize("fp8", [False, True], ids=["keys", "fp8"])
@pytest.mark.full_optimization
def test_step_updates_its_cache_in_place(page_size, fp8):
    attention = dataclasses.replace(ATTENTION, kv_rank=512, rope_dim=64)
    model = decoder(dataclasses.replace(DECODER, attention=attention, num_layers=1))
    sampler = training.Sampler(model)
    cache = model.init_cache(B, 64, page_size=page_size, fp8=fp8)
    token, stream = sampler.prefill(np.zeros((B, 1), np.int32), cache, jax.random.key(0))
    buffers = [x for x in jax.tree.leaves(stream.cache) if x.ndim > 2]
    compiled = sampler._decode.lower(sampler._params, token, stream).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in buffers)
    for x in buffers:
        shape = ",".join(map(str, x.shape))
        assert not re.search(rf"= \w+\[{shape}\]\S* copy\(", compiled.as_text()), shape
    sampler.step(token, stream)
    assert all(x.is_deleted() for x in jax.tree.leaves(stream.cache))
    assert not token.is_deleted()


def test_sampler_rounds_matrices_like_the_layers(rng):
    attention = dataclasses.replace(ATTENTION, dtype=jnp.bfloat16)
    model = decoder(dataclasses.replace(DECODER, attention=attention))
    rounded = training.sampling._cast_matrices(model)
    tokens = rng.integers(0, VOCAB, size=(B, 9)).astype(np.int32)
    run = jax.jit(lambda model: model.decode(tokens, model.init_cache(B, 9)))
    jax.tree.map(np.testing.assert_array_equal, run(rounded), run(model))
    kinds = {
        ".".join(map(str, path)): value.dtype
        for path, value in nnx.to_flat_state(nnx.state(rounded, nnx.Param))
    }
    exact = {name for name, dtype in kinds.items() if dtype == jnp.float32}
    assert all(re.search(r"norm\.|indexer\.weights", name) for name in exact)
    assert any("indexer.weights" in name for name in exact) and len(exact) < len(kinds) / 2


def run_example(example, monkeypatch, capsys, *arguments):
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    assert example.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_example_continues_a_prompt(example, tmp_path, monkeypatch, capsys):
    program = training.Program(CONFIG)
    state = program.init()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, {"config": settings(CONFIG)})
    checkpoints.close()
    options = ("--run-dir", str(tmp_path), "--prompt", "def f", "--temperature", "0")
    out = run_example(example, monkeypatch, capsys, *options, "--tokens", "6")
    model = program.model(state.backbone.params, state.indexer.params)
    prompt = np.array([[256, *b"def f"]], np.int32)
    want = training.generate(model, jnp.asarray(prompt), 6, jax.random.key(0), temperature=0)
    assert out.startswith(f"def f|{to_text(np.asarray(want[0]))}\n")
    assert re.search(r"batch 1, 6 tokens of context, float32, flat: [\d,]+ tokens/s", out)

    other = dataclasses.replace(DECODER, num_layers=1)
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: dataclasses.replace(CONFIG, model=other))
    for arguments, message in (
        (["--run-dir", str(tmp_path)], "another model than the preset of --preset"),
        (["--run-dir", str(tmp_path / "none")], "no checkpoint in"),
        (["--random", "--fp8", "--prompt", "x"], "want 576 with fp8=True"),
        (["--random", "--tokens", "2"], "2 is less than 3"),
        (["--random", "--temperature=-1"], "argument 'temperature' is -1.0"),
    ):
        with pytest.raises(SystemExit):
            example.main(arguments)
        assert message in capsys.readouterr().err


def test_example_with_random_weights(example, monkeypatch, capsys, tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("abcdefghij" * 10)
    options = ("--random", "--batch", "3", "--context", "20", "--tokens", "5", "--page-size", "8")
    out = run_example(example, monkeypatch, capsys, *options, "--data", str(tmp_path))
    assert "batch 3, 20 tokens of context, float32, pages of 8: " in out


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [None, 64], ids=["flat", "paged"])
def test_decoding_on_kernels_equals_the_forward_pass(rng, page_size, fp8, monkeypatch):
    """With FP8 records, the forward pass reads the records' values as keys."""
    monkeypatch.setenv("JAX_DSA_IMPL", "cuda")
    check_decoding(rng, page_size, fp8, monkeypatch)


def check_decoding(rng, page_size, fp8, monkeypatch):
    model, length, prompt = decoder(LARGE), 240, 200
    tokens = rng.integers(0, VOCAB, size=(B, length)).astype(np.int32)
    project = nn.MLA.project

    def rounded(self, x, positions):
        p = project(self, x, positions)
        return p._replace(kv=unpack_records(pack_records(p.kv), p.kv.dtype)) if fp8 else p

    with monkeypatch.context() as patch:
        patch.setattr(nn.MLA, "project", rounded)
        want, _ = jax.jit(lambda tokens: model(tokens))(tokens)
    cache = model.init_cache(B, 256, fp8=fp8, page_size=page_size)
    if page_size:
        table = cache.layers[0].kv.page_table
        order = rng.permutation(table.size).astype(np.int32)
        cache = cache.with_page_table(jnp.asarray(order)[table])
    step = jax.jit(model.decode, donate_argnums=1)
    logits, cache = step(tokens[:, :prompt], cache)
    got = [logits]
    for t in range(prompt, length):
        logits, cache = step(tokens[:, t : t + 1], cache)
        got.append(logits)
    got = jnp.concatenate(got, axis=1)
    # In bfloat16, products of one row and of many rows round differently, which may change the
    # selection. So the mean error is checked.
    for tokens in (np.s_[:, :prompt], np.s_[:, prompt:]):
        error = np.abs(got[tokens] - want[tokens]).mean() / np.abs(want[tokens]).mean()
        assert error < 0.05, error
