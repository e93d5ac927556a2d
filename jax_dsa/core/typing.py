"""Array annotations: `Float[Array, "B T N D"]`.

To a type checker each of them is `Annotated`, so that a user's `reveal_type` says `jax.Array`; at
run time they are that too, so that `typing.get_type_hints` works and finds the dims. They read as
those of jaxtyping do, which the core does not need at run time.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int
from typing import Annotated as UInt8
from typing import Literal

from jax import Array
from jax.typing import ArrayLike

Implementation = Literal["cuda", "xla"]

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Implementation", "Int", "UInt8"]
