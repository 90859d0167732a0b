"""Everything this package raises on purpose, beyond ValueError for bad arguments to the leaves."""

from __future__ import annotations

from collections.abc import Iterable


class JaxStateError(Exception):
    """Base of all errors of sessions, capacity and snapshots.

    Attributes:
      field: of a request to a server, what is wrong in it; "" = none, or nobody told.
      applied: appends of a series that were applied before this one failed.
    """

    field = ""
    applied = 0


class CapacityError(JaxStateError):
    """What was asked does not fit: no free pages, window full, question too long."""


class PoolFullError(CapacityError):
    """Too few pages are free now; others may give some back.

    Attributes:
      retry_after_s: when to come again; a guess, since it depends on whoever holds the pages.
    """

    retry_after_s = 1.0


class PoolLostError(JaxStateError):
    """A step failed on the device and took the pool with it; ask again, cells are rebuilt."""

    retry_after_s = 1.0


class BusyError(JaxStateError):
    """Too much waits already; `retry_after_s` says when to come again, about."""

    def __init__(self, message: str, retry_after_s: float):
        """Say what is full, and for how long, about."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(JaxStateError):
    """A tenant has as much as it may have.

    Attributes:
      quota: which one it is, see serving.quotas.Quota.
      tenant: whose.
      retry_after_s: when to come again, about.
    """

    def __init__(self, message: str, *, quota: str, tenant: str, retry_after_s: float):
        """Say what is used up."""
        super().__init__(message)
        self.quota = quota
        self.tenant = tenant
        self.retry_after_s = retry_after_s


class UnauthenticatedError(JaxStateError):
    """Nobody knows who calls."""


class DeniedError(JaxStateError):
    """It is known who calls, and he may not."""


class UnavailableError(JaxStateError):
    """A server does not answer yet, or no more; `retry_after_s` says when it may again."""

    def __init__(self, message: str, retry_after_s: float):
        """Say why."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteError(JaxStateError):
    """A server failed in a way that is no fault of the request; its log says more."""


class ExpiredError(JaxStateError):
    """The deadline passed before anything was run."""


class CancelledError(JaxStateError):
    """It was cancelled before it ended."""


class ClosedError(CancelledError):
    """Who should have run it has been closed."""


class SessionError(JaxStateError):
    """The session is unknown, closed, or cannot do what was asked in its present state."""


class UnknownSessionError(SessionError):
    """No open session has this id, which is `session_id`."""

    def __init__(self, session_id: str, open_ids: Iterable[str]):
        """Name those that are open."""
        known = ", ".join(open_ids) or "none"
        super().__init__(f"session {session_id} is unknown or closed; open: {known}")
        self.session_id = session_id


class SessionExistsError(SessionError):
    """The id of a new session is taken."""


class ConflictError(SessionError):
    """Two durable turns of a session would overlap; ask again behind the other."""


class CursorError(JaxStateError):
    """What a cursor points to is not kept any more."""


class InputError(JaxStateError, ValueError):
    """An argument is wrong: empty, out of range, contradictory."""


class UnknownQuestionError(InputError):
    """No registered question has this id."""


class SnapshotError(JaxStateError):
    """A snapshot or journal is damaged, or of another version or model."""


class ForeignSnapshotError(SnapshotError):
    """It is whole, but of another format, model or size."""


class UnknownSnapshotError(SnapshotError):
    """There is no snapshot of this name."""


class SnapshotExistsError(SnapshotError):
    """The name or path of a new snapshot is taken."""


class SnapshotSpaceError(SnapshotError):
    """A snapshot cannot be written: the disk is full, broken, or not ours."""


class JournalError(ClosedError):
    """The journal cannot be used, or written any more: nothing durable is done from now on."""
