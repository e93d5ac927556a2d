"""Turns a dense model into a sparse one by DeepSeek's recipe.

python examples/dense_to_sparse.py --checkpoint runs/dense

In the warm-up only the indexers learn, from the distribution of dense attention. Then indexers and
model learn with sparse attention. The checkpoint (Orbax) has the parameters of a decoder with
latent attention and without indexers. If it does not exist, the script first trains a small model
in place of yours and stores it there.
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jax_dsa import nn, training

LENGTH, BATCH = 256, 4
CONFIG = nn.DecoderConfig(
    nn.AttentionConfig(
        model_dim=128, num_heads=4, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32,
        index_heads=4, index_dim=32, index_rope_dim=16, top_k=16,
    ),
    vocab=256, num_layers=2, mlp_dim=384,
)  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/dense"))
    parser.add_argument(
        "--dense-steps", type=int, default=300, help="steps of the model without a checkpoint"
    )
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--sparse-steps", type=int, default=100)
    args = parser.parse_args(argv)
    train, validation = texts()
    rng = np.random.default_rng(0)
    model = nn.DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    graph, indexer, backbone = nnx.split(model, training.INDEXER, ...)

    def losses(backbone, indexer, tokens, sparse):
        logits, layers = nnx.merge(graph, indexer, backbone)(tokens[:, :-1], sparse=sparse)
        return training.next_token_loss(logits, tokens[:, 1:]), training.indexer_loss(layers)

    @jax.jit(static_argnames="sparse")
    def evaluate(backbone, indexer, *, sparse):
        return losses(backbone, indexer, validation, sparse)[0]

    path = args.checkpoint.absolute()
    with ocp.StandardCheckpointer() as checkpoints:
        if not path.exists():
            print("training a dense model")
            backbone = trained(
                lambda params, tokens: losses(params, indexer, tokens, False)[0],
                backbone,
                batches(train, args.dense_steps, rng),
            )
            checkpoints.save(path, nnx.to_pure_dict(backbone))
        checkpoints.wait_until_finished()
        nnx.replace_by_pure_dict(backbone, checkpoints.restore(path, nnx.to_pure_dict(backbone)))
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
    print(f"\nvalidation loss, nats per byte, top {CONFIG.attention.top_k} of {LENGTH} keys")
    for name, loss in found.items():
        print(f"{name:30} {loss:.4f}")
    return {name: float(loss) for name, loss in found.items()}


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
