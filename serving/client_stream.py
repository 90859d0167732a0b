"""Answers as they come, fresh ones to registered questions: what both clients do with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxstate import errors
from jaxstate.answer import Token
from jaxstate.serving import client_types
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.client_session import SessionState

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0


class AnswerParts:
    """Puts an answer together from the messages of a stream.

    Attributes:
      prompt: what was asked; None before the first message.
    """

    def __init__(self, on_answer: Callable[[client_types.Answer], None]):
        """Start empty; `on_answer` gets the whole answer when it is there."""
        self.prompt: client_types.PromptInfo | None = None
        self._on_answer = on_answer
        self._tokens: list[Token] = []
        self._answer: client_types.Answer | None = None

    @property
    def answer(self) -> client_types.Answer:
        """The whole answer.

        Raises:
          CancelledError: it did not come to its end, or not yet.
        """
        if self._answer is None:
            raise errors.CancelledError(
                "answer: expected a stream that was read to its end, got one that was left or is "
                "under way; call result()"
            )
        return self._answer

    @property
    def is_over(self) -> bool:
        """Whether the answer is there."""
        return self._answer is not None

    def take(self, part: pb.AnswerPart) -> list[Token]:
        """Take the next message; return the tokens that it brings."""
        kind = part.WhichOneof("part")
        if kind == "prompt":
            self.prompt = client_types.copied(client_types.PromptInfo, part.prompt)
        elif kind == "answer":
            self._answer = client_types.answer_of(part.answer, tuple(self._tokens))
            self._on_answer(self._answer)
        elif kind == "delta":
            tokens = [client_types.token(one) for one in part.delta.tokens]
            self._tokens += tokens
            return tokens
        return []


class AnswerUnderWay:
    """An answer that comes over a call; each client's own reads it."""

    def __init__(self, call: Any, parts: AnswerParts):
        """Made by query and generate."""
        self._call = call
        self._parts = parts

    @property
    def answer(self) -> client_types.Answer:
        """The answer, once all tokens have been read; see AnswerParts.answer."""
        return self._parts.answer

    @property
    def prompt(self) -> client_types.PromptInfo | None:
        """What was asked, in tokens; None before it is known."""
        return self._parts.prompt

    def cancel(self) -> None:
        """End it."""
        self._call.cancel()


def noting(session: SessionState, commit: bool) -> Callable[[client_types.Answer], None]:
    """Return what notes the version that a committed turn led to."""

    def note(answer: client_types.Answer) -> None:
        if commit:
            session.version = max(session.version, answer.version + 1)

    return note


class Watching:
    """Where a reader of fresh answers is, over as many connections as it takes.

    Attributes:
      cursor: where the next connection begins; "" = with the newest answer of every question.
    """

    def __init__(self, session_id: str, cursor: str | None):
        """Start at a cursor; None = with the newest answers."""
        self._session_id = session_id
        self.cursor = cursor or ""
        self._versions: dict[int, int] = {}  # of the answers told last, by question
        self._missed = False
        self._failures = 0

    def request(self) -> pb.WatchAnswersRequest:
        """Return the request of the next connection."""
        return pb.WatchAnswersRequest(session_id=self._session_id, cursor=self.cursor)

    def take(self, message: pb.FreshAnswer) -> client_types.FreshAnswer | None:
        """Take the next message; None if its answer was told before."""
        self._failures = 0
        answer = client_types.answer_of(message.answer)
        self.cursor = message.cursor or self.cursor
        if self._versions.get(message.flash_id) == answer.version:
            return None
        self._versions[message.flash_id] = answer.version
        missed, self._missed = self._missed, False
        return client_types.FreshAnswer(
            cursor=message.cursor, flash_id=message.flash_id, answer=answer, missed=missed
        )

    def resume(self, error: errors.JaxStateError) -> float:
        """Return after how many seconds to connect again, or raise what cannot be waited out."""
        if isinstance(error, errors.CursorError):
            if not self.cursor:
                raise error
            logger.warning("session %s: answers may have been missed: %s", self._session_id, error)
            self.cursor, self._missed = "", True
            return 0.0
        if not isinstance(error, errors.UnavailableError | errors.ClosedError):
            raise error
        if not self._failures:
            logger.warning("session %s: waiting for the server: %s", self._session_id, error)
        delay = min(_FIRST_DELAY_S * 2**self._failures, _LONGEST_DELAY_S)
        self._failures += 1
        return delay
