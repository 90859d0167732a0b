"""Durable verbs that were numbered by who sent them: one which comes again is applied once."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from jaxstate.errors import InputError
from jaxstate.plan import JobClass
from jaxstate.scheduler import State, Ticket

REMEMBERED = 1024  # verbs of a session
HIGHEST = 2**63 - 1  # that a journal's database can hold

Number = tuple[str, int]
"""Who sent a verb, and his number for it, growing from one to the next."""


class WriteMemory:
    """The numbered verbs of one session.

    One that was not run, or failed, is forgotten: it may come again and is tried again.
    """

    def __init__(self):
        """Start without any."""
        self._known: collections.OrderedDict[Number, tuple[bytes, Ticket]]
        self._known = collections.OrderedDict()
        self._highest: dict[str, int] = {}  # of each writer

    def find(self, number: Number, what: bytes) -> Ticket | None:
        """Return what a verb that comes again came to; None if it is new.

        Args:
          what: its digest.

        Raises:
          InputError: the number was given to another verb or other tokens, or is lower than others
            of its writer and not among those that are remembered.
        """
        writer, sequence = number
        if not 1 <= sequence <= HIGHEST:
            raise InputError(f"sequence: expected 1 to {HIGHEST}, got {sequence}")
        if number in self._known:
            known, ticket = self._known[number]
            if known != what:
                raise InputError(
                    f'sequence: expected what writer "{writer}" sent as {sequence} before, got '
                    "something else; number new verbs upwards"
                )
            return ticket if not ticket.is_over or ticket.state is State.DONE else None
        highest = self._highest.get(writer, 0)
        if sequence <= highest:
            raise InputError(
                f'sequence: expected more than {highest}, the highest of writer "{writer}", or one '
                f"of the {REMEMBERED} that are remembered, got {sequence}"
            )
        return None

    def note(self, number: Number, what: bytes, ticket: Ticket) -> None:
        """Remember a new verb by its number and digest."""
        writer, sequence = number
        self._known[number] = (what, ticket)
        self._highest[writer] = max(sequence, self._highest.get(writer, 0))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def done(self) -> list[tuple[Number, bytes, int]]:
        """Return those that were done: number, digest and the version that each led to."""
        return [
            (number, what, ticket.result)
            for number, (what, ticket) in self._known.items()
            if ticket.state is State.DONE
        ]

    def recall(self, number: Number, what: bytes, session_id: str, version: int) -> None:
        """Remember a verb that was done before the service started, and the version it led to."""
        ticket = Ticket(
            job_id=-1, job_class=JobClass.APPEND, session=session_id, deadline=math.inf,
            submitted=-math.inf, state=State.DONE, result=version,
        )  # fmt: skip
        self.note(number, what, ticket)


def digest(verb: str, token_ids: Sequence[int]) -> bytes:
    """Return what tells a verb and its tokens from others."""
    data = np.asarray(token_ids, np.int64).tobytes()
    return hashlib.sha256(verb.encode() + b"\0" + data).digest()
