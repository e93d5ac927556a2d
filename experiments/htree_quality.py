"""Whether tree attention keeps the loss: a small decoder trained on the same long sequences of text
with dense attention and with `htree_attention`.

    python -m jax_dsa.training.htree_quality --data SITE_PACKAGES
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.extras import needs_extra
from jax_dsa.nn.rotary import rope
from jax_dsa.ops.htree import htree_attention

with needs_extra("examples", __name__):
    import optax
    from flax import nnx
    from jax_dsa.training.report import grid
    from tqdm import tqdm

    from jax_dsa.training.data import VOCAB, Batches, RunError, load_corpus, validation_batches
    from jax_dsa.training.losses import token_losses

if TYPE_CHECKING:
    from jax_dsa.core.typing import Array, Float, Int

TOLERANCE = 0.02
"""The tree's validation loss may be this much above the dense one's."""
PARTS = 8
"""Of a sequence, whose losses are shown."""
TRIAL = 3
"""Steps of each model whose times decide how many there will be."""


class Sizes(NamedTuple):
    """Of the model and its sequences."""

    tokens: int
    layers: int
    width: int
    heads: int
    dim: int


class Layer(nnx.Module):
    """Attention with one head of keys and values, then a gated feed-forward layer."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width, inner = sizes.width, sizes.heads * sizes.dim
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, dtype=jnp.bfloat16, rngs=rngs)
        self.sizes = sizes
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.qkv = linear(width, inner + 2 * sizes.dim)
        self.out = linear(inner, width)
        self.gate_up, self.down = linear(width, 5 * width), linear(5 * width // 2, width)

    def __call__(self, x: Float[Array, "B T M"], top_k: int | None) -> Float[Array, "B T M"]:
        """Hidden states to hidden states; `top_k` is the tree's, None is dense attention."""
        heads, dim = self.sizes.heads, self.sizes.dim
        y = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], heads + 2, dim)
        q, k, v = jnp.split(y, (heads, heads + 1), axis=2)
        y = attend(q, k, v, top_k)
        x = x + self.out(y.reshape(*x.shape[:2], heads * dim))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class Decoder(nnx.Module):
    """Embedding, layers and the projection to the next byte's logits."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(sizes.width, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], top_k: int | None) -> Float[Array, "B T V"]:
        """Logits; see `Layer`."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, top_k)
        return self.head(self.norm(x)).astype(jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, top_k: int | None) -> jax.Array:
    """Causal attention with RoPE, dense or of a tree."""
    if top_k is not None:
        return htree_attention(q, k, v, top_k=top_k)
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(
        rope(q, positions), rope(k, positions), v, is_causal=True, implementation=implementation
    )


