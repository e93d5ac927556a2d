"""Measures what tree attention costs: trains a small decoder with dense and with tree attention.

    python experiments/htree_quality.py --data SITE_PACKAGES

All models start from the same parameters and train on the same long sequences of text.
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

with needs_extra("examples", "experiments/htree_quality.py"):
    import optax
    from flax import nnx
    from tqdm import tqdm

    from jax_dsa.training.data import VOCAB, Batches, RunError, load_corpus, validation_batches
    from jax_dsa.training.losses import token_losses
    from jax_dsa.training.summary import grid

if TYPE_CHECKING:
    from jax_dsa.core.typing import Array, Float, Int

TOLERANCE = 0.02
"""Largest relative increase of the tree's validation loss over the dense model's that passes."""
BINS = 8
"""Number of position bins for which losses are shown."""
TRIAL = 3
"""Steps of each model that are timed to plan how many steps fit into the given minutes."""


class Sizes(NamedTuple):
    """The sizes of the model and of its sequences."""

    tokens: int
    layers: int
    width: int
    heads: int
    dim: int


class Layer(nnx.Module):
    """Attention with one KV head, followed by a gated feed-forward layer."""

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
        """Returns the next hidden states. Attention is dense if `top_k` is None, else by a tree."""
        heads, dim = self.sizes.heads, self.sizes.dim
        y = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], heads + 2, dim)
        q, k, v = jnp.split(y, (heads, heads + 1), axis=2)
        y = attend(q, k, v, top_k)
        x = x + self.out(y.reshape(*x.shape[:2], heads * dim))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class Decoder(nnx.Module):
    """An embedding, the layers, and a projection to the logits of the next byte."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(sizes.width, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], top_k: int | None) -> Float[Array, "B T V"]:
        """Returns the logits. Attention is dense if `top_k` is None, else by a tree."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, top_k)
        return self.head(self.norm(x)).astype(jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, top_k: int | None) -> jax.Array:
    """Computes causal attention with RoPE: dense if `top_k` is None, else by a tree."""
    if top_k is not None:
        return htree_attention(q, k, v, top_k=top_k)
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(
        rope(q, positions), rope(k, positions), v, is_causal=True, implementation=implementation
    )


class Training:
    """The training program, which is the same for all models.

    Args:
        sizes: The sizes of the model.
        seed: Seed of the parameters.
        rate: Peak learning rate.
    """

    def __init__(self, sizes: Sizes, seed: int, rate: float) -> None:
        self.sizes, self.seed, self.rate = sizes, seed, rate
        self._graph: Any = nnx.graphdef(nnx.eval_shape(lambda: Decoder(sizes, nnx.Rngs(0))))
        # The learning rate is an argument of each step, because it depends on the number of steps.
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), optax.scale(-1.0)
        )

    def init(self) -> tuple[Any, Any]:
        """Returns the initial parameters and optimizer state, which are the same for all models."""
        params = nnx.state(Decoder(self.sizes, nnx.Rngs(self.seed)))
        return params, self._optimizer.init(params)

    @functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
    def step(
        self, state: tuple[Any, Any], batch: jax.Array, rate: jax.Array, top_k: int | None
    ) -> tuple[tuple[Any, Any], jax.Array]:
        """Returns the state after one batch [B, T + 1], and the batch's loss."""
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: self._losses(p, batch, top_k).mean())(params)
        updates, opt = self._optimizer.update(grads, opt)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return (params, opt), loss

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def losses(self, params: Any, batch: jax.Array, top_k: int | None) -> jax.Array:
        """Returns the loss of each token of a batch [B, T + 1], float32 [B, T]."""
        return self._losses(params, batch, top_k)

    def _losses(self, params: Any, batch: jax.Array, top_k: int | None) -> jax.Array:
        logits = nnx.merge(self._graph, params)(batch[:, :-1], top_k)
        return token_losses(logits, batch[:, 1:])

    def schedule(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step.

        It rises linearly over a twentieth of the steps, and then falls along a cosine to a tenth.
        """
        ramp = max(1, steps // 20)
        if step < ramp:
            return self.rate * (step + 1) / ramp
        progress = (step - ramp) / max(1, steps - ramp)
        return self.rate * (0.55 + 0.45 * float(np.cos(np.pi * progress)))


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        0 if the loss of every tree is within the tolerance, else 1.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    sizes = Sizes(args.tokens, args.layers, args.width, args.heads, args.dim)
    training = Training(sizes, args.seed, args.learning_rate)
    try:
        corpus = load_corpus(args.data, args.run_dir, packages=args.data is not None)
        batches = Batches(corpus.train, sizes.tokens + 1, 1, args.seed)
        validation = validation_batches(corpus.validation, sizes.tokens + 1, 1, args.sequences)
    except RunError as error:
        parser.error(str(error))
    models = {"dense": None, **{f"tree, top_k {k}": k for k in args.top_k}}
    seconds = {name: _seconds_per_step(training, batches, k) for name, k in models.items()}
    steps = max(TRIAL, round(60 * args.minutes / sum(seconds.values())))
    params = {}
    curves: dict[str, list[float]] = {}
    print(f"{corpus.name}: {steps} steps of {sizes.tokens} bytes; {sizes}", flush=True)
    for name, top_k in models.items():
        params[name], curves[name] = _train(training, batches, steps, name, top_k)
    # The dense model is also evaluated with each tree, to show what training with the tree gains.
    evaluated = {name: (params[name], top_k) for name, top_k in models.items()}
    evaluated |= {
        f"dense with {n}": (params["dense"], k) for n, k in models.items() if k is not None
    }
    losses = {
        name: np.mean([training.losses(p, batch, k)[0] for batch in validation], axis=0)
        for name, (p, k) in evaluated.items()
    }
    table, within = _table(losses, seconds, list(models))
    print(f"\n{len(validation)} validation sequences\n\n{table}")
    (args.run_dir / "htree_quality.txt").write_text(table + "\n")
    _write(curves, losses, args.run_dir / "htree_quality.csv")
    return int(not within)


def _seconds_per_step(training: Training, batches: Batches, top_k: int | None) -> float:
    """Times a few steps, whose parameters are discarded."""
    state = training.init()
    for i in range(TRIAL + 1):
        if i == 1:  # The first step waits for the compiler.
            start = time.perf_counter()
        state, loss = training.step(state, batches[i], jnp.float32(0), top_k)
        loss.block_until_ready()
    return (time.perf_counter() - start) / TRIAL


def _train(
    training: Training, batches: Batches, steps: int, name: str, top_k: int | None
) -> tuple[Any, list[float]]:
    """Returns the parameters after the last step, and the loss of each step."""
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
    losses: dict[str, np.ndarray], seconds: dict[str, float], models: list[str]
) -> tuple[str, bool]:
    """Returns the results as text, and whether all trees are within the tolerance."""
    bins = [f"{i + 1}/{BINS}" for i in range(BINS)]
    rows: list[tuple[str, ...]] = [("nats per byte", "validation", *bins, "ms per step")]
    for name, by_token in losses.items():
        by_bin = [f"{x.mean():.4f}" for x in np.array_split(by_token, BINS)]
        time = f"{1e3 * seconds[name]:.0f}" if name in seconds else ""
        rows.append((name, f"{by_token.mean():.4f}", *by_bin, time))
    dense = losses["dense"].mean()
    changes = {name: float(losses[name].mean() / dense - 1) for name in models[1:]}
    lines = [
        f"{'PASS' if change <= TOLERANCE else 'FAIL'}  {name}: validation loss within "
        f"{TOLERANCE:.0%} of dense attention's: {change:+.2%}"
        for name, change in changes.items()
    ]
    within = all(change <= TOLERANCE for change in changes.values())
    return "\n".join([grid(rows), "", *lines]), within


def _write(curves: dict[str, list[float]], losses: dict[str, np.ndarray], path: Path) -> None:
    """Writes the training losses by step, and the validation losses by bin ("part")."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("measure", "model", "number", "nats_per_byte"))
        for name, by_step in curves.items():
            writer.writerows(("step", name, i, f"{x:.5f}") for i, x in enumerate(by_step, 1))
        for name, by_token in losses.items():
            bins = enumerate(np.array_split(by_token, BINS), 1)
            writer.writerows(("part", name, i, f"{x.mean():.5f}") for i, x in bins)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder of Python packages (default: Python's standard library)"
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/htree_quality"))
    parser.add_argument(
        "--top-k",
        type=int,
        nargs="+",
        default=[128],
        help="selected nodes per layer; one tree model is trained for each number",
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64, help="dims per head")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--sequences", type=int, default=16, help="validation sequences")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="training time of all models together"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
