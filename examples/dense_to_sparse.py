"""Turns a dense model into a sparse one by DeepSeek's recipe.

python examples/dense_to_sparse.py --checkpoint runs/dense --output runs/sparse

The checkpoint is a Hugging Face folder of a DeepSeek-V3 model whose feed-forward layers are all
dense. Its attention layers get new indexers. In the warm-up only the indexers learn, from the
distribution of dense attention. Then indexers and model learn with sparse attention. The output is
a folder of a DeepSeek-V3.2 model.

If the checkpoint does not exist, the script first trains a small model in place of yours and stores
it there. docs/dense_to_sparse.md explains the steps.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

from jax_dsa import nn, training

LENGTH, BATCH = 256, 4
DENSE = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 2, "first_k_dense_replace": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "attention_bias": False,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
INDEXER = {"top_k": 16, "index_heads": 4, "index_dim": 32}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/dense"))
    parser.add_argument("--output", type=Path, default=Path("runs/sparse"))
    parser.add_argument(
        "--dense-steps", type=int, default=300, help="steps of the model without a checkpoint"
    )
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--sparse-steps", type=int, default=100)
    args = parser.parse_args(argv)
    train, validation = texts()
    rng = np.random.default_rng(0)
    if not args.checkpoint.exists():
        print("training a dense model")
        train_dense_model(args.checkpoint, batches(train, args.dense_steps, rng))

    layers, config = nn.sparse_from_hf(args.checkpoint, rngs=nnx.Rngs(1), **INDEXER)
    model = decoder(config)
    load_rest(model, nn.SafeTensors(args.checkpoint))
    for block, layer in zip(model.blocks, layers, strict=True):
        block.attention = layer
    graph, indexer, backbone = nnx.split(model, training.INDEXER, ...)

    def losses(backbone, indexer, tokens, sparse):
        logits, layers = nnx.merge(graph, indexer, backbone)(tokens[:, :-1], sparse=sparse)
        return training.next_token_loss(logits, tokens[:, 1:]), training.indexer_loss(layers)

    @jax.jit(static_argnames="sparse")
    def evaluate(backbone, indexer, *, sparse):
        return losses(backbone, indexer, validation, sparse)[0]

    found = {
        "the dense checkpoint": evaluate(backbone, indexer, sparse=False),
        "sparse, indexers untrained": evaluate(backbone, indexer, sparse=True),
    }

    print("warm-up: only the indexers learn, from the distribution of dense attention")
    indexer = trained(
        lambda params, tokens: losses(backbone, params, tokens, False)[1],
        indexer,
        batches(train, args.warmup_steps, rng),
    )
    found["sparse after the warm-up"] = evaluate(backbone, indexer, sparse=True)

    print("sparse training: each loss trains its own parameters")
    backbone, indexer = trained(
        lambda params, tokens: sum(losses(*params, tokens, True)),
        (backbone, indexer),
        batches(train, args.sparse_steps, rng),
    )
    found["sparse after sparse training"] = evaluate(backbone, indexer, sparse=True)
    save(args.output, config, weights_of(nnx.merge(graph, indexer, backbone)))
    print(f"\nvalidation loss, nats per byte, top {INDEXER['top_k']} of {LENGTH} keys")
    for name, loss in found.items():
        print(f"{name:30} {loss:.4f}")
    return {name: float(loss) for name, loss in found.items()}


def train_dense_model(folder, batches):
    """Trains a small model with dense attention and saves it without its indexers."""
    model = decoder(nn.sparse_hf_config(DENSE, **INDEXER))
    graph, params = nnx.split(model)

    def loss(params, tokens):
        logits, _ = nnx.merge(graph, params)(tokens[:, :-1], sparse=False)
        return training.next_token_loss(logits, tokens[:, 1:])

    weights = weights_of(nnx.merge(graph, trained(loss, params, batches)))
    save(folder, DENSE, {name: x for name, x in weights.items() if ".indexer." not in name})


def decoder(config):
    """Returns a new decoder of the sizes in a sparse model's configuration."""
    sizes = nn.DecoderConfig(
        nn.from_hf(config)[0].config,
        vocab=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        mlp_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
    )
    return nn.DecoderLM(sizes, rngs=nnx.Rngs(0))


def rest_of(model):
    """Yields the parameters outside of attention and their names; True for transposed ones."""
    yield model.embed.embedding, ["model.embed_tokens"], False
    yield model.norm.scale, ["model.norm"], False
    yield model.head.kernel, ["lm_head"], True
    for i, block in enumerate(model.blocks):
        layer = f"model.layers.{i}"
        yield block.attention_norm.scale, [f"{layer}.input_layernorm"], False
        yield block.mlp_norm.scale, [f"{layer}.post_attention_layernorm"], False
        gate_up = [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"]
        yield block.mlp.gate_up.kernel, gate_up, True
        yield block.mlp.down.kernel, [f"{layer}.mlp.down_proj"], True


def load_rest(model, files):
    """Loads the parameters outside of attention, which must be stored as floats."""
    for param, names, transposed in rest_of(model):
        x = np.concatenate([files[f"{name}.weight"] for name in names])
        assert x.dtype in (np.float32, np.float16, jnp.bfloat16), names
        param.set_value(jnp.asarray(x.T if transposed else x, jnp.float32))


def weights_of(model):
    """Returns all weights of a decoder by their names in `transformers`."""
    weights = {}
    for i, block in enumerate(model.blocks):
        weights |= nn.save_hf(block.attention, f"model.layers.{i}.self_attn.")
    for param, names, transposed in rest_of(model):
        x = np.asarray(param[...].T if transposed else param[...])
        for name, part in zip(names, np.split(x, len(names)), strict=True):
            weights[f"{name}.weight"] = np.ascontiguousarray(part)
    return weights


def save(folder, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def trained(loss, params, batches):
    """Returns the parameters after one step of AdamW on `loss(params, tokens)` per batch."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

    @jax.jit
    def step(params, state, tokens):
        grads = jax.grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for tokens in batches:
        params, state = step(params, state, tokens)
    return params


def texts():
    """Returns Python's own sources as bytes. Every twentieth file gives validation windows."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    split = [file for i, file in enumerate(files) if i % 20], files[::20]
    train, validation = (
        np.frombuffer(b"".join(file.read_bytes() for file in group), np.uint8) for group in split
    )
    windows = len(validation) // (LENGTH + 1)
    rows = validation[: windows * (LENGTH + 1)].reshape(windows, -1)
    return train, rows[:: -(-windows // 64)].astype(np.int32)


def batches(text, count, rng):
    for _ in range(count):
        starts = rng.integers(0, len(text) - LENGTH, BATCH)
        yield np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)


if __name__ == "__main__":
    main()
