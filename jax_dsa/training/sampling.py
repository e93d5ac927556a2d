"""Generates text with a model and its key cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core.checks import INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn import DecoderCache, Fp8Linear
from jax_dsa.nn.arguments import check_type, token_counts, token_numbers

if TYPE_CHECKING:
    from jax_dsa.nn import DecoderLM


def generate(
    model: DecoderLM,
    prompt: Int[Array, "B P"],
    steps: int,
    key: jax.Array,
    *,
    counts: Int[Array, "B"] | None = None,
    temperature: float = 1.0,
) -> Int[Array, "B L"]:
    """Returns the tokens that a model generates after each prompt, with sparse attention.

    The function runs one prefill and then one decode step per token. It is meant to be jitted.

    Args:
        model: The model.
        prompt: The prompts, int32, with at least one token each.
        steps: Number of tokens to generate, at least 1.
        key: Random key of the draws.
        counts: Number of tokens of each prompt, int32, 1 to P; the tokens that follow are padding.
            Default: P.
        temperature: With 0 the most likely token is taken, and with 1 tokens are drawn from the
            model's distribution. Must be finite and not negative.

    Returns:
        The generated tokens, int32 [B, steps].

    Raises:
        TypeError: If the prompt, `counts` or the key has the wrong type.
        ValueError: If `steps`, `temperature` or the prompt's shape is invalid.
    """
    if steps < 1:
        raise ValueError(f"generate: argument 'steps' is {steps}, expected at least 1")
    counts = _check_prompt("generate", prompt, counts)
    _check_key("generate", key)
    _check_temperature("generate", temperature)

    def step(
        carry: tuple[jax.Array, DecoderCache], key: jax.Array
    ) -> tuple[tuple[jax.Array, DecoderCache], jax.Array]:
        token, cache = carry
        logits, cache = model.decode(token[:, None], cache)
        token = _pick(key, logits[:, -1], temperature)
        return (token, cache), token

    cache = model.init_cache(len(prompt), prompt.shape[1] + steps)
    logits, cache = model.decode(prompt, cache, counts=counts)
    first, *rest = jax.random.split(key, steps)
    token = _pick(first, _last(logits, counts), temperature)
    if not rest:
        return token[:, None]
    _, tokens = jax.lax.scan(step, (token, cache), jnp.stack(rest))
    return jnp.concatenate([token[None], tokens]).T


@exportable
class Stream(NamedTuple):
    """The state that a decode step continues from, in addition to the last tokens."""

    cache: DecoderCache
    key: jax.Array


class Sampler:
    """Generates one token of each request at a time, so that a caller can read along.

    `prefill` processes the prompts. `step` is one compiled program per token: it appends to the
    caches, scores and selects keys, and attends to them. Both methods donate the stream that they
    are given, so that the cache is updated in place. Tokens stay on the device, so the next step
    can run while the caller reads a token. With `counts`, requests may have different numbers of
    tokens in a call, also none, so that they can begin and end at different times.

    Args:
        model: The model. Its matrices are stored in the dtype that the layers multiply in.
        temperature: With 0 the most likely token is taken, and with 1 tokens are drawn from the
            model's distribution. Must be finite and not negative.

    Raises:
        ValueError: If `temperature` is invalid.
    """

    PREFILL = 16384
    """Tokens of all requests together that a prefill processes at a time."""

    def __init__(self, model: DecoderLM, *, temperature: float = 1.0) -> None:
        _check_temperature("Sampler", temperature)
        self.temperature = temperature
        self._graph, self._params = nnx.split(_cast_matrices(model))
        self._decode = jax.jit(self._next, donate_argnums=2)

    def prefill(
        self,
        prompt: Int[Array, "B P"],
        cache: DecoderCache,
        key: jax.Array,
        *,
        counts: Int[Array, "B"] | None = None,
    ) -> tuple[Int[Array, "B 1"], Stream]:
        """Processes the prompts and returns the first token after each of them.

        Args:
            prompt: The prompts, int32, with at least one token each unless `counts` is given.
            cache: A cache in which the requests that begin have a length of 0. It is donated.
            key: Random key of this stream's draws.
            counts: Number of tokens of each prompt, int32, 0 to P; the tokens that follow are
                padding. A request with 0 stays as it is, so others can begin beside it. Default: P.

        Returns:
            The token after each prompt's own last token, int32 [B, 1], -1 where a prompt has no
            token; and the stream for the next `step`.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        counts = _check_prompt("Sampler.prefill", prompt, counts)
        check_type("Sampler.prefill", "cache", cache, DecoderCache)
        _check_key("Sampler.prefill", key)
        batch, length = prompt.shape
        chunk = max(1, self.PREFILL // max(1, batch))
        stream = Stream(cache, key.copy())  # The caller's key is not donated.
        token, stream = self.step(prompt[:, :chunk], stream, counts=counts)
        for start in range(chunk, length, chunk):
            left = None if counts is None else counts - start
            following, stream = self.step(prompt[:, start : start + chunk], stream, counts=left)
            # A prompt without a token in this chunk keeps the token of the chunk it ended in.
            token = jnp.where(following < 0, token, following)
        return token, stream

    def step(
        self,
        tokens: Int[Array, "B T"],
        stream: Stream,
        *,
        counts: Int[Array, "B"] | None = None,
    ) -> tuple[Int[Array, "B 1"], Stream]:
        """Returns the token after `tokens`, and the next stream.

        Args:
            tokens: The tokens to append, usually those that the last call returned.
            stream: The stream that the last call returned, which is donated.
            counts: How many of the T tokens each request has, as in `DecoderLM.decode`. A request
                with a count of 0 stays as it is and gets the token -1. Default: all.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        args, tokens = token_numbers("Sampler.step", None, tokens)
        check_type(args.op, "stream", stream, Stream, "which the last call returned")
        if counts is not None:
            counts = args.array("counts", counts, "B", INT32)
        return self._decode(self._params, tokens, stream, counts)

    def _next(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        stream: Stream,
        counts: Int[Array, "B"] | None = None,
    ) -> tuple[Int[Array, "B 1"], Stream]:
        model = nnx.merge(self._graph, params)
        logits, cache = model.decode(tokens, stream.cache, counts=counts)
        key, own = jax.random.split(stream.key)
        token = _pick(own, _last(logits, counts), self.temperature)
        if counts is not None:
            token = jnp.where(counts > 0, token, -1)
        return token[:, None], Stream(cache, key)


def _check_prompt(
    function: str, prompt: Int[Array, "B P"], counts: Int[Array, "B"] | None
) -> Int[Array, "B"] | None:
    """Returns the checked `counts`. The prompt must have a token."""
    args, prompt = token_numbers(function, None, prompt, "prompt")
    args.shape("prompt", prompt, prompt.shape[1] > 0, "[B, P] with P of at least 1")
    return token_counts(args, counts, prompt.shape[1])


def _check_key(function: str, key: Any) -> None:
    """Raises TypeError unless the key is an array: of keys, or of numbers as of `PRNGKey`."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(
            f"{function}: argument 'key' is {type(key).__name__}, want a random key, such as "
            f"jax.random.key(0)"
        )


