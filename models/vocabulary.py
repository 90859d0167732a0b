"""A vocabulary as its files describe it, whatever their format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import tokenizers

from jaxstate.models.pieces import Pieces


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """What a tokenizer is made of.

    Attributes:
      backend: encodes text; control tokens are its special tokens.
      pieces: how its tokens are read back.
      bos_id: id of the token that begins a text, or None.
      eos_ids: ids that end an answer, without repeats.
      add_bos: the model expects `bos_id` first.
      chat_template: Jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    pieces: Pieces
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None

    def __post_init__(self):
        """Check that the parts belong together."""
        size = self.size
        for name, idx in [("bos_id", self.bos_id), *(("eos_ids", idx) for idx in self.eos_ids)]:
            if idx is not None and (type(idx) is not int or not 0 <= idx < size):
                raise ValueError(
                    f"{name}: expected an id below {size}, got {idx!r}; the files of the "
                    "tokenizer do not belong together, fetch the model again"
                )
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "add_bos: expected a tokenizer with a bos_id, got none; the files of the "
                "tokenizer do not belong together, fetch the model again"
            )

    @functools.cached_property
    def size(self) -> int:
        """One more than the largest id that has a token."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def unique(ids: Iterable[Any]) -> tuple[Any, ...]:
    """Return the ids that are not None, each once."""
    return tuple(dict.fromkeys(idx for idx in ids if idx is not None))
