"""What a command says on stderr while it works; results go to stdout."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


def say(console: Console, text: str) -> None:
    """Print a line as it is: not wrapped, not coloured, brackets not read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(console: Console, value: dict[str, Any]) -> None:
    """Print an object as one line, at once."""
    console.file.write(json.dumps(value) + "\n")
    console.file.flush()


@contextlib.contextmanager
def activity(console: Console, text: str) -> Iterator[None]:
    """Show what is going on and for how long; a line of text where nothing can be animated."""
    if not console.is_terminal:
        say(console, f"{text} …")
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


class CompileProgress:
    """Shows each executable as it is compiled; pass it to Engine as `progress`.

    On a terminal one line is rewritten and only the total stays; else each is a line.
    """

    def __init__(self, console: Console):
        """Start when the engine is about to be built; use as a context manager."""
        self._console = console
        self._began = time.perf_counter()
        self._total = 0
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> CompileProgress:
        """Begin to show."""
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(),
            )
            progress = Progress(*columns, console=self._console, transient=True)
            self._task = progress.add_task("compiling", total=None)
            progress.start()
            self._progress = progress
        return self

    def __call__(self, done: int, total: int, name: str, seconds: float) -> None:
        """Show that one more is compiled; see executor.Progress."""
        self._total = total
        text = f"compiling {done}/{total} {name} … {seconds:.1f} s"
        if self._progress is None:
            say(self._console, text)
        else:
            self._progress.update(self._task, description=text, completed=done, total=total)

    def __exit__(self, *exception) -> None:
        """Leave one line with the total."""
        if self._progress is not None:
            self._progress.stop()
        if exception[0] is None:
            say(self._console, f"{self._total} programs ready after {self.seconds:.1f} s")

    @property
    def seconds(self) -> float:
        """Time since the start, in seconds."""
        return time.perf_counter() - self._began


class PullProgress:
    """Shows a download, whose size pip does not tell, and then the unpacking and checking of it.

    Pass it to sources.pull as `progress`; to hub.fetch, which tells the bytes of the download
    itself, with `doing` "fetch".
    """

    def __init__(self, console: Console, text: str, doing: str = "unpack"):
        """Announce `text`; use as a context manager around the pull."""
        self._console = console
        self._text = text
        self._doing = doing
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> PullProgress:
        """Begin to show."""
        say(self._console, f"{self._text} …")
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                DownloadColumn(), TimeElapsedColumn(),
            )
            progress = Progress(*columns, console=self._console, transient=True)
            self._task = progress.add_task("downloading", total=None)
            progress.start()
            self._progress = progress
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show bytes done of bytes in total; see hub.Progress."""
        if self._progress is not None:
            self._progress.update(
                self._task, description=f"{self._doing}ing", completed=done, total=total
            )
        elif done == total:
            say(self._console, f"{self._doing}ed {total:,} bytes")

    def __exit__(self, *exception) -> None:
        """Stop showing."""
        if self._progress is not None:
            self._progress.stop()


@contextlib.contextmanager
def counted(console: Console, text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how far a counted piece of work is; yield what is to be called after each part.

    A line of text where nothing can be animated.
    """
    if not console.is_terminal:
        say(console, f"{text}: {total:,} …")
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
