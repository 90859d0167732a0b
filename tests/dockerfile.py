"""The Dockerfile, taken apart."""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """Its instructions, in order: each with what follows, lines joined."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def all_of(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def one_of(name: str) -> str:
    (found,) = all_of(name)
    return found


def environment() -> dict[str, str]:
    """What ENV sets."""
    words = " ".join(all_of("ENV")).split()
    return {name: value.strip('"') for name, value in (word.split("=", 1) for word in words)}


def health_command() -> list[str]:
    """The words that HEALTHCHECK runs."""
    return json.loads(one_of("HEALTHCHECK").partition(" CMD ")[2])
