"""Attention layers against the eager float32 layers of `transformers`; needs the extra `parity`.

The tests compare outputs, gradients, decoding and weights.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dsa
from jax_dsa import nn

torch = pytest.importorskip("torch", reason="needs the extra 'parity'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'parity'")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra 'parity'")

SLOW = pytest.mark.slow
LENGTHS = 1, 5, 77, pytest.param(300, marks=SLOW)
SEEDS, BATCH = (0, 1, 2), 2
TOLERANCE = 1e-5
"""Largest permitted difference, relative to the largest value."""

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 12,
    "vocab_size": 50,
    "intermediate_size": 40,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}


class Model(NamedTuple):
    """A model of `transformers` with a small configuration."""

    module: str
    """The module below `transformers.models`."""
    names: str
    """The prefix of the names of its classes."""
    config: dict[str, Any]
    """Fields of the configuration beside `SIZES`."""


MODELS = {
    "deepseek_v32": Model(
        "deepseek_v32",
        "DeepseekV32",
        {
            "q_lora_rank": 20,
            "v_head_dim": 12,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "glm_moe_dsa": Model(
        "glm_moe_dsa",
        "GlmMoeDsa",
        {
            "q_lora_rank": 20,
            "v_head_dim": 20,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "hy_v4": Model(
        "hy_v4",
        "HYV4",
        {
            "q_lora_rank": 20,
            "v_head_dim": 20,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "full", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Layers 1 and 3 have no RoPE. Layers 2 and 3 attend to the keys of layers 0 and 1.
    "mistral_large4": Model(
        "mistral_large4",
        "MistralLarge4Text",
        {
            "v_head_dim": 12,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
            "rope_parameters": {**YARN, "attention_factor": 1.0},
        },
    ),
    "deepseek_v4": Model(
        "deepseek_v4",
        "DeepseekV4",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 20,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 16,
            },
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 10,
            "index_topk": 5,
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k},
        },
    ),
}
WINDOW = MODELS["deepseek_v4"].config["sliding_window"]


def hf_config(kind: str) -> Any:
    """Returns the configuration of a model in `transformers`."""
    model = MODELS[kind]
    package = getattr(transformers.models, model.module)
    name = next(
        n for n in (f"{model.names}Config", f"{model.names[:-1]}Config") if hasattr(package, n)
    )
    return getattr(package, name)(**{**SIZES, **model.config})


@functools.cache
def stack(kind: str) -> tuple[Any, Any, list[Any], tuple[nn.HFLayer, ...]]:
    """Returns a model's configuration, rotary embedding and layers, and our layers' specs."""
    config, model = hf_config(kind), MODELS[kind]
    modeling = __import__(
        f"transformers.models.{model.module}.modeling_{model.module}", fromlist=["x"]
    )
    rotary = getattr(modeling, f"{model.names}RotaryEmbedding")(config)
    alpha = None
    if hasattr(rotary, "alpha"):
        rotary.alpha += torch.linspace(-0.2, 0.3, len(rotary.alpha))
        alpha = rotary.alpha.tolist()
    layers = [
        getattr(modeling, f"{model.names}Attention")(config, i)
        for i in range(config.num_hidden_layers)
    ]
    return config, rotary, layers, nn.from_hf(config, rope_alpha=alpha)


@functools.cache
def our_layers(kind: str) -> list[Any]:
    """Returns our attention layers of a model."""
    return [
        nn.CompressedAttention(layer.config, rngs=nnx.Rngs(0))
        if isinstance(layer.config, nn.CompressedConfig)
        else nn.DSAttention(layer.config, layer.indexer_type, rngs=nnx.Rngs(0))
        for layer in stack(kind)[3]
    ]


def fill(layers: list[Any], seed: int) -> None:
    """Fills the layers with random weights, unlike those of an initialiser."""
    torch.manual_seed(seed)
    for layer in layers:
        for name, p in layer.named_parameters():
            with torch.no_grad():
                p.normal_(0, 0.3 if p.ndim == 1 else 1.5 * p.shape[-1] ** -0.5)
                if p.ndim == 1 and "norm" in name and name.endswith("weight"):
                    p.add_(1)
                if name.endswith("softmax_scaling.bias"):
                    p.add_(1)


def tensors(layer: Any) -> dict[str, np.ndarray]:
    """Returns a layer's weights as NumPy arrays."""
    return {name: x.numpy() for name, x in layer.state_dict().items()}


