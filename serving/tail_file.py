"""The lines of a file that grows, is rotated and truncated: each once, in order.

A file is followed by what it is (device and inode), not by its name. What takes the name is opened
at once and read when its turn comes: one that was renamed is read to its end first, and for a while
longer, for who writes to it may not have noticed. A line waits for its newline; what is left
without one when a file is given up is a line.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import threading
import time
from typing import BinaryIO

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # without a new byte, until a renamed file is given up
_READ_BYTES = 1 << 20  # at once
_MARK_BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a file, behind a line.

    Attributes:
      offset: in bytes from the file's beginning.
      mark: hash of the first bytes of the file and of the last ones before the offset, by which
        what was written anew under the same inode is told from what was read.
    """

    device: int
    inode: int
    offset: int
    mark: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line.

    Attributes:
      text: without its end.
      begin: where it begins.
      position: behind it.
    """

    text: str
    begin: Position
    position: Position


class Follower:
    """Reads the lines of a file as they come; `poll` when it may have changed."""

    def __init__(
        self,
        path: pathlib.Path,
        *,
        at_end: bool = False,
        position: Position | None = None,
        linger_s: float = LINGER_S,
    ):
        """Start at the file's beginning, which may not be there yet.

        Args:
          at_end: begin behind what is in it now.
          position: begin here instead, in this file or one that it was renamed to; where there is
            none any more, or its bytes are others, at the beginning, with a warning.
        """
        self._path = path
        self._linger_s = linger_s
        self._file: BinaryIO | None = None
        self._waiting: collections.deque[BinaryIO] = collections.deque()
        self._newest: tuple[int, int] | None = None  # device and inode of who had the name last
        self._looking = threading.Lock()
        if position is not None:
            self._resume(position)
        self.look()
        if at_end and position is None and self._waiting:
            self._begin(self._waiting.popleft())
            self._skip(self._last_line_end())

    def close(self) -> None:
        """Let go of all files."""
        if self._file is not None:
            self._waiting.append(self._file)
            self._file = None
        while self._waiting:
            self._waiting.popleft().close()

    def look(self) -> None:
        """Open what has taken the name, if something has; from any thread, while others poll."""
        with self._looking:
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) == self._newest:
                file.close()
                return
            self._newest = status.st_dev, status.st_ino
            self._waiting.append(file)

    def poll(self) -> list[Line]:
        """Return the lines that are there now, about a megabyte at most; [] = it has to change."""
        self.look()
        if self._file is None:
            if not self._waiting:
                return []
            self._begin(self._waiting.popleft())
        lines = self._read()
        if lines or not self._is_given_up():
            return lines
        rest = self._rest()
        assert self._file is not None
        self._file.close()
        self._file = None
        return rest or self.poll()

    def read_again(self, end: Position) -> list[Line]:
        """Return the lines up to a place behind the one to begin at, split as they were before.

        Call it before `poll`. Returns [] if they are not there any more, which a warning says.
        """
        if self._file is None:
            return []
        begin = self._position.offset
        lines = self._take(os.pread(self._file.fileno(), end.offset - begin, begin))
        lines += self._rest()  # the end of a file that was given up
        if self._position == end:
            return lines
        logger.warning("%s: what was read last has changed; lines may have been missed", self._path)
        self._skip(begin)
        return []

    def _begin(self, file: BinaryIO) -> None:
        self._file = file
        status = os.fstat(file.fileno())
        self._device, self._inode = status.st_dev, status.st_ino
        self._waits_since: float | None = None
        self._skip(0)

    def _skip(self, offset: int) -> None:
        """Go on at an offset, behind a line."""
        assert self._file is not None
        self._partial = b""  # read behind the position, without a newline yet
        self._head = os.pread(self._file.fileno(), min(_MARK_BYTES, offset), 0)
        self._before = self._bytes_before(offset, min(_MARK_BYTES, offset))
        self._position = self._place(offset)

    def _place(self, offset: int) -> Position:
        """Return the place at an offset that `_before` ends at."""
        marked = self._head[:offset] + self._before
        mark = hashlib.blake2b(marked, digest_size=16).hexdigest()
        return Position(device=self._device, inode=self._inode, offset=offset, mark=mark)

    def _resume(self, position: Position) -> None:
        files = [(path.stat(), path) for path in self._path.parent.iterdir() if self._is_one(path)]
        files.sort(key=lambda one: one[0].st_mtime_ns)
        for index, (status, path) in enumerate(files):
            if (status.st_dev, status.st_ino) == (position.device, position.inode):
                self._begin(path.open("rb"))
                self._skip(position.offset)
                if self._position != position:  # truncated, or another file with its inode
                    self.close()
                    break
                if path == self._path:
                    self._newest = status.st_dev, status.st_ino
                # Those that had the name meanwhile; who has it now is looked for like any other.
                between = [other for _, other in files[index + 1 :] if other != self._path]
                self._waiting += [other.open("rb") for other in between]
                return
        logger.warning(
            "%s: what was read last is gone; lines may have been missed, and those that are there "
            "are read from the first", self._path,
        )  # fmt: skip

    def _is_one(self, path: pathlib.Path) -> bool:
        """Say whether a file has the name, or the name and a number or date behind it."""
        behind = path.name.removeprefix(self._path.name)
        return path.is_file() and (
            path == self._path
            or path.name != behind
            and re.fullmatch(r"[.-][0-9T:.-]+", behind) is not None
        )

    def _read(self) -> list[Line]:
        """Return the next lines of the open file."""
        assert self._file is not None
        if self._was_truncated():
            lines = self._rest()
            logger.warning("%s: it was truncated; reading it from its beginning", self._path)
            self._skip(0)
            if lines:
                return lines
        begin = self._position.offset + len(self._partial)
        received = os.pread(self._file.fileno(), _READ_BYTES, begin)
        if not received:
            return []
        self._waits_since = None  # somebody still writes to it
        # Again for a line that is longer than what is read at once.
        return self._take(received) or self._read()

    def _take(self, received: bytes) -> list[Line]:
        """Return the lines that what was read next has made whole."""
        self._head = (self._head + received[:_MARK_BYTES])[:_MARK_BYTES]
        *whole, self._partial = (self._partial + received).split(b"\n")
        return [self._line(raw + b"\n") for raw in whole]

    def _line(self, raw: bytes) -> Line:
        begin = self._position
        self._before = (self._before + raw)[-_MARK_BYTES:]
        self._position = self._place(begin.offset + len(raw))
        text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace")
        return Line(text=text, begin=begin, position=self._position)

    def _rest(self) -> list[Line]:
        """Return what has no newline and gets none any more."""
        raw, self._partial = self._partial, b""
        return [self._line(raw)] if raw else []

    def _was_truncated(self) -> bool:
        """Say whether what was read is not what is there; it may have grown again meanwhile."""
        assert self._file is not None
        end = self._position.offset + len(self._partial)
        if os.fstat(self._file.fileno()).st_size < end:
            return True
        head = os.pread(self._file.fileno(), len(self._head), 0)
        before = (self._before + self._partial[-_MARK_BYTES:])[-_MARK_BYTES:]
        return head != self._head or self._bytes_before(end, len(before)) != before

    def _bytes_before(self, offset: int, count: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), count, offset - count)

    def _last_line_end(self) -> int:
        """Return the offset behind the last newline that is there."""
        assert self._file is not None
        end = os.fstat(self._file.fileno()).st_size
        while end > 0:
            begin = max(end - _READ_BYTES, 0)
            found = os.pread(self._file.fileno(), end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _is_given_up(self) -> bool:
        """Say whether another file has taken the name, and nothing came to this one for a while."""
        if not self._waiting:
            return False
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        return time.monotonic() - self._waits_since >= self._linger_s


def first_line(path: pathlib.Path) -> str | None:
    """Return a file's first line without its end; None before either is there."""
    follower = Follower(path)
    try:
        lines = follower.poll()
        return lines[0].text if lines else None
    finally:
        follower.close()
