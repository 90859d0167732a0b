"""How sessions' cells come back into the pool: moved, put, replayed from a snapshot or computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxstate import cell_copy
from jaxstate import pages as pages_module
from jaxstate import session as session_module
from jaxstate.cell_copy import Cells
from jaxstate.config import EngineConfig
from jaxstate.contexts import Contexts
from jaxstate.errors import SnapshotError
from jaxstate.executor import Executor
from jaxstate.needs import Steps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.session import Change, Session
from jaxstate.tail import Tail
from jaxstate.tiers import Tiers

logger = logging.getLogger(__name__)

Earlier = tuple[Session, Cells, np.ndarray, Sequence[Change]]
"""An earlier state of a session: its record, cells and their shifts, and all changes since."""


class Revival:
    """Brings cells back, and knows how when they are lost.

    Attributes:
      earlier: returns what was saved of a session whose cells are lost, None if nothing was;
        SnapshotError if that is worth nothing.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        pages: Pages,
        sessions: Mapping[str, Session],
        prefixes: Prefixes,
        tiers: Tiers,
        contexts: Contexts,
    ):
        """Hear from the executor when the pool is lost."""
        self.earlier: Callable[[Session], Earlier | None] = lambda session: None
        self._executor = executor
        self._config = config
        self._pages = pages
        self._sessions = sessions
        self._prefixes = prefixes
        self._tiers = tiers
        self._contexts = contexts
        executor.on_pool_lost = self.lose_all

    def resident(self, session: Session, count: int = 0) -> Steps:
        """Bring a session's cells into the pool; those that are lost are computed anew.

        Args:
          count: tokens that are to go on pages behind it.
        """
        if self.bring_back(session, count):
            return
        try:
            earlier = self.earlier(session)
            if earlier is not None:
                yield from self._replay(session, *earlier)
                return
        except SnapshotError as error:
            logger.warning("session %s: %s", session.session_id, error)
        yield from self._rebuild(session)

    def bring_back(self, session: Session, count: int = 0) -> bool:
        """Bring a session's cells into the pool at once; False where they are lost."""
        self._tiers.touch(session)
        if session.stored and session.stored.is_lost:
            return False
        with session_module.using(session):
            try:
                self._tiers.bring_back(session, -(-count // self._config.page_size))
            except SnapshotError as error:
                logger.warning("%s", error)
                self._tiers.lose(session)
                return False
        return True

    def put_cells(self, session: Session, cells: Cells, shifts: np.ndarray) -> None:
        """Give a session cells on pages of its own, in order of position."""
        if len(shifts):
            growth = pages_module.plan_growth(
                self._pages, session.owner, (), 0, shifts, growing=True
            )
            self._pages.hold(growth.entries)
            try:
                cell_copy.put(self._executor, growth, cells)
            except BaseException:
                self._pages.drop(growth.entries)
                raise
            session.entries = growth.entries

    def lose_all(self) -> None:
        """Note that the pool is empty. Verbs that have begun must not go on."""
        self._prefixes.forget_all()
        for session in self._sessions.values():
            self._tiers.forget_paid(session)
            if session.entries:
                self._tiers.lose(session)

    def _rebuild(self, session: Session) -> Steps:
        """Compute a session's cells anew from its tokens.

        Where nothing was evicted they are what they were. Else the kept tokens never saw what was
        evicted: its version advances, and its answers say `rebuilt`.
        """
        ids = np.asarray(session.token_ids, np.int32)
        kept = session.context_len - session.frozen_len
        shifts = np.concatenate(
            [
                np.zeros(session.frozen_len, np.int32),
                self._contexts.shifts(session, session.evicted, kept),
            ]
        )
        tail = Tail(self._executor, self._pages, session.owner, (), 0, shifts, growing=True)
        try:
            yield from tail.forward(ids, want_last=False)
            if session.stored is None:
                return  # another verb has done it meanwhile
            session.entries, session.stored = tail.keep(), None
        finally:
            tail.close()
        if session.evicted:
            session.rebuilt = True
            self._contexts.advance_version(session)

    def _replay(
        self, session: Session, past: Session, cells: Cells, shifts: np.ndarray,
        changes: Sequence[Change],
    ) -> Steps:  # fmt: skip
        """Give a session the cells of an earlier state of it, and do again what came after.

        Each change evicts when it did, so that every token sees what it saw.

        Raises:
          SnapshotError: that is not what the session has become.
        """
        past.owner = session.owner
        try:
            self.put_cells(past, cells, shifts)
            for change in changes:
                yield from self._redo(past, change)
            if past.token_ids != session.token_ids or past.evicted != session.evicted:
                raise SnapshotError("what its changes led to is not what it has become")
            if session.stored is None:
                return
            session.entries, past.entries, session.stored = past.entries, (), None
        finally:
            self._pages.drop(past.entries)

    def _redo(self, past: Session, change: Change) -> Steps:
        """Change a state as a durable verb did."""
        if past.stream_len > change.begin:
            self._contexts.roll_back(past, past.stream_len - change.begin)
        dropped = change.evicted - past.evicted
        # A committed turn was computed before it evicted anything, an append after it.
        is_turn = change.stream_floor > change.begin
        if dropped and not is_turn:
            self._contexts.drop_oldest(past, dropped)
        if change.token_ids:
            ids = np.asarray(change.token_ids, np.int32)
            yield from self._contexts.extend(
                past, ids, self._contexts.shifts(past, past.stream_len, len(ids))
            )
        if dropped and is_turn:
            self._contexts.drop_oldest(past, dropped)
        past.stream_floor = change.stream_floor