def causal_bias(length: int, past: int = 0, window: int | None = None) -> Any:
    """Returns the causal mask as a bias; with a window, for the keys that the cache still holds."""
    mask = torch.ones(length, past + length, dtype=torch.bool).tril(past)
    if window is not None:
        mask = mask.triu(past + 1 - window)[:, max(past - window + 1, 0) :]
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return bias[None, None].expand(BATCH, 1, -1, -1)


def run_hf(kind: str, inputs: Any, *, past: int = 0, cache: Any = None) -> tuple[list, list]:
    """Runs the layers of `transformers`, each on inputs of its own.

    Returns the outputs and the selections of all layers.
    """
    _, rotary, layers, _ = stack(kind)
    length = inputs[0].shape[1]
    positions = torch.arange(past, past + length)[None].expand(BATCH, -1)
    compressed = kind == "deepseek_v4"
    if compressed:
        names = ("main", "compress")
        rotations: Any = {name: rotary(inputs[0], positions, layer_type=name) for name in names}
    else:
        rotations = rotary(inputs[0], positions)
    outs, selections, selected = [], [], None
    extra: dict[str, Any] = {}
    if kind == "mistral_large4":
        extra["shared_kv_states"] = {}
    for layer, x in zip(layers, inputs, strict=True):
        found: list[Any] = []
        hook = None
        indexer = getattr(layer.compressor if compressed else layer, "indexer", None)
        if indexer is not None:
            hook = indexer.register_forward_hook(lambda m, i, o, found=found: found.append(o))
        if kind not in ("deepseek_v32", "deepseek_v4"):
            extra["prev_topk_indices"] = selected
        out, *_ = layer(
            x,
            position_embeddings=rotations,
            attention_mask=causal_bias(length, past, WINDOW if compressed else None),
            position_ids=positions,
            past_key_values=cache,
            **extra,
        )
        if hook is not None:
            hook.remove()
            selected = found[0]
        outs.append(out)
        has_no_selection = compressed and indexer is None
        selections.append(None if has_no_selection else selected.int().numpy())
    return outs, selections


def run_ours(
    kind: str, modules: list[Any], inputs: Any, selections: Any = None, **given: Any
) -> tuple:
    """Runs our layers, each on inputs of its own, and replays `selections` if they are given.

    Returns the outputs and the other results of all layers.
    """
    outs, found = [], []
    for i, (layer, x) in enumerate(zip(stack(kind)[3], inputs, strict=True)):
        indices = None if selections is None else selections[i]
        if isinstance(modules[i], nn.CompressedAttention):
            out, aux = modules[i](x, indices=indices, **given)
        else:
            if indices is None and layer.indexer_type == "shared":
                indices = found[-1].indices
            kv = found[layer.kv_source].kv if layer.config.shares_keys else None
            out, aux = modules[i](x, indices=indices, kv=kv, **given)
        outs.append(out)
        found.append(aux)
    return outs, found


def index_scores(module: Any, x: Any, aux: Any) -> Any:
    """Returns the indexer's scores of all keys, -inf for keys that a token does not see.

    The result is None if the layer has no indexer.
    """
    if module.indexer is None:
        return None
    if not isinstance(module, nn.CompressedAttention):
        return jax_dsa.indexer_logits(**aux.indexer._asdict(), is_causal=True)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q, weights = module.indexer(x, module.q_norm(module.wq_a(x)), positions)
    keys = module.indexer.compressor(x, positions, None)
    return jax_dsa.indexer_logits(q, keys, weights, ends=(positions + 1) // module.config.ratio)


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


@functools.cache
def compiled(kind: str) -> tuple[Any, Any]:
    graph = nnx.split(our_layers(kind))[0]

    @jax.jit
    def forward(params: Any, inputs: Any) -> Any:
        modules = nnx.merge(graph, params)
        outs, found = run_ours(kind, modules, inputs)
        scores = [index_scores(*each) for each in zip(modules, inputs, found, strict=True)]
        return outs, [aux.indices for aux in found], scores

    @jax.jit
    def replayed(params: Any, inputs: Any, selections: Any, weights: Any) -> Any:
        def loss(params: Any, inputs: Any) -> Any:
            outs, _ = run_ours(kind, nnx.merge(graph, params), inputs, selections)
            return sum(jnp.sum(o * w) for o, w in zip(outs, weights, strict=True)), outs

        (_, outs), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, inputs)
        return outs, grads

    return forward, replayed


