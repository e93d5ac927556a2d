"""Kinds of meshes on which tests compare a call with the same call on one device."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

if TYPE_CHECKING:
    from collections.abc import Sequence

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "auto": (AUTO, jax.set_mesh),
    "explicit": (EXPLICIT, jax.set_mesh),
    "explicit-of-types": (EXPLICIT, contextlib.nullcontext),
}
"""The type of the axes, and whether the mesh is current or only the arrays' types name it."""


def mesh_of(
    kind: str, shape: Sequence[int], names: Sequence[str], devices: Sequence[jax.Device]
) -> tuple[Mesh, Any]:
    """Returns a mesh of the devices, and a function of it: the context in which calls on it run."""
    axis_type, context = MESHES[kind]
    types = (axis_type,) * len(shape)
    return jax.make_mesh(tuple(shape), tuple(names), axis_types=types, devices=devices), context


def on(mesh: Mesh, tree: Any, spec: Any) -> Any:
    """Returns the tree's arrays on the mesh, all with the same spec."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def exchanged(text: str, collective: str) -> set[tuple[int, ...]]:
    """Returns the shapes that a compiled program exchanges by one kind of collective."""
    results = re.findall(rf"= (\S.*?) {collective}(?:-start)?\(", text)
    shapes = (re.findall(r"\w+\[([\d,]*)\]", result) for result in results)
    return {tuple(map(int, filter(None, s.split(",")))) for found in shapes for s in found}
