"""The newest overview of a service for many who watch it, at the price of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from jaxstate.errors import ClosedError
from jaxstate.serving.description import Overview
from jaxstate.serving.local_service import LocalService

EVERY_S = 0.5


class Feed:
    """Asks a service for an overview twice a second, while somebody watches.

    Not behind its changes: an overview is a command, behind which a service tells of a change.
    """

    def __init__(self, service: LocalService):
        """Ask for nothing yet."""
        self._service = service
        self._changed = threading.Condition()
        self._viewers = 0
        self._count = 0  # overviews so far
        self._newest: Overview | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxstate-feed", daemon=True)
        self._thread.start()

    def overviews(self) -> Iterator[Overview]:
        """Yield one after another; ends when the feed or the service is closed."""
        with self._changed:
            self._viewers += 1
            wanted = self._count + 1
            self._changed.notify_all()
        try:
            while (found := self._wait_for(wanted)) is not None:
                wanted, overview = found[0] + 1, found[1]
                yield overview
        finally:
            with self._changed:
                self._viewers -= 1

    def close(self) -> None:
        """End what is being watched."""
        self._end()
        self._thread.join()

    def _wait_for(self, number: int) -> tuple[int, Overview] | None:
        """Return the newest overview and its number when that is there; None = none will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._count >= number)
            if self._closed or self._newest is None:
                return None
            return self._count, self._newest

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, EVERY_S if self._count else 0)
                self._changed.wait_for(lambda: self._closed or self._viewers)
                if self._closed:
                    return
            try:
                overview = self._service.overview()
            except ClosedError:
                self._end()
                return
            with self._changed:
                self._newest = overview
                self._count += 1
                self._changed.notify_all()
