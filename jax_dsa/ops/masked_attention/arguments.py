"""Checks of the arguments that `masked_attention` and `attention_probs` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from jax_dsa.core.arguments import (
    CausalAlignment,
    SegmentIds,
    Window,
    check_heads,
    scale_or_default,
    shared_sinks,
)
from jax_dsa.core.checks import BOOL, FLOATS, INT32, Args, type_of
from jax_dsa.core.typing import Array, Bool, Float, Implementation, Int
from jax_dsa.ops.block_mask.spec import BlockMask
from jax_dsa.ops.masked_attention.spec import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax_dsa.ops.block_mask.visible import Visible


class SharedKeywords(TypedDict, total=False):
    """Keyword arguments of both functions, for the overloads."""

    scale: float | None
    is_causal: bool
    causal_alignment: CausalAlignment
    local_window_size: Window | None
    softcap: float | None
    block_mask: BlockMask | None
    kv_indices: Int[Array, "B G W"] | None
    sinks: Float[Array, "N"] | None
    deterministic: bool
    implementation: Implementation | None


class Keywords(SharedKeywords, total=False):
    """Keyword arguments of `masked_attention`, for the overloads."""

    segment_ids: SegmentIds | None
    key_value_seq_lengths: Int[Array, "B"] | None


class VarlenKeywords(SharedKeywords, total=False):
    """Keyword arguments of `masked_attention_varlen`, for the overloads."""

    bias: Float[Array, "1|G|N 1|T S"] | None
    mask: Bool[Array, "1|G|N 1|T S"] | None


def queries_and_keys(args: Args, q: Any, k: Any) -> tuple[Array, Array]:
    """Checks q [B, T, N, D] and k [B, S, G, D]."""
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B S G D", (q.dtype,))
    check_heads(args, "q", "k")
    return q, k


def require_no_batch_axis(args: Args, q: Any) -> None:
    """Raises unless q has no batch axis, as packed sequences require."""
    args.shape("q", q, not args.batched, "[T, N, D], without a batch axis")


def options_and_masks(
    args: Args,
    q: Array,
    k: Array,
    visible: Visible,
    *,
    bias: Any,
    mask: Any,
    block_mask: Any,
    kv_indices: Any,
    sinks: Any,
    scale: Any,
    softcap: Any,
    deterministic: Any = False,
) -> tuple[Options, dict[str, Any]]:
    """Checks the arguments of these names.

    Returns:
        The options, and the operands besides q, k and v by name.
    """
    bias, bias_heads = _per_score(args, "bias", bias, (q.dtype,), q, k)
    mask, mask_heads = _per_score(args, "mask", mask, BOOL, q, k)
    if kv_indices is not None:
        kv_indices = args.array("kv_indices", kv_indices, "B G W", INT32)
        args.option("block_mask", block_mask, block_mask is None, "None beside 'kv_indices'")
    blocks, tile_heads = _block_mask_operands(args, block_mask, q, k)
    if softcap is not None:
        # Outside of this range, logits / softcap or 1 / softcap overflow float32.
        softcap = args.real("softcap", softcap)
        fits = 1e-30 <= softcap <= 1e30
        args.option("softcap", softcap, fits, "None or a float in 1e-30..1e30")
    options = Options(
        scale=scale_or_default(args, scale),
        softcap=softcap,
        bias_heads=bias_heads,
        mask_heads=mask_heads,
        tile_heads=tile_heads,
        deterministic=args.flag("deterministic", deterministic),
    )
    masks = {"bias": bias, "mask": mask, "kv_indices": kv_indices}
    masks["sinks"] = shared_sinks(args, sinks)
    return options, masks | visible._asdict() | blocks


def _per_score(
    args: Args, name: str, x: Any, dtypes: Sequence[Any], q: Array, k: Array
) -> tuple[Array | None, str]:
    """Returns `x` as [1|B, 1|G|N, 1|T, S], or None, and the factors of its head axis."""
    if x is None:
        return None, "x"
    x = args.typed(name, x, dtypes)
    own = x if args.batched else x[None]
    (batch, queries, heads, _), (_, keys, groups, _) = q.shape, k.shape
    allowed = ((1, batch), (1, groups, heads), (1, queries), (keys,))
    fits = own.ndim == 4 and all(n in sizes for n, sizes in zip(own.shape, allowed))
    want = ["|".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
    letters = "[1|B, 1|G|N, 1|T, S]" if args.batched else "[1|G|N, 1|T, S]"
    numbers = ", ".join(want[not args.batched :])
    args.shape(name, x, fits, f"{letters} = [{numbers}]", "1|B 1|G|N 1|T S")
    return own, _head_factors(own.shape[1], heads)


def _head_factors(size: int, heads: int) -> str:
    """Returns the factors of a head axis of `size`, which is 1, G or N = `heads`."""
    return "x" if size == 1 else "(g m)" if size == heads else "g"


def _block_mask_operands(
    args: Args, mask: Any, q: Array, k: Array
) -> tuple[dict[str, Array | None], str]:
    """Returns the operands of a block mask by name, and the factors of its head axis."""
    if mask is None:
        return dict.fromkeys(("rows", "tiles", "bits")), "x"
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"{args.op}: argument 'block_mask' is {type_of(mask)}, want a BlockMask from "
            f"make_block_mask"
        )
    (batch, queries, heads, _), (_, keys, groups, _) = q.shape, k.shape
    tiles = args.array("block_mask.tiles", mask.tiles, "b h i j", INT32)
    bits = args.array("block_mask.bits", mask.bits, "b h p r c", (jnp.uint8,))
    lists = {"num_kv_tiles": "i", "kv_tiles": "i j", "num_q_tiles": "j", "q_tiles": "j i"}
    for name, dims in lists.items():
        args.array(f"block_mask.{name}", getattr(mask, name), f"b h {dims}", INT32)
    got = (*tiles.shape[:2], mask.query_length, mask.key_length)
    fits = got[0] in (1, batch) and got[1] in (1, groups, heads) and got[2:] == (queries, keys)
    want = f"[1|{batch}, 1|{groups}|{heads}, {queries}, {keys}]"
    whole = jax.ShapeDtypeStruct(got, bool)
    args.shape("block_mask", whole, fits, want, "1|B 1|G|N T S")
    rows = jnp.arange(queries, dtype=jnp.int32)[None]
    return {"rows": rows, "tiles": tiles, "bits": bits}, _head_factors(got[1], heads)
