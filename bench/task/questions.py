"""Questions about the rows of a context, with their true answers.

Each kind of yes/no question comes in two wordings that are true of opposite candles. Ties are
never asked, so exactly one of the two wordings is true.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from task import candles
from task.candles import Context

YES, NO = " yes", " no"
KINDS = ("first", "row", "rising", "extreme")
ROWS_BACK = (4, 8, 16)  # what "the last n" may be
MIN_ROWS = 4
_CLOSE, _OPEN, _HIGH, _LOW = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a context.

    Attributes:
      kind: one of KINDS, or "value", which asks for a price.
      tokens: of the question; joined they are its text.
      answer: tokens of the true answer: YES, NO, or the three of a price.
      opposite: tokens of the same question in the opposite wording; none for "value".
    """

    kind: str
    tokens: tuple[str, ...]
    answer: tuple[str, ...]
    opposite: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the question as people read it."""
        return "".join(self.tokens)

    @property
    def is_yes(self) -> bool:
        """Whether the true answer is yes."""
        return self.answer == (YES,)

    def reworded(self) -> Question:
        """Return the question in its opposite wording."""
        answer = (NO,) if self.is_yes else (YES,)
        return dataclasses.replace(self, tokens=self.opposite, opposite=self.tokens, answer=answer)


def draw(
    rng: np.random.Generator,
    context: Context,
    kind: str,
    *,
    truth: bool | None = None,
    opposites: bool = True,
) -> Question | None:
    """Draw a question of a kind about a context of at least MIN_ROWS rows.

    Args:
      opposites: whether it may come in the second wording.
      truth: what shall be true of the candles (above, rising), whatever the wording; None = drawn.
    Returns:
      the question, or None where the context has no such rows (or a tie).
    """
    wanted = bool(rng.integers(2)) if truth is None else truth
    found = _DRAW[kind](rng, context, wanted)
    return found.reworded() if found and opposites and rng.integers(2) else found


def value(rng: np.random.Generator, context: Context) -> Question:
    """Ask for a row's close or for the highest or lowest price of the last rows.

    Its answer is three digits of supervision where yes or no is one bit, which is why training
    asks it: finding a row and finding an extreme are learnt from it.
    """
    if rng.random() < 0.6:
        index = int(rng.integers(len(context)))
        asked = ("\nWhat", " close", " row", *_named(context, index), "?")
        price = int(context.prices[index, _CLOSE])
    else:
        count = _rows_back(rng, context)
        side, field, function = _SIDES[int(rng.integers(2))]
        asked = ("\nWhat", side, " of", " last", *_count_tokens(count), "?")
        price = int(function(context.last(count).prices[:, field]))
    return Question(kind="value", tokens=asked, answer=tuple(candles.price_tokens(price)))


def _first(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the last close above the first one?"""
    closes = context.prices[:, _CLOSE]
    if closes[-1] == closes[0] or (closes[-1] > closes[0]) != wanted:
        return None
    return _worded(
        "first", wanted, ("\nIs", " last", " close"), (" above", " below"),
        (" first", " close", "?"),
    )  # fmt: skip


def _row(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the last close above that of a row that is named?"""
    closes = context.prices[:, _CLOSE]
    index = _pick(rng, (closes[-1] > closes if wanted else closes[-1] < closes)[:-1])
    if index is None:
        return None
    return _worded(
        "row", wanted, ("\nIs", " last", " close"), (" above", " below"),
        (" row", *_named(context, index), "?"),
    )  # fmt: skip


def _rising(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Did a row that is named close above its open?"""
    opens, closes = context.prices[:, _OPEN], context.prices[:, _CLOSE]
    index = _pick(rng, closes > opens if wanted else closes < opens)
    if index is None:
        return None
    return _worded(
        "rising", wanted, ("\nIs", " row", *_named(context, index)), (" rising", " falling"),
        ("?",),
    )  # fmt: skip


def _extreme(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the highest, or lowest, price of the last n rows above a level?"""
    count = _rows_back(rng, context)
    side, field, function = _SIDES[int(rng.integers(2))]
    recent = context.last(count).prices
    found = int(function(recent[:, field]))
    # Levels lie as far away as a typical candle is wide: nearer than most rows of the window.
    width = float(np.mean(recent[:, _HIGH] - recent[:, _LOW]))
    away = 1 + int(rng.exponential(width))
    level = found - away if wanted else found + away
    if not 0 <= level < candles.PRICES:
        return None
    return _worded(
        "extreme", wanted, ("\nIs", side, " of", " last", *_count_tokens(count)),
        (" above", " below"), (*candles.price_tokens(level), "?"),
    )  # fmt: skip


_DRAW: dict[str, Callable[[np.random.Generator, Context, bool], Question | None]] = {
    "first": _first, "row": _row, "rising": _rising, "extreme": _extreme,
}  # fmt: skip
_SIDES = ((" high", _HIGH, np.max), (" low", _LOW, np.min))


def _worded(kind: str, truth: bool, before, wordings, behind) -> Question:
    """Put a question in the first of two wordings, which is true of the candles if `truth`."""
    return Question(
        kind=kind,
        tokens=(*before, wordings[0], *behind),
        answer=(YES,) if truth else (NO,),
        opposite=(*before, wordings[1], *behind),
    )


def _pick(rng: np.random.Generator, fits: np.ndarray) -> int | None:
    """Return a random index where `fits` [rows] is True, or None."""
    found = np.flatnonzero(fits)
    return int(rng.choice(found)) if len(found) else None


def _rows_back(rng: np.random.Generator, context: Context) -> int:
    return int(rng.choice([count for count in ROWS_BACK if count <= len(context)]))


def _named(context: Context, index: int) -> tuple[str, str]:
    first, second = candles.row_name(int(context.names[index]))
    return f" {first}", second


def _count_tokens(count: int) -> list[str]:
    """Return a count's digits, e.g. " 1", "6"."""
    digits = str(count)
    return [f" {digits[0]}", *digits[1:]]
