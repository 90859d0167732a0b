"""Runs registered questions on a stream of candles, and the same questions without a session.

The session slides over the newest WINDOW rows. Every answer is judged by the rows that the session
holds when it is asked, also one that a gate took from an older version.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxstate.answer import Answer
from jaxstate.calibration import Calibration
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import FlashQuery, Question
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.sampling import Sampling
from jaxstate.serving import candle_questions, candle_rows
from jaxstate.serving.candle_questions import CandleQuestion
from jaxstate.serving.candle_rows import Context
from jaxstate.serving.local_service import LocalService
from jaxstate.state import StepShape

WINDOW = 40  # rows
MOVE = 6.0  # ticks an hour
SEED = 7
_BIAS = 100.0  # logits, more than any two of the model's are apart
_WAIT_S = 60.0


class Moment(enum.Enum):
    """When a question is asked, and what the session knows of it; the value is how it is shown."""

    AT_ONCE = "at once"  # registered, the newest row has just been computed
    AT_REST = "later"  # registered, and idle time has passed
    OTHER_LEVEL = "other level"  # not registered, but a question that begins alike is
    ANY_ROW = "never seen"  # nothing like it is registered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A question that was asked and what came of it.

    Attributes:
      row: the newest row of the session, counted from 0.
      moment: see Moment.
      question: what was asked.
      answer: what the service gave.
      seconds: from the call to the whole answer.
      said_yes: what the answer says.
      is_yes: what is true of the rows.
    """

    row: int
    moment: Moment
    question: CandleQuestion
    answer: Answer
    seconds: float
    said_yes: bool
    is_yes: bool

    @property
    def is_right(self) -> bool:
        """Whether the answer is true."""
        return self.said_yes == self.is_yes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """What a number of questions took, and brought.

    Attributes:
      questions: how many.
      right: how many were answered truly.
      tokens: forwarded for them.
      seconds: waited for them.
    """

    questions: int
    right: int
    tokens: int
    seconds: float


def engine_config() -> EngineConfig:
    """Return the sizes of an engine for the session and one prompt beside it."""
    return EngineConfig(
        num_pages=64, page_size=16, context_len=1 + WINDOW * candle_rows.ROW_TOKENS,
        evict_quantum=candle_rows.ROW_TOKENS,
        step_shapes=tuple(  # of a row or a question, of registered ones together, of a prompt
            StepShape(num_tokens=tokens, block_tokens=block, num_rows=8)
            for tokens, block in ((12, 12), (24, 24), (384, 128))
        ),
    )  # fmt: skip


