"""The documents of a packed sequence, found one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def bounds(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first index and the exclusive end of each token's run of equal numbers."""
    ids = np.asarray(ids)
    starts, ends = np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.int64)
    for b, t in np.ndindex(*ids.shape):
        first = last = t
        while first > 0 and ids[b, first - 1] == ids[b, t]:
            first -= 1
        while last < ids.shape[1] - 1 and ids[b, last + 1] == ids[b, t]:
            last += 1
        starts[b, t], ends[b, t] = first, last + 1
    return starts, ends
