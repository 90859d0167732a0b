"""Many sessions of a service: what a question waits for, alone, joint, paid ahead, and gated."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import common
import device_model
import device_session_check
import numpy as np
from device_model import PAGE_SIZE
from device_report import Bar
from device_run import INTERPRETED, Job, Run
from device_session_check import WAIT_S
from device_sizes import SessionSizes
from device_timing import free_bytes

from jaxstate import calibration
from jaxstate.answer import Answer, Source
from jaxstate.calibration import ShadowSample
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import FlashQuery, Question
from jaxstate.gate import Gate
from jaxstate.models.params import num_params
from jaxstate.plan import JobClass
from jaxstate.prepositioning import Entry
from jaxstate.serving.local_service import LocalService, Pending

_TABLE_LEN = 1024  # stretches of a step: a session is one, or a few once it has slid
_SPARE_PAGES = 256  # for tails
_RISK, _SAMPLES = 0.05, 4000  # of a gate that surely fires
_GATED_QUERIES = 20  # per change, sooner than a fresh answer


@dataclasses.dataclass(kw_only=True)
class Service:
    """A service on random weights, its sessions, and how to ask them.

    Attributes:
      count: sessions that the memory has room for.
      weight_bytes: that a step reads.
      sessions: those that are full; the first is there before the others.
    """

    sizes: SessionSizes
    engine: Engine
    service: LocalService
    count: int
    weight_bytes: int
    rng: np.random.Generator
    sessions: list[str] = dataclasses.field(default_factory=list)

    def draw(self, count: int) -> tuple[int, ...]:
        """Draw token ids."""
        return tuple(self.rng.integers(0, self.sizes.model.vocab_size, count).tolist())

    def question(self) -> Question:
        """Draw a question."""
        ids = self.draw(self.sizes.question_len)
        return Question(token_ids=ids, max_new_tokens=self.sizes.answer_len)

    def fill(self) -> None:
        """Open a session and compute its whole context."""
        session = self.service.create((), when_full="slide")
        self.service.append(session, self.draw(self.sizes.context)).result(WAIT_S)
        self.sessions.append(session)

    def append(self, session: str) -> Pending:
        """Append as many tokens as an append has."""
        return self.service.append(session, self.draw(self.sizes.append_len))


def jobs(sizes: SessionSizes) -> list[Job]:
    """Return the jobs; between the first and the last of them the sessions fill the memory."""
    services: list[Service] = []

    def start(run: Run) -> None:
        services[:] = [_start(run, sizes)]

    def job(name: str, seconds: float, function: Callable[[Run, Service], None]) -> Job:
        def work(run: Run) -> None:
            if not services or not services[0].sessions:
                raise NotImplementedError("there are no sessions, see the lines before")
            function(run, services[0])

        return Job(name=f"sessions {name}", seconds=seconds, work=work)

    def end(run: Run) -> None:
        while services:
            services.pop().service.close()

    return [
        Job(name="check sessions", seconds=40, work=device_session_check.check),
        Job(name="sessions start", seconds=120, work=start),
        job("flash", 20, _flash),
        job("paid", 10, _paid),
        job("gate", 10, _gate),
        *(job(f"fill {part}", sizes.fill_s + 2 * sizes.ask_s, _fill) for part in range(1, 5)),
        job("ask", 2 * sizes.ask_s, _ask),
        Job(name="sessions end", seconds=0, work=end, always=True),
    ]


def bar(run: Run) -> Bar | None:
    """h200.flash16: all registered questions evaluated together beside one of them."""
    waits, sizes = run.report.waits, run.sizes.sessions
    together, one = (waits.get(_flash_name(count)) for count in (sizes.questions, 1))
    if together is None or one is None:
        return None
    detail = {"together_ms": common.median(together), "one_ms": common.median(one)}
    value = detail["together_ms"] / detail["one_ms"]
    return Bar(value=value, n=len(together), detail={"questions": sizes.questions, **detail})


def _start(run: Run, sizes: SessionSizes) -> Service:
    """Draw weights, take as many pages as there is memory for, compile, fill one session."""
    model = sizes.model
    run.require("kernel", model.head_dim, model.dtypes.cache_dtype)
    began = time.perf_counter()
    params = device_model.draw_params(model)
    weights = device_model.weight_bytes(params)
    each = sizes.context // PAGE_SIZE + 1
    count, free = sizes.count, free_bytes()
    if free is not None:
        fit = (free - device_model.SLACK_BYTES) // (PAGE_SIZE * model.bytes_per_cell)
        count = min(count, int(fit - _SPARE_PAGES) // each)
    if count < 1:
        raise MemoryError(f"weights of {weights / 1e9:.1f} GB and one session do not fit")
    drawn = time.perf_counter()
    # How long the interpreter takes says nothing; the check has tried it.
    implementation: Any = "xla" if run.kernels == INTERPRETED else run.kernels
    config = EngineConfig(
        num_pages=count * each + _SPARE_PAGES, page_size=PAGE_SIZE, context_len=sizes.context,
        evict_quantum=sizes.evict, step_shapes=sizes.shapes, table_capacity=_TABLE_LEN,
        implementation=implementation, kernel_cache_dir=tempfile.gettempdir(),
    )  # fmt: skip
    engine = Engine(params, model, config)
    compiled = time.perf_counter()
    found = Service(
        sizes=sizes, engine=engine, service=LocalService(engine, preposition=0), count=count,
        weight_bytes=weights, rng=np.random.default_rng(0),
    )  # fmt: skip
    found.fill()
    run.report.line(
        arm="sessions", params=num_params(model), weight_bytes=weights, sessions=count,
        context=sizes.context, cell_bytes=config.num_cells * model.bytes_per_cell,
        implementation=implementation, draw_s=drawn - began, compile_s=compiled - drawn,
        executables=engine.executor.num_executables, first_fill_s=time.perf_counter() - compiled,
    )  # fmt: skip
    return found


def _flash_name(count: int) -> str:
    return f"flash {count} together"


def _flash(run: Run, found: Service) -> None:
    """Time evaluating all registered questions, from a change to answers, and one of them."""
    sizes, service, session = found.sizes, found.service, found.sessions[0]
    asked = [service.register(session, found.question()) for _ in range(sizes.questions)]
    service.wait_until_idle(WAIT_S)
    for count in (sizes.questions, 1):
        for query in asked[count:]:
            service.unregister(session, query.flash_id)
        samples, steps = [], found.engine.executor.steps
        for _ in range(sizes.rounds):
            version = found.append(session).result(WAIT_S)
            began = time.perf_counter()
            service.wait_until_idle(WAIT_S)
            samples.append((time.perf_counter() - began) * 1e3)
            _require_fresh(asked[:count], version)
        run.report.wait(
            _flash_name(count), samples, questions=count, question_len=sizes.question_len,
            answer_len=sizes.answer_len, context=found.engine.session(session).context_len,
            steps=(found.engine.executor.steps - steps) / sizes.rounds - 1,  # less the append's
            floor_ms=sizes.answer_len * _floor_ms(run, found),
        )  # fmt: skip
    service.unregister(session, asked[0].flash_id)


def _require_fresh(asked: list[FlashQuery], version: int) -> None:
    found = [query.answer.version if query.answer else query.error for query in asked]
    if found != [version] * len(asked):
        raise RuntimeError(f"flash: expected answers of version {version} when idle, got {found}")


def _floor_ms(run: Run, found: Service) -> float:
    """Least time of a step: the weights and the cells of a session that has slid are read."""
    cells = (found.sizes.context - found.sizes.evict) * found.sizes.model.bytes_per_cell
    return run.floor_ms(found.weight_bytes + cells)


def _paid(run: Run, found: Service) -> None:
    """Time questions that were paid for wholly: no token is forwarded."""
    service, session = found.service, found.sessions[0]
    question = found.question()
    entry = Entry(token_ids=question.token_ids, max_new_tokens=question.max_new_tokens)
    service.advance(session, entry).result(WAIT_S)
    samples, forwarded = [], found.engine.executor.tokens_forwarded
    for _ in range(10 * found.sizes.rounds):
        took, answer = _timed(service, session, question)
        samples.append(took)
        if answer.source is not Source.RESUMED:
            raise RuntimeError(f"paid: expected an answer RESUMED, got {answer.source.name}")
    forwarded = found.engine.executor.tokens_forwarded - forwarded
    run.report.wait(
        "paid wholly", samples, tokens_forwarded=forwarded, answer_len=found.sizes.answer_len
    )


def _timed(
    service: LocalService, session: str, question: Question, **how: Any
) -> tuple[float, Answer]:
    began = time.perf_counter()
    answer = service.query(session, question, **how).result(WAIT_S)
    return (time.perf_counter() - began) * 1e3, answer


def _gate(run: Run, found: Service) -> None:
    """Time what a gate answers while the fresh answer is computed, and looking a fresh one up."""
    service, session = found.service, found.sessions[0]
    query = service.register(session, found.question())
    service.wait_until_idle(WAIT_S)
    query.stale = _sure_gate()
    gated, hits = [], []
    for _ in range(found.sizes.rounds):
        found.append(session).result(WAIT_S)
        for _ in range(_GATED_QUERIES):
            took, answer = _timed(service, session, query.question, risk=_RISK, stale="serve")
            if answer.source is Source.GATED:
                gated.append(took)
        service.wait_until_idle(WAIT_S)
        for _ in range(_GATED_QUERIES):
            took, answer = _timed(service, session, query.question)
            hits.append(took)
            assert answer.source is Source.FLASH
    service.unregister(session, query.flash_id)
    if not gated:
        raise RuntimeError("gate: expected it to fire while answers are stale, it never did")
    run.report.wait("gate fires", gated, asked=len(hits))
    run.report.wait("registered and fresh", hits)


def _sure_gate() -> Gate:
    """A gate that fires whatever random weights say: its samples are made up, all in agreement."""
    samples = [
        ShadowSample(gap=100.0, agreed=True, stale_version=number, version=number + 1)
        for number in range(_SAMPLES)
    ]
    found = dataclasses.replace(calibration.calibrate(samples, _RISK), version=1)
    gate = Gate()
    gate.add(samples[0])  # answers one version old may stand
    calibrated = {"calibrations": [found.to_json()], "after": [-1], "due": [2 * _SAMPLES]}
    return Gate.from_json(gate.to_json() | calibrated)


def _fill(run: Run, found: Service) -> None:
    """Fill more sessions, as many as there is time for."""
    if len(found.sessions) == found.count:
        return
    began, forwarded = time.perf_counter(), found.engine.executor.tokens_forwarded
    seconds = 0.0
    while len(found.sessions) < found.count and seconds < found.sizes.fill_s:
        found.fill()
        seconds = time.perf_counter() - began
    forwarded = found.engine.executor.tokens_forwarded - forwarded
    run.report.line(
        arm="fill", sessions=len(found.sessions), of=found.count, seconds=seconds,
        tokens_per_s=forwarded / seconds, cells=dataclasses.asdict(found.service.cells()),
    )  # fmt: skip


def _ask(run: Run, found: Service) -> None:
    """Time questions to random sessions, alone and while rows are appended to all of them."""
    sizes, figures = found.sizes, found.service.metrics.by_class[JobClass.APPEND]
    _questions(run, found, "alone", sizes.ask_s / 4)
    before, began = figures.tokens, time.perf_counter()
    stop, errors = threading.Event(), []
    thread = threading.Thread(target=_keep_appending, args=(found, stop, errors), daemon=True)
    thread.start()
    try:
        _questions(
            run, found, "during appends", sizes.ask_s, append_len=sizes.append_len,
            appends_under_way=sizes.appends,
        )  # fmt: skip
    finally:
        stop.set()
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    seconds = time.perf_counter() - began
    run.report.line(
        arm="appends", tokens_per_s=(figures.tokens - before) / seconds, seconds=seconds,
        compilations=found.service.metrics.compilations,
    )  # fmt: skip


def _questions(run: Run, found: Service, name: str, seconds: float, **detail: Any) -> None:
    """Ask one question after another."""
    firsts, wholes = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(wholes) < found.sizes.rounds:
        session = found.sessions[int(found.rng.integers(len(found.sessions)))]
        question = found.question()
        began = time.perf_counter()
        pending = found.service.query(session, question)
        next(iter(pending))
        firsts.append((time.perf_counter() - began) * 1e3)
        pending.result(WAIT_S)
        wholes.append((time.perf_counter() - began) * 1e3)
    detail |= {"sessions": len(found.sessions), "context": found.sizes.context}
    floor_ms, answer_len = _floor_ms(run, found), found.sizes.answer_len
    run.report.wait(f"first token {name}", firsts, floor_ms=floor_ms, **detail)
    run.report.wait(
        f"answer {name}", wholes, floor_ms=answer_len * floor_ms, answer_len=answer_len, **detail
    )


def _keep_appending(found: Service, stop: threading.Event, errors: list[BaseException]) -> None:
    """Keep a few appends under way, session after session, until told to stop."""
    rng = np.random.default_rng(1)
    under_way: deque[Pending] = deque()
    turn = 0
    try:
        while not stop.is_set() or under_way:
            while not stop.is_set() and len(under_way) < found.sizes.appends:
                session = found.sessions[turn % len(found.sessions)]
                ids = rng.integers(0, found.sizes.model.vocab_size, found.sizes.append_len)
                under_way.append(found.service.append(session, ids.tolist()))
                turn += 1
            under_way.popleft().result(WAIT_S)
    except BaseException as error:
        errors.append(error)
