"""The file of `serve --config`: flags by their names, in TOML."""

from __future__ import annotations

import difflib
import pathlib
import tomllib
from collections.abc import Collection
from typing import Any

from jaxstate.errors import InputError


def read(path: pathlib.Path, known: Collection[str]) -> dict[str, Any]:
    """Return the values of a file by the names of their parameters.

    Args:
      known: parameters that there are, e.g. max_model_len; in the file it is max-model-len.
    Raises:
      OSError: it cannot be read.
      InputError: no TOML, or a key that there is no flag for.
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
    return {flags[key]: value for key, value in found.items()}
