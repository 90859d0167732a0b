"""What a service keeps: its journal and snapshots, and whom it keeps waiting for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from typing import Any

from jaxstate import needs
from jaxstate.errors import CapacityError
from jaxstate.flash import FlashQuery
from jaxstate.prepositioning import Entry
from jaxstate.revival import Earlier
from jaxstate.scheduler import State, Ticket
from jaxstate.serving.journal import Journal
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.serving.snapshots import Snapshots
from jaxstate.serving.write_memory import Number, WriteMemory
from jaxstate.session import Session
from jaxstate.verbs import Verbs

logger = logging.getLogger(__name__)

GATE_SAMPLES = 64
"""Fresh answers to a registered question after which its gates are noted again; also when one of
them finds another threshold or closes."""


class Durable:
    """The journal of a service, or none: then nothing is noted."""

    def __init__(
        self,
        journal: Journal | None,
        snapshots: Snapshots | None,
        verbs: Verbs,
        enqueue: Callable[[Callable[[], None]], None],
    ):
        """Hear of every change that verbs make.

        Args:
          enqueue: has the worker call a function soon.
        """
        self._journal = journal
        self._snapshots = snapshots
        self._enqueue = enqueue
        self._verbs = verbs
        self._held: list[Ticket] = []
        self._gates: dict[tuple[str, int], tuple[int, Any]] = {}  # evaluations and what was found
        if journal is not None:
            verbs.contexts.on_change = journal.change
            verbs.revival.earlier = self._earlier

    def recover(self) -> list[SavedSession]:
        """Return the sessions of the journal."""
        saved = self._journal.read() if self._journal is not None else []
        if self._snapshots is not None:
            self._snapshots.recall(saved)
        return saved

    def _earlier(self, session: Session) -> Earlier | None:
        """Return what was saved of a session whose cells are lost."""
        if self._journal is None or self._snapshots is None:
            return None
        self._journal.commit()  # its changes until now
        [saved] = self._journal.read(session.session_id)
        return self._snapshots.earlier(saved, self._verbs)

    # What callers wait for

    def hold(self, ticket: Ticket) -> None:
        """Let nobody be told that a verb is over before `release`, behind the next commit."""
        ticket.held = True
        self._held.append(ticket)

    @property
    def num_held(self) -> int:
        """Verbs of whose end nobody has been told yet, or that go on."""
        return len(self._held)

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

    def end(self) -> None:
        """Save what has changed since it was saved, and write what was noted."""
        self._end_snapshot()
        for session in list(self._verbs.sessions.values()) if self._snapshots else ():
            if session.stored and not session.stored.is_lost:
                try:
                    needs.run_alone(self._verbs.executor, self._verbs.revive(session.session_id))
                except CapacityError as error:
                    logger.warning("session %s is not saved: %s", session.session_id, error)
            self._note_snapshot(session, self._snapshots.save(self._verbs, session))
        self.commit()

    def close(self) -> None:
        """Let go of the journal; what was not committed is lost."""
        if self._snapshots is not None:
            self._snapshots.close()
        if self._journal is not None:
            self._journal.close()
            self._verbs.contexts.on_change = lambda session: None
            self._verbs.revival.earlier = lambda session: None

    # Snapshots

    def rest(self, now: float) -> float | None:
        """Begin to save a session that is due; returns seconds until one may be, None = never."""
        if self._snapshots is None:
            return None
        session, wait_s = self._snapshots.next_due(self._verbs.sessions.values(), now)
        if session is None:
            return None if wait_s == math.inf else wait_s

        self._snapshots.begin(self._verbs, session, lambda: self._enqueue(self._end_snapshot))
        return None  # the end of that one wakes the worker

    def _end_snapshot(self) -> None:
        """Note the snapshot that is under way, if there is one, when it is written."""
        written = self._snapshots.end() if self._snapshots else None
        if written:
            self._note_snapshot(*written)

    def _note_snapshot(self, session: Session, name: str) -> None:
        """Name a snapshot in the journal, and only then let go of the one before; "" = none."""
        assert self._journal is not None and self._snapshots is not None
        if self._verbs.sessions.get(session.session_id) is not session:
            self._snapshots.remove(name)  # closed meanwhile, maybe its id is another's
        elif name:
            self._journal.snapshot(session.session_id, name)
            self._journal.commit()
            self._snapshots.note(session.session_id, name)

    # What is noted

    def created(self, session: Session) -> None:
        """Note a new session."""
        if self._journal is not None:
            self._journal.create(session)

    def closed(self, session_id: str) -> None:
        """Forget a session."""
        if self._journal is not None:
            self._journal.close_session(session_id)
            self._journal.commit()
            for key in [key for key in self._gates if key[0] == session_id]:
                del self._gates[key]
            if self._snapshots is not None:
                self._snapshots.forget(session_id)

    def numbered(self, steps: Generator, session_id: str, number: Number, what: bytes) -> Generator:
        """Run a verb that has a number, and note that and its digest beside its change."""
        version = yield from steps
        if self._journal is not None:
            self._journal.number(session_id, number, what, version)
        return version

    def registered(self, session_id: str, query: FlashQuery) -> None:
        """Note a registered question as it is now."""
        if self._journal is not None:
            self._gates[session_id, query.flash_id] = query.evaluations, _found(query)
            self._journal.question(session_id, query)

    def remembered(self, session_id: str, memory: WriteMemory) -> None:
        """Note the numbered verbs that a session has had."""
        if self._journal is not None:
            for number, digest, version in memory.done():
                self._journal.number(session_id, number, digest, version)

    def unregistered(self, session_id: str, flash_id: int) -> None:
        """Forget a registered question, but not that its id was one's; 0 = none."""
        if self._journal is not None and flash_id:
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
