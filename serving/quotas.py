"""What a tenant may have: sessions, cells and calls, and who counts them.

Sessions and cells are counted by the thread that owns the engine, in the step in which they are
taken; calls by the event loop. Each is one thread, so nothing can be taken twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

from jaxstate.errors import JaxStateError, QuotaError
from jaxstate.scheduler import Ticket
from jaxstate.session import Session

MAX_SNAPSHOTS = 100  # unless told otherwise: they fill the disk that all share
_SOON_S = 1.0  # when to come again where that depends on the tenant's other calls; a guess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quota:
    """What a tenant may have; None = as much as there is.

    Attributes:
      max_sessions: open at once.
      max_cells: tokens of the contexts of all its sessions, wherever they are kept, and the most
        that its calls under way can add to them: to one that slides, never more than its window
        holds. What it shares with itself counts for each.
      max_requests: calls under way at once, streams among them.
      requests_per_s: calls begun, on average; as many as those of a second at once.
      max_snapshots: saved by name.
    """

    max_sessions: int | None = None
    max_cells: int | None = None
    max_requests: int | None = None
    requests_per_s: float | None = None
    max_snapshots: int | None = MAX_SNAPSHOTS


QuotaOf = Callable[[str], Quota]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tenant has of an engine, see Quota."""

    sessions: int
    cells: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Held:
    """What a verb under way may take; `most` is the longest that it may leave its session."""

    ticket: Ticket | None  # None = it is not submitted yet
    session: str
    sessions: int
    cells: int
    most: int | None


class Holdings:
    """Counts what tenants have of an engine; used by the thread that owns it."""

    def __init__(self, sessions: Mapping[str, Session], quota_of: QuotaOf | None):
        """Count open sessions.

        Args:
          sessions: the engine's, by id.
          quota_of: of a tenant, as it is now; None = nobody has one.
        """
        self._sessions = sessions
        self._quota_of = quota_of or (lambda tenant: Quota())
        self._reserved: dict[str, list[_Held]] = {}  # by verbs under way, in order

    def check(
        self,
        tenant: str,
        *,
        sessions: int = 0,
        cells: int = 0,
        session: str = "",
        most: int | None = None,
    ) -> None:
        """See that a tenant may have so much more.

        Args:
          session, most: of a verb that leaves this session no longer than so many tokens, whatever
            it adds; None = it may become as much longer as there are cells.
        Raises:
          QuotaError: it may not.
        """
        quota = self._quota_of(tenant)
        if quota.max_sessions is None and quota.max_cells is None:
            return
        used = self.usage(tenant)
        check_limit(
            tenant, "max_sessions", quota.max_sessions, used.sessions, sessions,
            what="open sessions", remedy="close one",
        )  # fmt: skip
        more = _Held(ticket=None, session=session, sessions=sessions, cells=cells, most=most)
        check_limit(
            tenant, "max_cells", quota.max_cells, used.cells,
            self._cells(tenant, [*self._held(tenant), more]) - used.cells,
            what="cells of sessions and calls under way",
            remedy="close a session, roll one back, ask for less",
        )  # fmt: skip

    def reserve(
        self,
        ticket: Ticket,
        tenant: str,
        *,
        sessions: int = 0,
        cells: int,
        most: int | None = None,
    ) -> None:
        """Count what a verb may take until it has ended; arguments as of check."""
        held = _Held(
            ticket=ticket, session=ticket.session, sessions=sessions, cells=cells, most=most
        )
        self._reserved[tenant] = [*self._held(tenant), held]

    def usage(self, tenant: str) -> Usage:
        """Return what a tenant has, with what its verbs under way may take."""
        held = self._held(tenant)
        num_open = sum(one.tenant == tenant for one in self._sessions.values())
        return Usage(
            sessions=num_open + sum(one.sessions for one in held), cells=self._cells(tenant, held)
        )

    def _held(self, tenant: str) -> list[_Held]:
        held = self._reserved.get(tenant, ())
        return [one for one in held if one.ticket is None or not one.ticket.has_ended]

    def _cells(self, tenant: str, held: list[_Held]) -> int:
        """Add up the longest that sessions can become, and what calls need beside them."""
        mine = self._sessions.items()
        now = {name: one.context_len for name, one in mine if one.tenant == tenant}
        longest, beside = dict(now), 0
        for one in held:
            if one.most is None or one.session not in now:
                beside += one.cells
                continue
            now[one.session] = min(now[one.session] + one.cells, one.most)
            longest[one.session] = max(longest[one.session], now[one.session])
        return sum(longest.values()) + beside


class Requests:
    """Counts tenants' calls; used by one event loop, read by anybody.

    Attributes:
      running: calls under way by tenant.
      begun: all there were, but for those refused.
      refused: those and others that met a quota, by tenant and which it was.
    """

    def __init__(self, quota_of: QuotaOf, clock: Callable[[], float] = time.monotonic):
        """Count from now on."""
        self._quota_of = quota_of
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # calls that are left, and when
        self.running: collections.Counter[str] = collections.Counter()
        self.begun: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[tuple[str, str]] = collections.Counter()

    @contextlib.contextmanager
    def under_way(self, tenant: str) -> Iterator[None]:
        """Count a call while it runs.

        Raises:
          QuotaError: there are as many as there may be.
        """
        try:
            self._admit(tenant, self._quota_of(tenant))
            with self._running(tenant):
                yield
        except JaxStateError as error:
            cause = error.__cause__ or error  # of a series, what interrupted it
            if isinstance(cause, QuotaError):
                self.refused[tenant, cause.quota] += 1
            raise

    @contextlib.contextmanager
    def _running(self, tenant: str) -> Iterator[None]:
        self.running[tenant] += 1
        self.begun[tenant] += 1
        try:
            yield
        finally:
            self.running[tenant] -= 1

    def _admit(self, tenant: str, quota: Quota) -> None:
        check_limit(
            tenant, "max_requests", quota.max_requests, self.running[tenant], 1,
            what="calls under way", remedy="wait for one to end",
        )  # fmt: skip
        rate = quota.requests_per_s
        if rate is None:
            return
        most, now = max(rate, 1.0), self._clock()
        left, since = self._buckets.get(tenant, (most, now))
        left = min(left + (now - since) * rate, most)
        if left < 1.0:
            raise QuotaError(
                f"requests_per_s: expected at most {rate:g} calls a second, got more; wait",
                quota="requests_per_s", tenant=tenant, retry_after_s=(1.0 - left) / rate,
            )  # fmt: skip
        self._buckets[tenant] = left - 1.0, now


def check_limit(
    tenant: str, quota: str, limit: int | None, used: int, more: int, *, what: str, remedy: str
) -> None:
    """Raise QuotaError where more would be too much; who has too much may still give back."""
    if limit is not None and more and used + more > limit:
        raise QuotaError(
            f"{quota}: expected at most {limit} {what}, got {used} and {more} more; {remedy}, or "
            "have the quota raised",
            quota=quota, tenant=tenant, retry_after_s=_SOON_S,
        )  # fmt: skip
