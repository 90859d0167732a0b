"""Ask a model the task's questions through an engine, and count what it gets right."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np
from task import candles, questions
from task.candles import Context
from task.questions import Question

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.state import StepShape

Source = Literal["synthetic", "real"]
_PAGE = 64
_TRIES = 50
_MOVES = (4.0, 8.0)  # ticks an hour: as lively as the real ones are on their scale
_SHAPES = tuple(StepShape(num_tokens=n, block_tokens=n, num_rows=8) for n in (12, 512))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A context and questions about it: one of each kind, each in both wordings."""

    context: Context
    pairs: tuple[tuple[Question, Question], ...]


class Tally:
    """Counts right answers by kind of question and true answer, and contradictions."""

    def __init__(self):
        """Start at zero."""
        self._right: dict[tuple[str, bool], list[bool]] = collections.defaultdict(list)
        self._opposed: list[bool] = []

    def add(self, pair: tuple[Question, Question], said_yes: tuple[bool, bool]) -> None:
        """Count the answers to a question in both wordings."""
        for question, yes in zip(pair, said_yes, strict=True):
            self._right[question.kind, question.is_yes].append(yes == question.is_yes)
        self._opposed.append(said_yes[0] != said_yes[1])

    @property
    def count(self) -> int:
        """Number of questions, each wording by itself."""
        return 2 * len(self._opposed)

    @property
    def opposed(self) -> float:
        """Share of pairs of opposite wordings that were answered oppositely."""
        return float(np.mean(self._opposed))

    @property
    def yes_share(self) -> float:
        """Share of questions whose true answer is yes."""
        yes = sum(len(right) for (_, truth), right in self._right.items() if truth)
        return yes / self.count

    def by_kind(self) -> dict[str, float]:
        """Return balanced accuracies: means over the accuracies where yes and where no is true."""
        return {
            kind: float(np.mean([np.mean(self._right[kind, truth]) for truth in (True, False)]))
            for kind in questions.KINDS
        }

    @property
    def balanced(self) -> float:
        """Mean balanced accuracy over the kinds of questions."""
        return float(np.mean(list(self.by_kind().values())))


def cases(seed: int, count: int, rows: tuple[int, int], source: Source) -> Iterator[Case]:
    """Draw contexts of rows[0] to rows[1] rows that no training has seen.

    What is true of the candles is drawn first, and contexts until it is true of one: so both
    answers are equally likely for each kind of question, also where the market had a trend; what
    is true of none of _TRIES contexts is given up and drawn again. Nothing is asked that the newest
    row alone answers.
    """
    rng = np.random.default_rng([0xE7A1, seed])
    while count:
        truths = rng.integers(2, size=len(questions.KINDS)).astype(bool)
        for _ in range(_TRIES):
            context = _context(rng, int(rng.integers(rows[0], rows[1] + 1)), source)
            found = _questions(rng, context, truths)
            if found is not None:
                yield Case(context=context, pairs=tuple((each, each.reworded()) for each in found))
                count -= 1
                break


def _context(rng: np.random.Generator, rows: int, source: Source) -> Context:
    if source == "real":
        prices = candles.real_window(rng, rows, test=True)
    else:
        prices = candles.synthetic(rng, rows, moves=_MOVES)
    return Context(prices=prices, names=candles.names_in_order(rng, rows))


def _questions(rng, context: Context, truths: np.ndarray) -> list[Question] | None:
    found = []
    for kind, truth in zip(questions.KINDS, truths, strict=True):
        question = questions.draw(rng, context, kind, truth=bool(truth))
        if question is None or _newest_tells(context, question):
            return None
        found.append(question)
    return found


def engine_of(model: LoadedModel, max_tokens: int) -> Engine:
    """Start an engine for one session of at most `max_tokens` tokens and its questions."""
    config = EngineConfig(
        num_pages=-(-max_tokens // _PAGE) + 2, page_size=_PAGE, context_len=max_tokens,
        evict_quantum=_PAGE, step_shapes=_SHAPES,
    )  # fmt: skip
    return Engine(model.params, model.config, config, tokenizer=model.tokenizer)


def num_tokens(rows: int) -> int:
    """Return the length of a context of so many rows, in tokens."""
    return 1 + candles.ROW_TOKENS * rows


def ask(engine: Engine, model: LoadedModel, drawn: Iterator[Case], *, last_row: bool) -> Tally:
    """Ask every question of every case in a session of its own.

    Args:
      last_row: the session holds only the newest row, which shows what the others are worth.
    """

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, continues=True)

    choices = [encode(questions.YES), encode(questions.NO)]
    tally = Tally()
    for case in drawn:
        context = case.context.last(1) if last_row else case.context
        tokens = candles.context_tokens(context)
        session = engine.create(encode(tokens[0]))
        engine.append(session, encode("".join(tokens[1:])))
        for pair in case.pairs:
            said = [engine.choose(session, encode(each.text), choices).choice == 0 for each in pair]
            tally.add(pair, (said[0], said[1]))
        engine.close(session)
    return tally


def guess_from_last_row(drawn: Iterator[Case]) -> Tally:
    """Answer by the best rule of its kind that needs no training and sees the newest row alone.

    It says "above" where the row's price, drawn towards the middle of the scale by a share and
    shifted, is above the level; share and shift are those that would have been best.
    """
    found = list(drawn)
    pairs = [(case, pair) for case in found for pair in case.pairs]
    groups = np.array([f"{pair[0].field} {pair[0].kind}" for _, pair in pairs])
    prices = np.array([_newest(case.context, pair[0].field) for case, pair in pairs])
    levels = np.array([pair[0].level for _, pair in pairs])
    above = np.array([pair[0].price > pair[0].level for _, pair in pairs])
    guesses = np.zeros(len(pairs), bool)
    for group in np.unique(groups):
        chosen = groups == group
        best = -1.0
        for share, shift in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), range(-30, 31)):
            drawn_in = prices[chosen] + share * (candles.PRICES / 2 - prices[chosen])
            said = drawn_in + shift > levels[chosen]
            if np.mean(said == above[chosen]) > best:
                best = float(np.mean(said == above[chosen]))
                guesses[chosen] = said
    tally = Tally()
    for (_, pair), guess in zip(pairs, guesses.tolist(), strict=True):
        straight = pair[0].wording == questions.WORDINGS[0]
        tally.add(pair, (guess == straight, guess != straight))
    return tally


def _newest_tells(context: Context, question: Question) -> bool:
    """Whether the newest row is the one in question, or goes beyond the level by itself."""
    price = _newest(context, question.field)
    if question.field == "high":
        return price > question.level
    if question.field == "low":
        return price < question.level
    return question.rows == candles.NAMES[context.names[-1]]


def _newest(context: Context, field: str) -> int:
    column = {"close": candles.CLOSE, "high": candles.HIGH, "low": candles.LOW}[field]
    return int(context.prices[-1, column])
