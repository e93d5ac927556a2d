"""Finds arguments whose axes of positions and heads are exchanged.

Many libraries store queries as [B, N, T, D], whereas the operators here take [B, T, N, D]. Sizes
that disagree often show which argument has the other order.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
POSITIONS = ("T", "S")
QUERY_HEADS = ("N", "J")
HEADS = (*QUERY_HEADS, "G", "H", "1")


class Given(NamedTuple):
    """An array argument of a call.

    Attributes:
        name: the argument's name.
        shape: its shape.
        dims: for each axis a letter, a number, or alternatives, as "1|T".
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def axis(self) -> int | None:
        """The axis of positions, if that of heads follows it."""
        pairs = enumerate(itertools.pairwise(self.dims))
        return next((i for i, (p, h) in pairs if p in POSITIONS and h in HEADS), None)

    @property
    def unusual(self) -> bool:
        """Whether the sizes of these two axes are usual only in the other order.

        There are rarely more heads than positions, except in a decode step, and rarely only one
        query head.
        """
        if self.axis is None:
            return False
        positions, heads = self.shape[self.axis : self.axis + 2]
        if self.dims[self.axis + 1] in QUERY_HEADS:
            return heads == 1 or heads > positions > 1
        return heads > positions

    def swapped(self) -> Given:
        """Returns the argument with the sizes of positions and heads exchanged."""
        return self._replace(shape=self._exchange(self.shape))

    @property
    def other_dims(self) -> str:
        """The dims with positions and heads exchanged, for a message."""
        return f"[{', '.join(self._exchange(self.dims))}]"

    def _exchange(self, values: tuple[T, ...]) -> tuple[T, ...]:
        assert self.axis is not None
        i = self.axis
        return (*values[:i], values[i + 1], values[i], *values[i + 2 :])


def exchanged(arrays: Sequence[Given], bound: Mapping[str, int]) -> list[Given]:
    """Returns the arguments that have exchanged axes, for a call whose sizes disagree.

    The sizes agree if the axes of these arguments are swapped, and none of them is unusual then.
    Among several such sets of arguments, the one that leaves the fewest unusual arguments counts,
    and then the smallest. The result is empty if there is none, if it is not unique, or if the
    sizes agree as they are, because the call then fails for another reason.

    Args:
        arrays: the arguments so far.
        bound: sizes that something else than an array determines.
    """
    if not all(
        isinstance(n, int) for n in (*bound.values(), *(n for x in arrays for n in x.shape))
    ):
        return []  # Symbolic sizes cannot be compared.
    if _agree(arrays, bound):
        return []
    other_order = {i: x.swapped() for i, x in enumerate(arrays) if x.axis is not None}
    movable = [i for i, x in other_order.items() if x != arrays[i] and not x.unusual]
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for count in range(1, len(movable) + 1):
        for chosen in itertools.combinations(movable, count):
            read = [other_order[i] if i in chosen else x for i, x in enumerate(arrays)]
            if _agree(read, bound):
                rank = sum(x.unusual for x in read), count
                found.setdefault(rank, []).append(chosen)
    best = min(found, default=None)
    if best is None or len(found[best]) > 1:
        return []
    return [arrays[i] for i in found[best][0]]


def sizes_of(arrays: Sequence[Given]) -> dict[str, tuple[int, str]]:
    """Returns the size of each letter, and the argument that determines it."""
    sizes: dict[str, tuple[int, str]] = {}
    for x in arrays:
        for dim, size in zip(x.dims, x.shape, strict=True):
            letters = [d for d in dim.split("|") if not d.isdigit()]
            if len(letters) == 1 and (letters[0] == dim or size != 1):
                sizes.setdefault(letters[0], (size, x.name))
    return sizes


def heads_divide(sizes: Mapping[str, int]) -> bool:
    """Returns whether the number of query heads is a multiple of that of KV heads."""
    heads, groups = sizes.get("N"), sizes.get("G")
    return heads is None or groups is None or (groups > 0 and heads % groups == 0)


def _agree(arrays: Sequence[Given], bound: Mapping[str, int]) -> bool:
    sizes = dict(bound)
    axes = [axis for x in arrays for axis in zip(x.dims, x.shape, strict=True)]
    for dim, size in axes:
        if dim.isalpha() and sizes.setdefault(dim, size) != size:
            return False
    for dim, size in axes:
        known = [int(d) if d.isdigit() else sizes.get(d, size) for d in dim.split("|")]
        if size not in known:
            return False
    return heads_divide(sizes)
