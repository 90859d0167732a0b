"""Fresh answers to a session's registered questions, in the order they came, to be read on from."""

from __future__ import annotations

import collections
import dataclasses
import secrets
from collections.abc import Sequence

from jaxstate.answer import Answer
from jaxstate.errors import CursorError
from jaxstate.flash import FlashQuery

KEPT = 1024  # answers of a session


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshAnswer:
    """A registered question has been answered.

    Attributes:
      cursor: what comes behind this one is `AnswerLog.since(cursor)`.
      flash_id, prompt_len: the question's; its length in tokens.
      answer: its `age` is that at the time of reading.
    """

    cursor: str
    flash_id: int
    prompt_len: int
    answer: Answer


class AnswerLog:
    """The newest answers of one session; older ones are dropped, which a reader is told."""

    def __init__(self):
        """Start empty; cursors of another log are known as such."""
        self._name = secrets.token_hex(4)
        self._count = 0  # ever
        self._kept: collections.deque[FreshAnswer] = collections.deque(maxlen=KEPT)

    @property
    def cursor(self) -> str:
        """Where it ends now."""
        return f"{self._name}.{self._count}"

    def add(self, query: FlashQuery, answer: Answer) -> None:
        """Note an answer."""
        self._count += 1
        self._kept.append(_fresh(self.cursor, query, answer))

    def newest(self, queries: Sequence[FlashQuery]) -> list[FreshAnswer]:
        """Return the newest answer of every question that has one.

        All but the last carry no cursor: who goes on from one of them begins anew.
        """
        answered = [(query, query.answer) for query in queries if query.answer]
        return [
            _fresh(self.cursor if index == len(answered) else "", query, answer)
            for index, (query, answer) in enumerate(answered, 1)
        ]

    def since(self, cursor: str) -> list[FreshAnswer]:
        """Return all that came behind a cursor.

        Raises:
          CursorError: it is of another log, or some of it is not kept any more.
        """
        name, _, number = cursor.rpartition(".")
        known = name == self._name and number.isascii() and number.isdecimal() and len(number) < 20
        missed = self._count - int(number) if known else -1
        if not 0 <= missed <= len(self._kept):
            raise CursorError(
                f"cursor: expected one of this session's last {len(self._kept)} answers, got "
                f'"{cursor}"; leave it out to begin with the newest answer of every question'
            )
        return list(self._kept)[len(self._kept) - missed :] if missed else []


def _fresh(cursor: str, query: FlashQuery, answer: Answer) -> FreshAnswer:
    return FreshAnswer(
        cursor=cursor,
        flash_id=query.flash_id,
        prompt_len=len(query.question.token_ids),
        answer=answer,
    )
