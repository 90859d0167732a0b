"""The task's tokenizer: a name, a word or one digit of a price per token."""

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
    candles.START, " first", *(f" last {count}" for count in questions.ROWS_BACK),
    "close", "high", "low", *questions.WORDINGS, questions.YES, questions.NO,
)  # fmt: skip
TENS = ("c", " h", " l", " o", " ")  # what stands before the first digit
UNITS = ("", "\n", "?")  # what stands behind the second one; "?" ends a question


@functools.cache
def tokens() -> dict[str, int]:
    """Return the id of every token."""
    names = [
        *_WORDS,
        *(f"{before}{digit}" for before in TENS for digit in range(10)),
        *(f"{digit}{end}" for end in UNITS for digit in range(10)),
        *candles.NAMES,
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
