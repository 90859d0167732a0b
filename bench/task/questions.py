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
VALUES = ("value first", "value last", "value close", "value open", "value high", "value low")
ROWS_BACK = (4, 8, 16)  # what "the last n" may be
MIN_ROWS = 4
_OPEN, _CLOSE, _HIGH, _LOW = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a context.

    Attributes:
      kind: one of KINDS, or of VALUES, which ask for a price.
      tokens: of the question; joined they are its text.
      answer: tokens of the true answer: YES, NO, or the three of a price.
      evidence: the price of a row that is named, which the answer hangs on.
      opposite: tokens of the same question in the opposite wording; none for VALUES.
    """

    kind: str
    tokens: tuple[str, ...]
    answer: tuple[str, ...]
    opposite: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()

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
    opposites: float = 0.5,
) -> Question | None:
    """Draw a question of a kind about a context of at least MIN_ROWS rows.

    Args:
      opposites: how likely it comes in the second wording.
      truth: what shall be true of the candles (above, rising), whatever the wording; None = drawn.
    Returns:
      the question, or None where the context has no such rows (or a tie).
    """
    wanted = bool(rng.integers(2)) if truth is None else truth
    found = _DRAW[kind](rng, context, wanted)
    return found.reworded() if found and rng.random() < opposites else found


def value(rng: np.random.Generator, context: Context, kind: str) -> Question:
    """Ask for a price: the first or the last close, a row's close or open, an extreme.

    Its answer is three digits of supervision where yes or no is one bit, which is why training
    asks it: finding a row and finding an extreme are learnt from it.

    Args:
      kind: one of VALUES.
    """
    word = kind.removeprefix("value")
    if word in (" first", " last"):
        asked = ("\nWhat", word, " close?")
        price = context.prices[0 if word == " first" else -1, _CLOSE]
    elif word in (" close", " open"):
        index = int(rng.integers(len(context)))
        asked = ("\nWhat", word, " row", *_named(context, index))
        price = context.prices[index, _CLOSE if word == " close" else _OPEN]
    else:
        count = _rows_back(rng, context)
        field, function = _SIDES[word]
        *before, final = _count_tokens(count)
        asked = ("\nWhat", word, " of", " last", *before, f"{final}?")
        price = function(context.last(count).prices[:, field])
    return Question(kind=kind, tokens=asked, answer=tuple(candles.price_tokens(int(price))))


def _first(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the last close above the first one?"""
    closes = context.prices[:, _CLOSE]
    if closes[-1] == closes[0] or (closes[-1] > closes[0]) != wanted:
        return None
    return _worded(
        "first", wanted, ("\nIs", " last", " close"), (" above", " below"),
        (" first", " close?"),
    )  # fmt: skip


def _row(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the last close above that of a row that is named?"""
    closes = context.prices[:, _CLOSE]
    index = _pick(rng, (closes[-1] > closes if wanted else closes[-1] < closes)[:-1])
    if index is None:
        return None
    return _worded(
        "row", wanted, ("\nIs", " last", " close"), (" above", " below"),
        (" row", *_named(context, index)), int(closes[index]),
    )  # fmt: skip


def _rising(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Did a row that is named close above its open?"""
    opens, closes = context.prices[:, _OPEN], context.prices[:, _CLOSE]
    index = _pick(rng, closes > opens if wanted else closes < opens)
    if index is None:
        return None
    return _worded(
        "rising", wanted, (), ("\nRising", "\nFalling"), (" in", " row", *_named(context, index)),
        int(opens[index]),
    )  # fmt: skip


def _extreme(rng: np.random.Generator, context: Context, wanted: bool) -> Question | None:
    """Is the highest, or lowest, price of the last n rows above a level?"""
    count = _rows_back(rng, context)
    side = (" high", " low")[int(rng.integers(2))]
    field, function = _SIDES[side]
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
        (" above", " below"), (*candles.price_tokens(level)[:2], f"{level % 10}?"),
    )  # fmt: skip


_DRAW: dict[str, Callable[[np.random.Generator, Context, bool], Question | None]] = {
    "first": _first, "row": _row, "rising": _rising, "extreme": _extreme,
}  # fmt: skip
_SIDES = {" high": (_HIGH, np.max), " low": (_LOW, np.min)}


def _worded(
    kind: str, truth: bool, before, wordings, behind, evidence: int | None = None
) -> Question:
    """Put a question in the first of two wordings, which is true of the candles if `truth`."""
    return Question(
        kind=kind,
        tokens=(*before, wordings[0], *behind),
        answer=(YES,) if truth else (NO,),
        opposite=(*before, wordings[1], *behind),
        evidence=() if evidence is None else tuple(candles.price_tokens(evidence)),
    )


def _pick(rng: np.random.Generator, fits: np.ndarray) -> int | None:
    """Return a random index where `fits` [rows] is True, or None."""
    found = np.flatnonzero(fits)
    return int(rng.choice(found)) if len(found) else None


def _rows_back(rng: np.random.Generator, context: Context) -> int:
    return int(rng.choice([count for count in ROWS_BACK if count <= len(context)]))


def _named(context: Context, index: int) -> tuple[str, str]:
    first, second = candles.row_name(int(context.names[index]))
    return f" {first}", f"{second}?"


def _count_tokens(count: int) -> list[str]:
    """Return a count's digits, e.g. " 1", "6"."""
    digits = str(count)
    return [f" {digits[0]}", *digits[1:]]
