"""Text from a model, decoded with its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn import Fp8Linear

if TYPE_CHECKING:
    from jax_dsa.nn import DecoderCache, DecoderLM


def generate(
    model: DecoderLM,
    prompt: Int[Array, "B P"],
    steps: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
) -> Int[Array, "B L"]:
    """`steps` tokens after each prompt: one prefill, then one decode step a token, all with sparse
    attention.

    Temperature 0 takes the likeliest token, 1 samples from the model's distribution. Meant to be
    jitted.
    """
    if steps < 1:
        raise ValueError(f"generate: argument 'steps' is {steps}, want at least 1")
    _check_prompt("generate", prompt)

    def step(
        carry: tuple[jax.Array, DecoderCache], key: jax.Array
    ) -> tuple[tuple[jax.Array, DecoderCache], jax.Array]:
        token, cache = carry
        logits, cache = model.decode(token[:, None], cache)
        token = _pick(key, logits[:, -1], temperature)
        return (token, cache), token

    logits, cache = model.decode(prompt, model.init_cache(len(prompt), prompt.shape[1] + steps))
    first, *rest = jax.random.split(key, steps)
    token = _pick(first, logits[:, -1], temperature)
    if not rest:
        return token[:, None]
    _, tokens = jax.lax.scan(step, (token, cache), jnp.stack(rest))
    return jnp.concatenate([token[None], tokens]).T


class Stream(NamedTuple):
    """What a decode step goes on from beside the last tokens."""

    cache: DecoderCache
    key: jax.Array


class Sampler:
    """Text from a model a token of each request at a time, for whoever reads along.

    `prefill` takes the prompts in, `step` is one compiled program a token: append, indexer, top-k,
    sparse attention. Both write the cache in place: the stream that they are given is given up.
    Tokens stay on the device, so the next step can be under way while one is read.
    """

    PREFILL = 16384
    """Tokens of all requests that a prefill takes in at a time."""

    def __init__(self, model: DecoderLM, *, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._graph, self._params = nnx.split(_rounded(model))
        self._decode = jax.jit(self._next, donate_argnums=2)

    def prefill(
        self, prompt: Int[Array, "B P"], cache: DecoderCache, key: jax.Array
    ) -> tuple[Int[Array, "B 1"], Stream]:
        """The first token after each prompt, given a cache that is empty."""
        _check_prompt("Sampler.prefill", prompt)
        batch, length = prompt.shape
        chunk = max(1, self.PREFILL // max(1, batch))
        stream = Stream(cache, key)
        for start in range(0, length, chunk):
            token, stream = self.step(prompt[:, start : start + chunk], stream)
        return token, stream

    def step(self, tokens: Int[Array, "B T"], stream: Stream) -> tuple[Int[Array, "B 1"], Stream]:
        """The token after `tokens`, usually the one that came last."""
        return self._decode(self._params, tokens, stream)

    def _next(
        self, params: Any, tokens: Int[Array, "B T"], stream: Stream
    ) -> tuple[Int[Array, "B 1"], Stream]:
        logits, cache = nnx.merge(self._graph, params).decode(tokens, stream.cache)
        key, own = jax.random.split(stream.key)
        return _pick(own, logits[:, -1:], self.temperature), Stream(cache, key)


def _check_prompt(function: str, prompt: Int[Array, "B P"]) -> None:
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"{function}: argument 'prompt' has shape {prompt.shape}, want [B, P >= 1]"
        )


def _pick(key: jax.Array, logits: Float[Array, "*B V"], temperature: float) -> Int[Array, "*B"]:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def _rounded(model: DecoderLM) -> DecoderLM:
    """The model with matrices in the dtype that its layers multiply in, to which they would round
    them at every step; a step reads all of them.
    """
    quantised = {path for path, x in nnx.iter_graph(model) if isinstance(x, Fp8Linear)}

    def is_rounded(path: tuple[Any, ...], x: Any) -> bool:
        # The indexer's head weights are multiplied in float32; FP8 codes are of the matrix as it is
        # stored.
        return x.ndim > 1 and "weights" not in path and path[:-1] not in quantised

    graph, matrices, *others = nnx.split(model, is_rounded, ...)
    dtype = model.config.attention.dtype
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), matrices), *others)
