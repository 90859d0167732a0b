"""How long a question waits beside appends of other sessions: one long one, or too many."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from tenants_traffic import CALLERS, QUESTION_TOKENS, ROW_TOKENS, WAIT_S

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.errors import BusyError
from jaxstate.flash import Question
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.plan import JobClass
from jaxstate.serving.local_service import LocalService

PAGE, CONTEXT, LONG_APPEND, STEP_TOKENS = 64, 4096, 4096, 256
SESSIONS, SHORT, MAX_WAITING = 96, 64, 64
IDLE_QUERIES, ALONE = 40, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds.

    Attributes:
      idle_s: from asking to the first token where nothing else runs, median.
      step_s: the longest step of the appends.
      first_s, begun_s: of each question beside appends, until its first token and its first step.
    """

    idle_s: float
    step_s: float
    first_s: Sequence[float]
    begun_s: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overload:
    """What came of too many appends.

    Attributes:
      capacity: appends a second, as many at once as are let in.
      accepted, refused: appends that were offered at twice the capacity.
      least_hint_s: the least retry_after_s of those refused.
      deepest: most appends that waited at once.
      lost: sessions whose tokens are not what was accepted, in order.
      seconds: from the first to the last arrival.
    """

    waits: Waits
    capacity: float
    accepted: int
    refused: int
    least_hint_s: float
    deepest: int
    lost: int
    seconds: float


class Asker:
    """Asks new questions of one session and times them."""

    def __init__(self, service: LocalService, vocab_size: int, seed: int):
        """Open its session; the service must run on time.perf_counter."""
        self.rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self._service = service
        self._session = service.create(self.draw(CONTEXT))

    def draw(self, count: int) -> list[int]:
        """Draw token ids."""
        return self.rng.integers(0, self.vocab_size, count).tolist()

    def ask(self) -> tuple[float, float]:
        """Ask for a token: seconds until it was there, and until its first step began."""
        question = Question(token_ids=tuple(self.draw(QUESTION_TOKENS)), max_new_tokens=1)
        asked = time.perf_counter()
        pending = self._service.query(self._session, question)
        pending.result(WAIT_S)
        ticket = pending._ticket
        assert ticket is not None and ticket.first_output is not None
        assert ticket.started is not None
        return ticket.first_output - asked, ticket.started - asked

    def idle_s(self) -> float:
        """Seconds to the first token where nothing else runs."""
        self.ask()
        return float(np.median([self.ask()[0] for _ in range(IDLE_QUERIES)]))


def phases(model: LoadedModel, count: int) -> Waits:
    """Ask at random phases of another session's long append."""
    pages = (CONTEXT + LONG_APPEND) // PAGE + 16
    service, _ = _serve(model, pages, max_waiting=MAX_WAITING)
    asker = Asker(service, model.config.vocab_size, seed=1)
    base = service.create(asker.draw(PAGE))

    def append(meanwhile: Callable[[], None]) -> None:
        session = service.fork(base)
        pending = service.append(session, asker.draw(LONG_APPEND))
        meanwhile()
        pending.result(WAIT_S)
        service.close_session(session)

    idle_s = asker.idle_s()
    append(lambda: None)  # warms up
    service.metrics.step_s.clear()
    began = time.perf_counter()
    for _ in range(ALONE):
        append(lambda: None)
    append_s = (time.perf_counter() - began) / ALONE
    step_s = max(service.metrics.step_s)
    found: list[tuple[float, float]] = []

    def ask() -> None:
        time.sleep(asker.rng.uniform(0, 0.9 * append_s))
        found.append(asker.ask())

    for _ in range(count):
        append(ask)
    service.close()
    return _waits(idle_s, step_s, found)


