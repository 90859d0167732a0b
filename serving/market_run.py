"""Runs the market workload on one engine, in a session and in the ways that a session replaces."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator, Sequence

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models.config import ModelConfig
from jaxstate.serving import market
from jaxstate.serving.market import Workload

PAGE_SIZE = 64
CONTEXT_LEN = 7680
NUM_PAGES = 256
"""The session, one more whole context for the request without reuse, and a fork's new rows."""


class Arm(enum.Enum):
    """A way to get the question answered; the value is its name in JSON."""

    SESSION = "session"  # rows were appended when they came; the question alone is forwarded
    WARMED = "warmed"  # a prefix cache, after a request of its own had forwarded the new rows
    COLD = "cold"  # a prefix cache, and the request brings the new rows with the question
    NO_REUSE = "no_reuse"  # the whole context is forwarded again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One arm in one round.

    Attributes:
      first_token_ms: from the question to the answer's first token.
      total_ms: to its last token.
      token_ids: the greedy answer.
      waited_tokens: tokens forwarded between question and first token.
      all_tokens: these and what was forwarded before the question for this round.
    """

    first_token_ms: float
    total_ms: float
    token_ids: tuple[int, ...]
    waited_tokens: int
    all_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What happened in a round.

    Attributes:
      round_idx: counted from 0.
      context_tokens: tokens of the context when the question came.
      new_tokens: tokens that this round appended.
      question_tokens: tokens of its question.
      append_ms: time of the session's append, which nobody waits for.
      timings: by arm; an arm that did not run is missing.
      answers, truths: for each of the three questions, index of the model's choice and of the
        true one.
    """

    round_idx: int
    context_tokens: int
    new_tokens: int
    question_tokens: int
    append_ms: float
    timings: dict[Arm, Timing]
    answers: tuple[int, ...]
    truths: tuple[int, ...]

    @property
    def question_idx(self) -> int:
        """Which question was timed."""
        return market.question_idx(self.round_idx)

    @property
    def is_same_answer(self) -> bool:
        """All arms drew the same tokens, as far as each went."""
        session = self.timings[Arm.SESSION].token_ids
        return all(
            timing.token_ids == session[: len(timing.token_ids)]
            for timing in self.timings.values()
        )


def engine_config(model: ModelConfig) -> EngineConfig:
    """Return the sizes of an engine for the whole workload.

    Raises:
      ValueError: the model's contexts are too short for it.
    """
    if model.max_positions <= CONTEXT_LEN:
        raise ValueError(
            f"model: expected one with contexts of more than {CONTEXT_LEN} tokens, got "
            f"{model.max_positions}; choose another model"
        )
    return EngineConfig(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, context_len=CONTEXT_LEN,
        evict_quantum=PAGE_SIZE,
    )


def rounds_without_reuse(rounds: int) -> set[int]:
    """Return the rounds, counted from 0, that also run without reuse: first, middle and last."""
    return {0, (rounds - 1) // 2, rounds - 1}


def run(
    engine: Engine, workload: Workload, rounds: int, doing: Callable[[str], None]
) -> Iterator[RoundResult]:
    """Run the workload and yield each round's result.

    Args:
      doing: called with what comes next, for progress.
    """
    candles = market.candles()
    slow_rounds = rounds_without_reuse(rounds)
    doing(f"system prompt and {market.START} candles, {len(workload.start)} tokens")
    session = engine.create(workload.start)
    doing("one unmeasured answer to each question, since first runs are slower")
    for question in workload.questions:
        engine.query(session, question, max_new_tokens=market.MAX_NEW_TOKENS)
    for round_idx in range(rounds):
        new = workload.rounds[round_idx]
        question = workload.questions[market.question_idx(round_idx)]
        context = workload.context(round_idx + 1)
        before = engine.fork(session)  # what a prefix cache holds when the rows arrive

        doing(f"append of {len(new)} tokens")
        append_ms = _append_ms(engine, session, new)
        timings = {Arm.SESSION: _timed(engine, session, question, before=(), early=len(new))}

        doing(f"request with {len(new)} new tokens and {len(question)} of the question")
        timings[Arm.COLD] = _timed(engine, before, question, before=new, early=0)
        timings[Arm.WARMED] = _timed(engine, before, question, before=(), early=len(new))
        engine.close(before)
        if round_idx in slow_rounds:
            doing(f"request without reuse, {len(context) + len(question)} tokens")
            timings[Arm.NO_REUSE] = _timed_without_reuse(engine, [*context, *question])

        doing("choices")
        answers = tuple(
            engine.choose(session, ids, choices).choice or 0
            for ids, choices in zip(workload.questions, workload.choices, strict=True)
        )
        seen = candles[: market.START + market.ROWS * (round_idx + 1)]
        yield RoundResult(
            round_idx=round_idx, context_tokens=len(context), new_tokens=len(new),
            question_tokens=len(question), append_ms=append_ms, timings=timings,
            answers=answers, truths=tuple(market.true_choices(seen)),
        )
    engine.close(session)


def _append_ms(engine: Engine, session: str, token_ids: Sequence[int]) -> float:
    began = time.perf_counter()
    engine.append(session, token_ids)
    engine.executor.wait()
    return (time.perf_counter() - began) * 1e3


def _timed(
    engine: Engine, session: str, question: Sequence[int], *, before: Sequence[int], early: int
) -> Timing:
    """Ask for a short greedy answer, and wait for it.

    Args:
      before: tokens to append at question time, inside the timing.
      early: tokens of this round that were forwarded outside the timing.
    """
    forwarded = engine.executor.tokens_forwarded
    began = time.perf_counter()
    if before:
        engine.append(session, before)
    stream = engine.stream(session, question, max_new_tokens=market.MAX_NEW_TOKENS)
    token_ids = [next(stream).token_id]
    first_token_ms = (time.perf_counter() - began) * 1e3
    waited = engine.executor.tokens_forwarded - forwarded
    token_ids += [token.token_id for token in stream]
    return Timing(
        first_token_ms=first_token_ms, total_ms=(time.perf_counter() - began) * 1e3,
        token_ids=tuple(token_ids), waited_tokens=waited, all_tokens=early + waited,
    )


def _timed_without_reuse(engine: Engine, prompt: Sequence[int]) -> Timing:
    """Ask for one token, since what follows it costs the same as in a session."""
    forwarded = engine.executor.tokens_forwarded
    began = time.perf_counter()
    answer = engine.generate(prompt, max_new_tokens=1)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    waited = engine.executor.tokens_forwarded - forwarded
    return Timing(
        first_token_ms=elapsed_ms, total_ms=elapsed_ms, token_ids=answer.token_ids,
        waited_tokens=waited, all_tokens=waited,
    )
