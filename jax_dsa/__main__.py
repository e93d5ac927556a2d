"""`python -m jax_dsa`: which kernels are available here, and why not the others."""

from jax_dsa.core.capabilities import capabilities

print(capabilities())
