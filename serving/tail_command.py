"""`jaxstate tail`: the rows of a growing file go into a session, whose questions stay answered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import threading
from collections.abc import Iterator
from typing import Literal, get_args

import watchfiles
from rich.console import Console

from jaxstate import errors
from jaxstate.errors import InputError, JaxStateError
from jaxstate.serving import tail_file, tail_view, terminal
from jaxstate.serving.client import AnswerWatch, Client, Session
from jaxstate.serving.tail_file import Follower, Line
from jaxstate.serving.tail_position import Progress
from jaxstate.serving.tail_view import View

Format = Literal["csv", "lines"]
From = Literal["start", "end"]

_LOOK_S = 0.5  # between two looks, where the system tells of no change
_MOST_BYTES = 1 << 16  # of an append
_COME_AGAIN = (
    errors.UnavailableError, errors.BusyError, errors.PoolFullError, errors.PoolLostError,
    errors.QuotaError,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailOptions:
    """What `tail` was told on the command line.

    Attributes:
      file: which may not be there yet.
      asks: questions that stay answered; choices, max_new_tokens: how, see client_requests.Wanted.
      session: id of a session to go on with, or to open; None = one that ends with the command.
      format: csv = the first line is a header, which goes into the prefix of a new session, and is
        no row at the beginning of other files; lines = every line is a row, JSON or not; None =
        by the file's name.
      start: where to begin in a file without a remembered position.
      position: file in which the position is remembered; needs a session that has a name.
    """

    file: pathlib.Path
    asks: tuple[str, ...]
    choices: tuple[str, ...] = ()
    max_new_tokens: int = 32
    session: str | None = None
    format: str | None = None
    start: str = "start"
    position: pathlib.Path | None = None

    def __post_init__(self):
        """Refuse what would only fail later."""
        if self.format not in (None, *get_args(Format)):
            raise InputError(f"format: expected one of {get_args(Format)}, got {self.format!r}")
        if self.start not in get_args(From):
            raise InputError(f"from: expected one of {get_args(From)}, got {self.start!r}")
        if not self.asks:
            raise InputError("ask: expected at least one question, got none")
        if self.position is not None and self.session is None:
            raise InputError("position: expected --session, whose position it is, got none")
        if not self.file.absolute().parent.is_dir():
            raise InputError(f"file: expected a directory with {self.file.name}, got {self.file}")

    @property
    def has_header(self) -> bool:
        """Whether the first line is no row."""
        if self.format is None:
            return self.file.suffix in (".csv", ".tsv")
        return self.format == "csv"


def run(
    options: TailOptions, client: Client, *, as_json: bool, out: Console, log: Console,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Follow the file until `stop` is set.

    Raises:
      JaxStateError, OSError: the message says what is wrong.
    """
    view = tail_view.view_of(out, list(options.asks), as_json=as_json)
    progress = None
    if options.position is not None and options.session is not None:
        progress = Progress.load(options.position, options.session)
    follower = Follower(
        options.file, at_end=options.start == "end", position=progress and progress.position
    )
    with contextlib.ExitStack() as ends:
        ends.callback(follower.close)
        changed = threading.Event()
        looking = _Looking(options.file, follower, changed, stop)
        ends.callback(looking.end)
        ends.callback(stop.set)
        header = _header(options, changed, stop, log)
        if stop.is_set():
            return
        session = ends.enter_context(_session(options, client, header))
        terminal.say(log, f"session {session.session_id} gets the rows of {options.file}")
        watch = session.watch()
        answers = _Answers(watch, view, _registered(options, session), changed, stop)
        ends.callback(answers.end)
        ends.enter_context(view)
        tail = _Tail(options, session, view, _most_bytes(client), header, stop)
        tail.run(follower, progress, changed, log)