def overload(model: LoadedModel, seconds: float) -> Overload:
    """Offer twice the appends that can be computed, and ask meanwhile."""
    context_len = model.config.max_positions - 512
    pages = (CONTEXT + SESSIONS * context_len) // PAGE + 16
    service, engine = _serve(model, pages, max_waiting=MAX_WAITING)
    asker = Asker(service, model.config.vocab_size, seed=2)
    given = {}
    for _ in range(SESSIONS):
        ids = asker.draw(SHORT)
        given[service.create(ids)] = ids
    idle_s = asker.idle_s()
    offers = [_Offer(service, dict(mine), model, context_len) for mine in _dealt(given)]
    # The first round warms up.
    for share in (1, 3):
        service.metrics.step_s.clear()
        began = time.perf_counter()
        before = service.metrics.by_class[JobClass.APPEND].tokens
        _together(offers, 1e9, seconds * share / 20)
        computed = service.metrics.by_class[JobClass.APPEND].tokens - before
        capacity = computed / ROW_TOKENS / (time.perf_counter() - began)
        service.wait_until_idle(WAIT_S)
    service.metrics.step_s.clear()
    for offer in offers:
        offer.accepted, offer.hints = 0, []
    over = threading.Event()
    depths, found = [0], []

    def watch() -> None:
        while not over.wait(0.002):
            depths.append(service._scheduler.waiting[JobClass.APPEND])

    def ask() -> None:
        while not over.wait(asker.rng.exponential(0.1)):
            found.append(asker.ask())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(watch), pool.submit(ask)]
        try:
            _together(offers, 2 * capacity, seconds)
        finally:
            over.set()
        for other in others:
            other.result()
    service.wait_until_idle(WAIT_S)
    step_s = max(service.metrics.step_s)  # contexts have grown, and steps with them
    lost = sum(
        list(engine.session(session).token_ids) != ids
        for offer in offers
        for session, ids in offer.given.items()
    )
    service.close()
    hints = [hint for offer in offers for hint in offer.hints]
    return Overload(
        waits=_waits(idle_s, step_s, found), capacity=capacity, deepest=max(depths), lost=lost,
        accepted=sum(offer.accepted for offer in offers), refused=len(hints),
        least_hint_s=min(hints, default=0.0), seconds=seconds,
    )  # fmt: skip


def _serve(model: LoadedModel, pages: int, *, max_waiting: int) -> tuple[LocalService, Engine]:
    config = EngineConfig(
        num_pages=pages, page_size=PAGE, context_len=model.config.max_positions - 512,
        evict_quantum=512,
    )  # fmt: skip
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(
        engine, step_tokens=STEP_TOKENS, max_waiting=max_waiting, preposition=0,
        clock=time.perf_counter,
    )  # fmt: skip
    return service, engine


def _waits(idle_s: float, step_s: float, found: Sequence[tuple[float, float]]) -> Waits:
    first_s, begun_s = zip(*found, strict=True)
    return Waits(idle_s=idle_s, step_s=step_s, first_s=first_s, begun_s=begun_s)


@dataclasses.dataclass
class _Offer:
    """One caller's appends to its sessions, in turn, and what was accepted."""

    service: LocalService
    given: dict[str, list[int]]
    model: LoadedModel
    context_len: int
    accepted: int = 0
    hints: list[float] = dataclasses.field(default_factory=list)

    def run(self, rate: float, seconds: float, seed: int) -> None:
        """Offer rows at random times, `rate` a second."""
        rng = np.random.default_rng(seed)
        began = due = time.perf_counter()
        sessions = list(self.given)
        while (due := max(due + rng.exponential(1 / rate), began)) < began + seconds:
            time.sleep(max(due - time.perf_counter(), 0))
            session = sessions[rng.integers(len(sessions))]
            if time.perf_counter() > began + seconds:
                return
            row = rng.integers(0, self.model.config.vocab_size, ROW_TOKENS).tolist()
            if len(self.given[session]) + ROW_TOKENS > self.context_len:
                raise RuntimeError(f"{session}: {self.context_len} tokens are full; run shorter")
            try:
                self.service.append(session, row)
            except BusyError as error:
                self.hints.append(error.retry_after_s)
                if rate > 1e6:  # as many as are let in, without keeping the processor busy
                    time.sleep(0.002)
                continue
            self.given[session] += row
            self.accepted += 1


def _dealt(given: dict[str, list[int]]) -> list[list[tuple[str, list[int]]]]:
    items = list(given.items())
    return [items[caller::CALLERS] for caller in range(CALLERS)]


def _together(offers: Sequence[_Offer], rate: float, seconds: float) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(offers)) as pool:
        running = [
            pool.submit(offer.run, rate / len(offers), seconds, seed)
            for seed, offer in enumerate(offers)
        ]
        for one in running:
            one.result()
