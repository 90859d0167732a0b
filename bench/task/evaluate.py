"""Ask a model the task's questions through an engine, and count what it gets right."""

from __future__ import annotations

import collections
import dataclasses
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
    is true of none of _TRIES contexts is given up and drawn again.
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
        prices = candles.synthetic(rng, rows)
    return Context(prices=prices, names=candles.names_in_order(rng, rows))


def _questions(rng, context: Context, truths: np.ndarray) -> list[Question] | None:
    found = []
    for kind, truth in zip(questions.KINDS, truths, strict=True):
        question = questions.draw(rng, context, kind, truth=bool(truth))
        if question is None:
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
    """Answer by a rule that needs no training and sees the newest row alone.

    A row that rises speaks for "above" and for "rising"; of the highest or lowest price it knows
    its own.
    """
    tally = Tally()
    for case in drawn:
        for pair in case.pairs:
            truth = _guess(case.context, pair[0])
            tally.add(pair, (truth, not truth))
    return tally


def _guess(context: Context, question: Question) -> bool:
    """Guess the answer to a question in the wording that it has."""
    open_, close, high, low = context.prices[-1].tolist()
    truth = close >= open_
    if question.kind == "extreme":
        level = int("".join(token.strip(" .?") for token in question.tokens[-3:]))
        truth = (high if " high" in question.tokens else low) > level
    straight = " above" in question.tokens or "\nRising" in question.tokens
    return truth == straight