def _check_temperature(function: str, temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"{function}: argument 'temperature' is {temperature}, expected a finite number of at "
            f"least 0; 0 takes the most likely token"
        )


def _last(logits: Float[Array, "B T V"], counts: Int[Array, "B"] | None) -> Float[Array, "B V"]:
    """Returns the logits of each request's last token; arbitrary ones if it has none."""
    if counts is None:
        return logits[:, -1]
    last = jnp.clip(counts, 1, logits.shape[1]) - 1
    return jax.vmap(lambda x, i: x[i])(logits, last)


def _pick(key: jax.Array, logits: Float[Array, "*B V"], temperature: float) -> Int[Array, "*B"]:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def _cast_matrices(model: DecoderLM) -> DecoderLM:
    """Returns the model with its matrices in the dtype that its layers multiply in.

    Otherwise the layers would round every matrix in every step, and a step reads all of them.
    """
    quantized = {path for path, x in nnx.iter_graph(model) if isinstance(x, Fp8Linear)}

    def is_cast(path: tuple[Any, ...], x: Any) -> bool:
        # The indexer's head weights are multiplied in float32. FP8 layers quantize the float32
        # matrix; rounding it first would change their codes.
        return x.ndim > 1 and "weights" not in path and path[:-1] not in quantized

    graph, matrices, *others = nnx.split(model, is_cast, ...)
    dtype = model.config.attention.dtype
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), matrices), *others)
