"""`python -m jax_dsa` prints which kernels are available here, and why the others are not."""

from jax_dsa.core.capabilities import capabilities

print(capabilities())
