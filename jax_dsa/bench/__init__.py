"""Benchmarks of the operators. `python -m jax_dsa.bench --help` shows the options."""
