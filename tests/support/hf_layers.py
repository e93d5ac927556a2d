"""The attention layers of a model of `transformers`, ours alone: their runs and comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dsa
from jax_dsa import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-5
"""Largest permitted difference, relative to the largest value."""


DENSE = "deepseek_v3", "deepseek_v2"
"""Models without indexers. Our layers get new ones, which select all keys of short sequences."""


OFFSET_NORMS = "minimax_m3_vl", "qwen4_exp"
"""Models whose norms have the factor 1 + weight."""


def specs_of(kind: str, config: Any, **options: Any) -> tuple[nn.HFLayer, ...]:
    """Returns the specs of the layers of a model."""
    if kind in DENSE:
        config = nn.sparse_hf_config(config, top_k=512, index_heads=4, index_dim=16)
    return nn.from_hf(config, **options)


def load(kind: str, module: Any, weights: Any, prefix: str = "") -> Any:
    """Loads the weights of a layer of a model into ours."""
    return nn.load_hf(module, weights, prefix, new_indexer=kind in DENSE)


def make_layers(specs: Sequence[nn.HFLayer]) -> list[Any]:
    """Returns the layers of these specs."""
    layers: list[Any] = []
    for spec in specs:
        if isinstance(spec.config, nn.CompressedConfig):
            layers.append(nn.CompressedAttention(spec.config, rngs=nnx.Rngs(0)))
        else:
            grouped = isinstance(spec.config, nn.GroupedConfig)
            kind: Any = nn.GroupedAttention if grouped else nn.DSAttention
            layers.append(kind(spec.config, spec.indexer_type, rngs=nnx.Rngs(0)))
    return layers


def empty_caches(specs: Sequence[nn.HFLayer], batch: int, capacity: int) -> list[Any]:
    """Returns an empty cache for each layer."""
    return [module.init_cache(batch, capacity) for module in make_layers(specs)]


def run_ours(
    specs: Sequence[nn.HFLayer],
    modules: list[Any],
    inputs: Any,
    selections: Any = None,
    **given: Any,
) -> tuple:
    """Runs our layers, each on inputs of its own, and replays `selections` if they are given.

    Returns the outputs and the other results of all layers.
    """
    outs, found = [], []
    for i, (layer, x) in enumerate(zip(specs, inputs, strict=True)):
        indices = None if selections is None else selections[i]
        if not isinstance(modules[i], nn.DSAttention):
            out, aux = modules[i](x, indices=indices, **given)
        else:
            if indices is None and layer.indexer_type == "shared":
                indices = found[-1].indices
            kv = found[layer.kv_source].kv if layer.config.shares_keys else None
            out, aux = modules[i](x, indices=indices, kv=kv, **given)
        outs.append(out)
        found.append(aux)
    return outs, found


def decode_ours(
    specs: Sequence[nn.HFLayer], modules: list[Any], inputs: Any, caches: Any
) -> tuple[list, list, list]:
    """Decodes the next tokens of all layers; returns outputs, caches and selections."""
    outs: list[Any] = []
    new: list[Any] = []
    selections: list[Any] = []
    for module, spec, x, cache in zip(modules, specs, inputs, caches, strict=True):
        given: dict[str, Any] = {}
        if spec.indexer_type == "shared":
            given["indices"] = selections[-1]
        if spec.kv_source != len(new):
            given["kv"] = new[spec.kv_source].kv
        out, cache, indices = module.decode(x, cache, **given)
        outs.append(out)
        new.append(cache)
        selections.append(indices)
    return outs, new, selections


def index_scores(module: Any, x: Any, aux: Any) -> Any:
    """Returns the indexer's scores of all that it may select, -inf for what a token does not see.

    These are keys, pools or blocks. Where each KV head has its own scores, they have an axis more.

    The result is None if the layer has no indexer.
    """
    if module.indexer is None:
        return None
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    ends = (positions + 1) // tokens_per_key(module.config)
    if isinstance(module, nn.GroupedAttention):
        return grouped_scores(module, x, positions)
    if not isinstance(module, nn.CompressedAttention):
        return jax_dsa.indexer_logits(**aux.indexer._asdict(), ends=ends)
    q, weights = module.indexer(x, module.q_norm(module.wq_a(x)), positions)
    keys = module.indexer.compressor(x, positions, None)
    return jax_dsa.indexer_logits(q, keys, weights, ends=ends)


def first_key(config: Any, start: int) -> int:
    """Returns the number in a selection of the first key of a document that begins at a token."""
    if isinstance(config, nn.GroupedConfig):
        return 0  # Blocks are numbered within the document.
    return start // tokens_per_key(config)


def grouped_scores(module: nn.GroupedAttention, x: Any, positions: Any) -> Any:
    """Returns the indexer's scores of all blocks."""
    c, indexer = module.config, module.indexer
    assert indexer is not None
    q = indexer.queries(x, positions)
    keys = indexer.keys(indexer.raw_keys(x), positions, None)
    if c.indexer == "mean":
        weights = jnp.full(q.shape[:3], c.index_dim**-0.5)
        return jax_dsa.indexer_logits(q, keys, weights, ends=(positions + 1) // c.block_size)
    logits = jnp.einsum("btjc,bsc->btjs", q, keys)
    key = jnp.arange(x.shape[1])
    seen = jnp.where(key <= positions[:, :, None, None], logits, -jnp.inf)
    blocks = -(-x.shape[1] // c.block_size)
    padding = [(0, 0)] * 3 + [(0, blocks * c.block_size - x.shape[1])]
    seen = jnp.pad(seen, padding, constant_values=-jnp.inf)
    best = seen.reshape(*seen.shape[:3], blocks, c.block_size).max(-1)
    own = (positions // c.block_size)[:, :, None, None]
    number = jnp.arange(blocks)
    # The newest blocks are always selected, as if their scores were the largest.
    forced = (number <= own) & (number > own - c.local_blocks)
    return jnp.where(forced, jnp.where(jnp.isinf(best), 0, best).max() + 1, best)


def tokens_per_key(config: Any) -> int:
    """Returns the number of tokens per key of a layer's indexer."""
    return getattr(config, "ratio", None) or getattr(config, "index_pool", None) or 1


def assert_close(got: Any, want: Any, what: str, least: float = 0.0) -> None:
    """Asserts a difference of at most `TOLERANCE` times the largest value, or times `least`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    scale = max(np.abs(want).max(initial=0), least)
    worst = np.abs(got - want).max(initial=0)
    assert worst <= TOLERANCE * scale, f"{what}: error {worst}, largest value {scale}"
    model = what.split()[0]
    WORST[model] = max(WORST.get(model, 0.0), worst / scale if worst else 0.0)


WORST: dict[str, float] = {}
"""The largest relative error of each model, a column of the table in docs/models.md."""


def same_selection(got: Any, want: Any, scores: Any, what: str) -> np.ndarray:
    """Returns a mask of the rows that select the same keys, and checks the other rows.

    In the other rows, scores must tie: every key that only one side selects has, up to rounding,
    the smallest selected score.
    """
    got, want, scores = np.asarray(got), np.asarray(want), np.asarray(scores, np.float64)
    if got.ndim == 4:  # A list for each KV head.
        lists = (np.moveaxis(x, 2, 0) for x in (got, want, scores))
        each = [same_selection(*x, what) for x in zip(*lists, strict=True)]
        return np.logical_and.reduce(each)
    finite = np.isfinite(scores)
    scale = np.abs(scores[finite]).max(initial=0)
    same = np.ones(got.shape[:2], bool)
    for b, t in np.ndindex(same.shape):
        ours = set(got[b, t].tolist()) - {-1}
        theirs = set(want[b, t].tolist()) & set(np.flatnonzero(finite[b, t]).tolist())
        same[b, t] = ours == theirs
        if same[b, t]:
            continue
        assert len(ours) == len(theirs), what
        last, after = np.sort(scores[b, t])[::-1][len(ours) - 1 : len(ours) + 1]
        assert last - after <= TOLERANCE * scale, f"{what}: row {b, t} has no tie"
        for key in ours ^ theirs:
            assert abs(scores[b, t, key] - last) <= TOLERANCE * scale, f"{what}: row {b, t}"
    return same


def compiled_layers(specs: Sequence[nn.HFLayer]) -> tuple[Any, Any]:
    """Returns two compiled functions of the layers' parameters and their inputs.

    The first returns outputs, selections and the indexers' scores. The second replays selections
    and returns the outputs and the gradients of parameters and inputs.
    """
    graph = nnx.split(make_layers(specs))[0]

    @jax.jit
    def forward(params: Any, inputs: Any) -> Any:
        modules = nnx.merge(graph, params)
        outs, found = run_ours(specs, modules, inputs)
        scores = [index_scores(*each) for each in zip(modules, inputs, found, strict=True)]
        return outs, [aux.indices for aux in found], scores

    @jax.jit
    def replayed(params: Any, inputs: Any, selections: Any, weights: Any) -> Any:
        def loss(params: Any, inputs: Any) -> Any:
            outs, _ = run_ours(specs, nnx.merge(graph, params), inputs, selections)
            return sum(jnp.sum(o * w) for o, w in zip(outs, weights, strict=True)), outs

        (_, outs), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, inputs)
        return outs, grads

    return forward, replayed
