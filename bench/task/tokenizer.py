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
    "\nIs", "\nWhat", "\nRising", "\nFalling", " last", " close", " close?", " open", " first",
    " row", " above", " below", " high", " low", " of", " in", questions.YES, questions.NO,
)  # fmt: skip
_PIECE = Regex(
    r"Candles:|\n[A-Z][a-z]+| close\?| [a-z]{2,}| [A-Z]|[A-Z]\??|\no[0-9]| [chl][0-9]| [0-9]\??"
    r"|\.[0-9]|[0-9]\??"
)


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
    backend.pre_tokenizer = pre_tokenizers.Split(_PIECE, behavior="isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(
        Vocabulary(
            backend=backend, pieces=Pieces(alphabet="text"), bos_id=None, eos_ids=(),
            add_bos=False, chat_template=None,
        )
    )  # fmt: skip
