"""One session on the host: its tokens, its table, and the arithmetic of sliding."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxstate.errors import CapacityError, SessionError
from jaxstate.pages import Entry, cut_end, cut_middle
from jaxstate.tail import NextToken

WhenFull = Literal["error", "slide"]


@dataclasses.dataclass(kw_only=True)
class PaidTail:
    """Tokens forwarded behind a session's context before anybody asked.

    Attributes:
      token_ids: what was forwarded: an entry, and what was decoded greedily behind it.
      entries: the session's cells and its own behind them.
      along: the distributions after the entry and after every token behind it.
    """

    token_ids: tuple[int, ...]
    entries: tuple[Entry, ...]
    along: tuple[NextToken, ...]

    @property
    def ready(self) -> NextToken:
        """The distribution after the last token."""
        return self.along[-1]

    @property
    def entry_len(self) -> int:
        """Tokens of the entry."""
        return len(self.token_ids) - len(self.along) + 1

    def behind(self, count: int) -> tuple[NextToken, ...]:
        """Distributions after the first `count` tokens and after each one behind, if kept."""
        return self.along[count - self.entry_len :] if count >= self.entry_len else ()


@dataclasses.dataclass(kw_only=True)
class Session:
    """What the host knows of a session; the keys and values are in the pool.

    Positions are contiguous: [frozen | kept stream | tail]. `evicted` stream tokens came before
    the kept ones, so the n-th token the stream ever had stands at frozen_len + n - evicted.

    Attributes:
      session_id: name.
      owner: holder of its pages.
      when_full: what an append beyond context_len does.
      frozen_len: tokens at the start that are never evicted.
      token_ids: frozen and kept stream tokens; the truth.
      entries: its cells, in order of position.
      evicted: stream tokens dropped so far.
      stream_floor: stream length (evicted ones included) at the last eviction; a rollback below
        it would need tokens that are gone.
      version: number of durable operations.
      saved_len: stream tokens, evicted ones included, that are as Contexts.on_change saw them last.
      tenant: with whom its beginning may be shared.
      cached_tokens: at its start, that others had computed when it was created.
      paid: tails forwarded ahead; gone with the next durable operation.
      running: verbs that are under way on it.
      used: when it was last of use; larger is later.
      stored: its cells outside of the pool, a tiers.Stored; None = all are in it, see `entries`.
      copy: what host memory has of its cells in the pool, a host_copies.HostCopy; None = nothing.
      rebuilt: its cells were lost after an eviction and computed anew from the kept tokens, which
        is not the same.
    """

    session_id: str
    owner: int
    when_full: WhenFull
    frozen_len: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    entries: tuple[Entry, ...] = ()
    evicted: int = 0
    stream_floor: int = 0
    version: int = 0
    saved_len: int = 0
    tenant: str = ""
    cached_tokens: int = 0
    paid: list[PaidTail] = dataclasses.field(default_factory=list)
    running: int = 0
    used: int = 0
    stored: Any = None
    copy: Any = None
    rebuilt: bool = False

    @property
    def context_len(self) -> int:
        """Tokens in the context: frozen and kept stream."""
        return len(self.token_ids)

    @property
    def stream_len(self) -> int:
        """Stream tokens ever appended and not rolled back, evicted ones included."""
        return self.evicted + self.context_len - self.frozen_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A durable change of a session: an edit of its stream, whatever verb made it.

    The stream is cut at `begin`, its oldest tokens are dropped up to `evicted`, and `token_ids`
    come behind. Both count from the first token that the stream ever had.

    Attributes:
      version: that it led to.
      begin, evicted: in stream tokens.
      stream_floor, rebuilt: the session's behind it, see Session.
    """

    version: int
    begin: int
    evicted: int
    stream_floor: int
    rebuilt: bool
    token_ids: list[int]


@contextlib.contextmanager
def using(session: Session) -> Iterator[None]:
    """Keep a session where it is while a verb runs on it."""
    session.running += 1
    try:
        yield
    finally:
        session.running -= 1


def overflow_evictions(session: Session, count: int, context_len: int, quantum: int) -> int:
    """Decide how many stream tokens an append of `count` tokens evicts: once, before it runs.

    ceil(overflow / quantum) * quantum, at most what the stream holds.

    Raises:
      CapacityError: the session does not slide, or the append is longer than the window.
    """
    overflow = session.context_len + count - context_len
    if overflow <= 0:
        return 0
    if session.when_full == "error":
        raise CapacityError(
            f"session {session.session_id}: {session.context_len} of {context_len} tokens are "
            f"held and {count} more do not fit; create it with when_full='slide', roll back, or "
            "raise context_len"
        )
    window = context_len - session.frozen_len
    if count > window:
        raise CapacityError(
            f"session {session.session_id}: an append of {count} tokens is longer than the "
            f"stream's window of {window}; split it or raise context_len"
        )
    kept = session.context_len - session.frozen_len
    return min(-(-overflow // quantum) * quantum, kept)


def evict(session: Session, count: int) -> tuple[Entry, ...]:
    """Return the table without the stream's oldest `count` tokens; no key moves."""
    return cut_middle(session.entries, session.frozen_len, count)


def rotation_epoch(max_positions: int, frozen_len: int, page_size: int) -> int:
    """Stream tokens after which stored rotations start over at frozen_len, in whole pages.

    At least one page: only a prefix that leaves less than that of the model's positions lets a
    stored rotation pass the longest one, by less than a page. Scores depend on distances alone.
    """
    return max((max_positions - frozen_len) // page_size * page_size, page_size)


def stream_shifts(first: int, count: int, evicted: int, epoch: int) -> np.ndarray:
    """Shifts of the stream's tokens first … first + count - 1, [count] int32.

    Token n is stored rotated at frozen_len + n mod epoch, whatever was evicted before it came:
    all tokens of an epoch share one shift at any time, and stored rotations stay within the
    model's positions (see rotation_epoch).
    """
    index = np.arange(first, first + count, dtype=np.int64)
    return (index // epoch * epoch - evicted).astype(np.int32)


def rolled_back(session: Session, count: int) -> tuple[Entry, ...]:
    """Return the table without the last `count` stream tokens.

    Raises:
      SessionError: the stream is shorter, or what would be restored has been evicted.
    """
    kept = session.context_len - session.frozen_len
    if count > kept:
        raise SessionError(
            f"session {session.session_id}: cannot roll back {count} tokens, the stream holds "
            f"{kept}; the frozen prefix stays"
        )
    if session.stream_len - count < session.stream_floor:
        raise SessionError(
            f"session {session.session_id}: rolling back {count} tokens would pass the last "
            f"eviction, which {session.stream_len - session.stream_floor} tokens ago dropped what "
            "stood before them; append the wanted tokens to a new session instead"
        )
    return cut_end(session.entries, session.context_len - count)


def longest_paid(session: Session, ids: np.ndarray) -> tuple[PaidTail | None, int]:
    """Find the paid tail that saves most, and how many question tokens it saves.

    All of them only where the tail has kept the distribution after the last. Of several that save
    the same, that one which goes on longest behind the question.
    """
    best, skip, length = None, 0, 0
    for paid in session.paid:
        common = common_len(np.asarray(paid.token_ids, np.int32), ids)
        if common == len(ids) and not paid.behind(common):
            common -= 1
        if common and (common, len(paid.token_ids)) > (skip, length):
            best, skip, length = paid, common, len(paid.token_ids)
    return best, skip


def common_len(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix."""
    count = min(len(left), len(right))
    differs = np.flatnonzero(left[:count] != right[:count])
    return int(differs[0]) if differs.size else count
