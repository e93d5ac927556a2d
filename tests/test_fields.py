"""The docstrings of public dataclasses and named tuples describe every field."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa
from jax_dsa import nn, serving, training

REQUIRED = dataclasses.MISSING


def public_classes() -> list[type]:
    """Returns the public dataclasses and named tuples, each once."""
    modules: tuple[types.ModuleType, ...] = (jax_dsa, nn, training, serving)
    named = [getattr(module, name) for module in modules for name in module.__all__]
    classes = [x for x in named if inspect.isclass(x)]
    return list(dict.fromkeys(c for c in classes if defaults(c)))


def defaults(cls: type) -> dict[str, Any]:
    """Returns the fields of a class with their defaults, `REQUIRED` if there is none."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    given = getattr(cls, "_field_defaults", {})
    return {name: given.get(name, REQUIRED) for name in getattr(cls, "_fields", ())}


def described(cls: type) -> dict[str, str]:
    """Returns the descriptions in a docstring's section "Attributes", which may share one."""
    section = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[2]
    section = re.split(r"\n\n", section)[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section, re.M)
    texts = {names: " ".join(text.split()) for names, text in entries}
    return {name: text for names, text in texts.items() for name in names.split(", ")}


def spelled(default: Any) -> str:
    return np.dtype(default).name if default is jnp.float32 else repr(default)


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_sentence(cls: type) -> None:
    texts = described(cls)
    assert list(texts) == list(defaults(cls))
    for name, default in defaults(cls).items():
        assert re.fullmatch(r"[A-Z`(\d-].*\.", texts[name]), f"{name}: {texts[name]}"
        if default is not REQUIRED:
            assert texts[name].endswith(f" Default: {spelled(default)}."), f"{name}: {texts[name]}"


def test_the_configurations_are_public() -> None:
    names = {cls.__name__ for cls in public_classes()}
    assert names >= {"AttentionConfig", "CompressedConfig", "DecoderConfig", "TrainConfig"}
