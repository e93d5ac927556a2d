"""Makes `benchmarks` and `experiments`, which no wheel contains, importable in tests."""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]

# The root comes last, so that an installed jax_dsa wins over its sources.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
