"""What a service counts, for whoever shows it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

from jaxstate.answer import Answer, Source
from jaxstate.plan import JobClass
from jaxstate.scheduler import State, Ticket
from jaxstate.verbs import Verbs

RECENT = 4096  # verbs of a class whose times are kept


@dataclasses.dataclass(kw_only=True)
class ClassFigures:
    """Verbs of one class.

    Attributes:
      ended: how many ended in each state.
      tokens: forwarded for them.
      wait_s: of the newest that were begun, seconds from submission to their beginning.
      service_s: of the newest that are done, seconds from their beginning to their end.
      sojourn_s: of the newest that are done, seconds from submission to the end.
      longest_s: longest of those since the start.
    """

    ended: collections.Counter[State] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0
    wait_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT)
    )
    service_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT)
    )
    sojourn_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT)
    )
    longest_s: float = 0.0


class Listener(Protocol):
    """Who is told what is counted, by the thread that counts it; to return at once."""

    def end(self, ticket: Ticket) -> None:
        """A verb is over."""

    def answer(self, answer: Answer, asked_s: float, first_s: float) -> None:
        """Somebody got an answer so long after asking, and its first token so long after."""


@dataclasses.dataclass(kw_only=True)
class Metrics:
    """Counters of a service since it started.

    Attributes:
      by_class: see ClassFigures.
      answers: how many came from each source.
      stale_answers: how many of them were of an older version, by the caller's wish.
      entries_paid: entries forwarded ahead.
      entries_used: questions that forwarded less because of one, or of a registered question.
      step_s: of the newest steps, seconds.
      busy_s: seconds of all steps.
      compilations: programs that the worker compiled, though its engine should have all it needs;
        None where jax does not tell.
      listeners: see Listener.
    """

    by_class: dict[JobClass, ClassFigures] = dataclasses.field(
        default_factory=lambda: {job_class: ClassFigures() for job_class in JobClass}
    )
    answers: collections.Counter[Source] = dataclasses.field(default_factory=collections.Counter)
    stale_answers: int = 0
    entries_paid: int = 0
    entries_used: int = 0
    step_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT)
    )
    busy_s: float = 0.0
    compilations: int | None = None
    listeners: list[Listener] = dataclasses.field(default_factory=list)

    def note_step(self, seconds: float) -> None:
        """Count a step."""
        self.step_s.append(seconds)
        self.busy_s += seconds

    def note_end(self, ticket: Ticket) -> None:
        """Count a verb that is over."""
        figures = self.by_class[ticket.job_class]
        figures.ended[ticket.state] += 1
        figures.tokens += ticket.tokens_forwarded
        assert ticket.ended is not None
        if ticket.started is not None:
            figures.wait_s.append(max(ticket.started - ticket.submitted, 0.0))  # promoted since
        if ticket.state is State.DONE:
            assert ticket.started is not None
            figures.service_s.append(ticket.ended - ticket.started)
            figures.sojourn_s.append(ticket.ended - ticket.submitted)
            figures.longest_s = max(figures.longest_s, figures.sojourn_s[-1])
            if ticket.job_class is JobClass.ADVANCE:
                self.entries_paid += 1
            if ticket.job_class is JobClass.QUERY and isinstance(ticket.result, Answer):
                asked = ticket.asked or ticket.submitted
                # Of an evaluation that began before somebody asked, the first token may be there.
                first_s = max(_first(ticket) - asked, 0.0)
                self.note_answer(ticket.result, ticket.ended - asked, first_s)
        for listener in self.listeners:
            listener.end(ticket)

    def note_answer(self, answer: Answer, asked_s: float, first_s: float) -> None:
        """Count an answer to a query, computed or looked up, see Listener.answer."""
        self.answers[answer.source] += 1
        self.entries_used += answer.source is Source.RESUMED
        self.stale_answers += answer.source is Source.FLASH and answer.age > 0
        for listener in self.listeners:
            listener.answer(answer, asked_s, first_s)


def _first(ticket: Ticket) -> float:
    """When a verb that is done had its first output; what was paid for has it at the end."""
    assert ticket.ended is not None
    return ticket.ended if ticket.first_output is None else ticket.first_output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """Where cells are, in whole pages: the first four are the pool's, each page counted once.

    Attributes:
      sessions: that some session sees.
      prefixes: of kept beginnings that no session sees.
      tails: that verbs under way write, and what was forwarded ahead of questions.
      free: nobody's.
      host, disk: of sessions outside of the pool.
      copies: in host memory, of sessions' cells that are in the pool; they go where it lacks.
    """

    sessions: int
    prefixes: int
    tails: int
    free: int
    host: int
    disk: int
    copies: int


def count_cells(verbs: Verbs) -> Cells:
    """Count an engine's cells by owner and tier; while a step runs, tables change."""
    pages = verbs.pages
    sessions = {entry.page for one in verbs.sessions.values() for entry in one.entries}
    kept = {entry.page for table in verbs.prefixes.tree.tables() for entry in table} - sessions
    tails = pages.num_pages - pages.num_free - len(sessions) - len(kept)
    size, bytes_per_cell = pages.page_size, verbs.model.bytes_per_cell
    return Cells(
        sessions=len(sessions) * size, prefixes=len(kept) * size, tails=tails * size,
        free=pages.num_free * size,
        host=verbs.tiers.bytes_held("host") // bytes_per_cell,
        disk=verbs.tiers.bytes_held("disk") // bytes_per_cell,
        copies=verbs.tiers.copied_bytes // bytes_per_cell,
    )  # fmt: skip
