"""Registered questions: what a hit costs, what answering many together saves, one answer a burst.

    python bench/bench_flash.py [--quick] [--out FILE]

SmolLM2-135M in 32-bit floats behind 4,096 tokens of candles, in process. bench/README.md says what
every bar means.
"""

from __future__ import annotations

import argparse
import pathlib
import threading
import time

import common
from common import Limit, Report

from jaxstate.answer import Source
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import Question
from jaxstate.models import loading, sources
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.serving import market
from jaxstate.serving.local_service import LocalService

CONTEXT, QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 4096, 16, 24, 4
BURST, HITS, WAIT_S = 20, 2000, 600.0
HIT_MS = Limit(op="<=", value=0.2)
JOINT = Limit(op="<=", value=0.6, goal=0.45)
FRESH = Limit(op="<=", value=1.0)
ONCE = Limit(op="==", value=1)
SHARE = Limit(op=">=", value=0.95)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Registered questions.")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/bench_flash.py" + (" --quick" if args.quick else "")
    report = Report("flash", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    model = loading.load(sources.resolve("smollm2-135m"))
    config = EngineConfig(num_pages=140, page_size=64, context_len=7680, evict_quantum=512)
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine)
    load = common.OtherLoad(list)
    measure(service, model, 1 if args.quick else 5, report, load)
    service.close()
    report.no_bar(
        "flash.share", SHARE, unit="of what idle time allows",
        reason="needs a load generator with Poisson arrivals, which is not there yet",
    )  # fmt: skip
    report.table()


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
        registered.extend(service._boards[session].register(one) for one in questions)
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
    at, over = CONTEXT, []
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