class Training:
    """What is the same for all models."""

    def __init__(self, sizes: Sizes, seed: int, rate: float) -> None:
        self.sizes, self.seed, self.rate = sizes, seed, rate
        self._graph: Any = nnx.graphdef(nnx.eval_shape(lambda: Decoder(sizes, nnx.Rngs(0))))
        # The rate comes with each step, as it depends on how many there will be.
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), optax.scale(-1.0)
        )

    def init(self) -> tuple[Any, Any]:
        """Parameters and the optimiser's state; the same for every model."""
        params = nnx.state(Decoder(self.sizes, nnx.Rngs(self.seed)))
        return params, self._optimizer.init(params)

    @functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
    def step(
        self, state: tuple[Any, Any], batch: jax.Array, rate: jax.Array, top_k: int | None
    ) -> tuple[tuple[Any, Any], jax.Array]:
        """The state after a batch [B, T + 1], and its loss."""
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: self._losses(p, batch, top_k).mean())(params)
        updates, opt = self._optimizer.update(grads, opt)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return (params, opt), loss

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def losses(self, params: Any, batch: jax.Array, top_k: int | None) -> jax.Array:
        """Of each token."""
        return self._losses(params, batch, top_k)

    def _losses(self, params: Any, batch: jax.Array, top_k: int | None) -> jax.Array:
        logits = nnx.merge(self._graph, params)(batch[:, :-1], top_k)
        return token_losses(logits, batch[:, 1:])

    def schedule(self, step: int, steps: int) -> float:
        """Of the learning rate: linear over a twentieth of the steps, then a cosine to a tenth."""
        ramp = max(1, steps // 20)
        if step < ramp:
            return self.rate * (step + 1) / ramp
        share = (step - ramp) / max(1, steps - ramp)
        return self.rate * (0.55 + 0.45 * float(np.cos(np.pi * share)))


def main(argv: list[str] | None = None) -> int:
    """Runs the check; 0 if every tree's loss is within the tolerance, 1 if one is not."""
    parser = _parser()
    args = parser.parse_args(argv)
    sizes = Sizes(args.tokens, args.layers, args.width, args.heads, args.dim)
    training = Training(sizes, args.seed, args.learning_rate)
    try:
        corpus = load_corpus(args.data, args.run_dir, packages=args.data is not None)
        batches = Batches(corpus.train, sizes.tokens + 1, 1, args.seed)
        held = validation_batches(corpus.validation, sizes.tokens + 1, 1, args.sequences)
    except RunError as error:
        parser.error(str(error))
    models = {"dense": None, **{f"tree, top_k {k}": k for k in args.top_k}}
    seconds = {name: _seconds(training, batches, top_k) for name, top_k in models.items()}
    steps = max(TRIAL, round(60 * args.minutes / sum(seconds.values())))
    params = {}
    curves: dict[str, list[float]] = {}
    print(f"{corpus.name}: {steps} steps of {sizes.tokens} bytes; {sizes}", flush=True)
    for name, top_k in models.items():
        params[name], curves[name] = _train(training, batches, steps, name, top_k)
    # The dense model's parameters with each tree say how much is owed to training with it.
    judged = {name: (params[name], top_k) for name, top_k in models.items()}
    judged |= {f"dense with {n}": (params["dense"], k) for n, k in models.items() if k is not None}
    found = {
        name: np.mean([training.losses(p, batch, k)[0] for batch in held], axis=0)
        for name, (p, k) in judged.items()
    }
    table, within = _table(found, seconds, list(models))
    print(f"\n{len(held)} sequences validate\n\n{table}")
    (args.run_dir / "htree_quality.txt").write_text(table + "\n")
    _write(curves, found, args.run_dir / "htree_quality.csv")
    return int(not within)


def _seconds(training: Training, batches: Batches, top_k: int | None) -> float:
    """Of a step, on parameters that are thrown away."""
    state = training.init()
    for i in range(TRIAL + 1):
        if i == 1:  # the first one waits for the compiler
            start = time.perf_counter()
        state, loss = training.step(state, batches[i], jnp.float32(0), top_k)
        loss.block_until_ready()
    return (time.perf_counter() - start) / TRIAL


def _train(
    training: Training, batches: Batches, steps: int, name: str, top_k: int | None
) -> tuple[Any, list[float]]:
    """Parameters after the steps, and the loss of each."""
    state, losses = training.init(), []
    progress = tqdm(range(steps), desc=name, mininterval=5, file=sys.stdout)
    for step in progress:
        rate = jnp.float32(training.schedule(step, steps))
        state, loss = training.step(state, batches[step], rate, top_k)
        losses.append(loss)
        if step % 10 == 9:
            progress.set_postfix(loss=f"{float(loss):.4f}", refresh=False)
    return state[0], [float(loss) for loss in losses]


def _table(
    found: dict[str, np.ndarray], seconds: dict[str, float], models: list[str]
) -> tuple[str, bool]:
    """And whether all trees are within the tolerance."""
    parts = [f"{i + 1}/{PARTS}" for i in range(PARTS)]
    rows: list[tuple[str, ...]] = [("nats per byte", "validation", *parts, "ms a step")]
    for name, losses in found.items():
        by_part = [f"{x.mean():.4f}" for x in np.array_split(losses, PARTS)]
        time = f"{1e3 * seconds[name]:.0f}" if name in seconds else ""
        rows.append((name, f"{losses.mean():.4f}", *by_part, time))
    dense = found["dense"].mean()
    changes = {name: float(found[name].mean() / dense - 1) for name in models[1:]}
    lines = [
        f"{'PASS' if change <= TOLERANCE else 'FAIL'}  {name}: validation loss within "
        f"{TOLERANCE:.0%} of dense attention's: {change:+.2%}"
        for name, change in changes.items()
    ]
    within = all(change <= TOLERANCE for change in changes.values())
    return "\n".join([grid(rows), "", *lines]), within


def _write(curves: dict[str, list[float]], found: dict[str, np.ndarray], path: Path) -> None:
    """By step in training, by part of a sequence in validation."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("measure", "model", "number", "nats_per_byte"))
        for name, losses in curves.items():
            writer.writerows(("step", name, i, f"{x:.5f}") for i, x in enumerate(losses, 1))
        for name, by_token in found.items():
            parts = enumerate(np.array_split(by_token, PARTS), 1)
            writer.writerows(("part", name, i, f"{x.mean():.5f}") for i, x in parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of packages; default Python's own")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/htree_quality"))
    parser.add_argument("--top-k", type=int, nargs="+", default=[128], help="a tree for each")
    parser.add_argument("--tokens", type=int, default=32768, help="of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--sequences", type=int, default=16, help="that validate")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, of all models")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
