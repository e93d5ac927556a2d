"""Trains a decoder with sparse attention in a custom loop with an NNX model, optax, and a mesh.

python examples/own_loop.py --steps 100
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsa import nn, training

ATTENTION = nn.AttentionConfig(
    model_dim=128, num_heads=4, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32,
    index_heads=4, index_dim=32, index_rope_dim=16, top_k=16,
)  # fmt: skip


@nnx.jit
def step(model, optimizer, tokens):
    def loss(model):
        logits, layers = model(tokens[:, :-1])
        lm = training.next_token_loss(logits, tokens[:, 1:])
        kl = training.indexer_loss(layers)
        return lm + kl, (lm, kl)  # No parameter has a gradient of both losses.

    grads, losses = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args(argv)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        config = nn.DecoderConfig(ATTENTION, vocab=256, num_layers=2, mlp_dim=384)
        model = nn.DecoderLM(config, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        found = []
        for number in range(args.steps):
            starts = rng.integers(0, len(text) - args.length, 4 * mesh.size)
            tokens = np.stack([text[s : s + args.length + 1] for s in starts]).astype(np.int32)
            lm, kl = step(model, optimizer, jax.device_put(tokens, rows))
            found.append((float(lm), float(kl)))
            if number % 10 == 0 or number == args.steps - 1:
                print(f"step {number + 1}: loss {lm:.3f} nats per byte, KL {kl:.3f}", flush=True)
    return found


if __name__ == "__main__":
    main()
