"""What `tail` shows: questions with their current answers, or a line for every fresh one."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxstate.serving import terminal
from jaxstate.serving.client_types import FreshAnswer


@dataclasses.dataclass(kw_only=True)
class Shown:
    """A question and its newest answer."""

    ask: str
    fresh: FreshAnswer | None = None


class View(Protocol):
    """Shows how it goes; called from two threads."""

    def note_rows(self, rows: int, version: int) -> None:
        """Show how many rows the session has got, and its version."""
        ...

    def note_answer(self, ask: str, fresh: FreshAnswer) -> None:
        """Show a fresh answer."""
        ...

    def __enter__(self) -> View:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """Leave what was shown last."""
        ...


def view_of(out: Console, asks: list[str], *, as_json: bool) -> View:
    """Return what suits a terminal, a pipe, or who wants JSON."""
    if out.is_terminal and not as_json:
        return Board(out, asks)
    return Lines(out, as_json=as_json)


class Lines:
    """A line for every fresh answer."""

    def __init__(self, out: Console, *, as_json: bool):
        """Print on `out`."""
        self._out = out
        self._as_json = as_json

    def __enter__(self) -> Lines:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End."""

    def note_rows(self, rows: int, version: int) -> None:
        """Say nothing: answers tell the version."""

    def note_answer(self, ask: str, fresh: FreshAnswer) -> None:
        """Print it."""
        answer = fresh.answer
        if not self._as_json:
            text = f"version {answer.version}: {ask} {answer.text.strip()}"
            terminal.say(self._out, f"{text} ({answer.source.value}, age {answer.age})")
            return
        line = {
            "ask": ask, "text": answer.text, "choice": answer.choice,
            "source": answer.source.value, "version": answer.version, "age": answer.age,
            "missed": fresh.missed,
        }  # fmt: skip
        terminal.print_json(self._out, line)


class Board:
    """A table on a terminal that is drawn anew."""

    def __init__(self, out: Console, asks: list[str]):
        """Show the questions, none answered yet."""
        self._shown = {ask: Shown(ask=ask) for ask in asks}
        self._rows, self._version = 0, 0
        self._live = Live(console=out, get_renderable=self._table, refresh_per_second=8)

    def __enter__(self) -> Board:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw a last time."""
        self._live.stop()

    def note_rows(self, rows: int, version: int) -> None:
        """Show how far it is."""
        self._rows, self._version = rows, version

    def note_answer(self, ask: str, fresh: FreshAnswer) -> None:
        """Show it from the next drawing on."""
        self._shown[ask].fresh = fresh

    def _table(self) -> Table:
        table = Table("question", "answer", "source", "age", expand=True)
        table.caption = f"{self._rows:,} rows appended, version {self._version}; Ctrl-C ends"
        for one in self._shown.values():
            ask = Text(one.ask)  # which may have brackets, as answers may: they are no markup
            if one.fresh is None:
                table.add_row(ask, "…", "", "")
                continue
            answer = one.fresh.answer
            age = max(self._version - answer.version, 0)
            behind = "current" if not age else f"{age} versions"
            table.add_row(ask, Text(answer.text.strip()), answer.source.value, behind)
        return table
