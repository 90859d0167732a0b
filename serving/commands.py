"""What callers in any thread have a service's worker do, and how they wait for it."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from jaxstate.errors import ClosedError


class Commands:
    """Functions that the worker is to call, in order.

    Attributes:
      changed: held by who uses what callers and worker share; notified of every change of it.
      is_closing: whether the worker ends or has ended; nothing more is taken.
      has_ended: whether it has ended; what it had taken is done.
      failure: what ended it, by whose fault nothing runs any more; None = nothing.
    """

    def __init__(self):
        """Start without any."""
        self.changed = threading.Condition()
        self.is_closing = False
        self.has_ended = False
        self.failure: BaseException | None = None
        self._waiting: collections.deque[Callable[[], Any]] = collections.deque()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the worker and return what it returns, or raise what it raises.

        Raises:
          ClosedError: it was not run.
        """
        done: list[tuple[Any, BaseException | None]] = []

        def command() -> None:
            try:
                done.append((function(), None))
            except Exception as error:
                done.append((None, error))

        with self.changed:
            self.enqueue(command)
            self.changed.wait_for(lambda: done or self.has_ended)
        if not done:
            raise self.closed()
        result, error = done[0]
        if error is not None:
            raise error
        return result

    def soon(self, command: Callable[[], None]) -> None:
        """Have the worker call a function, unless it ends first."""
        with self.changed:
            if not self.is_closing:
                self.enqueue(command)

    def enqueue(self, command: Callable[[], None]) -> None:
        """Add a function; the caller holds `changed`.

        Raises:
          ClosedError: the worker ends or has ended.
        """
        if self.is_closing:
            raise self.closed()
        self._waiting.append(command)
        self.changed.notify_all()

    def take(self) -> list[Callable[[], Any]]:
        """Return and forget all that wait; the caller holds `changed`."""
        commands = list(self._waiting)
        self._waiting.clear()
        return commands

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """See LocalService.listen."""
        with self.changed:
            self._listeners.append(callback)

        def end() -> None:
            with self.changed:
                self._listeners.remove(callback)

        return end

    def notify(self) -> None:
        """Wake whoever waits for a change; the caller holds `changed`."""
        self.changed.notify_all()
        for callback in self._listeners:
            callback()

    def close(self) -> None:
        """Take nothing more; the worker ends."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def closed(self) -> ClosedError:
        """What a caller is told who comes too late."""
        why = f": {self.failure!r}" if self.failure else ""
        error = ClosedError(f"the service is closed{why}")
        error.__cause__ = self.failure
        return error
