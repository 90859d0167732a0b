"""Questions about candles that a session watches, and the true answer to each from its rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxstate.serving import candle_rows
from jaxstate.serving.candle_rows import Context

NAMED = "close"
_LEVELS_AWAY = 9  # ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandleQuestion:
    """Whether a price is above or below a level, e.g. "high last 8 above 60?".

    Attributes:
      field: the highest "high" or lowest "low" of some rows, or the "close" of one.
      rows: " last 4", " last 8", or the name of one row.
      wording: what is asked.
      level: in ticks, 0 to 99.
    """

    field: Literal["high", "low", "close"]
    rows: str
    wording: Literal["above", "below"]
    level: int

    @property
    def text(self) -> str:
        """Return the question as the model reads it."""
        return f"{self.field}{self.rows} {self.wording} {self.level:02}?"

    def is_yes(self, context: Context) -> bool:
        """Return the true answer of the rows; a price that is the level is neither above nor below.

        Raises:
          ValueError: the row that is named is none of them.
        """
        price = self._price(context)
        return price > self.level if self.wording == "above" else price < self.level

    def _price(self, context: Context) -> int:
        if self.field == NAMED:
            found = np.flatnonzero(context.names == candle_rows.NAMES.index(self.rows))
            if not len(found):
                raise ValueError(f"rows: expected one of the context, got{self.rows}; ask earlier")
            return int(context.prices[found[0], candle_rows.CLOSE])
        recent = context.prices[-int(self.rows.removeprefix(" last ")) :]
        if self.field == "high":
            return int(recent[:, candle_rows.HIGH].max())
        return int(recent[:, candle_rows.LOW].min())


REGISTERED = (
    CandleQuestion(field="high", rows=" last 8", wording="above", level=60),
    CandleQuestion(field="low", rows=" last 4", wording="above", level=40),
    CandleQuestion(field="high", rows=" last 4", wording="below", level=50),
    CandleQuestion(field="low", rows=" last 8", wording="below", level=30),
)
"""What the demo registers: high and low, both ranges of rows, both wordings."""


def at_another_level(question: CandleQuestion, rng: np.random.Generator) -> CandleQuestion:
    """Return the question about another level close by."""
    away = int(rng.integers(1, _LEVELS_AWAY + 1)) * int(rng.choice((-1, 1)))
    return dataclasses.replace(question, level=question.level + away)


def about_any_row(context: Context, rng: np.random.Generator) -> CandleQuestion:
    """Return a question about the close of a random row, at a level around the newest close."""
    newest = int(context.prices[-1, candle_rows.CLOSE])
    level = newest + int(rng.integers(-_LEVELS_AWAY, _LEVELS_AWAY + 1))
    return CandleQuestion(
        field=NAMED, rows=candle_rows.NAMES[rng.choice(context.names)],
        wording="above" if rng.integers(2) else "below",
        level=min(max(level, 0), candle_rows.PRICES - 1),
    )  # fmt: skip
