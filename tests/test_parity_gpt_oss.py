"""`masked_attention` with sinks in the place of the attention of gpt-oss; needs the extra `parity`.

The layer of `transformers` runs eagerly in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

import jax_dsa

torch = pytest.importorskip("torch", reason="needs the extra 'parity'")
gpt_oss = pytest.importorskip(
    "transformers.models.gpt_oss.modeling_gpt_oss", reason="needs the extra 'parity'"
)

N, G, D, HIDDEN, WINDOW = 8, 2, 16, 40, 9


def hf_layer(kind: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns an attention layer with random weights, and its configuration."""
    config = gpt_oss.GptOssConfig(
        hidden_size=HIDDEN, num_attention_heads=N, num_key_value_heads=G, head_dim=D,
        num_hidden_layers=1, layer_types=[kind], sliding_window=WINDOW, vocab_size=11,
        attn_implementation="eager",
    )  # fmt: skip
    layer = gpt_oss.GptOssAttention(config, 0)
    for p in layer.parameters():
        p.data = torch.tensor(rng.normal(size=p.shape) * p.shape[-1] ** -0.5, dtype=torch.float32)
    layer.sinks.data = torch.tensor(rng.normal(size=N) + 1, dtype=torch.float32)
    return layer, config


def rotate(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.asarray(cos)[:, :, None], jnp.asarray(sin)[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_layer(kind: str, rng: np.random.Generator) -> None:
    B, T = 2, 50
    layer, config = hf_layer(kind, rng)
    hidden, weight = (rng.normal(size=(B, T, HIDDEN)).astype(np.float32) for _ in range(2))
    x = torch.tensor(hidden, requires_grad=True)
    positions = torch.arange(T)[None].expand(B, T)
    cos, sin = gpt_oss.GptOssRotaryEmbedding(config)(x, positions)
    sliding = kind == "sliding_attention"
    make = gpt_oss.create_sliding_window_causal_mask if sliding else gpt_oss.create_causal_mask
    mask = make(config, x, None, None, position_ids=positions)
    want, _ = layer(x, (cos, sin), mask)
    (want * torch.tensor(weight)).sum().backward()

    def ours(params: dict[str, Any], x: jax.Array) -> jax.Array:
        def project(name: str, x: jax.Array) -> jax.Array:
            return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

        q, k, v = (
            project(name, x).reshape(B, T, heads, D)
            for name, heads in (("q_proj", N), ("k_proj", G), ("v_proj", G))
        )
        q, k = (rotate(y, cos.numpy(), sin.numpy()) for y in (q, k))
        out = jax_dsa.masked_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=(WINDOW - 1, 0) if sliding else None,
            sinks=params["sinks"],
        )
        return project("o_proj", out.reshape(B, T, N * D))

    params = {name: jnp.asarray(p.detach().numpy()) for name, p in layer.named_parameters()}
    got, pull = jax.vjp(jax.jit(ours), params, jnp.asarray(hidden))
    grads = pull(jnp.asarray(weight))
    assert_matches(got, want.detach().numpy(), 1e-5, "output")
    wanted = {name: p.grad.numpy() for name, p in layer.named_parameters()}
    assert_matches(grads, (wanted, x.grad.numpy()), 1e-5, "gradients")
