"""Registered questions that are being answered, and how many callers wait for each."""

from __future__ import annotations

import dataclasses
import math

from jaxstate.flash import FlashBoard, FlashQuery
from jaxstate.plan import JobClass
from jaxstate.scheduler import Scheduler, State, Ticket

OUTDATED_S = 10.0
"""Under appends that never pause, an evaluation that has begun is let end once answers have been
outdated for so long."""


@dataclasses.dataclass(kw_only=True)
class Evaluation:
    """A registered question that is being answered.

    Attributes:
      version: of its session, when it was submitted.
      asked: callers that wait for it.
    """

    board: FlashBoard
    query: FlashQuery
    version: int
    asked: int = 0


class Evaluations:
    """Those of all sessions, by ticket."""

    def __init__(self, scheduler: Scheduler):
        """Start with none."""
        self._scheduler = scheduler
        self._by_ticket: dict[Ticket, Evaluation] = {}
        self._outdated_since: dict[str, float] = {}

    @property
    def sessions(self) -> set[str]:
        """Sessions of which a question is being answered."""
        return {ticket.session for ticket in self._by_ticket}

    @property
    def tickets(self) -> list[Ticket]:
        """All that are under way."""
        return list(self._by_ticket)

    def add(self, ticket: Ticket, evaluation: Evaluation) -> None:
        """Note one that was submitted."""
        self._by_ticket[ticket] = evaluation

    def lacking(self, board: FlashBoard, version: int) -> list[FlashQuery]:
        """Questions without an answer of this version, none of which is under way."""
        outdated = board.outdated(version)
        under_way = {id(one.query) for one in self._by_ticket.values()} if outdated else ()
        return [query for query in outdated if id(query) not in under_way]

    def join(self, query: FlashQuery, version: int, deadline_s: float, now: float) -> Ticket | None:
        """Let a caller wait for the evaluation of this version that is under way, if there is one.

        Args:
          deadline_s: the caller's; one with a deadline can only join what has begun.
        """
        for ticket, evaluation in self._by_ticket.items():
            begun = ticket.state is State.RUNNING or ticket.deadline == deadline_s == math.inf
            current = evaluation.version == version
            if evaluation.query is query and begun and current and not ticket.is_over:
                evaluation.asked += 1
                self._scheduler.promote(ticket, JobClass.QUERY, now)
                return ticket
        return None

    def leave(self, ticket: Ticket) -> bool:
        """Let a caller wait no more: whether nobody is left who does."""
        evaluation = self._by_ticket.get(ticket)
        if evaluation is None:
            return True
        evaluation.asked -= 1
        return not evaluation.asked

    def take_ended(self) -> list[tuple[Ticket, Evaluation]]:
        """Return those that are over, and forget them."""
        ended = [ticket for ticket in self._by_ticket if ticket.is_over]
        return [(ticket, self._by_ticket.pop(ticket)) for ticket in ended]

    def drop(self, session_id: str, now: float) -> None:
        """End those of a version that is about to pass, so that a burst is evaluated once.

        What somebody waits for goes on; see OUTDATED_S, too.
        """
        outdated_s = now - self._outdated_since.setdefault(session_id, now)
        unasked = [ticket for ticket, one in self._by_ticket.items() if not one.asked]
        for ticket in [one for one in unasked if one.session == session_id]:
            if ticket.state is State.WAITING or outdated_s < OUTDATED_S:
                self._scheduler.cancel(ticket, now)

    def note_fresh(self, session_id: str) -> None:
        """Note that no answer of a session is outdated any more, or that it is closed."""
        self._outdated_since.pop(session_id, None)
