"""Array annotations such as `Float[Array, "B T N D"]`.

Each name is `typing.Annotated`. To a type checker the annotated type is `jax.Array`, and at run
time `typing.get_type_hints` finds the dims. The notation is that of jaxtyping, which the package
does not depend on.
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
