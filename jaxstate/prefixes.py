"""Where a new context may find its beginning computed already: what lives, and what was kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxstate.pages import Entry, Pages, cut_end
from jaxstate.prefix_tree import PrefixTree, Table
from jaxstate.session import Session, common_len
from jaxstate.tail import Tail


class Prefixes:
    """Beginnings of open sessions, of contexts under way, and kept ones; per tenant."""

    def __init__(self, pages: Pages, sessions: Mapping[str, Session], share: float | None):
        """Look into `sessions` as they are when asked; see EngineConfig.prefix_share."""
        self.is_on = share is not None
        self.tree = PrefixTree(pages, int((share or 0.0) * pages.num_pages))
        self._pages = pages
        self._sessions = sessions
        self._running: dict[Tail, tuple[str, np.ndarray]] = {}

    def match(self, tenant: str, token_ids: np.ndarray, most: int) -> tuple[int, Table]:
        """Find the longest computed beginning of at most `most` tokens: (tokens, their cells).

        The caller holds the entries at once.
        """
        if not self.is_on:
            return 0, ()
        count, found = self.tree.match(tenant, token_ids[:most])
        for tokens, entries in self._live(tenant):
            common = common_len(np.asarray(tokens[:most], np.int32), token_ids[:most])
            if common > count:
                common = min(common, _clean_len(entries))
            if common > count:
                count, found = common, entries
        return count, cut_end(found, count)

    def begin(self, tail: Tail, tenant: str, token_ids: np.ndarray) -> None:
        """Let others see what a context computes while it does; its tail ends in `end`."""
        if self.is_on:
            self._running[tail] = tenant, token_ids

    def end(self, tail: Tail, *, keep: bool = True) -> None:
        """Keep what a context has computed of its beginning, all or a part."""
        tenant, token_ids = self._running.pop(tail, ("", None))
        if token_ids is not None and keep:
            self._keep(tenant, token_ids, tail.entries())

    def forget_all(self) -> None:
        """Forget what is kept and what is being computed: the pool is empty."""
        self.tree.clear()
        self._running.clear()

    def keep_session(self, session: Session) -> None:
        """Keep the context of a session that is about to be closed."""
        if self.is_on and session.stored is None:
            tokens = np.asarray(session.token_ids[: _unslid_len(session)], np.int32)
            self._keep(session.tenant, tokens, session.entries)

    def _keep(self, tenant: str, token_ids: np.ndarray, entries: Sequence[Entry]) -> None:
        count = min(len(token_ids), _clean_len(entries))
        self.tree.keep(tenant, token_ids[:count], entries)

    def _live(self, tenant: str) -> Iterator[tuple[Sequence[int] | np.ndarray, Table]]:
        for session in self._sessions.values():
            if session.tenant == tenant and session.stored is None:
                yield session.token_ids[: _unslid_len(session)], session.entries
        for tail, (owner, token_ids) in self._running.items():
            if owner == tenant:
                yield token_ids, tail.entries()


def _unslid_len(session: Session) -> int:
    """Tokens at the start that nothing was evicted before or between."""
    return session.frozen_len if session.evicted else session.context_len


def _clean_len(entries: Sequence[Entry]) -> int:
    """Tokens at the start of a table that are stored rotated at their own positions."""
    count = 0
    for entry in entries:
        if entry.shift or entry.base + entry.first != count:
            break
        count = entry.base + entry.fill
    return count
