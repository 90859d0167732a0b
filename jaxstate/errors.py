"""Everything this package raises on purpose, beyond ValueError for bad arguments to the leaves."""

from __future__ import annotations


class JaxStateError(Exception):
    """Base of all errors of sessions, capacity and snapshots."""


class CapacityError(JaxStateError):
    """What was asked does not fit: no free pages, window full, question too long."""


class PoolFullError(CapacityError):
    """Too few pages are free now; others may give some back."""


class BusyError(JaxStateError):
    """Too much waits already; `retry_after_s` says when to come again, about."""

    def __init__(self, message: str, retry_after_s: float):
        """Say what is full, and for how long, about."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ExpiredError(JaxStateError):
    """The deadline passed before anything was run."""


class CancelledError(JaxStateError):
    """It was cancelled before it ended."""


class SessionError(JaxStateError):
    """The session is unknown, closed, or cannot do what was asked in its present state."""


class InputError(JaxStateError, ValueError):
    """An argument is wrong: empty, out of range, contradictory."""


class SnapshotError(JaxStateError):
    """A snapshot is of another version or model, or damaged."""
