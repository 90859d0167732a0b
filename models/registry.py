"""Look up a model family by the name its files carry."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstate.models.families import llama
from jaxstate.models.families.base import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY,)


def family_from_gguf(architecture: str) -> Family:
    """Return the family called `general.architecture` in GGUF metadata, e.g. "llama".

    Raises:
      ValueError: no family has this name.
    """
    for family in FAMILIES:
        if family.name == architecture:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ValueError(
        f"general.architecture: expected one of {known}, got {architecture!r}; use a model of a "
        "supported family"
    )


def family_from_hf(architectures: Sequence[str]) -> Family:
    """Return the family named in `architectures` of config.json, e.g. ["LlamaForCausalLM"].

    Raises:
      ValueError: none of them is known.
    """
    for family in FAMILIES:
        if set(family.hf_architectures) & set(architectures):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.hf_architectures)
    raise ValueError(
        f"architectures: expected one of {known}, got {list(architectures)}; use a model of a "
        "supported family"
    )
