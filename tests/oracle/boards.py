"""Registered questions of many sessions, as a service keeps them, each answer held to its version.

What a board gives without computing must be what computing would have given: an answer of the
newest version equals the reference there, by the rule of equality; one that a gate lets stand is,
token for token, the full answer that was computed for the version it claims, and claims an old one.
"""

from __future__ import annotations

import collections

import numpy as np

from jaxstate.answer import Answer, Source
from jaxstate.calibration import ShadowSample
from jaxstate.flash import FlashBoard, FlashQuery, Question
from oracle.answers import Answers
from oracle.equality import require
from oracle.mirror import Mirror

FIRST_VERSION = 640
"""Of sessions, so that gates may have learned from what came before."""
AGE = 3  # of what a gate has learned from
GAP = 0.05  # likewise, in logits; most are larger
RISK = 0.3


class Boards:
    """A board for each session, and every full answer that was put on it."""

    def __init__(self, answers: Answers, events: collections.Counter[str]):
        """Compare by `answers`, count in `events`."""
        self._answers = answers
        self._events = events
        self._boards: dict[str, FlashBoard] = {}
        self._full: dict[tuple[str, int, int], tuple] = {}  # by session, question, version
        self._under_way: set[tuple[str, int]] = set()

    def open(self, session: str) -> None:
        """Start without questions."""
        self._boards[session] = FlashBoard()

    def close(self, session: str) -> None:
        """Forget a session's questions."""
        del self._boards[session]
        self._under_way = {one for one in self._under_way if one[0] != session}

    def register(self, session: str, question: Question) -> None:
        """Register a question whose gate has seen that older answers mostly agree."""
        query = self._boards[session].register(question, RISK)
        if query.stale.samples:
            return
        agreed = np.random.default_rng(0).random(FIRST_VERSION) > RISK / 10
        for version in range(AGE, FIRST_VERSION):
            query.stale.add(
                ShadowSample(
                    gap=GAP, agreed=bool(agreed[version]), stale_version=version - AGE,
                    version=version,
                )
            )  # fmt: skip

    def changed(self, session: str) -> None:
        """Let questions be tried again that could not be answered."""
        self._boards[session].forget_errors()

    def queries(self, session: str) -> list[FlashQuery]:
        """Questions of a session."""
        return self._boards[session].queries

    def take_outdated(self, session: str, version: int) -> list[FlashQuery]:
        """Questions to be evaluated now; they are under way until `note`."""
        found = [
            query
            for query in self._boards[session].outdated(version)
            if (session, query.flash_id) not in self._under_way
        ]
        self._under_way |= {(session, query.flash_id) for query in found}
        return found

    def note(self, session: str, query: FlashQuery, answer: Answer | None, now: float) -> None:
        """Put a full answer on the board, which was compared before; None if there is none."""
        self._under_way.discard((session, query.flash_id))
        if answer is None:
            return
        self._events["evaluated"] += 1
        self._full[session, query.flash_id, answer.version] = _said(answer)
        self._boards[session].note(query, answer, now)

    def ask(self, session: str, query: FlashQuery, mirror: Mirror) -> None:
        """Ask as a service does: look the newest up, else ask the gate, else take the old one."""
        board, question = self._boards[session], query.question
        answer = board.look_up(question, mirror.version)
        if answer is not None:
            require(
                (answer.source, answer.version, answer.age, answer.context_len)
                == (Source.FLASH, mirror.version, 0, len(mirror.context)),
                f"flash: {answer} is not of the newest version {mirror.version}",
            )
            self._answers.check_content(answer, mirror, question)
            self._events["flash"] += 1
        for source, old in (
            (Source.GATED, board.gated(query, mirror.version, RISK) if answer is None else None),
            (Source.FLASH, board.look_up(question, mirror.version, stale=True)),
        ):
            if old is None or answer is not None:
                continue
            full = self._full.get((session, query.flash_id, old.version))
            require(
                old.source is source and 0 < old.age == mirror.version - old.version,
                f"{source}: {old} is given as if it were of version {mirror.version}",
            )
            require(
                _said(old) == full,
                f"{source}: {old} is not the full answer of its version, which was {full}",
            )
            if source is Source.GATED:
                require(
                    old.evidence is not None and old.evidence.age == old.age <= AGE,
                    f"gate: evidence {old.evidence} of an answer of age {old.age}",
                )
            self._events["gated" if source is Source.GATED else "stale"] += 1


def _said(answer: Answer) -> tuple:
    return answer.token_ids, answer.choice
