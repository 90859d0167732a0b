"""`jaxstate sessions`, `snapshot` and `restore`: an operator's look at a server."""

from __future__ import annotations

import dataclasses
import datetime

from rich.console import Console
from rich.table import Table

from jaxstate.serving import terminal
from jaxstate.serving.client import Client
from jaxstate.serving.client_types import SavedSnapshot, SessionInfo


def show(client: Client, *, as_json: bool, out: Console) -> None:
    """Print the open sessions: a table, or one JSON object a line."""
    sessions = client.sessions()
    if as_json:
        for one in sessions:
            terminal.print_json(out, dataclasses.asdict(one))
        return
    table = Table("session", "version", "tokens", "prefix", "dropped", "when full", "questions")
    for one in sessions:
        table.add_row(*_cells(one))
    out.print(table)


def _cells(one: SessionInfo) -> tuple[str, ...]:
    return (
        one.session_id, f"{one.version:,}", f"{one.context_len:,}", f"{one.frozen_len:,}",
        f"{one.evicted:,}", one.when_full, f"{one.num_flash}",
    )  # fmt: skip


def show_snapshots(client: Client, *, as_json: bool, out: Console) -> None:
    """Print what is saved: a table, or one JSON object a line; and what cannot be read."""
    found = client.snapshots()
    if as_json:
        for one in found.saved:
            terminal.print_json(out, dataclasses.asdict(one))
        for name in found.damaged:
            terminal.print_json(out, {"name": name, "damaged": True})
        return
    table = Table("snapshot", "session", "version", "tokens", "MB", "saved")
    for one in found.saved:
        saved_at = datetime.datetime.fromtimestamp(one.saved_at).isoformat(" ", "seconds")
        table.add_row(
            one.name, one.session_id, f"{one.version:,}", f"{one.context_tokens:,}",
            f"{one.size_bytes / 1e6:,.1f}", saved_at,
        )  # fmt: skip
    for name in found.damaged:
        table.add_row(name, "damaged")
    out.print(table)


def snapshot(client: Client, session: str, name: str, *, as_json: bool, out: Console) -> None:
    """Save a session and print under which name."""
    saved: SavedSnapshot = client.session(session).snapshot(name)
    if as_json:
        terminal.print_json(out, dataclasses.asdict(saved))
        return
    terminal.say(
        out,
        f"{saved.name}: session {saved.session_id} at version {saved.version}, "
        f"{saved.context_tokens:,} tokens, {saved.size_bytes / 1e6:,.1f} MB",
    )


def restore(client: Client, name: str, session: str, *, as_json: bool, out: Console) -> None:
    """Open a session from a snapshot and print how it stands."""
    info = client.restore(name, session_id=session).describe()
    if as_json:
        terminal.print_json(out, dataclasses.asdict(info))
        return
    terminal.say(
        out,
        f"session {info.session_id} at version {info.version}, {info.context_len:,} tokens, "
        f"{info.num_flash} questions",
    )
