"""One of the two processes of test_distributed.py.

Both compute sparse attention and its gradients on a mesh that spans them.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dsa


def main(address: str, process: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    assert jax.process_count() == 2
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 4, 16)).astype(np.float32)
    kv = rng.standard_normal((2, 12, 1, 16)).astype(np.float32)
    indices = rng.integers(-1, 12, (2, 8, 1, 6)).astype(np.int32)

    def value_and_grads(q: jax.Array, kv: jax.Array, indices: jax.Array) -> tuple:
        def loss(q: jax.Array, kv: jax.Array) -> jax.Array:
            return jnp.sin(jax_dsa.sparse_mla(q, kv, indices, value_dim=8)).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))(q, kv)

    local = [jax.device_put(x, jax.local_devices()[0]) for x in (q, kv, indices)]
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(value_and_grads)(*local))]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (P("x"), P(None, "x")):  # sharded by batch, then by queries
        kv_spec = spec if spec == P("x") else P()
        specs = (spec, kv_spec, spec)
        args = [
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, s), lambda i, x=x: x[i])
            for x, s in zip((q, kv, indices), specs, strict=True)
        ]
        out = NamedSharding(mesh, P())
        got = jax.tree.leaves(jax.jit(value_and_grads, out_shardings=out)(*args))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(g.addressable_data(0)), w, rtol=1e-4, atol=1e-5)
    print(f"process {process} agrees")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
