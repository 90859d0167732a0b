"""Registered questions and entries paid ahead: what a hit costs, what it saves to answer jointly.

    python bench/bench_flash.py [--quick] [--out FILE]

SmolLM2-135M in 32-bit floats behind 4,096 tokens of candles, in process. bench/README.md says what
every bar means.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import common
import flash_share
import numpy as np
from common import Limit, Report

from jaxstate.answer import Source
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import Question
from jaxstate.models import loading, sources
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.prepositioning import Entry
from jaxstate.serving import market
from jaxstate.serving.local_service import LocalService

CONTEXT, QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 4096, 16, 24, 4
BURST, HITS, WAIT_S = 20, 2000, 600.0
HIT_MS = Limit(op="<=", value=0.2)
JOINT = Limit(op="<=", value=0.6, goal=0.45)
FRESH = Limit(op="<=", value=1.0)
ONCE = Limit(op="==", value=1)
SHARE = Limit(op=">=", value=0.95)
RATIOS = {10.0: 1, 1.0: 1, 0.1: 3}  # queries per update: minutes, longer where queries are few
FULL_MS = Limit(op="<=", value=2.0)
TAIL = Limit(op="<=", value=1.3)
FLASH16 = Limit(op="<=", value=4)


def main() -> None:
    """Measure and report."""
    args, report = common.start("flash", "Registered questions.", quick="one round")
    model = loading.load(sources.resolve("smollm2-135m"))
    config = EngineConfig(num_pages=140, page_size=64, context_len=7680, evict_quantum=512)
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine, preposition=0)
    load = common.OtherLoad(list)
    measure(service, model, 1 if args.quick else 5, report, load)
    resumed(engine, service, model, 5 if args.quick else 30, report, load)
    service.close()
    random_arrivals(report, load, minute=5 if args.quick else 60)
    report.no_bar(
        "h200.flash16", FLASH16, unit="x one question, all registered together, 8k",
        reason="no H200 here; python bench/device_check.py --part sessions on one measures it",
    )  # fmt: skip
    report.table()


def resumed(
    engine: Engine, service: LocalService, model: LoadedModel, rounds: int, report: Report,
    load: common.OtherLoad,
) -> None:
    """Ask what was paid for ahead, wholly and but for its last tokens."""
    [session] = engine.session_ids
    question = questions_of(model)[0]
    ids = question.token_ids[:-1] + (model.tokenizer.encode("\nWhy")[-1],)  # not registered
    full, forwarded, ratios = [], [], {m: [] for m in (1, 2, 4, 8)}
    choice = Question(token_ids=ids, choices=(question.token_ids[:1], question.token_ids[1:2]))
    service.advance(session, Entry(token_ids=ids, max_new_tokens=ANSWER_TOKENS)).result(WAIT_S)
    for asked in (dataclasses.replace(question, token_ids=ids), choice):
        for _ in range(rounds):
            before = engine.executor.tokens_forwarded
            began = time.perf_counter()
            answer = service.query(session, asked).result(WAIT_S)
            full.append((time.perf_counter() - began) * 1e3)
            forwarded.append(engine.executor.tokens_forwarded - before)
            assert answer.source is Source.RESUMED
    for round_idx in range(rounds):
        # A change, so that what is paid for does not fill the pool.
        service.append(session, ids[:1]).result(WAIT_S)
        service.wait_until_idle(WAIT_S)  # the registered questions have their answers
        for index, (m, found) in enumerate(ratios.items()):
            # Each has a beginning of its own, of which nothing else is paid for.
            fresh = (*ids[:8], len(ratios) * round_idx + index, *ids[9:])
            service.advance(session, Entry(token_ids=fresh[:-m])).result(WAIT_S)
            before = engine.executor.tokens_forwarded
            began = time.perf_counter()
            service.query(session, Question(token_ids=fresh, max_new_tokens=1)).result(WAIT_S)
            tail_s = time.perf_counter() - began
            assert engine.executor.tokens_forwarded - before == m
            # One decode step at this context: two tokens less one.
            began = time.perf_counter()
            longer = Question(token_ids=fresh[:-m], max_new_tokens=2)
            service.query(session, longer).result(WAIT_S)
            found.append(tail_s / (time.perf_counter() - began))
    load.end("resumed")
    spoiled = load.reason("resumed")
    report.bar(
        "resumed.full_ms", common.median(full), FULL_MS, unit="ms, p50, in process", n=len(full),
        spoiled=spoiled, sound=not any(forwarded), tokens_forwarded=sum(forwarded),
    )  # fmt: skip
    by_tokens = {str(m): common.median(found) for m, found in ratios.items()}
    report.bar(
        "resumed.tail", max(by_tokens.values()), TAIL,
        unit="x one decode step, worst of 1, 2, 4, 8 tokens", n=rounds, spoiled=spoiled,
        by_tokens=by_tokens,
    )  # fmt: skip


def random_arrivals(report: Report, load: common.OtherLoad, *, minute: float) -> None:
    """Random arrivals on the small model that was trained for candles."""
    model = loading.load(common.TASK_MODEL)
    config = EngineConfig(num_pages=96, page_size=64, context_len=2048, evict_quantum=256)
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine, preposition=0)
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return rng.integers(0, model.config.vocab_size, count).tolist()

    session = service.create(draw(64), when_full="slide")
    service.append(session, draw(1900)).result(WAIT_S)
    questions = [Question(token_ids=tuple(draw(12)), max_new_tokens=4) for _ in range(4)]
    for question in questions:
        service.register(session, question)
    service.wait_until_idle(WAIT_S)
    # Before and while it is measured the session slides several times, as it will all the time.
    rows = [draw(14) for _ in range(flash_share.CALIBRATIONS)]
    flash_share.costs(service, session, questions, rows)
    cost = flash_share.costs(service, session, questions, rows)
    # Updates so frequent that evaluating them takes a third of the time.
    rate = 1 / (3 * (cost.append_s + cost.evaluate_s))
    load.end("calibration of shares")
    found = {}
    for seed, (ratio, minutes) in enumerate(RATIOS.items()):
        seconds = minutes * minute
        rows = [draw(14) for _ in range(int(rate * seconds * 2) + flash_share.CALIBRATIONS)]
        shares, paced = flash_share.play(
            service, session, questions, rows, updates_per_s=rate, queries_per_s=ratio * rate,
            seconds=seconds, seed=seed,
        )  # fmt: skip
        found[f"{ratio:g}:1"] = shares
        lines = dataclasses.asdict(shares) | dataclasses.asdict(paced)
        report.line(arm="share", queries_per_update=ratio, **lines)
    load.end("share")
    service.close()
    worth = {name: one.measured / one.possible for name, one in found.items()}
    report.bar(
        "flash.share", min(worth.values()), SHARE, unit="of what idle time allows, worst",
        n=sum(one.queries for one in found.values()), spoiled=load.reason("share"),
        by_ratio=worth, **dataclasses.asdict(cost), updates_per_s=rate,
    )  # fmt: skip


def measure(
    service: LocalService, model: LoadedModel, rounds: int, report: Report, load: common.OtherLoad
) -> None:
    """Take all bars on one session."""
    assert model.tokenizer is not None
    text = market.SYSTEM + "".join(candle.text for candle in market.candles())
    ids = model.tokenizer.encode(text)
    session = service.create(ids[:CONTEXT])
    questions = questions_of(model)
    alone, together, hits, same = [], [], [], []
    for number in range(rounds + 1):  # the first warms up
        common.note(f"round {number} of {rounds}")
        # What the last round's evaluations kept must not help this one.
        service.append(session, ids[CONTEXT + number : CONTEXT + number + 1]).result(WAIT_S)
        began = time.perf_counter()
        separate = [service.query(session, question).result(WAIT_S) for question in questions]
        alone.append(time.perf_counter() - began)
        took, registered = evaluate_together(service, session, questions)
        together.append(took)
        for number in range(HITS):
            question = questions[number % QUESTIONS]
            began = time.perf_counter()
            answer = service.query(session, question).result()
            hits.append((time.perf_counter() - began) * 1e3)
            assert answer.source is Source.FLASH
        answers = [service.query(session, question).result() for question in questions]
        same += [
            answer.token_ids == other.token_ids
            for answer, other in zip(answers, separate, strict=True)
        ]
        for query in registered:
            service.unregister(session, query.flash_id)
        report.line(arm="joint", alone_s=alone[-1], together_s=together[-1])
    load.end("flash")
    spoiled = load.reason("flash")
    report.bar(
        "flash.hit_ms", common.median(hits), HIT_MS, unit="ms, p50, in process", n=len(hits)
    )
    ratios = [one / other for one, other in zip(together[1:], alone[1:], strict=True)]
    report.bar(
        "flash.joint", common.median(ratios), JOINT,
        unit=f"x the sum of {QUESTIONS} separate evaluations", n=rounds, spoiled=spoiled,
        sound=all(same), answers_equal=sum(same), answers=len(same),
    )  # fmt: skip
    bursts(service, session, questions, ids, common.median(together[1:]), report, spoiled)


def questions_of(model: LoadedModel) -> list[Question]:
    """Sixteen questions of 24 tokens."""
    assert model.tokenizer is not None
    found = []
    for number in range(QUESTIONS):
        text = f"\nQuestion: In row {number + 1}, and in all that follow, is the last close above"
        ids = model.tokenizer.encode(text + " the first close, yes or no? Answer now:")
        ids = ids[: QUESTION_TOKENS - 1] + ids[-1:]
        found.append(Question(token_ids=tuple(ids), max_new_tokens=ANSWER_TOKENS))
    return found


def evaluate_together(service: LocalService, session: str, questions: list[Question]):
    """Register all at once, as if they had been there: (seconds until answered, registrations)."""
    registered = []
    done = threading.Event()

    def register() -> None:
        registered.extend(service._sessions[session].board.register(one) for one in questions)
        done.set()

    began = time.perf_counter()
    service._call(register)
    service.wait_until_idle(WAIT_S)
    return time.perf_counter() - began, registered


def bursts(
    service: LocalService, session: str, questions: list[Question], ids: list[int],
    together_s: float, report: Report, spoiled: str | None,
) -> None:
    """Append, and see when all answers are fresh; then append in a burst."""
    registered = [service.register(session, question) for question in questions]
    service.wait_until_idle(WAIT_S)
    at, over = CONTEXT + 16, []
    for _ in range(5):
        began = time.perf_counter()
        service.append(session, ids[at : at + 40]).result(WAIT_S)
        appended = time.perf_counter()
        service.wait_until_idle(WAIT_S)
        # Beyond the append: the joint evaluation, against 1.2 times that of before.
        over.append((time.perf_counter() - appended) / (1.2 * together_s))
        report.line(arm="fresh", append_s=appended - began, of_limit=over[-1])
        at += 40
    report.bar(
        "flash.fresh", max(over), FRESH, unit="x (1.2 joint evaluations), after the append, worst",
        n=len(over), spoiled=spoiled,
    )  # fmt: skip
    before = [query.evaluations for query in registered]
    burst = [service.append(session, ids[at + n : at + n + 1]) for n in range(BURST)]
    for pending in burst:
        pending.result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    counts = [
        query.evaluations - count for query, count in zip(registered, before, strict=True)
    ]
    report.bar(
        "flash.burst", max(counts), ONCE, unit="evaluations of a question after 20 appends",
        n=len(counts), sound=min(counts) == 1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
