"""The file of `serve --config`: flags by their names, in TOML."""

from __future__ import annotations

import difflib
import pathlib
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

from jaxstate.errors import InputError


def read(path: pathlib.Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file by the names of their parameters.

    Args:
      known: parameters that there are, with their types, e.g. max_model_len, which is max-model-len
        in the file.
    Raises:
      OSError: it cannot be read.
      InputError: no TOML, a key that there is no flag for, or a value that would silently become
        something else.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"config: expected TOML, got {path}: {error}") from error
    flags = {name.replace("_", "-"): name for name in known}
    for key, value in found.items():
        if key not in flags:
            nearest = difflib.get_close_matches(key, flags, n=1, cutoff=0.0)[0]
            raise InputError(
                f"config: expected the name of a flag in {path}, got {key}; nearest is {nearest}"
            )
        if isinstance(value, dict | list):
            raise InputError(f"config: expected one value of {key} in {path}, got {value}")
        kind = known[flags[key]]
        if isinstance(value, bool) and kind is not bool:
            raise InputError(
                f"config: expected a value of {key} in {path}, got {str(value).lower()}; only "
                "flags without a value are true or false"
            )
        if value == "" and pathlib.Path in (kind, *typing.get_args(kind)):
            raise InputError(
                f"config: expected a path of {key} in {path}, got an empty text; leave {key} "
                "out or name one"
            )
    return {flags[key]: value for key, value in found.items()}
