"""Trains a custom decoder that uses the attention layers of `jax_dsa.nn`.

python examples/own_decoder.py               # as GLM-5: three layers share a layer's selection
python examples/own_decoder.py --model v4    # as DeepSeek-V4: keys compressed 4 to 1 or 128 to 1
python examples/own_decoder.py --model v4 --size large    # 32768 tokens, for a GPU

In the first steps the model attends to all keys, and the indexers learn to rank them. All later
steps are sparse. Tokens are the bytes of Python's standard library, or of the text in `--data`.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from jax_dsa import nn, training
from jax_dsa.training.data import VOCAB, Batches, load_corpus, validation_batches


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its training."""

    layers: tuple  # (configuration, indexer type) of each layer
    seq_len: int
    batch: int
    steps: int
    dense_steps: int


class Block(nnx.Module):
    """Attention and a feed-forward layer, each preceded by a norm."""

    def __init__(self, config, indexer_type, *, rngs):
        dim, dtype = config.model_dim, config.dtype
        self.shared = indexer_type == "shared"
        if isinstance(config, nn.CompressedConfig):
            self.attention = nn.CompressedAttention(config, rngs=rngs)
        else:
            self.attention = nn.DSAttention(config, indexer_type, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(dim, 4 * dim, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x, selection, sparse):
        given = {"indices": selection} if self.shared and sparse else {}
        y, aux = self.attention(self.norms[0](x), sparse=sparse, **given)
        x = x + y
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x)))), aux


class Decoder(nnx.Module):
    """Computes logits from tokens, and returns what each layer's attention returned."""

    def __init__(self, layers, *, rngs):
        first, _ = layers[0]
        dim = first.model_dim
        self.embed = nnx.Embed(VOCAB, dim, dtype=first.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(*layer, rngs=rngs) for layer in layers])
        self.norm = nnx.RMSNorm(dim, dtype=first.dtype, rngs=rngs)
        self.head = nnx.Linear(dim, VOCAB, use_bias=False, dtype=first.dtype, rngs=rngs)

    def __call__(self, tokens, sparse=True):
        x, found = self.embed(tokens), []
        for block in self.blocks:
            selection = found[-1].indices if found else None
            x, aux = block(x, selection, sparse)
            found.append(aux)
        return self.head(self.norm(x)), found


class Trainer:
    """The parameters of a model, and the training step."""

    def __init__(self, setting, seed):
        graph, self.params = nnx.split(Decoder(setting.layers, rngs=nnx.Rngs(seed)))
        rate = optax.warmup_cosine_decay_schedule(0, 3e-3, 20, max(setting.steps, 21), 3e-4)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
        self.opt = optimizer.init(self.params)

        def losses(params, tokens, sparse):
            logits, found = nnx.merge(graph, params)(tokens[:, :-1], sparse)
            text = training.next_token_loss(logits, tokens[:, 1:])
            # No parameter has a gradient of both losses. The indexers learn only from the KL.
            kl = training.indexer_loss(found)
            return text + kl, (text, kl)

        def step(params, opt, tokens, sparse):
            grads, found = jax.grad(losses, has_aux=True)(params, tokens, sparse)
            changes, opt = optimizer.update(grads, opt, params)
            return optax.apply_updates(params, changes), opt, found

        self._step = jax.jit(step, static_argnums=3, donate_argnums=(0, 1))
        self._losses = jax.jit(lambda *args: losses(*args)[1], static_argnums=2)

    def step(self, tokens, sparse):
        """Runs one training step, and returns the losses of the batch."""
        self.params, self.opt, found = self._step(self.params, self.opt, tokens, sparse)
        return found

    def validate(self, batches, sparse):
        """Returns the mean next-token loss in nats per byte."""
        found = [self._losses(self.params, tokens, sparse)[0] for tokens in batches]
        return float(np.mean(found))


