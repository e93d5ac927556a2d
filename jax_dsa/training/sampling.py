"""Text from a model, decoded with its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Int

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
    if prompt.shape[1] < 1:
        raise ValueError(f"generate: argument 'prompt' has shape {prompt.shape}, want [B, P >= 1]")

    def pick(key: jax.Array, logits: jax.Array) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
        return jax.random.categorical(key, logits / temperature).astype(prompt.dtype)

    def step(
        carry: tuple[jax.Array, DecoderCache], key: jax.Array
    ) -> tuple[tuple[jax.Array, DecoderCache], jax.Array]:
        token, cache = carry
        logits, cache = model.decode(token[:, None], cache)
        token = pick(key, logits[:, -1])
        return (token, cache), token

    logits, cache = model.decode(prompt, model.init_cache(len(prompt), prompt.shape[1] + steps))
    first, *rest = jax.random.split(key, steps)
    token = pick(first, logits[:, -1])
    if not rest:
        return token[:, None]
    _, tokens = jax.lax.scan(step, (token, cache), jnp.stack(rest))
    return jnp.concatenate([token[None], tokens]).T
