"""Questions about the rows of a context, with their true answers.

Each is "<price> <which rows> above <level>?", e.g. "close K7 above 47?" or "high last 8 below
60?", and has an opposite wording, which is true where it is not: the level is never the price.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from task import candles
from task.candles import Context

from jaxstate.serving import candle_rows

YES, NO = candle_rows.YES, candle_rows.NO
KINDS = ("first", "row", "extreme")
WORDINGS = (" above", " below")
ROWS_BACK = (4, 8)  # what "the last n" may be
MIN_ROWS = 4
NUM_TOKENS = 5
_NEAREST, _MEAN_AWAY = 2, 10.0  # ticks between a price and the level that it is compared with
_SIDES = {"high": (candles.HIGH, np.max), "low": (candles.LOW, np.min)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a context.

    Attributes:
      kind: one of KINDS.
      field: of the price, the first token of the question.
      rows: which, its second token.
      price: that the question is about, in ticks.
      level: that the price is compared with.
      wording: one of WORDINGS.
    """

    kind: str
    field: str
    rows: str
    price: int
    level: int
    wording: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the NUM_TOKENS tokens of the question."""
        level = candles.price_tokens(self.level, " ", "?")
        return (self.field, self.rows, self.wording, *level)

    @property
    def text(self) -> str:
        """Return the question as people read it."""
        return "".join(self.tokens)

    @property
    def is_yes(self) -> bool:
        """Whether the true answer is yes."""
        return (self.price > self.level) == (self.wording == WORDINGS[0])

    def reworded(self) -> Question:
        """Return the question in its opposite wording."""
        other = WORDINGS[1 - WORDINGS.index(self.wording)]
        return dataclasses.replace(self, wording=other)


def draw(
    rng: np.random.Generator, context: Context, kind: str, *, truth: bool | None = None
) -> Question | None:
    """Draw a question of a kind about a context of at least MIN_ROWS rows.

    Args:
      truth: whether the price shall be above the level, whatever the wording; None = drawn.
    Returns:
      the question, or None where the level would leave the scale.
    """
    above = bool(rng.integers(2)) if truth is None else truth
    field = "close"
    if kind == "first":
        rows, price = " first", context.prices[0, candles.CLOSE]
    elif kind == "row":
        index = int(rng.integers(len(context)))
        rows, price = candles.NAMES[context.names[index]], context.prices[index, candles.CLOSE]
    else:
        count = int(rng.choice([count for count in ROWS_BACK if count <= len(context)]))
        field = ("high", "low")[int(rng.integers(2))]
        column, function = _SIDES[field]
        rows, price = f" last {count}", function(context.prices[-count:, column])
    away = _NEAREST + int(rng.exponential(_MEAN_AWAY))
    level = int(price) - away if above else int(price) + away
    if not 0 <= level < candles.PRICES:
        return None
    return Question(
        kind=kind, field=field, rows=rows, price=int(price), level=level,
        wording=WORDINGS[int(rng.integers(2))],
    )  # fmt: skip
