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

_SOON_S = 1.0  # when to come again where that depends on the tenant's other calls; a guess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quota:
    """What a tenant may have; None = as much as there is.

    Attributes:
      max_sessions: open at once.
      max_cells: tokens of the contexts of all its sessions, wherever they are kept, and the most
        that its calls under way can add to them. What it shares with itself counts for each.
      max_requests: calls under way at once, streams among them.
      requests_per_s: calls begun, on average; as many as those of a second at once.
    """

    max_sessions: int | None = None
    max_cells: int | None = None
    max_requests: int | None = None
    requests_per_s: float | None = None


QuotaOf = Callable[[str], Quota]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tenant has of an engine, see Quota."""

    sessions: int
    cells: int


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
        self._reserved: dict[str, list[tuple[Ticket, Usage]]] = {}  # by verbs under way

    def check(self, tenant: str, *, sessions: int = 0, cells: int = 0) -> None:
        """See that a tenant may have so much more.

        Raises:
          QuotaError: it may not.
        """
        quota = self._quota_of(tenant)
        if quota.max_sessions is None and quota.max_cells is None:
            return
        used = self.usage(tenant)
        _check(
            tenant, "max_sessions", quota.max_sessions, used.sessions, sessions,
            what="open sessions", remedy="close one",
        )  # fmt: skip
        _check(
            tenant, "max_cells", quota.max_cells, used.cells, cells,
            what="cells of sessions and calls under way",
            remedy="close a session, roll one back, ask for less",
        )  # fmt: skip

    def reserve(self, ticket: Ticket, tenant: str, *, sessions: int = 0, cells: int) -> None:
        """Count what a verb may take until it has ended."""
        held = [one for one in self._reserved.get(tenant, ()) if not one[0].has_ended]
        self._reserved[tenant] = [*held, (ticket, Usage(sessions=sessions, cells=cells))]

    def usage(self, tenant: str) -> Usage:
        """Return what a tenant has, with what its verbs under way may take."""
        mine = [one for one in self._sessions.values() if one.tenant == tenant]
        held = [usage for ticket, usage in self._reserved.get(tenant, ()) if not ticket.has_ended]
        return Usage(
            sessions=len(mine) + sum(usage.sessions for usage in held),
            cells=sum(one.context_len for one in mine) + sum(usage.cells for usage in held),
        )


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
        _check(
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


def _check(
    tenant: str, quota: str, limit: int | None, used: int, more: int, *, what: str, remedy: str
) -> None:
    """Raise where more would be too much; who is above a quota already may still give back."""
    if limit is not None and more and used + more > limit:
        raise QuotaError(
            f"{quota}: expected at most {limit} {what}, got {used} and {more} more; {remedy}, or "
            "have the quota raised",
            quota=quota, tenant=tenant, retry_after_s=_SOON_S,
        )  # fmt: skip
