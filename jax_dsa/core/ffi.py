"""The CUDA extension: loading it, registering its handlers with XLA, and calling them."""

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
    """Returns why an XLA of FFI API version `runtime` cannot load handlers built against `built`.

    The result is "" if it can. XLA loads handlers that are not newer than itself. Registering a
    newer handler does not merely fail, it disables the whole GPU backend, so it must not be tried.
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
    """Returns whether the CUDA kernels can be used; if not, also the reason and the remedy.

    They can be used on a machine without a GPU, where a program may be compiled for another one.
    """
    if not _LOADED[0]:
        return _LOADED
    built, driver = extension().cuda_versions()
    if 0 < driver // 1000 < built // 1000:  # All of one major version are compatible.
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
    """Returns a CUDA version number as text: 12080 as "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def extension() -> Any:
    """Returns the loaded extension."""
    return importlib.import_module("jax_dsa._cuda")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the argument `disabled_checks` of `jax.export.export` for this package's kernels.

    JAX exports a program only if it knows every custom call in it, or if a check is disabled:

    >>> import jax, jax.numpy as jnp, jax_dsa
    >>> program = jax.jit(lambda x: jax_dsa.topk(x, 2))
    >>> checks = jax_dsa.export_checks()
    >>> exported = jax.export.export(program, disabled_checks=checks)(jnp.arange(8.0))
    >>> exported.out_avals
    (ShapedArray(int32[2]),)

    `exported.serialize()` needs the package `flatbuffers`, which the extra `export` installs.

    Returns:
        One entry for each handler of the extension; none if there is no extension.
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
        run: `(options, avals, *groups) -> results`, which calls one or more handlers. `avals` is
            the named tuple of the results with their shapes and dtypes.
        supports: `(options, *groups)` -> None, or the reason why the kernel cannot run this call.
            Operands have shapes and dtypes but perhaps no values; absent ones are None.
        limits: the calls that the kernel covers, as text for `python -m jax_dsa`.
        takes: the fields of the first group that the kernel reads; None for all. The kernel cannot
            run a call that has another operand.
        prefer_query_sharding: `(options, *groups)` -> whether the kernel prefers query sharding to
            head sharding, given the shapes of the whole call. Mesh axes that shard heads then split
            the queries. None means that it never does.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None]
    limits: str
    takes: tuple[str, ...] | None = None
    prefer_query_sharding: Callable[..., bool] | None = None

    def unsupported_reason(self, options: Any, *groups: Any) -> str | None:
        """Returns the reason why the kernel cannot run this call; None if it can."""
        fields = () if self.takes is None else groups[0]._fields
        for name in fields:
            if name not in (self.takes or ()) and getattr(groups[0], name) is not None:
                return f"it does not take '{name}'"
        if {type(n) for x in chain(*groups) if x is not None for n in x.shape} - {int}:
            return "it takes no symbolic sizes"
        return self.supports(options, *groups)


def call(
    target: str,
    operands: Sequence[Any],
    avals: Sequence[Any],
    aliases: dict[int, int] | None = None,
    **attrs: np.generic,
) -> list[Any]:
    """Calls one handler with the operands and returns its results.

    Args:
        target: the handler's name, as the extension registers it.
        operands: arrays, in the handler's order. None reaches the handler as an empty array.
        avals: shapes and dtypes of the results, in the handler's order. None makes an empty result.
        aliases: maps the index of an operand to the index of the result that may overwrite it in
            memory. XLA copies an operand that is read later.
        **attrs: the handler's attributes, as numpy scalars of the types that it expects.

    Returns:
        The results, with None where `avals` has None.
    """
    nothing = compat.match_vary(jnp.zeros(0, jnp.float32), *operands)
    absent = jax.ShapeDtypeStruct((0,), jnp.float32)
    declared = [absent if a is None else a for a in avals]
    results = jax.ffi.ffi_call(
        target,
        [compat.out_aval(a.shape, a.dtype, *operands) for a in declared],
        input_output_aliases=aliases,
    )(*[nothing if x is None else x for x in operands], **attrs)
    return [None if a is None else y for a, y in zip(avals, results, strict=True)]
