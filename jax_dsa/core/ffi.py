"""The CUDA extension: loading it, registering its kernels with XLA, and calling them."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

_HEADER = "xla/ffi/api/c_api.h"


def _runtime_api() -> tuple[int, int]:
    """The FFI API version (major, minor) of the XLA that JAX runs on, from the header it ships."""
    text = (Path(jax.ffi.include_dir()) / _HEADER).read_text()
    found = {
        part: re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")
    }
    major, minor = (int(m.group(1)) if m else 0 for m in found.values())
    return major, minor


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
    why = _incompatible(extension.FFI_API_VERSION, _runtime_api())
    if why:
        return False, why
    for name, handler in extension.targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return True, ""


_STATUS = _load()


def status() -> tuple[bool, str]:
    """Whether the CUDA extension is loaded, and if not, why, with what to do about it."""
    return _STATUS


def extension() -> Any:
    """The loaded extension."""
    return importlib.import_module("jax_dsa._cuda")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel that implements a pass.

    Attributes:
        target: the FFI target's name; its handler takes the pass's operands and results in order,
            then the workspace as further results.
        limits: what it covers, in words: shown by `python -m jax_dsa`.
        supported: `(options, *operands)` -> None, or the reason why the kernel cannot run this
            call. Operands have shapes and dtypes, perhaps no values; absent ones are None.
        attrs: `(options, *operands)` -> the handler's attributes, as numpy scalars of its types.
        workspace: `(options, *operands)` -> what the kernel needs besides its results.
        composed: `(options, avals, *operands)` -> results, where the pass is more than one call of
            one handler; it reaches handlers through `handler`, and `attrs` and `workspace` are not
            used.
    """

    target: str
    limits: str
    supported: Callable[..., str | None]
    attrs: Callable[..., dict[str, np.generic]] = lambda *_: {}
    workspace: Callable[..., tuple[jax.ShapeDtypeStruct, ...]] = lambda *_: ()
    composed: Callable[..., tuple[jax.Array | None, ...]] | None = None

    def call(
        self,
        options: Any,
        operands: Sequence[jax.Array | None],
        avals: Sequence[jax.ShapeDtypeStruct | None],
    ) -> tuple[jax.Array | None, ...]:
        """Runs the kernel; an absent operand or result (None) reaches it as an empty array."""
        if self.composed is not None:
            return self.composed(options, avals, *operands)
        results = handler(
            self.target,
            operands,
            [*avals, *self.workspace(options, *operands)],
            self.attrs(options, *operands),
        )
        return results[: len(avals)]


def handler(
    target: str,
    operands: Sequence[jax.Array | None],
    avals: Sequence[jax.ShapeDtypeStruct | None],
    attrs: dict[str, np.generic],
) -> tuple[jax.Array | None, ...]:
    """Calls one handler; None among operands and results reaches it as an empty array."""
    nothing = compat.match_vary(jnp.zeros(0, jnp.float32), *operands)
    absent = jax.ShapeDtypeStruct((0,), jnp.float32)
    given = [absent if a is None else a for a in avals]
    results = jax.ffi.ffi_call(
        target,
        [compat.out_aval(a.shape, a.dtype, *operands) for a in given],
    )(*(nothing if x is None else x for x in operands), **attrs)
    return tuple(None if a is None else y for a, y in zip(avals, results, strict=True))
