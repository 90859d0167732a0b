"""How sessions' contexts change: tables, tokens and versions, all at once or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from jaxstate import pages as pages_module
from jaxstate import rows as rows_module
from jaxstate import session as session_module
from jaxstate.config import EngineConfig
from jaxstate.errors import CapacityError
from jaxstate.executor import Executor
from jaxstate.models.config import ModelConfig
from jaxstate.needs import Steps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.session import Session
from jaxstate.tail import Tail
from jaxstate.tiers import Tiers


class Contexts:
    """Changes contexts of sessions whose cells are in the pool.

    Attributes:
      on_change: called with every session that has come to a new version.
    """

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        config: EngineConfig,
        pages: Pages,
        prefixes: Prefixes,
        tiers: Tiers,
    ):
        """Change what is on these pages."""
        self.on_change: Callable[[Session], None] = lambda session: None
        self._executor = executor
        self._model = model
        self._config = config
        self._pages = pages
        self._prefixes = prefixes
        self._tiers = tiers

    def begin(self, session: Session, ids: np.ndarray) -> Steps:
        """Make `ids` the context of a new session, forwarding what nobody has computed."""
        count, entries = self._prefixes.match(session.tenant, ids, len(ids))
        self._pages.hold(entries)
        session.entries, session.token_ids = entries, ids[:count].tolist()
        session.cached_tokens = count
        if count == len(ids):
            return
        shifts = np.zeros(len(ids) - count, np.int32)
        try:
            yield from self.extend(session, ids[count:], shifts, beginning=ids)
        except BaseException:
            self._pages.drop(session.entries)
            raise

    def append(self, session: Session, ids: np.ndarray) -> Steps:
        """Forward tokens behind the context, which drops its oldest where it is full.

        Raises:
          CapacityError: it may not, or there is no room; nothing has changed.
        """
        dropped = session_module.overflow_evictions(
            session, len(ids), self._config.context_len, self._config.evict_quantum
        )
        shifts = self.shifts(session, session.stream_len, len(ids), dropped)
        entries = session_module.evict(session, dropped) if dropped else session.entries
        position = session.context_len - dropped
        self.check_room(session, entries, position, shifts)
        self._tiers.forget_paid(session)
        if not dropped:
            yield from self.extend(session, ids, shifts)
            return
        with self._as_it_was(session):
            self.drop_oldest(session, dropped)
            yield from self.extend(session, ids, shifts)

    def update(self, session: Session, ids: np.ndarray) -> Steps:
        """Make `ids` the stream, keeping what it begins with as far as that is the same.

        Raises:
          CapacityError, SessionError: it is too long, or differs where tokens are gone; nothing
            has changed.
        """
        stream = np.asarray(session.token_ids[session.frozen_len :], np.int32)
        common = session_module.common_len(stream, ids)
        if common < len(stream):
            session_module.rolled_back(session, len(stream) - common)  # may refuse
        if len(ids) > self._config.context_len - session.frozen_len:
            raise CapacityError(
                f"update of {len(ids)} tokens is longer than the stream's window of "
                f"{self._config.context_len - session.frozen_len}; shorten it or raise context_len"
            )
        if common < len(ids):
            position = session.frozen_len + common
            begin = session.stream_len - (len(stream) - common)
            self.check_room(
                session, pages_module.cut_end(session.entries, position), position,
                self.shifts(session, begin, len(ids) - common),
            )  # fmt: skip
        if common == len(stream) == len(ids):
            return
        if common == len(stream):
            yield from self.append(session, ids[common:])
            return
        with self._as_it_was(session):
            self.roll_back(session, len(stream) - common)
            if common < len(ids):
                yield from self.append(session, ids[common:])

    def extend(
        self,
        session: Session,
        ids: np.ndarray,
        shifts: np.ndarray,
        beginning: np.ndarray | None = None,
    ) -> Steps:
        """Forward tokens behind the context and make them part of it.

        Args:
          beginning: the whole context to be, where others may share it meanwhile.
        """
        tail = Tail(
            self._executor,
            self._pages,
            session.owner,
            session.entries,
            session.context_len,
            shifts,
            growing=True,
        )
        if beginning is not None:
            self._prefixes.begin(tail, session.tenant, beginning)
        try:
            yield from tail.forward(ids, want_last=False)
            self._prefixes.end(tail, keep=False)  # the session has it
            entries = tail.keep()
        except BaseException:
            self._prefixes.end(tail)
            tail.close()
            raise
        self._pages.drop(session.entries)
        session.entries = entries
        session.token_ids.extend(ids.tolist())

    @contextlib.contextmanager
    def _as_it_was(self, session: Session) -> Iterator[None]:
        """Give a session its tokens back where that for which it gave cells up does not end.

        Its cells are lost then: they are computed anew, or come from a snapshot, when it is of use.
        """
        before = list(session.token_ids), session.evicted, session.stream_floor, session.saved_len
        try:
            yield
        except BaseException:
            session.token_ids, session.evicted, session.stream_floor, session.saved_len = before
            self._tiers.lose(session)
            raise

    def drop_oldest(self, session: Session, count: int) -> None:
        """Evict the stream's oldest tokens."""
        entries = session_module.evict(session, count)
        self._pages.replace(session.entries, entries)
        session.entries = entries
        session.stream_floor = session.stream_len
        del session.token_ids[session.frozen_len : session.frozen_len + count]
        session.evicted += count

    def roll_back(self, session: Session, count: int) -> None:
        """Take the newest tokens back; see session.rolled_back."""
        entries = session_module.rolled_back(session, count)
        self._tiers.forget_paid(session)
        self._pages.replace(session.entries, entries)
        session.entries = entries
        del session.token_ids[session.context_len - count :]
        session.saved_len = min(session.saved_len, session.stream_len)

    def check_room(self, session: Session, entries, position: int, shifts: np.ndarray) -> None:
        """Refuse tokens that pool or step table cannot hold behind `entries`.

        What paid tails, eviction and rollback give back counts as free.
        """
        needed = pages_module.pages_needed(self._pages, session.owner, entries, position, shifts)
        self._pages.require(needed, session.entries, staying=entries)
        one_step = len(shifts) <= self._executor.longest_step  # reads only what is there already
        rows_module.check_context(
            pages_module.stretches(entries, self._config.page_size), 0 if one_step else needed,
            self._executor.config.step_shapes[-1], self._executor.config,
        )  # fmt: skip

    def shifts(self, session: Session, first: int, count: int, evicting: int = 0) -> np.ndarray:
        """Shifts of stream tokens `first` and following after `evicting` more are dropped."""
        epoch = session_module.rotation_epoch(
            self._model.max_positions, session.frozen_len, self._config.page_size
        )
        return session_module.stream_shifts(first, count, session.evicted + evicting, epoch)

    def advance_version(self, session: Session) -> None:
        """Note a change; what was paid for beside it saw the session as it was."""
        self._tiers.forget_paid(session)
        session.version += 1
        self.on_change(session)
