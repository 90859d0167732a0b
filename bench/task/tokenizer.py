"""The task's tokenizer: one letter, one digit or one word of a question per token."""

from __future__ import annotations

import functools

import tokenizers
from task import candles, questions
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxstate.models.pieces import Pieces
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.models.vocabulary import Vocabulary

_WORDS = (
    "\nIs", "\nWhat", " last", " close", " first", " row", " above", " below", " rising",
    " falling", " high", " low", " of", "?", questions.YES, questions.NO,
)  # fmt: skip
_PIECE = Regex(
    r"Candles:|\nIs|\nWhat| [a-z]{2,}|\n[A-Z]| [A-Z]|[A-Z]| [cohl]?[0-9]|\.[0-9]|[0-9]|\?"
)


@functools.cache
def tokens() -> dict[str, int]:
    """Return the id of every token."""
    digits = "0123456789"
    names = [
        candles.START,
        *_WORDS,
        *(f"{before}{letter}" for before in ("\n", " ", "") for letter in candles.LETTERS),
        *(f" {mark}{digit}" for mark in (*candles.FIELDS, "") for digit in digits),
        *(f".{digit}" for digit in digits),
        *digits,
    ]
    return {name: index for index, name in enumerate(names)}


def build() -> Tokenizer:
    """Return the tokenizer; what it has no token for is left out, as other tokenizers do."""
    backend = tokenizers.Tokenizer(models.WordLevel(tokens()))
    backend.pre_tokenizer = pre_tokenizers.Split(_PIECE, behavior="isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(
        Vocabulary(
            backend=backend, pieces=Pieces(alphabet="text"), bos_id=None, eos_ids=(),
            add_bos=False, chat_template=None,
        )
    )  # fmt: skip
