"""Appends that follow one another closely: what is evaluated between them is for nothing."""

from __future__ import annotations

import dataclasses
import math

BURST_GAP_S = 0.0025
"""An append that is asked for within this time behind the end of the one before makes a burst,
which is over when so much time has passed without one; a client sends its next within less."""


@dataclasses.dataclass
class _Burst:
    """Of one session.

    Attributes:
      last: when the newest append was submitted, or was over.
      over: from when on none is expected any more.
    """

    last: float = -math.inf
    over: float = -math.inf


class Bursts:
    """Knows which sessions are to expect an append; all times are seconds on one clock."""

    def __init__(self):
        """Start with none."""
        self._by_session: dict[str, _Burst] = {}

    def submit(self, session_id: str, asked: float, now: float) -> None:
        """Note an append that a caller asked for and that is submitted now."""
        burst = self._by_session.setdefault(session_id, _Burst())
        burst.over = math.inf if asked - burst.last < BURST_GAP_S else -math.inf
        burst.last = now

    def end(self, session_id: str, now: float) -> None:
        """Note that an append is over; of a burst another may follow."""
        burst = self._by_session.get(session_id)
        if burst is None:
            return
        burst.last = now
        if burst.over > -math.inf:
            burst.over = now + BURST_GAP_S

    def expecting(self, now: float) -> set[str]:
        """Sessions whose burst is not over."""
        return {session_id for session_id, one in self._by_session.items() if one.over > now}

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session."""
        self._by_session.pop(session_id, None)
