"""Random queries against random updates: how many find a fresh answer, and how many could."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from jaxstate.answer import Source
from jaxstate.flash import Question
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.pending import Pending

WAIT_S = 600.0
CALIBRATIONS = 100  # updates of which costs are measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, measured on an idle service: an append, all evaluations after it, one query."""

    append_s: float
    evaluate_s: float
    query_s: float

    def mean(self, other: Costs) -> Costs:
        """Return what lies between this and another."""
        others = dataclasses.asdict(other)
        mine = dataclasses.asdict(self)
        return Costs(**{name: (cost + others[name]) / 2 for name, cost in mine.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of queries answered FLASH from the newest version."""

    measured: float
    possible: float
    queries: int
    updates: int


def costs(
    service: LocalService, session: str, questions: list[Question], rows: list[list[int]],
    rests_s: np.ndarray | None = None,
) -> Costs:
    """Measure on an idle service; medians.

    Args:
      rests_s: before each update: a processor that has waited is slower for a while.
    """
    appends, evaluations, queries = [], [], []
    other = dataclasses.replace(questions[0], max_new_tokens=questions[0].max_new_tokens + 1)
    for row, rest_s in zip(rows, np.zeros(len(rows)) if rests_s is None else rests_s, strict=True):
        time.sleep(rest_s)
        began = time.perf_counter()
        service.append(session, row).result(WAIT_S)
        appended = time.perf_counter()
        service.wait_until_idle(WAIT_S)
        fresh = time.perf_counter()
        service.query(session, other).result(WAIT_S)  # not registered, but resumed
        queries.append(time.perf_counter() - fresh)
        appends.append(appended - began)
        evaluations.append(fresh - appended)
    return Costs(
        append_s=float(np.median(appends)), evaluate_s=float(np.median(evaluations)),
        query_s=float(np.median(queries)),
    )  # fmt: skip


def arrivals(rng: np.random.Generator, rate: float, seconds: float) -> np.ndarray:
    """Draw Poisson arrivals, seconds from the start."""
    gaps = rng.exponential(1 / rate, int(rate * seconds * 2) + 20)
    times = np.cumsum(gaps)
    return times[times < seconds]


def possible(updates: np.ndarray, queries: np.ndarray, cost: Costs) -> float:
    """Which share one server could answer fresh that evaluates whenever it has nothing else to do.

    An update takes effect when its append is done; queries that miss are computed at once.
    """
    hits, busy_until = 0, 0.0
    ready = np.inf  # nothing is evaluated before the first update
    at = 0
    for query in queries:
        while at < len(updates) and updates[at] <= query:
            start = max(updates[at], min(busy_until, updates[at] + cost.query_s))
            busy_until = start + cost.append_s
            ready = busy_until + cost.evaluate_s
            at += 1
        if query >= ready:
            hits += 1
        else:
            ready += cost.query_s
            busy_until = max(busy_until, query) + cost.query_s
    return hits / len(queries)


def play(
    service: LocalService, session: str, questions: list[Question], rows: list[list[int]], *,
    updates_per_s: float, queries_per_s: float, seconds: float, seed: int,
) -> tuple[Shares, Costs]:  # fmt: skip
    """Run arrivals against a service from one thread that never waits for answers.

    What things cost is measured before and after, at the same pace: machines change their own.
    """
    rng = np.random.default_rng(seed)
    rests_s = rng.exponential(1 / updates_per_s, CALIBRATIONS)
    before = costs(service, session, questions, rows[:CALIBRATIONS], rests_s)
    updates = arrivals(rng, updates_per_s, seconds)[: len(rows)]
    queries = arrivals(rng, queries_per_s, seconds)
    events = sorted([(t, 0, i) for i, t in enumerate(updates)] + [(t, 1, 0) for t in queries])
    version = service.append(session, rows[-1]).result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    hits, asked = 0, 0
    first = True
    pendings: list[Pending] = []
    began = time.perf_counter()
    for when, is_query, index in events:
        delay = began + when - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        if not is_query:
            pendings.append(service.append(session, rows[index]))
            version += 1
            first = False
            continue
        if first:
            continue  # before the first update all are hits
        asked += 1
        pending = service.query(session, questions[asked % len(questions)])
        pendings.append(pending)
        if pending.is_over:
            answer = pending.result()
            hits += answer.source is Source.FLASH and answer.version == version
    for pending in pendings:
        pending.result(WAIT_S)
    cost = before.mean(costs(service, session, questions, rows[:CALIBRATIONS], rests_s))
    counted = queries[queries > updates[0]]
    shares = Shares(
        measured=hits / asked, possible=possible(updates, counted, cost), queries=asked,
        updates=len(updates),
    )  # fmt: skip
    return shares, cost
