"""A verb under way in a service, as its caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxstate.answer import Token
from jaxstate.errors import CancelledError, ExpiredError
from jaxstate.scheduler import State, Ticket


class Pending:
    """A verb under way: `result()` waits for its end, iteration yields an answer's tokens."""

    def __init__(
        self,
        changed: threading.Condition,
        ticket: Ticket | None,
        result: Any = None,
        *,
        asked: float = 0.0,
    ):
        """Made by LocalService; without a ticket it is done and has this result.

        Args:
          asked: when the verb was called, seconds on the service's clock; deadlines count from it;
            0 = nobody called.
        """
        self.asked = asked
        self._changed = changed
        self._ticket = ticket
        self._result = result
        self._taken = 0  # tokens; others may wait for the same ticket
        self._cancel: Callable[[], Any] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self._ticket is None or self._ticket.is_over

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end and return what the verb returns, or raise what it raised.

        Raises:
          TimeoutError: it goes on.
          ExpiredError, CancelledError: it was not run, or not to its end.
        """
        ticket = self._ticket
        if ticket is None:
            return self._result
        with self._changed:
            if not self._changed.wait_for(lambda: ticket.is_over, timeout_s):
                raise TimeoutError(f"{ticket.job_class.name} of session {ticket.session} goes on")
        if ticket.error is not None:
            raise ticket.error
        if ticket.state is State.EXPIRED:
            raise ExpiredError(f"session {ticket.session}: the deadline passed, nothing was run")
        if ticket.state is State.CANCELLED:
            raise CancelledError(f"session {ticket.session}: cancelled")
        return ticket.result

    def __iter__(self) -> Iterator[Token]:
        """Yield tokens as they are drawn; raises as `result` does."""
        ticket = self._ticket
        if ticket is None:
            yield from self._result.tokens
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(ticket.tokens) > self._taken or ticket.is_over)
                tokens = self.take()
            yield from tokens
            if not tokens:
                self.result()
                return

    def take(self) -> list[Token]:
        """Return the tokens drawn since the last call, without waiting."""
        tokens = self._ticket.tokens if self._ticket else self._result.tokens
        taken = list(tokens[self._taken :])
        self._taken += len(taken)
        return taken

    @property
    def tokens_to_first(self) -> int:
        """Tokens that were forwarded up to its first output."""
        return self._ticket.tokens_to_first if self._ticket else 0

    def cancel(self) -> None:
        """End it at the next step; an append that has begun goes on."""
        self._cancel()
