"""An agent's tool calls: what the time until its next words costs, and what a pause pays ahead.

    python bench/bench_agent.py [--quick] [--out FILE]

Recorded turns with SmolLM2-135M in 32-bit floats, in process. bench/README.md says what the bar and
the arms mean.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time

import common
from common import Limit, Report

from jaxstate.answer import Answer, Source
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import Question
from jaxstate.models import loading, sources
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.prepositioning import Entry
from jaxstate.serving.local_service import LocalService
from jaxstate.state import StepShape

TRANSCRIPT = common.ROOT / "bench" / "agent_transcript.json"
HEADER = "\nAssistant:"  # the envelope behind a tool's result
ENOUGH = "\nThe result above is high enough to sell, yes or no? Answer:"
ANSWER_TOKENS, PAUSE_S, WAIT_S, RISK = 8, 0.5, 600.0, 0.05
SHAPES = tuple(
    StepShape(num_tokens=n, block_tokens=n, num_rows=1 if n == 1 else 8)
    for n in (1, 4, 16, 32, 64, 512)
)
COLD_EVERY = 10  # turns; it is slow
AGENT = Limit(op="<=", value=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn appends: the request with the call of the tool, then the tool's result."""

    called: list[int]
    result: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """An answer, how long it took, and how long the append of the tool's result before it."""

    answer: Answer
    query_s: float
    append_s: float = 0.0


def main() -> None:
    """Measure and report."""
    args, report = common.start("agent", "An agent's tool calls.", quick="ten turns")
    model = loading.load(sources.resolve("smollm2-135m"))
    assert model.tokenizer is not None
    system, turns = read(model.tokenizer)
    turns = turns[:10] if args.quick else turns
    # One session at a time, with room for what it is asked.
    config = EngineConfig(
        num_pages=112, page_size=64, context_len=3072, evict_quantum=512, step_shapes=SHAPES
    )
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine, preposition=0)
    load = common.OtherLoad(list)
    header = tuple(model.tokenizer.encode(HEADER, continues=True))
    free = Question(token_ids=header, max_new_tokens=ANSWER_TOKENS)
    play(service, system, turns[:2], free, pause_s=0.0)  # warms up
    arms = {
        "computed": play(service, system, turns, free),
        "resumed": play(service, system, turns, free, pause_s=PAUSE_S),
        "at once": play(service, system, turns, free, pause_s=0.0),
        "cold": cold(service, system, turns, free),
    }
    for name, found in arms.items():
        line(report, name, found)
    choose = dataclasses.replace(
        free, token_ids=tuple(model.tokenizer.encode(ENOUGH, continues=True)),
        choices=tuple(
            tuple(model.tokenizer.encode(one, continues=True)) for one in (" yes", " no")
        ),
    )  # fmt: skip
    gated(report, service, system, turns, choose)
    load.end("agent")
    service.close()
    medians = {name: common.median([one.query_s for one in found]) for name, found in arms.items()}
    same = [
        one.answer.token_ids == other.answer.token_ids
        for one, other in zip(arms["resumed"], arms["computed"], strict=True)
    ]
    forwarded = sum(one.answer.tokens_forwarded for one in arms["resumed"])
    report.bar(
        "agent", medians["resumed"] / medians["computed"], AGENT,
        unit="x computed, p50 of the time from query to answer", n=len(turns),
        spoiled=load.reason("agent"), sound=all(same) and not forwarded, answers_equal=sum(same),
        tokens_forwarded=forwarded, cold_vs_resumed=medians["cold"] / medians["resumed"],
    )  # fmt: skip
    report.table()


def read(tokenizer: Tokenizer) -> tuple[list[int], list[Turn]]:
    """Return the recorded system prompt and turns as tokens."""
    recorded = json.loads(TRANSCRIPT.read_text(encoding="utf-8"))
    turns = []
    for turn in recorded["turns"]:
        called = f"\nUser: {turn['request']}\nCall: {turn['call']}"
        result = f"\nResult: {turn['result']}"
        turns.append(
            Turn(
                called=tokenizer.encode(called, continues=True),
                result=tokenizer.encode(result, continues=True),
            )
        )
    return tokenizer.encode(recorded["system"]), turns


