"""Progress on stderr: lines where nobody watches, one moving line on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jaxstate.serving import terminal

ERASE_LINE = "\x1b[1A\x1b[2K"


def _console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80, color_system=None)
    return console, file


def _compile(console: Console) -> None:
    with terminal.CompileProgress(console) as progress:
        progress(1, 2, "draw", 0.04)
        progress(2, 2, "step 64", 2.91)


def test_each_compilation_is_a_line():
    console, file = _console(is_terminal=False)
    _compile(console)
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["compiling 1/2 draw … 0.0 s", "compiling 2/2 step 64 … 2.9 s"]
    assert lines[2].startswith("2 programs ready after 0.")


def test_on_a_terminal_only_the_total_stays():
    console, file = _console(is_terminal=True)
    _compile(console)
    shown, last = file.getvalue().rsplit(ERASE_LINE, 1)
    assert "compiling 2/2 step 64 … 2.9 s" in shown
    assert last.startswith("2 programs ready after 0.")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_total_is_claimed_after_a_failure(is_terminal):
    console, file = _console(is_terminal=is_terminal)
    with pytest.raises(ValueError), terminal.CompileProgress(console) as progress:
        progress(1, 2, "draw", 0.04)
        raise ValueError
    assert "ready" not in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_pull_tells_what_and_how_much(is_terminal):
    console, file = _console(is_terminal=is_terminal)
    with terminal.PullProgress(console, "fetching [tiny]") as progress:
        progress(500, 1000)
        progress(1000, 1000)
    assert file.getvalue().startswith("fetching [tiny] …\n")  # brackets are not markup
    assert ("1.0/1.0 kB" if is_terminal else "unpacked 1,000 bytes") in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_activity_is_named(is_terminal):
    console, file = _console(is_terminal=is_terminal)
    with terminal.activity(console, "loading x"):
        pass
    assert "loading x" in file.getvalue()


def test_long_lines_are_left_to_the_terminal():
    console, file = _console(is_terminal=False)
    terminal.say(console, "word " * 40)
    assert file.getvalue().count("\n") == 1
