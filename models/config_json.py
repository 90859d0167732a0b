"""Frozen dataclasses such as ModelConfig as JSON and back, field by field."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import jax.numpy as jnp
import numpy as np

_CLASS = "class"  # says which one of a union of dataclasses it is; no field can be called so


def to_json(value: Any, *, leave_out: str = "") -> Any:
    """Describe a value in what JSON knows: dataclasses as objects, tuples as lists, dtypes by name.

    Every field is described, so that no new one can be forgotten.

    Args:
      leave_out: a field of the outermost dataclass that is kept elsewhere.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name != leave_out]
        return {_CLASS: type(value).__name__, **{n: to_json(getattr(value, n)) for n in names}}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return np.dtype(value).name


def from_json(described: Any, kind: type, origin: str, **given: Any) -> Any:
    """Return the dataclass of class `kind` that `to_json` described.

    Args:
      origin: what to call the description in messages.
      given: the field that was left out.
    Raises:
      ValueError: an unknown class, missing or unknown fields, or values that it refuses.
    """
    if not isinstance(described, dict) or described.get(_CLASS) != kind.__name__:
        raise ValueError(
            f"{origin}: expected a {kind.__name__}, got {described!r:.80}; it is damaged, save it "
            "again"
        )
    try:
        return _restore(described, _dataclasses_of(kind), given)
    except (TypeError, LookupError) as error:
        raise ValueError(
            f"{origin}: expected a {kind.__name__} as this version knows it, got {error}; it was "
            "saved by another version, save it again"
        ) from error


def _restore(described: Any, known: dict[str, type], given: dict[str, Any]) -> Any:
    if isinstance(described, list):
        return tuple(_restore(item, known, {}) for item in described)
    if not isinstance(described, dict):
        return described
    kind = known[described[_CLASS]]
    fields = given | {
        name: _restore(item, known, {}) for name, item in described.items() if name != _CLASS
    }
    hints = typing.get_type_hints(kind)
    if missing := hints.keys() - fields.keys():  # a default would be a guess
        raise LookupError(f"no {min(missing)}")
    for name, value in fields.items():
        if hints.get(name) is Any:  # a dtype, see DtypePolicy
            fields[name] = jnp.dtype(value).type
    return kind(**fields)


def _dataclasses_of(kind: type) -> dict[str, type]:
    """Return a dataclass and all that its fields may hold, by name."""
    found: dict[str, type] = {}
    todo: list[Any] = [kind]
    while todo:
        hint = todo.pop()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if hint.__name__ not in found:
                found[hint.__name__] = hint
                todo += typing.get_type_hints(hint).values()
        elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is not None:
            todo += typing.get_args(hint)
    return found
