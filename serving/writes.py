"""What changes sessions: appends, updates, rollbacks and turns that are kept, each applied once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxstate.errors import CancelledError, ConflictError
from jaxstate.needs import Steps
from jaxstate.plan import JobClass
from jaxstate.scheduler import Scheduler, State, Ticket
from jaxstate.serving import write_memory
from jaxstate.serving.bursts import Bursts
from jaxstate.serving.durable import Durable
from jaxstate.serving.open_session import OpenSession
from jaxstate.serving.pending import Pending
from jaxstate.serving.questions import Questions
from jaxstate.serving.submissions import Submissions
from jaxstate.serving.write_memory import Number
from jaxstate.session import common_len
from jaxstate.verbs import Verbs


class Writes:
    """Submits what changes sessions, and knows what is on its way; used by the worker."""

    def __init__(
        self,
        verbs: Verbs,
        sessions: dict[str, OpenSession],
        scheduler: Scheduler,
        durable: Durable,
        submissions: Submissions,
        questions: Questions,
        clock: Callable[[], float],
    ):
        """Start with none."""
        self._verbs = verbs
        self._sessions = sessions
        self._scheduler = scheduler
        self._durable = durable
        self._submissions = submissions
        self._questions = questions
        self._clock = clock
        self._tokens: dict[Ticket, int] = {}  # of those under way
        self._exclusive: set[Ticket] = set()  # of these, those that evict or roll back
        self._bursts = Bursts()

    # Verbs; arguments as of LocalService

    def append(
        self,
        pending: Pending,
        session_id: str,
        token_ids: Sequence[int],
        number: Number | None,
        behind: Pending | None,
        **how: Any,
    ) -> None:
        """Submit an append."""
        begin = self._verbs.append
        if behind is not None:
            begin = functools.partial(_only_behind, behind, begin)
        session = self._verbs.session(session_id)
        count = len(token_ids)
        ahead = sum(self.under_way(session_id).values())
        window = self._verbs.config.context_len
        full = session.context_len + ahead + count > window
        # What one ahead has cut comes back if that fails: who counts on the room waits for its end.
        full |= any(one in self._exclusive for one in self.under_way(session_id))
        most = window if session.when_full == "slide" else None
        self._submit_numbered(
            pending, begin, session_id, token_ids, number, "append", cells=count, most=most,
            exclusive=full, **how,
        )  # fmt: skip

    def update(
        self,
        pending: Pending,
        session_id: str,
        token_ids: Sequence[int],
        number: Number | None,
        **how: Any,
    ) -> None:
        """Submit an update."""
        session = self._verbs.session(session_id)
        count = len(token_ids)
        if not self.under_way(session_id):
            stream = np.asarray(session.token_ids[session.frozen_len :], np.int64)
            count -= common_len(stream, np.asarray(token_ids, np.int64))
        self._submit_numbered(
            pending, self._verbs.update, session_id, token_ids, number, "update", cells=count,
            most=session.frozen_len + len(token_ids), exclusive=True, **how,
        )  # fmt: skip

    def rollback(
        self, pending: Pending, session_id: str, count: int, number: Number | None, **how: Any
    ) -> None:
        """Submit a rollback."""

        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            yield from ()  # a verb like the others, that needs nothing
            return self._verbs.rollback(session_id, count)

        self._verbs.session(session_id)
        self._submit_numbered(
            pending, begin, session_id, (), number, f"rollback {count}", cells=0, exclusive=True,
            **how,
        )  # fmt: skip

    def turn(
        self,
        pending: Pending,
        begin: Callable,
        session_id: str,
        token_ids: Sequence[int],
        job_class: JobClass,
        *,
        cells: int,
        **how: Any,
    ) -> None:
        """Submit a question that is kept with its answer.

        Raises:
          ConflictError: another of the session is under way.
        """
        if any(one.job_class is job_class for one in self.under_way(session_id)):
            raise ConflictError(
                f"session {session_id}: another turn that will be committed is under way; ask "
                "when it is over"
            )
        self._submit(
            pending, begin, session_id, token_ids, job_class, cells=cells, exclusive=True, **how
        )

    # What is on its way

    def under_way(self, session_id: str) -> dict[Ticket, int]:
        """Return what is under way of a session, and of how many tokens each is."""
        return {one: count for one, count in self._tokens.items() if one.session == session_id}

    def changing(self) -> set[str]:
        """Sessions whose next version is on its way or, within a burst, to be expected."""
        return {one.session for one in self._tokens} | self._bursts.expecting(self._clock())

    def note_ends(self) -> None:
        """Forget what is over; the caller holds `Commands.changed`."""
        for ticket in [ticket for ticket in self._tokens if ticket.is_over]:
            del self._tokens[ticket]
            self._exclusive.discard(ticket)
            if ticket.state is State.DONE:
                self._sessions[ticket.session].board.forget_errors()
            self._bursts.end(ticket.session, self._clock())

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session."""
        self._bursts.forget(session_id)

    # Inside

    def _submit_numbered(
        self,
        pending: Pending,
        begin: Callable[..., Steps],
        session_id: str,
        token_ids: Sequence[int],
        number: Number | None,
        verb: str,
        **how: Any,
    ) -> None:
        """Submit a verb; one that has come before with its number only once."""
        if number is None:
            self._submit(pending, begin, session_id, token_ids, **how)
            return
        memory, what = self._sessions[session_id].memory, write_memory.digest(verb, token_ids)
        known = memory.find(number, what)
        if known is not None:
            # Whoever sent it first may be gone and have little time left.
            known.joined = True
            self._scheduler.extend(known, pending.asked + how.get("deadline_s", math.inf))
            self._submissions.attach(pending, known)
            return

        def note(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._durable.numbered(begin(session_id, token_ids), session_id, number, what)

        ticket = self._submit(pending, note, session_id, token_ids, **how)
        memory.note(number, what, ticket)

    def _submit(
        self,
        pending: Pending,
        begin: Callable,
        session_id: str,
        token_ids: Sequence[int],
        job_class: JobClass = JobClass.APPEND,
        *,
        cells: int,
        exclusive: bool,
        **how: Any,
    ) -> Ticket:
        ticket = self._submissions.submit(
            pending, begin, session_id, token_ids, job_class, cells=cells, exclusive=exclusive,
            **how,
        )  # fmt: skip
        self._tokens[ticket] = cells
        if exclusive:
            self._exclusive.add(ticket)
        now = self._clock()
        self._bursts.submit(session_id, pending.asked, now)
        self._questions.drop(session_id, now)
        return ticket


def _only_behind(
    earlier: Pending, begin: Callable[..., Steps], session_id: str, token_ids: Sequence[int]
) -> Steps:
    """Run an append if the one before it is done, so that a series has no holes."""
    if earlier._ticket is None or earlier._ticket.state is not State.DONE:
        raise CancelledError(f"session {session_id}: the append before this one was not done")
    return (yield from begin(session_id, token_ids))
