"""The CUDA extension: loading it, registering its kernels with XLA, and calling them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np


def _incompatible(built: tuple[int, int], runtime: tuple[int, int]) -> str:
    """Why an XLA of FFI API version `runtime` cannot load kernels compiled against `built`, or "".

    XLA loads what is not newer than itself. A newer handler does not merely fail to register: it
    takes the whole GPU backend down with it, so it must not be tried.
    """
    if built[0] == runtime[0] and built <= runtime:
        return ""
    versions = "was built for XLA FFI API {}.{} and this jaxlib has {}.{}".format(*built, *runtime)
    if built > runtime:
        return (
            f"the extension {versions}: upgrade JAX (pip install -U jax), or rebuild jax_dsa "
            f"against this one's headers (JAX_DSA_CUDA=ON JAX_DSA_FFI_INCLUDE=$(python -c 'import "
            f"jax; print(jax.ffi.include_dir())') pip install --force-reinstall --no-deps jax_dsa)"
        )
    return f"the extension {versions}: upgrade jax_dsa (pip install -U jax_dsa)"


def _load() -> tuple[bool, str]:
    try:
        extension: Any = importlib.import_module("jax_dsa._cuda")
    except ModuleNotFoundError:
        return False, (
            "jax_dsa was installed without its CUDA extension; to build it, install the CUDA "
            "toolkit and reinstall with the environment variable JAX_DSA_CUDA=ON"
        )
    except ImportError as error:
        return False, f"the CUDA extension does not load: {error}"
    why = _incompatible(extension.FFI_API_VERSION, compat.runtime_ffi_api())
    if why:
        return False, why
    for name, handler in extension.targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return True, ""


_LOADED = _load()
_HOPPER = (9, 0)


@functools.cache
def status() -> tuple[bool, str]:
    """Whether the CUDA kernels can be used, and if not, why, with what to do about it.

    They can where there is no GPU: a program may be compiled there for another machine.
    """
    if not _LOADED[0]:
        return _LOADED
    built, driver = extension().cuda_versions()
    if 0 < driver // 1000 < built // 1000:  # of one major version all are compatible
        return False, (
            f"the kernels were compiled by CUDA {_version(built)}, and the driver knows CUDA "
            f"{_version(driver)}: upgrade the driver, or compile them by CUDA {driver // 1000} "
            f"(JAX_DSA_CUDA=ON CUDACXX=... pip install --force-reinstall --no-deps --no-binary "
            f"jax_dsa jax_dsa)"
        )
    others = {tuple(c) for c in extension().compute_capabilities()} - {_HOPPER}
    if not others:
        return True, ""
    found = ", ".join(f"{major}.{minor}" for major, minor in sorted(others))
    return False, (
        f"the kernels are compiled for Hopper (compute capability 9.0), and there are GPUs of "
        f"{found} here; CUDA_VISIBLE_DEVICES can leave them out"
    )


def _version(number: int) -> str:
    """12080 as "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def extension() -> Any:
    """The loaded extension."""
    return importlib.import_module("jax_dsa._cuda")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export` wants to be told of this package's kernels.

    JAX exports a program only if it knows every custom call in it, or is told not to ask:

    >>> import jax, jax.numpy as jnp, jax_dsa
    >>> program = jax.jit(lambda x: jax_dsa.topk(x, 2))
    >>> checks = jax_dsa.export_checks()
    >>> exported = jax.export.export(program, disabled_checks=checks)(jnp.arange(8.0))
    >>> exported.out_avals
    (ShapedArray(int32[2]),)

    Returns:
        One entry for each kernel of the extension; none if there is no extension.
    """
    targets = extension().targets() if _LOADED[0] else ()
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(targets)]


def either(values: Sequence[int]) -> str:
    """Returns the values as text for `Kernel.limits`: "8, 16 or 32"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel that implements a pass.

    Attributes:
        run: `(options, avals, *groups) -> results`: calls the handler, or several. `avals` are the
            results' shapes and dtypes, in the results' named tuple.
        supports: `(options, *groups)` -> None, or the reason why the kernel cannot run this call.
            Operands have shapes and dtypes, perhaps no values; absent ones are None.
        limits: what it covers, in words: shown by `python -m jax_dsa`.
        takes: the fields of the first group that it knows; None for all. One that it does not know
            it would ignore.
        prefer_query_sharding: `(options, *groups)` -> whether the kernel prefers query sharding to
            head sharding. Mesh axes that shard heads then split the queries.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None]
    limits: str
    takes: tuple[str, ...] | None = None
    prefer_query_sharding: Callable[..., bool] | None = None

    def unsupported_reason(self, options: Any, *groups: Any) -> str | None:
        """None, or the reason why it cannot run this call."""
        given = () if self.takes is None else groups[0]._fields
        for name in given:
            if name not in (self.takes or ()) and getattr(groups[0], name) is not None:
                return f"it does not take '{name}'"
        if any(not isinstance(n, int) for x in chain(*groups) if x is not None for n in x.shape):
            return "it takes no symbolic sizes"
        return self.supports(options, *groups)


def call(
    target: str,
    operands: Sequence[Any],
    avals: Sequence[Any],
    aliases: dict[int, int] | None = None,
    **attrs: np.generic,
) -> list[Any]:
    """Calls one handler, which takes the operands and gives results like `avals` in their order.

    Args:
        target: its name, as the extension registers it.
        operands, avals: arrays, and shapes with dtypes; None reaches the handler as an empty array.
        aliases: the numbers of operands that results may replace in memory, and of the results;
            XLA copies an operand that is read later.
        attrs: numpy scalars of the types that it has them in.
    """
    nothing = compat.match_vary(jnp.zeros(0, jnp.float32), *operands)
    absent = jax.ShapeDtypeStruct((0,), jnp.float32)
    given = [absent if a is None else a for a in avals]
    results = jax.ffi.ffi_call(
        target,
        [compat.out_aval(a.shape, a.dtype, *operands) for a in given],
        input_output_aliases=aliases,
    )(*[nothing if x is None else x for x in operands], **attrs)
    return [None if a is None else y for a, y in zip(avals, results, strict=True)]
