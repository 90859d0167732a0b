"""What follows from a step: ends are noted, and what nobody asked for yet is begun."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from jaxstate.answer import Answer, Source
from jaxstate.calibration import ShadowSample
from jaxstate.errors import JaxStateError
from jaxstate.flash import FlashQuery
from jaxstate.gate import Gate, same_answer
from jaxstate.plan import JobClass
from jaxstate.scheduler import Scheduler, State, Ticket
from jaxstate.serving.durable import Durable
from jaxstate.serving.evaluations import Evaluation, Evaluations
from jaxstate.serving.open_session import OpenSession
from jaxstate.serving.questions import Questions
from jaxstate.serving.submissions import Submissions
from jaxstate.serving.writes import Writes
from jaxstate.verbs import Verbs

UNASKED = 128
"""Registered questions of a tenant that are under way at once, and headers: the others come when
these are over, so that no step is planned out of thousands."""


class AfterSteps:
    """Of a service; used by the worker, which holds `Commands.changed` but where it is said."""

    def __init__(
        self,
        verbs: Verbs,
        sessions: dict[str, OpenSession],
        scheduler: Scheduler,
        durable: Durable,
        submissions: Submissions,
        evaluations: Evaluations,
        questions: Questions,
        writes: Writes,
        clock: Callable[[], float],
    ):
        """Start with nothing to note."""
        self._verbs = verbs
        self._sessions = sessions
        self._scheduler = scheduler
        self._durable = durable
        self._submissions = submissions
        self._evaluations = evaluations
        self._questions = questions
        self._writes = writes
        self._clock = clock

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and nothing is to be computed in idle time."""
        return not (
            self._scheduler.num_waiting
            or self._durable.num_held  # ended, and nobody knows it yet
            or any(session.is_outdated for session in self._sessions.values())
        )

    # Ends

    def note_ends(self) -> None:
        """Note what has become of the verbs that are over."""
        self._writes.note_ends()
        self._submissions.note_ends()
        # From here on no answer of a version before is served as current.
        for session_id, session in self._sessions.items():
            session.version = self._verbs.session(session_id).version
        for ticket, evaluation in self._evaluations.take_ended():
            if ticket.state is State.DONE:
                self._note_evaluation(ticket, evaluation)
            elif ticket.error is not None:
                evaluation.query.error = ticket.error
            session = self._sessions.get(ticket.session)
            if not evaluation.board.outdated(session.version if session else -1):
                self._evaluations.note_fresh(ticket.session)
        advancing = self._questions.advancing
        for ticket in [ticket for ticket in advancing if ticket.is_over]:
            prepositions, entry, version = advancing.pop(ticket)
            session = self._verbs.sessions.get(ticket.session)
            if ticket.state is State.DONE and session and session.version == version:
                prepositions.note(entry, version, session.context_len, ticket.result)
            elif ticket.error is not None:
                prepositions.fail(entry, version)

    def _note_evaluation(self, ticket: Ticket, evaluation: Evaluation) -> None:
        """Keep what was computed in full as the registered question's answer."""
        answer: Answer = ticket.result
        if answer.source is Source.GATED:
            return
        if evaluation.board.note(evaluation.query, answer, self._clock()):
            session = self._sessions.get(ticket.session)
            if session and session.board is not evaluation.board:
                session = None  # restored meanwhile: the same ids are other questions'
            if session:
                session.log.add(evaluation.query, answer)
            evaluation.query.served += evaluation.asked
            if session:
                _sample_headers(session, evaluation.query, answer)
            if evaluation.board.find(evaluation.query.question) is evaluation.query:
                self._durable.evaluated(ticket.session, evaluation.query)

    def note_gates(self) -> None:
        """Note all that gates have learned; at the end, without `Commands.changed`."""
        for session_id, session in self._sessions.items():
            for query in session.board.queries:
                self._durable.evaluated(session_id, query, least=1)

    # What nobody asked for yet

    def changing(self) -> set[str]:
        """See Writes.changing."""
        return self._writes.changing()

    def evaluate(self, changing: set[str]) -> None:
        """Submit what registered questions lack, together, where no append is on its way."""
        submitted = self._by_tenant(self._evaluations.tickets)
        for session_id, session in self._sessions.items():
            tenant = self._verbs.session(session_id).tenant
            if session_id in changing or submitted[tenant] >= UNASKED:
                continue
            lacking = self._evaluations.lacking(session.board, session.version)
            for query in lacking[: UNASKED - submitted[tenant]]:
                submitted[tenant] += 1
                try:
                    self._questions.evaluate(
                        self._submissions.unasked(), session_id, query, asked=0
                    )
                except JaxStateError as error:
                    query.error = error

    def preposition(self, changing: set[str]) -> None:
        """Submit what sessions lack ahead of their next questions, behind all else."""
        advancing = self._questions.advancing
        busy = changing | self._evaluations.sessions | {ticket.session for ticket in advancing}
        submitted = self._by_tenant(advancing)
        for session_id, session in self._sessions.items():
            tenant = self._verbs.session(session_id).tenant
            if session_id in busy or submitted[tenant] >= UNASKED:
                continue
            prepositions, version = session.prepositions, session.version
            for entry in prepositions.outdated(version):
                submitted[tenant] += 1
                try:
                    ticket = self._questions.advance(self._submissions.unasked(), session_id, entry)
                except JaxStateError:
                    prepositions.fail(entry, version)  # does not fit; questions will say so
                    continue
                advancing[ticket] = (prepositions, entry, version)

    def _by_tenant(self, tickets: Iterable[Ticket]) -> collections.Counter[str]:
        """Count verbs of sessions that are open."""
        sessions = self._verbs.sessions
        return collections.Counter(
            sessions[one.session].tenant for one in tickets if one.session in sessions
        )

    def maintain(self) -> bool:
        """Submit the repacking of sessions that have changed and leave many cells dead."""
        for session_id, session in self._sessions.items():
            if session.looked_after == session.version:
                continue
            session.looked_after = session.version
            if self._verbs.tiers.is_scattered(self._verbs.sessions[session_id]):
                self._submissions.submit(
                    self._submissions.unasked(), lambda name, _: self._verbs.repack(name),
                    session_id, (), JobClass.MAINTENANCE, cells=0,
                )  # fmt: skip
        return self._scheduler.num_waiting > 0

    def revive_all(self) -> None:
        """Bring back what was lost with the pool; without `Commands.changed`."""
        for name, session in self._verbs.sessions.items():
            if name in self._sessions and session.stored and session.stored.is_lost:
                self._submissions.revive(name)


def _sample_headers(session: OpenSession, query: FlashQuery, fresh: Answer) -> None:
    """Compare what declared headers led to with a fresh answer."""
    for header, ready in session.prepositions.ready.items():
        found = ready.answer(query.question)
        if found is None or not session.prepositions.is_declared(header):
            continue
        sample = ShadowSample(
            gap=found.certainty, agreed=same_answer(found, fresh),
            stale_version=found.version, version=fresh.version,
        )  # fmt: skip
        query.headers.setdefault(header, Gate()).add(sample)
