"""Live streams for the calibrated gate: what it answers on versions it has not seen, and how well.

A stream is a session that slides over rows, one append a version, with registered questions about
them. The first half of the versions calibrates, the second is held out. Answers come from a service
as they would in use: every stale answer is compared with the fresh one that followed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from common import Report, note
from task import candles, questions
from task.candles import Context

from jaxstate import calibration
from jaxstate.answer import Answer
from jaxstate.calibration import ShadowSample
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import FlashQuery, Question
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.prepositioning import Entry
from jaxstate.serving import market
from jaxstate.serving.local_service import LocalService

RISKS = (0.01, 0.05, 0.1)
FIXED_TAU = 2.0  # logits, arXiv:2606.29565
FEWEST_LEFT_OUT = 0.01  # of the versions, for a gate to be told from answering always
WAIT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A registered question of a stream.

    Attributes:
      name: of the question.
      question: see Question; its first choice is what `truth` calls True.
      truth: the true answer at a version.
    """

    name: str
    question: Question
    truth: Callable[[int], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """A session's life.

    Attributes:
      name: of model and data.
      model: whose answers they are.
      config: of the engine.
      frozen: what the session starts with.
      rows: token ids of each append.
      asked: the questions.
      header: how questions begin, the entry of the question-independent ready state.
    """

    name: str
    model: LoadedModel
    config: EngineConfig
    frozen: list[int]
    rows: list[list[int]]
    asked: list[Asked]
    header: tuple[int, ...]


def smollm2(model: LoadedModel, versions: int) -> Stream:
    """Real hourly candles, SmolLM2 and the market demo's questions."""
    assert model.tokenizer is not None
    encode = model.tokenizer.encode
    seen = market.candles(market.START + versions)
    rows = [encode(one.text, continues=True) for one in seen]
    workload = market.tokenize(model.tokenizer)
    window = market.START  # rows that stay, about

    def truth(index: int) -> Callable[[int], bool]:
        def of(version: int) -> bool:
            last = market.START + version
            return market.TRUTHS[index](seen[max(last - window, 0) : last])

        return of

    asked = [
        Asked(
            name=market.QUESTION_NAMES[index],
            question=Question(token_ids=question, choices=workload.choices[index]),
            truth=truth(index),
        )
        for index, question in enumerate(workload.questions)
    ]
    frozen = encode(market.SYSTEM)
    length = len(frozen) + sum(map(len, rows[: market.START])) + 64
    config = EngineConfig(
        num_pages=2 * length // 64 + 16, page_size=64, context_len=length, evict_quantum=64
    )
    header = encode("\nQuestion:", continues=True)
    start = [token for row in rows[: market.START] for token in row]
    return Stream(
        name="SmolLM2-135M, real candles", model=model, config=config,
        frozen=frozen, rows=[start, *rows[market.START :]], asked=asked, header=tuple(header),
    )  # fmt: skip


def candles_1m(model: LoadedModel, versions: int) -> Stream:
    """Synthetic candles, the model that was trained for them, questions at three levels."""
    assert model.tokenizer is not None
    window = 40  # rows
    rng = np.random.default_rng(7)
    count = window + versions
    prices = candles.synthetic(rng, count, moves=(6.0, 6.0))
    whole = Context(prices=prices, names=np.arange(count) % len(candles.NAMES))
    encode = model.tokenizer.encode
    rows = [encode("".join(candles.row_tokens(whole, index))) for index in range(count)]
    choices = (tuple(encode(questions.YES)), tuple(encode(questions.NO)))

    def truth(asked: tuple[str, str, int]) -> Callable[[int], bool]:
        def of(version: int) -> bool:
            field, which, level = asked
            seen = prices[version : version + window]
            if which == "first":
                return bool(seen[0, candles.CLOSE] > level)
            recent = seen[-int(which.split()[1]) :]
            if field == "high":
                return bool(recent[:, candles.HIGH].max() > level)
            return bool(recent[:, candles.LOW].min() > level)

        return of

    asked = []
    for field, which in (("close", "first"), ("high", "last 8"), ("low", "last 4")):
        for level in (30, 50, 70):
            text = f"{field} {which} above {level}?"
            asked.append(
                Asked(
                    name=text,
                    question=Question(token_ids=tuple(encode(text)), choices=choices),
                    truth=truth((field, which, level)),
                )
            )
    length = 1 + window * candles.ROW_TOKENS
    config = EngineConfig(
        num_pages=64, page_size=16, context_len=length, evict_quantum=candles.ROW_TOKENS
    )
    start = [token for row in rows[:window] for token in row]
    return Stream(
        name="candles-1m, synthetic candles", model=model, config=config,
        frozen=encode(candles.START), rows=[start, *rows[window:]], asked=asked,
        header=tuple(encode("close first above")),
    )  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class Recorded:
    """What a question's service knew at each version but the first.

    Attributes:
      samples: a stale answer beside the fresh one.
      header: what the header alone would have answered, likewise.
      truths: whether the stale answer's first choice was said, and should have been.
    """

    samples: list[ShadowSample] = dataclasses.field(default_factory=list)
    header: list[ShadowSample] = dataclasses.field(default_factory=list)
    said: list[bool] = dataclasses.field(default_factory=list)
    fresh: list[bool] = dataclasses.field(default_factory=list)
    truth: list[bool] = dataclasses.field(default_factory=list)


def play(stream: Stream, report: Report) -> list[Recorded]:
    """Let a stream run through a service."""
    engine = Engine(
        stream.model.params, stream.model.config, stream.config, tokenizer=stream.model.tokenizer
    )
    service = LocalService(engine, preposition=0)
    session = service.create(stream.frozen, when_full="slide")
    service.append(session, stream.rows[0]).result(WAIT_S)
    queries = [service.register(session, one.question) for one in stream.asked]
    service.declare(session, Entry(token_ids=stream.header))
    service.wait_until_idle(WAIT_S)
    found = [Recorded() for _ in queries]
    for version, row in enumerate(stream.rows[1:], 1):
        before = [_answer(query) for query in queries]
        service.append(session, row).result(WAIT_S)
        service.wait_until_idle(WAIT_S)
        for one, old, query, asked in zip(found, before, queries, stream.asked, strict=True):
            one.said.append(old.choice == 0)
            one.fresh.append(_answer(query).choice == 0)
            one.truth.append(asked.truth(version))
        if version % 100 == 0:
            note(f"{stream.name}: version {version} of {len(stream.rows) - 1}")
    for one, query in zip(found, queries, strict=True):
        one.samples = list(query.stale.samples)
        one.header = [sample for gate in query.headers.values() for sample in gate.samples]
        assert len(one.samples) == len(one.said)
    report.line(
        arm="stream", stream=stream.name, versions=len(stream.rows) - 1,
        tokens_forwarded=engine.executor.tokens_forwarded, steps=engine.executor.steps,
    )  # fmt: skip
    service.close()
    return found


def _answer(query: FlashQuery) -> Answer:
    assert query.answer is not None
    return query.answer


def table(stream: Stream, found: Sequence[Recorded], report: Report) -> Iterator[tuple[str, float]]:
    """Write a line per question and arm; yield what a calibrated gate's disagreement is worth.

    Yields:
      question and risk, and the gate's disagreement in multiples of that of all stale answers,
      wherever it fired, left something out, and stale answers differ from fresh ones.
    """
    for asked, one in zip(stream.asked, found, strict=True):
        half = len(one.samples) // 2
        held = np.arange(half, len(one.samples))
        gaps = np.array([sample.gap for sample in one.samples])
        disagreed = np.array([not sample.agreed for sample in one.samples])
        said, fresh, truth = (np.array(x) for x in (one.said, one.fresh, one.truth))
        always = float(disagreed[held].mean())

        def line(
            arm: str, fires: np.ndarray, *, answers=said, wrong=disagreed,
            asked=asked, fresh=fresh, truth=truth, held=held, **more,
        ) -> float | None:  # fmt: skip
            """Write what an arm does with the held-out versions on which it fires."""
            on = held[fires[held]]
            share = float(wrong[on].mean()) if len(on) else None
            report.line(
                arm=arm, stream=stream.name, question=asked.name, held_out=len(held),
                coverage=len(on) / len(held), disagreement=share,
                accuracy=float((answers[on] == truth[on]).mean()) if len(on) else None,
                fresh_accuracy=float((fresh[held] == truth[held]).mean()),
                true_share=float(truth[held].mean()), **more,
            )  # fmt: skip
            return share

        everywhere = np.ones(len(gaps), bool)
        line("always stale", everywhere)
        line("fixed tau 2.0", gaps > FIXED_TAU)
        common = bool(fresh[:half].mean() >= 0.5)
        line(
            "majority", everywhere, answers=np.full(len(gaps), common), wrong=fresh != common
        )
        if one.header:
            sampled = np.array([sample.gap for sample in one.header])
            wrong = np.zeros(len(gaps), bool)
            fires = np.zeros(len(gaps), bool)
            at = [sample.version - one.samples[0].version for sample in one.header]
            wrong[at] = [not sample.agreed for sample in one.header]
            fires[at] = sampled > FIXED_TAU
            line("header, tau 2.0", fires, wrong=wrong, answers=np.where(wrong, ~fresh, fresh))
            fires[at] = True
            line("header, always", fires, wrong=wrong, answers=np.where(wrong, ~fresh, fresh))
        for risk in RISKS:
            gate = calibration.calibrate(one.samples[:half], risk)
            fires = np.array([calibration.decide(gate, gap) for gap in gaps])
            share = line(
                "calibrated", fires, risk=risk, tau=gate.tau, bound=gate.bound,
                num_effective=gate.num_effective, block_len=gate.block_len,
            )  # fmt: skip
            chooses = 1 - float(fires[held].mean()) >= FEWEST_LEFT_OUT
            if share is not None and always and chooses:
                yield f"{stream.name}: {asked.name} at {risk:.0%}", share / always