def play(
    service: LocalService,
    system: list[int],
    turns: list[Turn],
    question: Question,
    *,
    pause_s: float | None = None,
) -> list[Asked]:
    """Play all turns in one session, and ask for the next words behind every result.

    Args:
      pause_s: between the result and the question, whose header was declared; None = it was not
        declared, nothing is paid ahead, and the question comes at once.
    """
    session = service.create(system)
    if pause_s is not None:
        entry = Entry(token_ids=question.token_ids, max_new_tokens=question.max_new_tokens)
        service.declare(session, entry)
    found = []
    for turn in turns:
        service.append(session, turn.called).result(WAIT_S)
        service.wait_until_idle(WAIT_S)  # the tool runs
        began = time.perf_counter()
        service.append(session, turn.result).result(WAIT_S)
        append_s = time.perf_counter() - began
        time.sleep(pause_s or 0.0)
        began = time.perf_counter()
        answer = service.query(session, question).result(WAIT_S)
        query_s = time.perf_counter() - began
        found.append(Asked(answer=answer, query_s=query_s, append_s=append_s))
    service.close_session(session)
    return found


def cold(
    service: LocalService, system: list[int], turns: list[Turn], question: Question
) -> list[Asked]:
    """Ask the same without a session: the whole transcript is forwarded for each answer."""
    found = []
    prompt = list(system)
    for number, turn in enumerate(turns, start=1):
        prompt += turn.called + turn.result
        if number % COLD_EVERY:
            continue
        began = time.perf_counter()
        pending = service.generate(
            [*prompt, *question.token_ids], max_new_tokens=question.max_new_tokens
        )
        answer = pending.result(WAIT_S)
        found.append(Asked(answer=answer, query_s=time.perf_counter() - began))
    return found


def gated(
    report: Report, service: LocalService, system: list[int], turns: list[Turn], question: Question
) -> None:
    """Ask a registered question as soon as a result is there: may what was known before it answer?

    It is answered in idle time while the tool runs and after the turn, so the gate learns from two
    changes a turn.
    """
    session = service.create(system)
    query = service.register(session, question)
    found, agreed = [], []
    for turn in turns:
        service.append(session, turn.called).result(WAIT_S)
        service.wait_until_idle(WAIT_S)  # the tool runs
        service.append(session, turn.result).result(WAIT_S)
        began = time.perf_counter()
        answer = service.query(session, question, risk=RISK).result(WAIT_S)
        found.append(Asked(answer=answer, query_s=time.perf_counter() - began))
        service.wait_until_idle(WAIT_S)  # the user reads
        if answer.source is Source.GATED:
            fresh = service.query(session, question).result(WAIT_S)
            agreed.append(answer.choice == fresh.choice)
    line(
        report, "gated", found, risk=RISK, fires=query.fires, disagreements=agreed.count(False),
        gated_ms=[1e3 * one.query_s for one in found if one.answer.source is Source.GATED],
        shadow_samples=len(query.stale.samples),
        shadow_agreed=sum(sample.agreed for sample in query.stale.samples),
    )  # fmt: skip
    service.close_session(session)


def line(report: Report, arm: str, found: list[Asked], **more: object) -> None:
    """Write an arm's line."""
    answers = [one.answer for one in found]
    report.line(
        arm=arm, turns=len(found), **common.spread("query", [1e3 * one.query_s for one in found]),
        append_ms=common.median([1e3 * one.append_s for one in found]),
        tokens_forwarded=sum(answer.tokens_forwarded for answer in answers),
        sources=collections.Counter(answer.source.value for answer in answers),
        context_tokens=answers[-1].context_len, **more,
    )  # fmt: skip


if __name__ == "__main__":
    main()