class CandleStream:
    """A session that candles stream into, with its registered questions; close it at the end."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, rows: int, risk: float):
        """Open the session with WINDOW rows and register questions.

        Args:
          rows: that will be appended at most.
          risk: see LocalService.query.
        Raises:
          InputError: a risk that no gate can keep.
        """
        count = WINDOW + rows
        prices = candle_rows.synthetic(np.random.default_rng(SEED), count, moves=(MOVE, MOVE))
        names = np.arange(count) % len(candle_rows.NAMES)
        self._whole = Context(prices=prices, names=names)
        self._seen = WINDOW
        self._rng = np.random.default_rng(SEED + 1)
        self._risk = risk
        self._engine = engine
        self._encode = tokenizer.encode
        self._yes, self._no = (
            tuple(tokenizer.encode(text, continues=True))
            for text in (candle_rows.YES, candle_rows.NO)
        )
        self._service = LocalService(engine, preposition=0)
        try:
            self._session = self._service.create(
                tokenizer.encode(candle_rows.START), when_full="slide"
            )
            self._service.append(self._session, self._tokens(0, WINDOW)).result(_WAIT_S)
            self.queries: dict[CandleQuestion, FlashQuery] = {
                question: self._service.register(
                    self._session, self._with_choices(question), risk=risk
                )
                for question in candle_questions.REGISTERED
            }
            self._service.wait_until_idle(_WAIT_S)
        except BaseException:
            self._service.close()
            raise

    @property
    def context(self) -> Context:
        """The rows that the session holds."""
        return self._whole.first(self._seen).last(WINDOW)

    def close(self) -> None:
        """Stop the service."""
        self._service.close()

    def calibrate(
        self, rows: int, advance: Callable[[], None]
    ) -> dict[CandleQuestion, Calibration]:
        """Let rows pass, so that gates see how often an older answer differs, and set them.

        Args:
          advance: called after every row.
        """
        for _ in range(rows):
            self._append()
            self._service.wait_until_idle(_WAIT_S)
            advance()
        return {
            question: query.stale.calibration(self._risk)
            for question, query in self.queries.items()
        }

    def ask_while_rows_come(self, rows: int, every_s: float) -> Iterator[list[Asked]]:
        """Append rows, one every so many seconds, and ask; yield what was asked of each.

        Where a gate is open nobody waits, so these questions are asked first; while another waits
        for a step, answers to the rest become fresh.
        """
        open_first = sorted(
            self.queries.items(), key=lambda one: one[1].stale.calibration(self._risk).tau is None
        )
        due = time.perf_counter()
        for _ in range(rows):
            time.sleep(max(0.0, due - time.perf_counter()))
            due = time.perf_counter() + every_s
            self._append()
            asked = [self._ask(question, Moment.AT_ONCE) for question, _ in open_first]
            self._service.wait_until_idle(_WAIT_S)
            asked += [self._ask(question, Moment.AT_REST) for question in self.queries]
            asked += [
                self._ask(
                    candle_questions.at_another_level(question, self._rng), Moment.OTHER_LEVEL
                )
                for question in self.queries
            ]
            any_row = candle_questions.about_any_row(self.context, self._rng)
            asked.append(self._ask(any_row, Moment.ANY_ROW))
            yield asked

    def ask_without_session(self, asked: Sequence[Asked], advance: Callable[[], None]) -> Spent:
        """Ask the same questions one after another, each as a prompt of its own with all rows.

        Args:
          advance: called after every question.
        """
        sampling = Sampling(logit_bias={token: _BIAS for token in (*self._yes, *self._no)})
        right, tokens, seconds = 0, 0, 0.0
        for one in asked:
            rows = self._tokens(one.row + 1 - WINDOW, one.row + 1)
            prompt = [
                *self._encode(candle_rows.START), *rows, *self._encode(one.question.text)
            ]  # fmt: skip
            began = time.perf_counter()
            answer = self._service.generate(prompt, max_new_tokens=1, sampling=sampling).result(
                _WAIT_S
            )
            seconds += time.perf_counter() - began
            tokens += answer.tokens_forwarded
            right += (answer.token_ids == self._yes) == one.is_yes
            advance()
        return Spent(questions=len(asked), right=right, tokens=tokens, seconds=seconds)

    @property
    def tokens_forwarded(self) -> int:
        """Tokens that ran through the model so far, for whatever."""
        return self._engine.executor.tokens_forwarded

    def _append(self) -> None:
        tokens = self._tokens(self._seen, self._seen + 1)
        self._service.append(self._session, tokens).result(_WAIT_S)
        self._seen += 1

    def _ask(self, question: CandleQuestion, moment: Moment) -> Asked:
        asked = self._with_choices(question)
        began = time.perf_counter()
        answer = self._service.query(self._session, asked).result(_WAIT_S)
        seconds = time.perf_counter() - began
        return Asked(
            row=self._seen - 1, moment=moment, question=question, answer=answer, seconds=seconds,
            said_yes=answer.choice == 0, is_yes=question.is_yes(self.context),
        )  # fmt: skip

    def _with_choices(self, question: CandleQuestion) -> Question:
        return Question(token_ids=tuple(self._encode(question.text)), choices=(self._yes, self._no))

    def _tokens(self, first: int, end: int) -> list[int]:
        texts = ("".join(candle_rows.row_tokens(self._whole, row)) for row in range(first, end))
        return [token for text in texts for token in self._encode(text, continues=True)]


def spent(asked: Sequence[Asked]) -> Spent:
    """Return what questions to the session took."""
    return Spent(
        questions=len(asked), right=sum(one.is_right for one in asked),
        tokens=sum(one.answer.tokens_forwarded for one in asked),
        seconds=sum(one.seconds for one in asked),
    )  # fmt: skip