class _Thread:
    """A thread whose failure ends the command: it sets both events, and `end` raises it."""

    def __init__(self, changed: threading.Event, stop: threading.Event):
        """Start; subclasses call it last."""
        self._changed = changed
        self._stop = stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._try, name="jaxstate-tail", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _try(self) -> None:
        try:
            self._run()
        except BaseException as error:  # rich ends a program whose output is gone
            self._error = error
            self._stop.set()
        finally:
            self._changed.set()

    def end(self) -> None:
        """Wait for it; raises what it has failed with."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class _Looking(_Thread):
    """Sees files come while others wait for the server; ended by `stop`."""

    def __init__(
        self,
        file: pathlib.Path,
        follower: Follower,
        changed: threading.Event,
        stop: threading.Event,
    ):
        """Start; sets `changed` when the file may have changed, and every now and then."""
        self._file = file.absolute()
        self._follower = follower
        super().__init__(changed, stop)

    def _run(self) -> None:
        looks = watchfiles.watch(
            self._file.parent, watch_filter=lambda _, path: path.startswith(str(self._file)),
            debounce=200, step=20, stop_event=self._stop, rust_timeout=int(_LOOK_S * 1000),
            yield_on_timeout=True, recursive=False,
        )  # fmt: skip
        for _ in looks:
            self._follower.look()
            self._changed.set()


def _header(
    options: TailOptions, changed: threading.Event, stop: threading.Event, log: Console
) -> str | None:
    """Return the header that the file has; waits for it."""
    if not options.has_header:
        return None
    found = tail_file.first_line(options.file)
    if found is None:
        terminal.say(log, f"{options.file}: waiting for its header")
    while found is None and not stop.is_set():
        changed.wait()
        changed.clear()
        found = tail_file.first_line(options.file)
    return found


@contextlib.contextmanager
def _session(options: TailOptions, client: Client, header: str | None) -> Iterator[Session]:
    """Open a session, which ends with the command, or go on with one that has a name."""
    prefix = f"{header}\n" if header is not None else ()
    if options.session is None:
        session = client.create(prefix, when_full="slide")
    else:
        session = client.session(options.session)
        try:
            session.describe()
        except errors.UnknownSessionError:
            session = client.create(prefix, session_id=options.session, when_full="slide")
    try:
        yield session
    finally:
        if options.session is None:
            with contextlib.suppress(JaxStateError):  # what has ended the command says more
                session.close()


def _registered(options: TailOptions, session: Session) -> dict[int, str]:
    """Register the questions; return them by id."""
    how = {"choices": options.choices} if options.choices else {}
    return {
        session.register(ask, max_new_tokens=options.max_new_tokens, **how).flash_id: ask
        for ask in options.asks
    }


def _most_bytes(client: Client) -> int:
    """Return the size of appends that fit a session's window with room to spare."""
    return min(_MOST_BYTES, max(client.model_info().context_tokens // 2, 1))


class _Answers(_Thread):
    """Shows fresh answers."""

    def __init__(
        self,
        watch: AnswerWatch,
        view: View,
        asks: dict[int, str],
        changed: threading.Event,
        stop: threading.Event,
    ):
        """Start."""
        self._watch = watch
        self._view = view
        self._asks = asks
        super().__init__(changed, stop)

    def _run(self) -> None:
        for fresh in self._watch:
            if fresh.flash_id in self._asks:  # others may have registered theirs
                self._view.note_answer(self._asks[fresh.flash_id], fresh)

    def end(self) -> None:
        """End it; raises what it has failed with."""
        self._watch.cancel()
        super().end()


class _Tail:
    """Brings lines into the session, in appends that are numbered and written down."""

    def __init__(
        self, options: TailOptions, session: Session, view: View, most_bytes: int,
        header: str | None, stop: threading.Event,
    ):  # fmt: skip
        self._stop = stop
        self._options = options
        self._session = session
        self._view = view
        self._most_bytes = most_bytes
        self._header = header
        self._rows = 0

    def run(
        self, follower: Follower, progress: Progress | None, changed: threading.Event, log: Console
    ) -> None:
        """Read and append whenever the file may have changed; `progress` as it was remembered."""
        if progress is not None and progress.end != progress.position:
            # It may have been appended: under its number it is so once.
            self._send(follower.read_again(progress.end), progress, log)
        lines = follower.poll()
        while not self._stop.is_set():
            for batch in self._batches(lines):
                self._append(batch, log)
            if not lines:
                changed.wait()
                changed.clear()
            lines = follower.poll()

    def _batches(self, lines: list[Line]) -> Iterator[list[Line]]:
        """Split lines into appends of a fair size, each of one file."""

        def file_of(line: Line) -> tuple[int, int]:
            return line.position.device, line.position.inode

        for _, of_one in itertools.groupby(lines, file_of):
            batch, size = [], 0
            for line in of_one:
                length = len(line.text.encode()) + 1
                # A truncated file begins anew: what is before must not end behind what follows.
                if batch and (size + length > self._most_bytes or line.begin.offset == 0):
                    yield batch
                    batch, size = [], 0
                batch.append(line)
                size += length
            yield batch

    def _append(self, batch: list[Line], log: Console) -> None:
        """Append what is rows of a batch, once, whatever happens to this process."""
        last = batch[-1].position
        self._session.sequence += 1
        progress = Progress(
            session=self._session.session_id, writer=self._session.writer,
            sequence=self._session.sequence, position=batch[0].begin, end=last,
        )  # fmt: skip
        self._save(progress)
        self._send(batch, progress, log)
        self._save(dataclasses.replace(progress, position=last))

    def _send(self, batch: list[Line], progress: Progress, log: Console) -> None:
        rows = [f"{line.text}\n" for line in batch if self._is_row(line)]
        if not rows:
            return
        number = progress.writer, progress.sequence
        waits = False
        while True:
            try:
                version = self._session.append("".join(rows), number=number)
                break
            except _COME_AGAIN as error:
                if not waits:
                    terminal.say(log, f"waiting for the server: {error}")
                waits = True
                if self._stop.wait(error.retry_after_s):
                    raise
        self._rows += len(rows)
        self._view.note_rows(self._rows, version)

    def _is_row(self, line: Line) -> bool:
        is_header = line.begin.offset == 0 and line.text == self._header
        return bool(line.text.strip()) and not is_header

    def _save(self, progress: Progress) -> None:
        if self._options.position is not None:
            progress.save(self._options.position)
