"""Appends that were numbered by who sent them, so that one which comes again is applied once."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from jaxstate.errors import InputError
from jaxstate.plan import JobClass
from jaxstate.scheduler import State, Ticket

REMEMBERED = 1024  # appends of a session

Number = tuple[str, int]
"""Who sent an append, and his number for it, growing from one to the next."""


class AppendMemory:
    """The numbered appends of one session.

    One that was not run, or failed, is forgotten: it may come again and is tried again.
    """

    def __init__(self):
        """Start without any."""
        self._known: collections.OrderedDict[Number, tuple[bytes, Ticket]]
        self._known = collections.OrderedDict()
        self._highest: dict[str, int] = {}  # of each writer

    def find(self, number: Number, token_ids: Sequence[int]) -> Ticket | None:
        """Return what an append that comes again came to; None if it is new.

        Raises:
          InputError: the number was given to other tokens, or is lower than others of its writer
            and not among those that are remembered.
        """
        writer, sequence = number
        if sequence < 1:
            raise InputError(f"sequence: expected 1 or more, got {sequence}")
        if number in self._known:
            known, ticket = self._known[number]
            if known != digest(token_ids):
                raise InputError(
                    f'sequence: expected the tokens that writer "{writer}" sent as {sequence} '
                    "before, got others; number new appends upwards"
                )
            return ticket if not ticket.is_over or ticket.state is State.DONE else None
        highest = self._highest.get(writer, 0)
        if sequence <= highest:
            raise InputError(
                f'sequence: expected more than {highest}, the highest of writer "{writer}", or one '
                f"of the {REMEMBERED} that are remembered, got {sequence}"
            )
        return None

    def note(self, number: Number, token_ids: Sequence[int], ticket: Ticket) -> None:
        """Remember a new append."""
        self._note(number, digest(token_ids), ticket)

    def recall(self, number: Number, known: bytes, session_id: str, version: int) -> None:
        """Remember an append that was done before the service started.

        Args:
          known: digest of its tokens.
          version: that it led to.
        """
        ticket = Ticket(
            job_id=-1, job_class=JobClass.APPEND, session=session_id, deadline=math.inf,
            submitted=-math.inf, state=State.DONE, result=version,
        )  # fmt: skip
        self._note(number, known, ticket)

    def _note(self, number: Number, known: bytes, ticket: Ticket) -> None:
        writer, sequence = number
        self._known[number] = (known, ticket)
        self._highest[writer] = max(sequence, self._highest.get(writer, 0))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def digest(token_ids: Sequence[int]) -> bytes:
    """Return what tells an append's tokens from others."""
    return hashlib.sha256(np.asarray(token_ids, np.int64).tobytes()).digest()
