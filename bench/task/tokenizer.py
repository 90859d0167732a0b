"""The task's tokenizer: one letter, one digit or one word of a question per token."""

from __future__ import annotations

import functools
import re

import tokenizers
from task import candles, questions
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxstate.models.pieces import Pieces
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.models.vocabulary import Vocabulary

_WORDS = (
    "\nIs", "\nWhat", "\nRising", "\nFalling", " last", " close", " close?", " open", " first",
    " row", " above", " below", " high", " low", " of", " in", questions.YES, questions.NO,
)  # fmt: skip


@functools.cache
def tokens() -> dict[str, int]:
    """Return the id of every token."""
    before = ("\no", " c", " h", " l", " ", ".", "")
    names = [
        candles.START,
        *_WORDS,
        *(f"{space}{letter}" for space in (" ", "") for letter in candles.LETTERS),
        *(f"{mark}{digit}" for mark in before for digit in range(10)),
        # The last token of a question carries its mark, and so is where its answer is sought.
        *(f"{letter}?" for letter in candles.LETTERS),
        *(f"{space}{digit}?" for space in (" ", "") for digit in range(10)),
    ]
    return {name: index for index, name in enumerate(names)}


def build() -> Tokenizer:
    """Return the tokenizer; what it has no token for is left out, as other tokenizers do."""
    backend = tokenizers.Tokenizer(models.WordLevel(tokens()))
    pieces = sorted(tokens(), key=len, reverse=True)
    pattern = Regex("|".join(re.escape(piece) for piece in pieces))
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    backend.decoder = decoders.Fuse()
    return Tokenizer(
        Vocabulary(
            backend=backend, pieces=Pieces(alphabet="text"), bos_id=None, eos_ids=(),
            add_bos=False, chat_template=None,
        )
    )  # fmt: skip
