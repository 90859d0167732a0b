"""Look up a model family by the name its files carry."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstate.models.families import (
    gemma3,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from jaxstate.models.families.base import Family, Gguf, HuggingFace

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.DENSE,
    qwen3.ROUTED,
    gemma3.FAMILY,
    smollm3.FAMILY,
    phi3.FAMILY,
)


def gguf_format(architecture: str) -> Gguf:
    """Return how to read GGUF files of a `general.architecture`, e.g. "llama".

    Raises:
      ValueError: no family has this name.
    """
    known = {family.gguf.architecture: family.gguf for family in FAMILIES if family.gguf}
    if architecture not in known:
        raise ValueError(
            f"general.architecture: expected one of {', '.join(known)}, got {architecture!r}; "
            "use a model of a supported family"
        )
    return known[architecture]


def hf_format(architectures: Sequence[str]) -> HuggingFace:
    """Return how to read directories of the `architectures` in config.json.

    Raises:
      ValueError: none of them is known.
    """
    known = {name: family.hf for family in FAMILIES for name in family.hf.architectures}
    for name in architectures:
        if name in known:
            return known[name]
    raise ValueError(
        f"architectures: expected one of {', '.join(known)}, got {list(architectures)}; use a "
        "model of a supported family"
    )
