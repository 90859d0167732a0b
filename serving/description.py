"""What a service says about its sessions and itself."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxstate.engine import Engine
from jaxstate.flash import FlashQuery
from jaxstate.metrics import Cells, ClassFigures, Metrics
from jaxstate.plan import JobClass
from jaxstate.session import Session, WhenFull


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session as it was between two steps; see Session for what is not said here.

    Attributes:
      context_len, frozen_len, evicted, cached_tokens: in tokens.
      num_flash: registered questions.
      lag_tokens, lag_s: of durable verbs that are not done, and since when the oldest was asked
        for; 0 if all are.
    """

    session_id: str
    tenant: str
    version: int
    context_len: int
    frozen_len: int
    evicted: int
    when_full: WhenFull
    cached_tokens: int
    rebuilt: bool
    num_flash: int
    lag_tokens: int
    lag_s: float

    @classmethod
    def of(cls, session: Session, *, num_flash: int, lag_tokens: int, lag_s: float) -> SessionInfo:
        """Copy what does not change any more from a session's record."""
        return cls(
            session_id=session.session_id, tenant=session.tenant, version=session.version,
            context_len=session.context_len, frozen_len=session.frozen_len,
            evicted=session.evicted, when_full=session.when_full,
            cached_tokens=session.cached_tokens, rebuilt=session.rebuilt, num_flash=num_flash,
            lag_tokens=lag_tokens, lag_s=lag_s,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overview:
    """A service between two steps.

    Attributes:
      now: seconds on the service's clock, which is that of FlashQuery.answered_at.
      sessions: the open ones by id, each with copies of its registered questions.
      cells: see Cells.
      waiting, running: verbs of each class that have not begun, and that have.
    """

    now: float
    sessions: tuple[tuple[SessionInfo, tuple[FlashQuery, ...]], ...]
    cells: Cells
    waiting: Mapping[JobClass, int]
    running: Mapping[JobClass, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassInfo:
    """Verbs of one class.

    Attributes:
      waiting: not over yet.
      ended: how many ended in each state.
      tokens: forwarded for them.
      sojourn_p50_s, sojourn_p99_s: of the newest that are done, from submission to the end; 0
        before the first.
    """

    waiting: int
    ended: Mapping[str, int]
    tokens: int
    sojourn_p50_s: float
    sojourn_p99_s: float

    @classmethod
    def of(cls, figures: ClassFigures, waiting: int) -> ClassInfo:
        """Sum figures up."""
        p50, p99 = np.percentile(figures.sojourn_s or [0.0], (50, 99)).tolist()
        return cls(
            waiting=waiting, ended={state.value: n for state, n in figures.ended.items()},
            tokens=figures.tokens, sojourn_p50_s=p50, sojourn_p99_s=p99,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceInfo:
    """A service since its start.

    Attributes:
      num_sessions: open now.
      cells_used, cells_held, cells: see Engine; all there are.
      classes: see ClassInfo.
      answers: how many came from each source.
      stale_answers, entries_paid, entries_used, busy_s: see Metrics.
    """

    num_sessions: int
    cells_used: int
    cells_held: int
    cells: int
    classes: Mapping[str, ClassInfo]
    answers: Mapping[str, int]
    stale_answers: int
    entries_paid: int
    entries_used: int
    busy_s: float

    @classmethod
    def of(
        cls, engine: Engine, metrics: Metrics, waiting: collections.Counter[JobClass]
    ) -> ServiceInfo:
        """Read an engine and its counters; nobody may use them meanwhile."""
        return cls(
            num_sessions=len(engine.session_ids),
            cells_used=engine.cells_used,
            cells_held=engine.cells_held,
            cells=engine.config.num_pages * engine.config.page_size,
            classes={
                job_class.name.lower(): ClassInfo.of(figures, waiting[job_class])
                for job_class, figures in metrics.by_class.items()
            },
            answers={source.value: count for source, count in metrics.answers.items()},
            stale_answers=metrics.stale_answers,
            entries_paid=metrics.entries_paid,
            entries_used=metrics.entries_used,
            busy_s=metrics.busy_s,
        )
