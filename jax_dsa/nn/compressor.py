"""The compressor of DeepSeek-V4: it pools blocks of tokens into keys, in training and decoding."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core import compat
from jax_dsa.core.checks import INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.layout import put_rows
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_module, check_type, hidden_states
from jax_dsa.nn.compressed_config import CompressedConfig
from jax_dsa.nn.ring import put_in_ring, rows_of_ring_and_new
from jax_dsa.nn.scopes import Linear, Module, RMSNorm, scoped
from jax_dsa.ops.gated_pool import gated_pool_for_norm

if TYPE_CHECKING:
    from jax_dsa.core.checks import Args


@exportable
class Stream(NamedTuple):
    """Compressed keys of some requests, and the contributions that the next keys will pool.

    Attributes:
        keys: Row w holds the key of block w, once the block is complete.
        values: Values of the last R tokens, before the pooling, in a ring buffer; see `nn.ring`.
        gates: Gates of the last R tokens, before the pooling, in a ring buffer.
    """

    keys: Float[Array, "B W D"]
    values: Float[Array, "B R F"]
    gates: Float[Array, "B R F"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(
    epsilon: float, scaled: Float[Array, "B W D"], squares: Float[Array, "B W"]
) -> Float[Array, "B W D"]:
    """Returns the RMS norm of keys.

    It has a derivative of its own because JAX's would save the keys in float32.

    Args:
        epsilon: Added to the mean square.
        scaled: The keys times the norm's scale.
        squares: The sum of each key's squares, before the scale.
    """
    return _rms_norm_fwd(epsilon, scaled, squares)[0]


def _rms_norm_fwd(epsilon: float, scaled: Array, squares: Array) -> tuple[Array, Any]:
    factor = jax.lax.rsqrt(squares / scaled.shape[-1] + epsilon)[..., None]
    return (scaled * factor).astype(scaled.dtype), (scaled, factor)


def _rms_norm_bwd(epsilon: float, saved: Any, dy: Array) -> tuple[Array, Array]:
    scaled, factor = saved
    by_squares = -0.5 / scaled.shape[-1] * factor**3
    return (dy * factor).astype(scaled.dtype), jnp.sum(dy * (scaled * by_squares), axis=-1)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


class Compressor(Module):
    """Pools every `ratio` tokens into a key, elementwise by a softmax over the tokens' gates.

    With `overlap` a token contributes to two keys, its own block's and the next block's, and each
    key pools 2 `ratio` contributions. The tokens of an incomplete block contribute to no key.

    Args:
        config: Sizes and switches of the layer; `config.ratio` is not None.
        dim: D, the width of the keys.
        rngs: Random streams that initialise the parameters.
    """

    def __init__(self, config: CompressedConfig, dim: int, *, rngs: nnx.Rngs) -> None:
        check_module("Compressor", config, CompressedConfig, rngs)
        assert config.ratio is not None
        self.config, self.dim, self.ratio = config, dim, config.ratio
        c, width = config, dim * (2 if config.overlap else 1)
        linear = {"use_bias": False, "dtype": c.dtype, "rngs": rngs}
        self.wkv = Linear(c.model_dim, width, **linear)
        self.wg = Linear(c.model_dim, width, **linear)
        self.position_bias = nnx.Param(jnp.zeros((self.ratio, width)))
        self.norm = RMSNorm(dim, epsilon=c.norm_eps, dtype=c.dtype, rngs=rngs)

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        starts: Int[Array, "B T"] | None,
    ) -> Float[Array, "B W D"]:
        """Returns the compressed keys of hidden states.

        Args:
            x: Hidden states.
            positions: Rotary positions of the tokens, int32.
            starts: Index of the first token of each token's document, int32. Block i of a document
                that begins at token s has the number s // ratio + i. None: each sequence is one
                document.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        args, x = hidden_states("Compressor", self, x, self.config.model_dim)
        positions = args.array("positions", positions, "B T", INT32)
        complete = x.shape[1] - x.shape[1] % self.ratio
        block_positions = positions[:, : complete : self.ratio]
        if starts is not None:
            first = functools.partial(_first_positions, self.ratio)
            block_positions = compat.left_to_compiler(first, block_positions)(positions, starts)
        return self.pool(self.wkv(x), self.wg(x), block_positions, starts)

    def stream(self, batch: int, capacity: int, max_rollback: int) -> Stream:
        """Returns an empty stream; the arguments are those of `CompressedAttention.init_cache`."""
        shape, dtype = (batch, *self._ring_shape(max_rollback)), self.config.dtype
        return Stream(
            jnp.zeros((batch, capacity // self.ratio, self.dim), dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
        )

    def check_stream(self, args: Args, name: str, stream: Stream, max_rollback: int) -> None:
        """Raises unless the argument `name` is a stream of these sizes in the layer's dtype."""
        check_type(args.op, name, stream, Stream)
        rows, width = self._ring_shape(max_rollback)
        dtypes = (jnp.dtype(self.config.dtype),)
        args.array(f"{name}.keys", stream.keys, f"B W {self.dim}", dtypes)
        args.array(f"{name}.values", stream.values, f"B {rows} {width}", dtypes)
        args.array(f"{name}.gates", stream.gates, f"B {rows} {width}", dtypes)

    def _ring_shape(self, max_rollback: int) -> tuple[int, int]:
        """Returns the sizes R and F of a stream's ring buffers."""
        history = self.ratio * (2 if self.config.overlap else 1) - 1  # what the next key may need
        return history + max_rollback, self.position_bias.shape[1]

    @scoped
    def extend(
        self,
        stream: Stream,
        x: Float[Array, "B T M"],
        lengths: Int[Array, "B"],
        counts: Int[Array, "B"],
    ) -> Stream:
        """Returns the stream with more tokens of each request.

        Args:
            stream: The keys and contributions of the tokens before.
            x: Hidden states of the new tokens.
            lengths: Number of tokens before the new ones in each request, int32.
            counts: Number of new tokens of each request, int32, 0 to T. The rest is padding.
        """
        ratio = self.ratio
        new_values, new_gates = self.wkv(x), self.wg(x)
        blocks = x.shape[1] // ratio + 1  # as many as T tokens can complete
        earlier_blocks = int(self.config.overlap)
        number = lengths[:, None] // ratio + jnp.arange(blocks, dtype=jnp.int32)
        # The rows of all blocks that may become complete. With overlap, they begin with the block
        # before the first one of these.
        first = (number[:, :1] - earlier_blocks) * ratio
        rows = first + jnp.arange((blocks + earlier_blocks) * ratio, dtype=jnp.int32)
        values = rows_of_ring_and_new(stream.values, new_values, rows, lengths)
        gates = rows_of_ring_and_new(stream.gates, new_gates, rows, lengths)
        starts = None
        if self.config.overlap:  # There is no block before a request's first one.
            is_first = (lengths < ratio)[:, None]
            rows = jnp.arange((blocks + 1) * ratio, dtype=jnp.int32)[None]
            starts = jnp.where(is_first & (rows >= ratio), jnp.int32(ratio), jnp.int32(0))
        pooled_blocks = jnp.arange(blocks + earlier_blocks, dtype=jnp.int32)
        keys = self.pool(values, gates, first + pooled_blocks * ratio, starts)
        is_complete = (number + 1) * ratio <= (lengths + counts)[:, None]
        rows = jnp.where(is_complete, number, -1)
        return Stream(
            put_rows(stream.keys, rows, keys[:, earlier_blocks:]),
            put_in_ring(stream.values, new_values, lengths, counts),
            put_in_ring(stream.gates, new_gates, lengths, counts),
        )

    def pool(
        self, values: Array, gates: Array, positions: Array, starts: Array | None
    ) -> Float[Array, "B W D"]:
        """Returns the normalised and rotated keys of projected tokens.

        Args:
            values: The tokens' values [B, T, F], where F is D or, with overlap, 2 D.
            gates: The tokens' gates [B, T, F].
            positions: Position of each block's first token [B, W], int32.
            starts: As in `__call__`.
        """
        bias = self.position_bias[...].astype(jnp.float32).reshape(self.ratio, -1, self.dim)
        values, gates = (x.reshape(*x.shape[:2], *bias.shape[1:]) for x in (values, gates))
        assert self.norm.scale is not None
        pooled = gated_pool_for_norm(values, gates, bias, self.norm.scale[...], starts)
        norm = functools.partial(_rms_norm, self.config.norm_eps)
        # Where the tokens are sharded, the pooling shards the channels instead; the norm reduces
        # over the channels, so the compiler chooses its sharding.
        keys = compat.left_to_compiler(norm, values)(*pooled)
        return self.config.rotate(keys, positions)


def _first_positions(
    ratio: int, positions: Int[Array, "B T"], starts: Int[Array, "B T"]
) -> Int[Array, "B W"]:
    """Returns the position of the first token of each block, by block number.

    Entries without a complete block are arbitrary. Of the rows that a block's number stands for,
    the last one at which a block begins is the block's first row.
    """
    batch, length = starts.shape
    count = length // ratio
    rows = jnp.arange(length, dtype=jnp.int32)[None]
    begins = jnp.where((rows - starts) % ratio == 0, rows, 0)[:, : count * ratio]
    first_rows = begins.reshape(batch, count, ratio).max(axis=2)
    return jnp.take_along_axis(positions, first_rows, axis=1)