def filled(kind: str, seed: int) -> Any:
    """Fills the layers of `transformers` and returns the same parameters for our layers."""
    _, _, layers, _ = stack(kind)
    fill(layers, seed)
    for module, layer in zip(our_layers(kind), layers, strict=True):
        nn.load_hf(module, tensors(layer))
    return nnx.split(our_layers(kind))[1]


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
        outs, new, selections = [], [], []
        for module, spec, x, cache in zip(
            nnx.merge(graph, params), specs, inputs, caches, strict=True
        ):
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

    for seed in SEEDS:
        params = filled(kind, seed)
        rng = np.random.default_rng(seed)
        shape = (len(layers), BATCH, length, SIZES["hidden_size"])
        x = rng.normal(size=shape).astype(np.float32)
        scores = compiled(kind)[0](params, list(x))[2]
        cache = transformers.DynamicCache(config=config)
        caches = [
            module.init_cache(BATCH, length + 3)
            if isinstance(module, nn.CompressedAttention)
            else nn.LayerCache.empty(spec.config, BATCH, length + 3, indexer_type=spec.indexer_type)
            for module, spec in zip(our_layers(kind), specs, strict=True)
        ]
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
        outs, found = run_ours(kind, nnx.merge(graph, params), inputs, segment_ids=ids)
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
                    ratio = getattr(spec.config, "ratio", 1)
                    here = np.asarray(selections[i])[:, start : start + n]
                    ours, separate = (
                        np.sort(k, -1)[..., ::-1] for k in (here, np.asarray(alone[i]))
                    )
                    ours, width = np.where(ours >= 0, ours - start // ratio, -1), separate.shape[-1]
                    np.testing.assert_array_equal(ours[..., :width], separate, what)
                    assert (ours[..., width:] < 0).all(), what
                assert_close(
                    np.asarray(outs[i])[:, start : start + n][same], wants[i].numpy()[same], what
                )
            start += n


@pytest.mark.parametrize("kind", MODELS)
def test_saved_weights_equal_loaded_weights(kind: str, tmp_path: pathlib.Path) -> None:
    """The weights come from arrays, and in bfloat16 from a file."""
    layers = stack(kind)[2]
    fill(layers, 0)
    for i, (module, layer) in enumerate(zip(our_layers(kind), layers, strict=True)):
        want, prefix = tensors(layer), f"model.layers.{i}.self_attn."
        got = nn.save_hf(nn.load_hf(module, want))
        assert got.keys() == want.keys()
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x)
        half = {prefix + name: x.bfloat16().contiguous() for name, x in layer.state_dict().items()}
        safetensors_torch.save_file(half, tmp_path / f"model-{i}.safetensors")
    for i, (module, layer) in enumerate(zip(our_layers(kind), layers, strict=True)):
        prefix = f"model.layers.{i}.self_attn."
        got = nn.save_hf(nn.load_hf(module, tmp_path, prefix), prefix, dtype=jnp.bfloat16)
        for name, x in layer.state_dict().items():
            np.testing.assert_array_equal(got[prefix + name], x.bfloat16().float().numpy())


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0},
        {"factor": 2048.0, "original_max_position_embeddings": 512, "attention_factor": 1.0},
        {"factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 20.0},
        {"factor": 4.0, "original_max_position_embeddings": 100, "truncate": False},
    ],
)
def test_yarn_at_the_models_sizes(rope: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **rope}
    if "mscale" in rope:
        rope["mscale_all_dim"] = 1.0
    config = transformers.DeepseekV32Config(num_hidden_layers=1, rope_parameters=rope)
    modeling = transformers.models.deepseek_v32.modeling_deepseek_v32
    with torch.device("meta"):
        scale = modeling.DeepseekV32Attention(config, 0).scaling
    rotary = modeling.DeepseekV32RotaryEmbedding(config)
    (layer,) = nn.from_hf(config.to_dict())
    np.testing.assert_allclose(layer.config.rope_frequencies, rotary.inv_freq, rtol=1e-5)
    np.testing.assert_allclose(layer.config.rope_factor, rotary.attention_scaling, rtol=1e-6)
    np.testing.assert_allclose(layer.config.scale, scale, rtol=1e-6)


