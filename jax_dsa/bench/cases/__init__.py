"""The benchmark cases, one module per operator. `jax_dsa.bench.registry` lists them."""
