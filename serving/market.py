"""The streaming-market workload: hourly candles arrive, and questions about them are asked.

Scaled to a context of 8k tokens from "Attention Once Is All You Need", section 4: a system prompt
and START candles, then ROUNDS times ROWS more candles and a question. Texts are fixed to the
letter, so that token counts and greedy answers can be compared between engines and over time.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.resources
import itertools
from collections.abc import Callable, Sequence

from jaxstate.models.tokenizer import Tokenizer

START = 40
ROWS = 14
ROUNDS = 10
MAX_NEW_TOKENS = 4
SYSTEM = (
    "You watch hourly EURUSD candles and answer questions about them with one word.\n"
    "time open high low close\n"
)
QUESTIONS = (
    "\nQuestion: Is the last close above the first close, yes or no?\nAnswer:",
    "\nQuestion: Is the market trend up or down?\nAnswer:",
    "\nQuestion: Is volatility high or low?\nAnswer:",
)
QUESTION_NAMES = ("rise", "trend", "volatility")
CHOICES = ((" yes", " no"), (" up", " down"), (" high", " low"))
"""The answers to each question; the first one is what its truth function calls True."""

TREND_ROWS = 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candle:
    """One hour of prices as the model sees them: rounded to four digits behind the point.

    Attributes:
      text: its line in the context.
      high, low, close: in US dollars per euro.
    """

    text: str
    high: float
    low: float
    close: float


def candles(count: int = START + ROWS * ROUNDS) -> list[Candle]:
    """Return the oldest candles of the data, as many as the workload has; there are 1,500."""
    found = []
    file = importlib.resources.files("jaxstate.serving").joinpath("data/eurusd_1h.csv")
    records = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    for record in itertools.islice(records, count):
        prices = {name: f"{float(record[name]):.4f}" for name in ("Open", "High", "Low", "Close")}
        label = record["Time"][5:16]  # year and time, the day cut off: fixed to the letter
        found.append(
            Candle(
                text=f"{label} {' '.join(prices.values())}\n", high=float(prices["High"]),
                low=float(prices["Low"]), close=float(prices["Close"]),
            )
        )
    return found


def rows() -> list[str]:
    """Return the candles' lines, oldest first."""
    return [candle.text for candle in candles()]


def is_last_above_first(seen: Sequence[Candle]) -> bool:
    """Whether the newest close is above the close of the oldest candle in the context."""
    return seen[-1].close > seen[0].close


def is_trend_up(seen: Sequence[Candle]) -> bool:
    """Whether the newest close is above the mean close of the newest TREND_ROWS candles."""
    recent = seen[-TREND_ROWS:]
    return seen[-1].close > sum(candle.close for candle in recent) / len(recent)


def is_volatility_high(seen: Sequence[Candle]) -> bool:
    """Whether the newest ROWS candles are wider, high less low, than the context's on average."""
    return _mean_width(seen[-ROWS:]) > _mean_width(seen)


TRUTHS: tuple[Callable[[Sequence[Candle]], bool], ...] = (
    is_last_above_first,
    is_trend_up,
    is_volatility_high,
)
"""The true answer to each question, from the candles in the context, oldest first."""


def true_choices(seen: Sequence[Candle]) -> list[int]:
    """Return for each question the index of its true answer among CHOICES."""
    return [0 if truth(seen) else 1 for truth in TRUTHS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload as token ids, every part tokenized on its own and without special tokens.

    Attributes:
      start: system prompt and the first START candles.
      rounds: what each round appends.
      questions: one per entry of QUESTIONS.
      choices: the answers to each question.
    """

    start: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]

    def context(self, num_rounds: int) -> list[int]:
        """Return the whole context after the first `num_rounds` rounds."""
        ids = list(self.start)
        for new in self.rounds[:num_rounds]:
            ids += new
        return ids


def tokenize(tokenizer: Tokenizer) -> Workload:
    """Return the workload in a model's own tokens."""
    lines = rows()

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, continues=True))

    return Workload(
        start=tuple(
            tokenizer.encode(SYSTEM + "".join(lines[:START]), add_bos=tokenizer.add_bos)
        ),
        rounds=tuple(
            ids("".join(lines[begin : begin + ROWS]))
            for begin in range(START, START + ROWS * ROUNDS, ROWS)
        ),
        questions=tuple(ids(question) for question in QUESTIONS),
        choices=tuple(tuple(ids(choice) for choice in choices) for choices in CHOICES),
    )


def question_idx(round_idx: int) -> int:
    """Return which question round `round_idx`, counted from 0, asks."""
    return round_idx % len(QUESTIONS)


def _mean_width(seen: Sequence[Candle]) -> float:
    return sum(candle.high - candle.low for candle in seen) / len(seen)
