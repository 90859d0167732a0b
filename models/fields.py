"""Checked reading of the values that describe a model: a config.json or GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fields:
    """Values by key; an absent key and a null value mean the same.

    Attributes:
      values: the mapping as read.
      origin: what to call it in messages, e.g. the path of the file.
    """

    values: Mapping[str, Any]
    origin: str

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least one.

        Raises:
          ValueError: absent without a default, or anything else.
        """
        value = self._get(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number of at least 1", value)
        return value

    def optional_count(self, key: str, default: int | None) -> int | None:
        """Return a whole number of at least one; None where the key has a null value.

        Args:
          default: returned where the key is absent.
        Raises:
          ValueError: anything else.
        """
        if key not in self.values:
            return default
        return None if self.values[key] is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero.

        Raises:
          ValueError: absent without a default, or anything else.
        """
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number above 0", value)
        if not 0 < value < math.inf:
            raise self._wrong(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false.

        Raises:
          ValueError: anything else.
        """
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        Raises:
          ValueError: absent without a default, or anything else.
        """
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def group(self, key: str) -> Fields:
        """Return the fields of a nested mapping, empty where it is absent.

        Raises:
          ValueError: something other than a mapping.
        """
        value = self._get(key, {}, "a mapping")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a mapping", value)
        return Fields(value, f"{self.origin}: {key}")

    def require(self, key: str, *supported: Any) -> None:
        """Refuse a feature this package lacks: the key is absent or has a supported value.

        Raises:
          ValueError: any other value; without `supported`, any value.
        """
        value = self.values.get(key)
        if value is not None and value not in supported:
            expected = " or ".join(str(item) for item in supported) if supported else "no value"
            raise ValueError(
                f"{self.origin}: {key}: expected {expected}, got {value!r}, which is not "
                "supported; use another model"
            )

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(
                f"{self.origin}: {key}: expected {expected}, got nothing; the file is incomplete, "
                "fetch it again"
            )
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> ValueError:
        return ValueError(
            f"{self.origin}: {key}: expected {expected}, got {value!r}; the file is damaged or "
            "of a kind that is not supported, use another model"
        )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object a JSON file holds.

    Raises:
      ValueError: the file is missing, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: expected a JSON file, got none; give a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path}: expected JSON, got something else ({error}); fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path}: expected a JSON object, got {type(value).__name__}; fetch the file again"
        )
    return value
