"""The fields of configurations of `transformers`, whose errors name the field and the file."""

from __future__ import annotations

import numbers
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jax_dsa.core.checks import LARGEST
from jax_dsa.nn.safetensors import read_json, unreadable

Config = TypeVar("Config")
LARGEST_FLOAT = sys.float_info.max


class Fields(dict[str, Any]):
    """The fields of a configuration. One that is absent or null raises an error that names it."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        """Holds `fields`, which error messages call `name`."""
        super().__init__(fields)
        self.name = name

    def __getitem__(self, field: str) -> Any:
        """Returns a field that must be given; `get` returns one that may be absent."""
        value = self.get(field)
        if value is None:
            raise KeyError(f"from_hf: {self.name} lacks the field {field!r}")
        return value

    def optional(self, field: str, default: Any) -> Any:
        """Returns a field, or `default` if it is absent or null."""
        return default if self.get(field) is None else self[field]

    def integer(self, field: str, low: int = 1, default: int | None = None) -> int:
        """Returns a field that must be an int from `low` to 2^31 - 1, or may be absent."""
        value = self[field] if default is None else self.optional(field, default)
        known = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not known or not low <= value <= LARGEST:
            raise ValueError(
                f"from_hf: {field!r} in {self.name} is {value!r}, expected an int from {low} to "
                f"{LARGEST}"
            )
        return int(value)

    def number(self, field: str, above: float = 0, most: float = LARGEST_FLOAT) -> float:
        """Returns a field that must be a number larger than `above`, and at most `most`."""
        value = self[field]
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not above < value <= most:
            limit = "" if most == LARGEST_FLOAT else f" and up to {most}"
            raise ValueError(
                f"from_hf: {field!r} in {self.name} is {value!r}, expected a number above {above}"
                f"{limit}"
            )
        return value

    def inner(self, field: str) -> Fields:
        """Returns a field that contains fields itself."""
        value = self[field]
        if not isinstance(value, Mapping):
            raise TypeError(
                f"from_hf: {field!r} in {self.name} is {value!r}, expected a dictionary"
            )
        return Fields(value, f"{field!r} in {self.name}")

    def built(self, kind: Callable[..., Config], **sizes: Any) -> Config:
        """Returns a layer's configuration. Its errors name these fields.

        Args:
            kind: The configuration's class.
            **sizes: Its own fields.
        """
        try:
            return kind(**sizes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"from_hf: no layer has the sizes in {self.name}: {error}") from None

    def option(self, field: str, value: Any, options: Iterable[Any]) -> None:
        """Raises ValueError unless `value`, which comes from a field, is one of `options`."""
        if value not in (known := tuple(options)):
            raise ValueError(
                f"from_hf: {field} in {self.name} is {value!r}, expected one of {known}"
            )

    def per_layer(self, field: str, values: Any = None) -> list[Any]:
        """Returns one value for each layer, from a field or from `values` that it stands for.

        A published list may have more values than there are layers. The others belong to modules
        for the prediction of several tokens.
        """
        values, count = self[field] if values is None else values, self.integer("num_hidden_layers")
        if not isinstance(values, list | tuple | range) or len(values) < count:
            raise ValueError(
                f"from_hf: {field} in {self.name} is {values!r}, expected a list with a value for "
                f"each of num_hidden_layers = {count} layers"
            )
        return list(values[:count])


def read_fields(op: str, config: Any) -> Fields:
    """Returns the fields of the argument `config` of `op` that describe the language model.

    Raises:
        OSError: If there is no such file.
        TypeError: If the argument is neither a configuration nor a path.
        ValueError: If the file contains no JSON object.
    """
    c, name = config, "argument 'config'"
    if isinstance(c, str | os.PathLike):
        path = pathlib.Path(c)
        try:
            path = path / "config.json" if path.is_dir() else path
            c, name = read_json(op, path), str(path)
        except OSError as error:
            expected = "a dictionary, or the path of a config.json or of its directory"
            raise unreadable(op, path, error, expected) from None
    elif not isinstance(c, Mapping):
        if not hasattr(c, "to_dict"):
            raise TypeError(
                f"{op}: argument 'config' is {type(c).__name__}, expected a configuration of "
                f"transformers, a dictionary or a path"
            )
        c = c.to_dict()
    fields = Fields(c, name)
    if fields.get("text_config") is None:
        return fields
    shared = {n: fields[n] for n in ("quantization_config",) if n in fields}
    if isinstance(kind := fields.get("model_type"), str):
        shared["model_type"] = f"{kind}_text"  # if the text's configuration does not name its type
    text = fields.inner("text_config")
    return Fields({**shared, **text}, text.name)
