"""The CUDA extension: loading it, registering its handlers with XLA, and calling them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

# Compute capabilities (major, minor).
Gpu = tuple[int, int]
_HOPPER = (9, 0)
_LEAST = (8, 0)  # the oldest GPUs with portable kernels


def status() -> tuple[bool, str]:
    """Returns whether the CUDA kernels can be used; if not, also the reason and the remedy.

    They can be used on a machine without a GPU, where a program may be compiled for another one.
    """
    return _status(_machine(), os.getenv("JAX_DSA_TIER", "")) if _LOADED[0] else _LOADED


@functools.cache
def _status(machine: _Machine, tier: str) -> tuple[bool, str]:
    """Returns `status` for this value of JAX_DSA_TIER. Every call of an operator asks."""
    # All versions with the same major number are compatible.
    if 0 < machine.driver // 1000 < machine.built // 1000:
        return False, (
            f"the kernels were compiled by CUDA {_version(machine.built)}, and the driver knows "
            f"CUDA {_version(machine.driver)}: upgrade the driver, or compile them by CUDA "
            f"{machine.driver // 1000} (JAX_DSA_CUDA=ON CUDACXX=... pip install --force-reinstall "
            f"--no-deps --no-binary jax_dsa jax_dsa)"
        )
    others = [gpu for gpu in machine.gpus if _tier_of(gpu, machine.tiers, tier) is None]
    if not others:
        return True, ""
    needed = f"the kernels need compute capability {gpu_name(_LEAST)} or newer"
    if "portable" not in machine.tiers:
        needed = "the extension was built without portable kernels (JAX_DSA_TIERS)"
        if tier:
            return False, f"{needed}, and JAX_DSA_TIER asks for them"
    found = ", ".join(map(gpu_name, others))
    return (
        False,
        f"{needed}, and there are GPUs of {found} here; CUDA_VISIBLE_DEVICES can leave them out",
    )


@dataclasses.dataclass(frozen=True)
class _Machine:
    """What the extension says about itself and about this machine."""

    built: int  # the CUDA version of the kernels
    driver: int  # the newest CUDA version that the driver supports; 0 without a driver
    gpus: tuple[Gpu, ...]  # the GPUs of this process, each compute capability once
    tiers: tuple[str, ...]  # the tiers of kernels that were built


@functools.cache
def _machine() -> _Machine:
    """Asks the extension, which asks the driver. No JAX backend starts."""
    if not _LOADED[0]:
        return _Machine(0, 0, (), ("hopper", "portable"))
    module = extension()
    built, driver = module.cuda_versions()
    gpus = sorted({(major, minor) for major, minor in module.compute_capabilities()})
    return _Machine(built, driver, tuple(gpus), tuple(module.tiers()))


def gpus() -> tuple[Gpu, ...]:
    """Returns the compute capabilities of the GPUs of this process, each once."""
    return _machine().gpus


def gpu_name(gpu: Gpu) -> str:
    """Returns a compute capability as text: "9.0"."""
    return f"{gpu[0]}.{gpu[1]}"


def portable_tier_forced() -> bool:
    """Returns whether JAX_DSA_TIER=portable asks for portable kernels on Hopper GPUs too.

    Raises:
        ValueError: the variable has another value.
    """
    return _is_portable(os.getenv("JAX_DSA_TIER", ""))


def _is_portable(tier: str) -> bool:
    if tier not in ("", "portable"):
        raise ValueError(f"the environment variable JAX_DSA_TIER is '{tier}', want 'portable'")
    return tier == "portable"


@contextlib.contextmanager
def portable_tier() -> Iterator[None]:
    """Makes Hopper GPUs run portable kernels in programs that are traced and executed inside.

    It holds for all threads.
    """
    before = os.environ.get("JAX_DSA_TIER", "")
    try:
        os.environ["JAX_DSA_TIER"] = "portable"
        extension().force_portable_tier(True)
        yield
    finally:
        os.environ["JAX_DSA_TIER"] = before
        extension().force_portable_tier(before == "portable")


def tier_of(gpu: Gpu) -> str | None:
    """Returns the tier of kernels that a GPU runs, "hopper" or "portable"; None if it runs none."""
    return _tier_of(gpu, _machine().tiers, os.getenv("JAX_DSA_TIER", ""))


@functools.cache
def _tier_of(gpu: Gpu, tiers: tuple[str, ...], tier: str) -> str | None:
    """Returns `tier_of` for the tiers that were built and for this value of JAX_DSA_TIER."""
    if gpu == _HOPPER and "hopper" in tiers and not _is_portable(tier):
        return "hopper"
    return "portable" if gpu >= _LEAST and "portable" in tiers else None


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


def has_both_tiers() -> bool:
    """Returns whether the GPUs of this process run kernels of either tier."""
    tiers = {tier_of(gpu) for gpu in gpus()}
    return status()[0] and tiers == {"hopper"} and "portable" in _machine().tiers


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel that implements a pass.

    Attributes:
        run: `(options, avals, *groups) -> results`, which calls one or more handlers. `avals` is
            the named tuple of the results with their shapes and dtypes.
        supports: `(options, *groups)` -> None, or the reason why the kernel cannot run this call on
            a Hopper GPU. Operands have shapes and dtypes but perhaps no values; absent ones are
            None.
        limits: the calls that the kernel covers, as text for `python -m jax_dsa`.
        takes: the fields of the first group that the kernel reads; None for all. The kernel cannot
            run a call that has another operand.
        prefer_query_sharding: `(options, *groups)` -> whether the kernel prefers query sharding to
            head sharding, given the shapes of the whole call. Mesh axes that shard heads then split
            the queries. None means that it never does.
        portable: like `supports`, for the kernels of the portable tier. None: there are none.
        portable_since: the oldest GPU that runs them.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None]
    limits: str
    takes: tuple[str, ...] | None = None
    prefer_query_sharding: Callable[..., bool] | None = None
    portable: Callable[..., str | None] | None = None
    portable_since: Gpu = _LEAST

    def unsupported_reason(self, options: Any, *groups: Any) -> str | None:
        """Returns the reason why the kernel cannot run this call; None if it can.

        It must be able to run on every GPU of this process. Without a GPU, the program may be for a
        Hopper GPU elsewhere.
        """
        fields = () if self.takes is None else groups[0]._fields
        for name in fields:
            if name not in (self.takes or ()) and getattr(groups[0], name) is not None:
                return f"it does not take '{name}'"
        for x in chain(*groups):
            if x is not None and set(map(type, x.shape)) - {int}:
                return "it takes no symbolic sizes"
        machine, asked = _machine(), os.getenv("JAX_DSA_TIER", "")
        portable = self.portable if "portable" in machine.tiers else None
        for gpu in machine.gpus or (_HOPPER,):
            tier = _tier_of(gpu, machine.tiers, asked)
            if tier is None or (
                tier == "portable" and (portable is None or gpu < self.portable_since)
            ):
                forced = " in the portable tier (JAX_DSA_TIER)" if gpu == _HOPPER else ""
                return f"it has no kernel for GPUs of compute capability {gpu_name(gpu)}{forced}"
            first = self.supports if tier == "hopper" else portable
            why = None if first is None else first(options, *groups)
            # The launcher takes the portable kernel for what the Hopper kernel does not cover.
            if why is not None and portable not in (None, first):
                why = why if portable(options, *groups) is not None else None
            if why is not None:
                return why
        return None

    def tier_on(self, gpu: Gpu) -> str | None:
        """Returns the tier whose kernel a GPU runs for this pass; None if there is no kernel."""
        tier = tier_of(gpu)
        if tier == "portable" and (self.portable is None or gpu < self.portable_since):
            return None
        return tier


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
