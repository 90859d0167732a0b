"""What a client knows of a session: its id, the number of its own last write, and the version."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, TypeAlias

from jaxstate.serving import jaxstate_pb2 as pb

Number: TypeAlias = tuple[str, int]
"""Who writes, and his number for it, growing from one to the next."""

SERIES_MESSAGES = 256  # of a call: what a server remembers of writers is several times that
SERIES_BYTES = 1 << 20  # of a call, which is kept to be sent again


class SessionState:
    """A handle on a session; others may have others on the same.

    Attributes:
      session_id: of the session.
      writer: under which this handle numbers what it writes, so that what is sent again is applied
        once.
      version: that its own last write led to; 0 before the first.
      is_closed: it has closed the session.
    """

    def __init__(self, session_id: str, *, version: int = 0):
        """Take a name as a writer that nobody else has."""
        self.session_id = session_id
        self.writer = secrets.token_hex(8)
        self.version = version
        self.is_closed = False
        self.sequence = 0

    def number(self, request: Any) -> Any:
        """Give a write its number, unless it has one."""
        if not request.sequence:
            self.sequence += 1
            request.writer, request.sequence = self.writer, self.sequence
        return request

    def append_request(self, prompt: pb.Prompt) -> pb.AppendRequest:
        """Return a numbered append."""
        return self.number(pb.AppendRequest(session_id=self.session_id, prompt=prompt))

    def note(self, response: Any) -> int:
        """Note and return the version that a write led to."""
        self.version = max(self.version, response.version)
        return response.version


class Series:
    """Appends on their way in calls of limited length, each of which can be sent again."""

    def __init__(self, session: SessionState, prompts: Iterator[pb.Prompt]):
        """Start before the first."""
        self._session = session
        self._prompts = prompts
        self._next: pb.AppendRequest | None = None
        self._raised: BaseException | None = None
        self.applied = 0

    def has_more(self) -> bool:
        """Wait for the next append; raises what the user's iterable has raised."""
        if self._raised is None:
            self._pull()
        if self._raised is not None:
            raise self._raised
        return self._next is not None

    def requests(self) -> Iterator[pb.AppendRequest]:
        """Yield the appends of one call, as they come; read by a thread of gRPC's."""
        count = size = 0
        while self._next is not None:
            yield self._next
            count, size = count + 1, size + self._next.ByteSize()
            if count == SERIES_MESSAGES or size >= SERIES_BYTES:
                return
            self._pull()

    def note(self, response: pb.AppendStreamResponse) -> None:
        """Note what a call has come to."""
        self.applied += response.appends
        self._session.note(response)

    def _pull(self) -> None:
        """Number the next append, or note that there is none or what was raised instead."""
        self._next = None
        try:
            prompt = next(self._prompts, None)
        except BaseException as error:  # the user's, for the user's thread: gRPC would only log it
            self._raised = error
            return
        if prompt is not None:
            self._next = self._session.append_request(prompt)
