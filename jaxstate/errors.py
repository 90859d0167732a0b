"""Everything this package raises on purpose, beyond ValueError for bad arguments to the leaves."""

from __future__ import annotations


class JaxStateError(Exception):
    """Base of all errors of sessions, capacity and snapshots."""


class CapacityError(JaxStateError):
    """What was asked does not fit: no free pages, window full, question too long."""


class PoolFullError(CapacityError):
    """Too few pages are free now; others may give some back."""


class SessionError(JaxStateError):
    """The session is unknown, closed, or cannot do what was asked in its present state."""


class InputError(JaxStateError, ValueError):
    """An argument is wrong: empty, out of range, contradictory."""


class SnapshotError(JaxStateError):
    """A snapshot is of another version or model, or damaged."""