def test_a_published_checkpoint(tmp_path: pathlib.Path) -> None:
    """The published names of DeepSeek-V4's weights differ from those of `transformers`' modules."""
    config = hf_config("deepseek_v4")
    config.n_routed_experts = config.n_shared_experts = config.num_experts_per_tok = 1
    config.moe_intermediate_size = 8
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    for i, (module, layer) in enumerate(
        zip(our_layers("deepseek_v4"), model.model.layers, strict=True)
    ):
        got = nn.save_hf(nn.load_hf(module, tmp_path, f"model.layers.{i}.attn."))
        for name, x in tensors(layer.self_attn).items():
            np.testing.assert_array_equal(got[name], x)


def test_a_model_from_files(tmp_path: pathlib.Path) -> None:
    """Loads two blocks of DeepSeek-V3.2 with YaRN from files into a `DecoderLM`."""
    config = hf_config("deepseek_v32")
    config.first_k_dense_replace, config.mlp_layer_types = 2, ["dense"] * 2
    torch.manual_seed(0)
    want = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in want.parameters():
        with torch.no_grad():
            p.add_(torch.randn_like(p), alpha=0.1)
    want.save_pretrained(tmp_path)
    attention = nn.from_hf(transformers.AutoConfig.from_pretrained(tmp_path))[0].config
    model = nn.DecoderLM(
        nn.DecoderConfig(attention, SIZES["vocab_size"], 2, SIZES["intermediate_size"]),
        rngs=nnx.Rngs(0),
    )
    files = nn.SafeTensors(tmp_path)
    model.embed.embedding.set_value(jnp.asarray(files["model.embed_tokens.weight"]))
    model.norm.scale.set_value(jnp.asarray(files["model.norm.weight"]))
    model.head.kernel.set_value(jnp.asarray(files["lm_head.weight"].T))
    for i, block in enumerate(model.blocks):
        name = f"model.layers.{i}."
        nn.load_hf(block.attention, files, f"{name}self_attn.")
        block.attention_norm.scale.set_value(jnp.asarray(files[f"{name}input_layernorm.weight"]))
        block.mlp_norm.scale.set_value(jnp.asarray(files[f"{name}post_attention_layernorm.weight"]))
        gate, up, down = (files[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
        block.mlp.gate_up.kernel.set_value(jnp.concatenate([gate, up], 1))
        block.mlp.down.kernel.set_value(jnp.asarray(down))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (BATCH, 77)).astype(np.int32)
    selections: list[Any] = []
    for layer in want.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda m, i, o: selections.append(o.numpy()))
    with torch.no_grad():
        logits = want(torch.tensor(tokens, dtype=torch.long)).logits
    # A tie in the first layer could change the scores of the second one, so the selections of
    # `transformers` are replayed.
    got, found = jax.jit(lambda t, s: model(t, indices=s))(tokens, selections)
    assert_close(got, logits, "deepseek_v32 logits of two blocks")
    own, again = jax.jit(lambda t: model(t))(tokens)
    same = np.ones(tokens.shape, bool)
    for recorded, other in zip(found, again, strict=True):
        ours, theirs = (np.sort(np.asarray(x.indices), -1) for x in (other, recorded))
        same &= (ours == theirs).all(-1)
    assert same.mean() > 0.9
    assert_close(np.asarray(own)[same], logits.numpy()[same], "deepseek_v32 logits of two blocks")
