"""Candles as the trained model reads them, and random ones.

A row is "c52 K7 h55 l41 o47\\n": close, the row's name, high, low and open, prices in ticks, 0 to
99, on a scale that fits the context. Every token of a price holds one digit; the first also
carries the price's field, the last of a row its end. A name is one token, right behind the price
that it is asked for.
"""

from __future__ import annotations

import dataclasses
import pathlib
import string

import numpy as np

MODEL = pathlib.Path(__file__).parent / "data" / "candles-1m"
"""The checkpoint of the model that bench/task/train_task.py trained on such rows."""

START = "Candles:\n"
CLOSE, HIGH, LOW, OPEN = range(4)
_LETTERS = [letter for letter in string.ascii_letters if letter not in "chlo"]  # fields' letters
NAMES = tuple(f" {letter}{digit}" for letter in _LETTERS for digit in range(10))
ROW_TOKENS = 9
PRICES = 100  # ticks of the scale
MOVES = (1.5, 8.0)  # ticks an hour; real ones move by 7.5 pips on average
YES, NO = " yes", " no"
_FLOOR, _CEILING = 3, PRICES - 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Rows as a session holds them, oldest first.

    Attributes:
      prices: [rows, 4] int64, close, high, low, open in ticks.
      names: [rows] int64, distinct, each an index into NAMES.
    """

    prices: np.ndarray
    names: np.ndarray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.names)

    def first(self, count: int) -> Context:
        """Return the oldest rows alone."""
        return Context(prices=self.prices[:count], names=self.names[:count])

    def last(self, count: int) -> Context:
        """Return the newest rows alone."""
        return Context(prices=self.prices[-count:], names=self.names[-count:])


def price_tokens(price: int, before: str, end: str = "") -> list[str]:
    """Return a price's two tokens, e.g. " h5", "2" for 52 with " h" before it."""
    return [f"{before}{price // 10}", f"{price % 10}{end}"]


def row_tokens(context: Context, index: int) -> list[str]:
    """Return the tokens of one row; joined they are its text."""
    close, high, low, open_ = context.prices[index].tolist()
    return [
        *price_tokens(close, "c"), NAMES[context.names[index]], *price_tokens(high, " h"),
        *price_tokens(low, " l"), *price_tokens(open_, " o", "\n"),
    ]  # fmt: skip


def context_tokens(context: Context) -> list[str]:
    """Return the tokens of a whole context, its start included."""
    tokens = [START]
    for index in range(len(context)):
        tokens += row_tokens(context, index)
    return tokens


def synthetic(
    rng: np.random.Generator, rows: int, *, moves: tuple[float, float] = MOVES
) -> np.ndarray:
    """Draw a random walk that turns back at the ends of the scale: [rows, 4] prices.

    Args:
      moves: the standard deviation of an hour's move is drawn between these, in ticks.
    """
    scale = moves[0] * (moves[1] / moves[0]) ** rng.random()
    path = rng.uniform(_FLOOR, _CEILING) + np.cumsum(rng.normal(0.0, scale, rows + 1))
    span = _CEILING - _FLOOR
    folded = np.abs((path - _FLOOR + span) % (2 * span) - span) + _FLOOR
    closes = np.rint(folded).astype(np.int64)
    opens, closes = closes[:-1], closes[1:]
    wicks = np.rint(np.abs(rng.normal(0.0, 0.5 * scale, (2, rows)))).astype(np.int64)
    highs = np.minimum(np.maximum(opens, closes) + wicks[0], PRICES - 1)
    lows = np.maximum(np.minimum(opens, closes) - wicks[1], 0)
    return np.stack([closes, highs, lows, opens], axis=1)
