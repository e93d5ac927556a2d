"""Benchmarks: `python -m jax_dsa.bench --help`."""