def glm(large):
    """Returns four layers with GLM-5's attention, of which the first selects for all.

    The large size has a quarter of GLM-5's heads.
    """
    config = nn.AttentionConfig(
        model_dim=1024 if large else 128,
        num_heads=16 if large else 4,
        q_rank=512 if large else 96,
        kv_rank=512 if large else 64,
        nope_dim=192 if large else 24,
        rope_dim=64 if large else 16,
        v_dim=256 if large else 32,
        index_heads=32 if large else 4,
        index_dim=128 if large else 32,
        index_rope_dim=64 if large else 16,
        top_k=1024 if large else 32,
        index_rope_layout="interleaved",
        dtype=jnp.bfloat16 if large else jnp.float32,
    )
    layers = tuple((config, kind) for kind in ("full", "shared", "shared", "shared"))
    return Setting(layers, 8192 if large else 256, 1 if large else 4, 300, 100)


def v4(large):
    """Returns layers with DeepSeek-V4's attention.

    The first layer has only a window. The others also attend to compressed keys: either to keys
    selected among those compressed 4 to 1, or to all of those compressed more. The large size has a
    quarter of DeepSeek-V4's heads.
    """
    config = nn.CompressedConfig(
        model_dim=1024 if large else 128,
        num_heads=16 if large else 4,
        q_rank=512 if large else 96,
        head_dim=512 if large else 32,
        rope_dim=64 if large else 8,
        out_groups=4 if large else 2,
        out_rank=512 if large else 48,
        window=128 if large else 32,
        ratio=4,
        overlap=True,
        top_k=512 if large else 16,
        index_heads=64 if large else 4,
        index_dim=128 if large else 32,
        dtype=jnp.bfloat16 if large else jnp.float32,
    )
    plain = {"overlap": False, "top_k": None}
    alone = dataclasses.replace(config, ratio=None, **plain)
    heavy = dataclasses.replace(config, ratio=128 if large else 16, **plain)
    layers = tuple((each, "full") for each in (alone, config, heavy, config))
    length = 32768 if large else 256
    return Setting(layers, length, 1 if large else 4, 300, 0 if large else 100)


MODELS = {"glm": glm, "v4": v4}


def train(setting, corpus, seed=0):
    """Returns the trainer after its last step, and both losses of each step."""
    trainer, history = Trainer(setting, seed), []
    batches = Batches(corpus.train, setting.seq_len + 1, setting.batch, seed)
    with tqdm(range(setting.steps), unit=" steps", dynamic_ncols=True) as bar:
        for i in bar:
            sparse = i >= setting.dense_steps
            found = trainer.step(batches[i], sparse)
            history.append(found)
            if i % 10 == 0 or i == setting.steps - 1:  # Reading a number waits for the step.
                text, kl = map(float, found)
                bar.set_description(f"{'sparse' if sparse else 'dense'} {text:.3f}, KL {kl:.3f}")
    return trainer, np.asarray(history)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="glm")
    parser.add_argument("--size", choices=["small", "large"], default="small")
    parser.add_argument("--steps", type=int, help="number of all steps")
    parser.add_argument("--dense-steps", type=int, help="number of first steps with all keys")
    parser.add_argument("--data", type=Path, help="folder of text")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/own_decoder"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    given = {k: v for k in ("steps", "dense_steps") if (v := getattr(args, k)) is not None}
    setting = dataclasses.replace(MODELS[args.model](args.size == "large"), **given)
    corpus = load_corpus(args.data, args.run_dir)
    trainer, history = train(setting, corpus, args.seed)
    size = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(
        f"{args.model}, {size:,} parameters, {setting.seq_len} tokens per sequence: "
        f"{history[0, 0]:.3f} nats per byte in the first step, {history[-1, 0]:.3f} in the last, "
        f"KL {history[-1, 1]:.3f}"
    )
    held_out = validation_batches(corpus.validation, setting.seq_len + 1, setting.batch, 8)
    print(f"validation {trainer.validate(held_out, True):.3f} with selected keys", end="")
    small = args.size == "small"
    print(f", {trainer.validate(held_out, False):.3f} with all keys" if small else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
