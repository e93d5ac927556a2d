"""FP8 records of caches in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from support.oracles import fp8

LATENT, BLOCKS, ROPE = 512, 4, 64


def packed(rows: np.ndarray) -> np.ndarray:
    """Returns the records [..., 656] of rows [..., 576]."""
    codes, scales = fp8.quantize(rows[..., :LATENT], LATENT // BLOCKS, True)
    pieces = codes, scales, rows[..., LATENT:].astype(ml_dtypes.bfloat16)
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in pieces], -1)


def unpacked(records: np.ndarray) -> np.ndarray:
    """Returns the rows of records, in float32."""
    pieces = np.split(records, (LATENT, LATENT + 4 * BLOCKS), -1)
    dtypes = ml_dtypes.float8_e4m3fn, np.float32, ml_dtypes.bfloat16
    codes, scales, rope = (
        np.ascontiguousarray(x).view(dtype).astype(np.float32)
        for x, dtype in zip(pieces, dtypes, strict=True)
    )
    return np.concatenate([codes * np.repeat(scales, LATENT // BLOCKS, -1), rope], -1)
