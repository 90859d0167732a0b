"""Commands of the command line that speak to a server, and how all of them find it."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Annotated

import typer
from rich.console import Console

from jaxstate.serving import client_channel, remote_sessions, tail_command
from jaxstate.serving.client import Client

app = typer.Typer()
sessions = typer.Typer(invoke_without_command=True)
app.add_typer(sessions, name="sessions")

Server = Annotated[
    str | None,
    typer.Option(
        help="Address of a server, host:port.", show_default="$JAXSTATE_SERVER, or 127.0.0.1:50051",
    ),
]  # fmt: skip
TokenFile = Annotated[
    pathlib.Path | None,
    typer.Option(help="File with the token that the server asks for; else $JAXSTATE_TOKEN."),
]
TlsCa = Annotated[
    pathlib.Path | None, typer.Option(help="PEM file of whom to trust; without TLS if none.")
]
TlsCert = Annotated[pathlib.Path | None, typer.Option(help="PEM file of one's own certificate.")]
TlsKey = Annotated[pathlib.Path | None, typer.Option(help="PEM file of its key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


@app.command()
def tail(
    file: Annotated[pathlib.Path, typer.Argument(help="CSV, JSON lines, or plain lines.")],
    ask: Annotated[
        list[str] | None, typer.Option(help="A question to keep answered; may be repeated.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A possible answer; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 32,
    session: Annotated[
        str | None,
        typer.Option(help="To go on with, or to open.", show_default="one that ends with this"),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="csv (its first line is a header) or lines.", show_default="by the file's name"
        ),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", help="start or end: where in the file to begin.")
    ] = "start",
    position: Annotated[
        pathlib.Path | None,
        typer.Option(help="File to remember the position in, to go on there; with --session."),
    ] = None,
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Stream a growing file into a session of a server; show answers to questions as they come."""
    options = tail_command.TailOptions(
        file=file, asks=tuple(ask or ()), choices=tuple(choice or ()),
        max_new_tokens=max_new_tokens, session=session, format=format, start=start,
        position=position,
    )  # fmt: skip
    stop = threading.Event()
    came: list[int] = []

    def on_signal(number: int, _: object) -> None:
        came.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait for the server

    # A KeyboardInterrupt within a call can leave gRPC's channel locked for good, and the session
    # could not be closed any more.
    for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(one, on_signal)
    with client_of(server, token_file, tls_ca, tls_cert, tls_key, retry=True) as client:
        tail_command.run(
            options, client, as_json=as_json, out=Console(), log=Console(stderr=True), stop=stop
        )
    if signal.SIGINT in came:
        raise KeyboardInterrupt


@sessions.callback()
def list_sessions(
    context: typer.Context,
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """List the sessions of a server, or close one."""
    if context.invoked_subcommand is None:
        with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
            remote_sessions.show(client, as_json=as_json, out=Console())


@sessions.command("close")
def close_session(
    session: Annotated[str, typer.Argument(help="Its id.")],
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Close a session and free its cells."""
    with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
        client.session(session).close()


@app.command()
def snapshot(
    session: Annotated[
        str, typer.Argument(help="Id of the session to save.", show_default="list what is saved")
    ] = "",
    name: Annotated[
        str, typer.Argument(help="Of what is saved.", show_default="the server chooses")
    ] = "",
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Have a server save a session, which goes on; without one, list what is saved."""
    with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
        if not session:
            remote_sessions.show_snapshots(client, as_json=as_json, out=Console())
            return
        remote_sessions.snapshot(client, session, name, as_json=as_json, out=Console())


@app.command()
def restore(
    name: Annotated[str, typer.Argument(help="Of what was saved.")],
    session: Annotated[str, typer.Option(help="Id that it gets.", show_default="as it was")] = "",
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Have a server open a session that was saved; an open one of its id is replaced."""
    with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
        remote_sessions.restore(client, name, session, as_json=as_json, out=Console())


def client_of(
    server: str | None, token_file: pathlib.Path | None, tls_ca: pathlib.Path | None,
    tls_cert: pathlib.Path | None, tls_key: pathlib.Path | None, *, retry: bool = False,
) -> Client:  # fmt: skip
    """Return a client of a server that was named, or that the environment names."""
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
    else:
        token = os.environ.get("JAXSTATE_TOKEN")
    uses_tls = any(path is not None for path in (tls_ca, tls_cert, tls_key))
    return Client(
        server or os.environ.get("JAXSTATE_SERVER") or "127.0.0.1:50051", token=token or None,
        retry=retry,
        tls=client_channel.Tls(ca=tls_ca, cert=tls_cert, key=tls_key) if uses_tls else None,
    )  # fmt: skip
