"""Candles, drawn and real, and how a row of them is written.

A row is "\\no4.52 c4.55 AB h4.58 l4.50": open and close, the row's name of two letters, high and
low, in US cents above one dollar per euro. Every token holds one letter or one digit, and the
first digit of a price carries its field. The name stands right behind what it is asked for most.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib

import numpy as np

START = "Candles:"
FIELDS = "ochl"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROW_TOKENS = 2 + 3 * len(FIELDS)
PRICES = 1000  # a price is a whole number of hundredths of a cent, 0 to 999
REAL_TRAIN_ROWS = 1000  # of 1,500; what is later belongs to the test
MOVES = (4.0, 20.0)  # hundredths of a cent an hour; real ones move by 7.5 on average
_NAMES = len(LETTERS) ** 2
_FILE = pathlib.Path(__file__).parents[2] / "serving" / "data" / "eurusd_1h.csv"
_FLOOR, _CEILING = 20, PRICES - 21


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Rows as a session holds them, oldest first.

    Attributes:
      prices: [rows, 4] int64, open, close, high, low in hundredths of a cent.
      names: [rows] int64, distinct; `row_name` turns one into two letters.
    """

    prices: np.ndarray
    names: np.ndarray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.names)

    def last(self, count: int) -> Context:
        """Return the newest rows alone."""
        return Context(prices=self.prices[-count:], names=self.names[-count:])


def row_name(name: int) -> tuple[str, str]:
    """Return the two letters of a name."""
    return LETTERS[name // len(LETTERS)], LETTERS[name % len(LETTERS)]


def price_tokens(price: int, before: str = " ") -> list[str]:
    """Return a price's three tokens, e.g. " c4", ".5", "5", with " c" before it."""
    return [f"{before}{price // 100}", f".{price // 10 % 10}", str(price % 10)]


def row_tokens(context: Context, index: int) -> list[str]:
    """Return the tokens of one row; joined they are its text."""
    open_, close, high, low = context.prices[index].tolist()
    first, second = row_name(int(context.names[index]))
    return [
        *price_tokens(open_, "\no"), *price_tokens(close, " c"), f" {first}", second,
        *price_tokens(high, " h"), *price_tokens(low, " l"),
    ]  # fmt: skip


def context_tokens(context: Context) -> list[str]:
    """Return the tokens of a whole context, its start included."""
    tokens = [START]
    for index in range(len(context)):
        tokens += row_tokens(context, index)
    return tokens


def names_in_order(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return consecutive names from a random one on, [count] int64."""
    return (rng.integers(_NAMES) + np.arange(count)) % _NAMES


def names_at_random(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return distinct names in no order, so that both letters matter, [count] int64."""
    return rng.permutation(_NAMES)[:count]


def synthetic(
    rng: np.random.Generator, rows: int, *, moves: tuple[float, float] = MOVES
) -> np.ndarray:
    """Draw a random walk that turns back at the ends of the scale: [rows, 4] prices.

    Args:
      moves: the standard deviation of an hour's move is drawn between these.
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
    return np.stack([opens, closes, highs, lows], axis=1)


@functools.cache
def real() -> np.ndarray:
    """Return the real hourly EURUSD candles, [1500, 4] prices."""
    with _FILE.open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    fields = ("Open", "Close", "High", "Low")
    dollars = np.array([[float(record[field]) for field in fields] for record in records])
    return np.rint((dollars - 1.0) * 1e4).astype(np.int64)


def real_window(rng: np.random.Generator, rows: int, *, test: bool) -> np.ndarray:
    """Return a random stretch of real candles from before or after the split: [rows, 4].

    Training stretches are turned upside down half of the time and put anywhere on the scale.
    """
    part = real()[REAL_TRAIN_ROWS:] if test else real()[:REAL_TRAIN_ROWS]
    begin = rng.integers(len(part) - rows + 1)
    prices = part[begin : begin + rows]
    if test:
        return prices
    if rng.random() < 0.5:
        prices = PRICES - 1 - prices[:, [0, 1, 3, 2]]
    return prices + rng.integers(-prices.min(), PRICES - prices.max())
