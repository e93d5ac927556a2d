"""`make demo`: trains a small decoder with sparse attention on real text."""

import sys

from jax_dsa.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
