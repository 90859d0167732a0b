"""What a service notes in its journal, and whom it keeps waiting until that is written."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from jaxstate.flash import FlashQuery
from jaxstate.prepositioning import Entry
from jaxstate.scheduler import State, Ticket
from jaxstate.serving import append_memory
from jaxstate.serving.append_memory import Number
from jaxstate.serving.journal import Journal
from jaxstate.session import Session
from jaxstate.verbs import Verbs

GATE_SAMPLES = 64
"""Fresh answers to a registered question after which its gates are noted again; also when one of
them finds another threshold or closes."""


class Durable:
    """The journal of a service, or none: then nothing is noted and nobody waits."""

    def __init__(self, journal: Journal | None, verbs: Verbs):
        """Hear of every change that verbs make."""
        self._journal = journal
        self._verbs = verbs
        self._held: list[Ticket] = []
        self._gates: dict[tuple[str, int], tuple[int, Any]] = {}  # evaluations and what was found
        if journal is not None:
            verbs.on_change = journal.change

    # What callers wait for

    def hold(self, ticket: Ticket) -> None:
        """Let nobody be told that a verb is done before the next commit behind it."""
        if self._journal is not None:
            ticket.held = True
            self._held.append(ticket)

    def commit(self) -> None:
        """Write what was noted.

        Raises:
          JournalError: it could not be written, now or before.
        """
        if self._journal is not None:
            self._journal.commit()

    def release(self, failure: BaseException | None = None) -> None:
        """Let callers be told what has ended; what a failure kept from being written has failed."""
        for ticket in [one for one in self._held if one.has_ended]:
            if failure is not None and ticket.state is State.DONE:
                ticket.error, ticket.state = failure, State.FAILED
            ticket.held = False
            self._held.remove(ticket)

    def close(self) -> None:
        """Let go of the journal; what was not committed is lost."""
        if self._journal is not None:
            self._journal.close()
            self._verbs.on_change = lambda session: None

    # What is noted

    def created(self, session: Session) -> None:
        """Note a new session."""
        if self._journal is not None:
            self._journal.create(session)

    def closed(self, session_id: str) -> None:
        """Forget a session."""
        if self._journal is not None:
            self._journal.close_session(session_id)
            for key in [key for key in self._gates if key[0] == session_id]:
                del self._gates[key]

    def numbered(
        self, steps: Generator, session_id: str, number: Number, token_ids: Sequence[int]
    ) -> Generator:
        """Run an append that has a number, and note that beside its change."""
        version = yield from steps
        if self._journal is not None:
            known = append_memory.digest(token_ids)
            self._journal.number(session_id, number, known, version)
        return version

    def registered(self, session_id: str, query: FlashQuery) -> None:
        """Note a registered question as it is now."""
        if self._journal is not None:
            self._gates[session_id, query.flash_id] = query.evaluations, _found(query)
            self._journal.question(session_id, query)

    def unregistered(self, session_id: str, flash_id: int) -> None:
        """Forget a registered question."""
        if self._journal is not None:
            self._gates.pop((session_id, flash_id), None)
            self._journal.unregister(session_id, flash_id)

    def declared(self, session_id: str, header: Entry) -> None:
        """Note a declared header."""
        if self._journal is not None:
            self._journal.declare(session_id, header)

    def evaluated(self, session_id: str, query: FlashQuery, *, least: int = GATE_SAMPLES) -> None:
        """Note a question's gates where they have learned enough since the last time."""
        evaluations, found = self._gates.get((session_id, query.flash_id), (0, None))
        if query.evaluations - evaluations >= least or _found(query) != found:
            self.registered(session_id, query)


def _found(query: FlashQuery) -> list[Any]:
    return [gate.found for gate in (query.stale, query.first, *query.headers.values())]
