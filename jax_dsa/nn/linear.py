"""Linear layers in FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jax_dsa.core.checks import Args, as_array
from jax_dsa.core.typing import Array, Float
from jax_dsa.nn.scopes import Linear, scoped
from jax_dsa.ops.fp8_linear import fp8_linear
from jax_dsa.ops.quantize_fp8.spec import leading_dims

if TYPE_CHECKING:
    from jax_dsa.nn.config import AttentionConfig
    from jax_dsa.nn.grouped_config import GroupedConfig


class Fp8Linear(Linear):
    """An `nnx.Linear` whose three matrix products, forward and backward, run in FP8.

    `jax_dsa.fp8_linear` computes them. Arguments and parameters are those of `nnx.Linear`. The
    kernel is quantised from the dtype that it is stored in, and its gradient is rounded to that
    dtype only. `precision`, `dot_general` and `preferred_element_type` have no effect.

    Source: DeepSeek-V3 (2024), section 3.3.
    """

    @scoped
    def __call__(self, inputs: Float[Array, "... F"], out_sharding: Any = None) -> Array:
        """Returns `inputs @ kernel + bias`, in the layer's `dtype`.

        If the layer has none, the result has the widest dtype of input and parameters.

        Raises:
            TypeError: If `inputs` is not an array.
            ValueError: If its last axis does not have `in_features` elements.
        """
        args = Args("Fp8Linear", "inputs", inputs, leading_dims(inputs, "F"))
        shape = getattr(as_array(inputs), "shape", ())
        if shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{args.op}: argument 'inputs' has shape {shape}, want [..., F] with "
                f"F={self.in_features} (from 'in_features')"
            )
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        y = fp8_linear(x, kernel)
        if out_sharding is not None:
            y = jax.reshard(y, out_sharding)
        return y if bias is None else y + bias


def projection(
    config: AttentionConfig | GroupedConfig,
    inputs: int,
    outputs: int,
    rngs: nnx.Rngs,
    *,
    bias: bool = False,
) -> Linear:
    """Returns a linear layer, in FP8 if `config.fp8` is True.

    Args:
        config: Configuration of the layer that the projection belongs to.
        inputs: Width of the input.
        outputs: Width of the output.
        rngs: Random streams that initialise the parameters.
        bias: Whether the projection has a bias.
    """
    layer = Fp8Linear if config.fp8 else Linear
    return layer(inputs, outputs, use_bias=bias, dtype=config.dtype, rngs=rngs)
