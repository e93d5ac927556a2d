"""Attention layers against the eager float32 layers of `transformers`; needs the extra `parity`.

The tests compare outputs, gradients, prefill, decoding and packed documents.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.hf_layers import (
    assert_close,
    decode_ours,
    empty_caches,
    first_key,
    run_ours,
    same_selection,
)
from support.parity import (
    BATCH,
    MODELS,
    SEEDS,
    SIZES,
    SLOW,
    compiled,
    filled,
    our_layers,
    run_hf,
    stack,
    torch,
    transformers,
)

from jax_dsa import nn

LENGTHS = 1, 5, 77, pytest.param(300, marks=SLOW)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients(kind: str, length: int) -> None:
    layers, (forward, replayed) = stack(kind)[2], compiled(kind)
    for seed in SEEDS:
        params = filled(kind, seed)
        rng = np.random.default_rng(seed)
        shape = (len(layers), BATCH, length, SIZES["hidden_size"])
        x, weights = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
        inputs = torch.tensor(x, requires_grad=True)
        wants, selections = run_hf(kind, list(inputs))
        for layer in layers:
            layer.zero_grad()
        sum((o * torch.tensor(w)).sum() for o, w in zip(wants, weights, strict=True)).backward()

        own, indices, scores = forward(params, list(x))
        outs, (d_params, d_inputs) = replayed(params, list(x), selections, list(weights))
        gradients = nnx.merge(nnx.split(our_layers(kind))[0], d_params)
        last = None
        for i, layer in enumerate(layers):
            # A single key has all the weight, so the gradients of the queries are zero up to
            # rounding errors of the size of the other gradients.
            grads = [p.grad.abs().max().item() for p in layer.parameters() if p.grad is not None]
            least = max(grads) if length == 1 else 0.0
            what, want = f"{kind} layer {i} T {length} seed {seed}:", wants[i].detach().numpy()
            last = last if scores[i] is None else scores[i]
            same = np.ones((BATCH, length), bool)
            if selections[i] is not None:
                same = same_selection(indices[i], selections[i], last, what)
            assert same.mean() > 0.9, what
            assert_close(own[i][same], want[same], f"{what} output")
            assert_close(outs[i], want, f"{what} output, selection replayed")
            assert_close(d_inputs[i], inputs.grad[i], f"{what} gradient of the input", least)
            got = nn.save_hf(gradients[i])
            for name, p in layer.named_parameters():
                if p.grad is None:  # The indexer, or no complete block.
                    assert not got[name].any(), f"{what} {name}"
                else:
                    assert_close(got[name], p.grad, f"{what} gradient of {name}", least)


@pytest.mark.parametrize(
    ("prefill", "length"),
    [(0, 1), (2, 5), (0, 77), (70, 77), pytest.param(292, 300, marks=SLOW)],
)
@pytest.mark.parametrize("kind", MODELS)
def test_prefill_and_token_by_token_decode(kind: str, prefill: int, length: int) -> None:
    config, _, layers, specs = stack(kind)
    graph = nnx.split(our_layers(kind))[0]

    @jax.jit
    def step(params: Any, inputs: Any, caches: Any) -> Any:
        return decode_ours(specs, nnx.merge(graph, params), inputs, caches)

    for seed in SEEDS:
        params = filled(kind, seed)
        rng = np.random.default_rng(seed)
        shape = (len(layers), BATCH, length, SIZES["hidden_size"])
        x = rng.normal(size=shape).astype(np.float32)
        scores = compiled(kind)[0](params, list(x))[2]
        cache = transformers.DynamicCache(config=config)
        caches = empty_caches(specs, BATCH, length + 3)
        ends = [*([prefill] if prefill else []), *range(prefill + 1, length + 1)]
        for start, end in zip([0, *ends], ends, strict=False):
            chunk = x[:, :, start:end]
            with torch.no_grad():
                wants, picked = run_hf(kind, list(torch.tensor(chunk)), past=start, cache=cache)
            outs, caches, selections = step(params, list(chunk), caches)
            last = None
            for i in range(len(layers)):
                what = f"{kind} layer {i} tokens {start}..{end} seed {seed}:"
                last = last if scores[i] is None else scores[i][:, start:end]
                same = np.ones((BATCH, end - start), bool)
                if picked[i] is not None:
                    same = same_selection(selections[i], picked[i], last, what)
                assert_close(np.asarray(outs[i])[same], wants[i].numpy()[same], f"{what} decoded")


@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents(kind: str) -> None:
    """Compares each document of a sequence with the layers of `transformers` on it alone."""
    specs, (forward, _), lengths = stack(kind)[3], compiled(kind), (5, 77, 1)
    graph = nnx.split(our_layers(kind))[0]
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    ids = jnp.broadcast_to(ids, (BATCH, len(ids)))

    @jax.jit
    def packed(params: Any, inputs: Any) -> Any:
        outs, found = run_ours(specs, nnx.merge(graph, params), inputs, segment_ids=ids)
        return outs, [aux.indices for aux in found]

    for seed in SEEDS:
        params = filled(kind, seed)
        rng = np.random.default_rng(seed)
        shape = (len(specs), BATCH, sum(lengths), SIZES["hidden_size"])
        x = rng.normal(size=shape).astype(np.float32)
        outs, selections = packed(params, list(x))
        start = 0
        for n in lengths:
            document = x[:, :, start : start + n]
            with torch.no_grad():
                wants, picked = run_hf(kind, list(torch.tensor(document)))
            _, alone, scores = forward(params, list(document))
            last = None
            for i, spec in enumerate(specs):
                what = f"{kind} layer {i} tokens {start}..{start + n} packed, seed {seed}:"
                last = last if scores[i] is None else scores[i]
                same = np.ones((BATCH, n), bool)
                if picked[i] is not None:
                    same = same_selection(alone[i], picked[i], last, what)
                    first = first_key(spec.config, start)
                    here = np.asarray(selections[i])[:, start : start + n]
                    ours, separate = (
                        np.sort(k, -1)[..., ::-1] for k in (here, np.asarray(alone[i]))
                    )
                    ours, width = np.where(ours >= 0, ours - first, -1), separate.shape[-1]
                    np.testing.assert_array_equal(ours[..., :width], separate, what)
                    assert (ours[..., width:] < 0).all(), what
                assert_close(
                    np.asarray(outs[i])[:, start : start + n][same], wants[i].numpy()[same], what
                )
            start += n


def test_positions_in_time_height_and_width() -> None:
    """Tokens of an image in the middle of a text, as in Qwen3.8."""
    kind, length, side = "qwen4_exp", 41, 4
    layers, positions = stack(kind)[2], np.zeros((3, BATCH, length), np.int32)
    row, column = np.divmod(np.arange(side * side), side)
    text = np.arange(9)
    image = np.stack([np.full(side * side, 9), 9 + row, 9 + column])
    after = 9 + side + np.arange(length - 9 - side * side)
    three = np.concatenate([np.stack([text] * 3), image, np.stack([after] * 3)], axis=1)
    positions[:] = three[:, None]
    graph = nnx.split(our_layers(kind))[0]

    @jax.jit
    def ours(params: Any, inputs: Any) -> Any:
        found = [
            module(x, positions=jnp.asarray(positions))
            for module, x in zip(nnx.merge(graph, params), inputs, strict=True)
        ]
        return [y for y, _ in found], [aux.indices for _, aux in found]

    for seed in SEEDS:
        params = filled(kind, seed)
        rng = np.random.default_rng(seed)
        shape = (len(layers), BATCH, length, SIZES["hidden_size"])
        x = rng.normal(size=shape).astype(np.float32)
        with torch.no_grad():
            wants, picked = run_hf(kind, list(torch.tensor(x)), places=torch.tensor(positions))
        outs, selections = ours(params, list(x))
        for i, (want, found) in enumerate(zip(wants, picked, strict=True)):
            assert (np.sort(selections[i], -1) == np.sort(found, -1)).mean() > 0.95
            same = (np.sort(selections[i], -1) == np.sort(found, -1)).all(-1)
            what = f"{kind} layer {i} with positions in space, seed {seed}"
            assert_close(np.asarray(outs[i])[same], want.numpy()[same], what)
