"""What training and test draw candles from: random walks and real stretches, and rows' names.

How a row is written, and random walks, come with the package, whose demo streams such rows.
"""

from __future__ import annotations

import csv
import functools
import pathlib

import numpy as np

from jaxstate.serving.candle_rows import (
    CLOSE,
    HIGH,
    LOW,
    MOVES,
    NAMES,
    OPEN,
    PRICES,
    ROW_TOKENS,
    START,
    Context,
    context_tokens,
    price_tokens,
    row_tokens,
    synthetic,
)

__all__ = [
    "CLOSE", "HIGH", "LOW", "MOVES", "NAMES", "OPEN", "PRICES", "REAL_TRAIN_ROWS", "ROW_TOKENS",
    "START", "Context", "context_tokens", "names_at_random", "names_in_order", "price_tokens",
    "real", "real_window", "row_tokens", "synthetic",
]  # fmt: skip

REAL_TRAIN_ROWS = 1000  # of 1,500; what is later belongs to the test
_TICKS = (1, 2, 3, 5, 8, 12)  # pips, of 0.0001 dollars per euro
_FILE = pathlib.Path(__file__).parents[2] / "serving" / "data" / "eurusd_1h.csv"


def names_in_order(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return consecutive names from a random one on, [count] int64."""
    return (rng.integers(len(NAMES)) + np.arange(count)) % len(NAMES)


def names_at_random(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return distinct names in no order, [count] int64."""
    return rng.permutation(len(NAMES))[:count]


@functools.cache
def real() -> np.ndarray:
    """Return the real hourly EURUSD candles, [1500, 4] in pips above one dollar per euro."""
    with _FILE.open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    fields = ("Close", "High", "Low", "Open")
    dollars = np.array([[float(record[field]) for field in fields] for record in records])
    return np.rint((dollars - 1.0) * 1e4).astype(np.int64)


def real_window(rng: np.random.Generator, rows: int, *, test: bool) -> np.ndarray:
    """Return a random stretch of real candles from before or after the split: [rows, 4] prices.

    The tick is the finest with which the stretch fits the scale, where it lies at random.
    Training stretches are turned upside down half of the time.
    """
    part = real()[REAL_TRAIN_ROWS:] if test else real()[:REAL_TRAIN_ROWS]
    begin = rng.integers(len(part) - rows + 1)
    pips = part[begin : begin + rows]
    pips = pips - pips.min()
    prices = next(pips // tick for tick in _TICKS if pips.max() // tick < PRICES)
    if not test and rng.random() < 0.5:
        prices = prices.max() - prices[:, [CLOSE, LOW, HIGH, OPEN]]
    return prices + rng.integers(PRICES - prices.max())
