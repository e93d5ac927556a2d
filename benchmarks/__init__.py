"""Programs that measure jax_dsa. They are run from a checkout and are not part of the wheel."""
