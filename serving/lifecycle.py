"""How a service's sessions are opened and closed, forked, saved and restored."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

from jaxstate import session_snapshot
from jaxstate.engine import Engine
from jaxstate.errors import SessionError
from jaxstate.needs import Steps
from jaxstate.prepositioning import Prepositions
from jaxstate.scheduler import Scheduler
from jaxstate.serving import recovery
from jaxstate.serving.commands import Commands
from jaxstate.serving.durable import Durable
from jaxstate.serving.evaluations import Evaluations
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.serving.open_session import OpenSession
from jaxstate.serving.quotas import Holdings
from jaxstate.serving.submissions import Submissions
from jaxstate.serving.writes import Writes
from jaxstate.session import WhenFull
from jaxstate.session_snapshot import SessionSnapshot


class Lifecycle:
    """Opens and closes sessions; used by the worker but where it is said."""

    def __init__(
        self,
        engine: Engine,
        sessions: dict[str, OpenSession],
        scheduler: Scheduler,
        commands: Commands,
        durable: Durable,
        holdings: Holdings,
        submissions: Submissions,
        evaluations: Evaluations,
        writes: Writes,
        clock: Callable[[], float],
        *,
        preposition: int,
    ):
        """Start with none.

        Args:
          preposition: see Prepositions.
        """
        self._engine = engine
        self._sessions = sessions
        self._scheduler = scheduler
        self._commands = commands
        self._durable = durable
        self._holdings = holdings
        self._submissions = submissions
        self._evaluations = evaluations
        self._writes = writes
        self._clock = clock
        self._preposition = preposition

    def create(
        self,
        frozen: Sequence[int],
        session_id: str | None,
        when_full: WhenFull,
        tenant: str,
        opener: object,
    ) -> Steps:
        """See Engine.create; `opener` as of take_back."""
        name = yield from self._engine.verbs.create(frozen, session_id, when_full, tenant)
        self.open(name, opener)
        self._durable.created(self._engine.session(name))
        return name

    def fork(self, session_id: str, new_id: str | None, opener: object) -> Steps:
        """See LocalService.fork; a verb, so that no change of the parent is half done meanwhile."""
        yield from ()
        parent = self._engine.session(session_id)
        self._holdings.check(parent.tenant, sessions=1, cells=parent.context_len)
        name = self._engine.fork(session_id, new_id=new_id)
        self.open(name, opener)
        self._durable.created(self._engine.session(name))
        return name

    def close(self, session_id: str) -> None:
        """See LocalService.close_session."""
        self._engine.session(session_id)
        self._check_cancellable(session_id, "close")
        self._scheduler.cancel_session(session_id, self._clock())
        self._engine.close(session_id)
        self._durable.closed(session_id)
        self._forget(session_id)

    def take_back(self, session_id: str, opener: object) -> None:
        """See LocalService.take_back."""
        session = self._sessions.get(session_id)
        if session is None or session.opener is not opener:
            return
        is_used = (
            self._engine.session(session_id).used != session.opened
            or self._scheduler.tickets_of(session_id)
            or session.board.queries
            or session.prepositions.declared
        )
        if not is_used:
            self.close(session_id)

    def recover(self, saved: SavedSession) -> None:
        """Open a session as the journal has it, and bring its cells back in idle time.

        Raises:
          SnapshotError: it does not fit this engine.
        """
        name = saved.session_id
        recovery.recover(self._engine, saved)
        session = self.open(name)
        recovery.refill(saved, session)
        self._submissions.revive(name)

    def take(self, session_id: str, fingerprint: str) -> Steps:
        """Copy a session for LocalService.snapshot, see session_snapshot.take; a verb as `fork`."""
        yield from self._engine.verbs.revive(session_id)
        session = self._sessions[session_id]
        return session_snapshot.take(
            self._engine.verbs, self._engine.session(session_id), fingerprint=fingerprint,
            registered=recovery.registered(session),
        )  # fmt: skip

    def read(
        self,
        path: str | pathlib.Path,
        fingerprint: str,
        session_id: str | None,
        tenant: str | None,
    ) -> tuple[SessionSnapshot, str, OpenSession]:
        """Read what `put` takes, in the caller's own thread; see LocalService.restore."""
        snapshot = session_snapshot.read(path, self._engine.verbs, fingerprint=fingerprint)
        name = session_id if session_id is not None else snapshot.fields["session_id"]
        if tenant is not None:
            snapshot.fields["tenant"] = tenant
        saved = OpenSession(version=snapshot.version, prepositions=Prepositions(self._preposition))
        recovery.register(snapshot.registered, saved, name)
        return snapshot, name, saved

    def put(self, snapshot: SessionSnapshot, name: str, saved: OpenSession) -> str:
        """See LocalService.restore.

        Args:
          saved: what the session was registered for, and its numbered verbs, which count where it
            is not open: those of an open one were done, whatever it becomes.
        """
        verbs = self._engine.verbs
        live = verbs.sessions.get(name)
        more = len(snapshot.token_ids) - (live.context_len if live else 0)
        self._holdings.check(snapshot.fields["tenant"], sessions=live is None, cells=max(more, 0))
        self._check_cancellable(name, "restore")
        restored = session_snapshot.put(
            verbs, snapshot, name,
            end_verbs=lambda: self._scheduler.cancel_session(name, self._clock()),
        )  # fmt: skip
        before = self._sessions.get(name)
        with self._commands.changed:
            if before is not None:
                self._forget(name)
            session = self.open(name)
            session.board, session.prepositions = saved.board, saved.prepositions
            session.memory = before.memory if before is not None else saved.memory
            if before is not None:  # an id is one question's, for good
                session.board.recall_id(before.board.last_id)
        self._durable.created(restored)
        if before is None:
            self._durable.remembered(name, session.memory)
        self._durable.unregistered(name, session.board.last_id)
        for query in session.board.queries:
            self._durable.registered(name, query)
        for header in session.prepositions.declared:
            self._durable.declared(name, header)
        return name

    def open(self, session_id: str, opener: object = None) -> OpenSession:
        """Begin to know a session of the engine."""
        record = self._engine.session(session_id)
        session = OpenSession(
            version=record.version, prepositions=Prepositions(self._preposition), opener=opener,
            opened=record.used,
        )  # fmt: skip
        with self._commands.changed:  # callers walk over all of them
            self._sessions[session_id] = session
        return session

    def _check_cancellable(self, session_id: str, verb: str) -> None:
        if not self._scheduler.can_cancel_session(session_id):
            raise SessionError(
                f"session {session_id}: an append is being computed; {verb} it when that is done"
            )

    def _forget(self, session_id: str) -> None:
        """Drop what there is of a session beside its record."""
        with self._commands.changed:
            del self._sessions[session_id]
            self._evaluations.note_fresh(session_id)
            self._writes.forget(session_id)
