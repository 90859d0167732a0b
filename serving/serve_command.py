"""`jaxstate serve`: a gRPC server, and a page and metrics beside it, from start to drain.

Ports are bound before anything else, so that a mistake shows at once and whoever asks meanwhile is
told to come again. The first SIGTERM or SIGINT lets calls that are under way end, a second one ends
the process as if nobody had listened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import signal
from typing import Any, get_args

from rich.console import Console

from jaxstate.engine import Engine
from jaxstate.models import loading
from jaxstate.models.config import DtypePolicy
from jaxstate.models.quantized import Weights
from jaxstate.serving import local_model, ports, serve_sizes, terminal
from jaxstate.serving.auth import Access
from jaxstate.serving.grpc_server import GrpcServer, ServerConfig
from jaxstate.serving.journal import Durability, Journal
from jaxstate.serving.live_page import LivePage
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.open_session import MAX_HEADERS, MAX_REGISTERED
from jaxstate.serving.rpc_calls import Served
from jaxstate.serving.serve_sizes import Sizes
from jaxstate.serving.snapshot_store import SnapshotStore
from jaxstate.serving.snapshots import Snapshots
from jaxstate.serving.tls import Tls

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `serve` was told on the command line.

    Attributes:
      model: name or path.
      served_model_name: what clients and metrics call it; None = as the files are called.
      dtype, weights: see loading.load.
      sizes: see Sizes.
      server: where to serve.
      metrics_host: of page and metrics, which show all tenants' sessions to whoever reaches them;
        None = the server's host if it is of the loopback, else 127.0.0.1.
      metrics_port: 0 = any that is free.
      tls: see Tls; None = clients connect without.
      auth_tokens: who may call, see tokens_file; None = whoever reaches the server.
      force: let other machines in where nobody has to say who he is.
      state_dir: where sessions outlive the process; None = they end with it.
      durability: see Journal; "off" = nothing is kept.
      max_registered, max_headers: of a session, see LocalService.
      snapshot_dir: of what clients save by name; None = beside what state_dir keeps, if that is.
    """

    model: str
    served_model_name: str | None
    dtype: str
    weights: Weights
    sizes: Sizes
    server: ServerConfig
    metrics_port: int
    metrics_host: str | None = None
    tls: Tls | None = None
    auth_tokens: pathlib.Path | None = None
    force: bool = False
    state_dir: pathlib.Path | None = None
    durability: Durability = "full"
    snapshot_dir: pathlib.Path | None = None
    max_registered: int = MAX_REGISTERED
    max_headers: int = MAX_HEADERS

    def __post_init__(self):
        """Refuse what would let others in unasked, or lose what is to be kept."""
        if self.durability not in (known := get_args(Durability)):
            raise ValueError(f"durability: expected one of {known}, got {self.durability!r}")
        if self.state_dir is not None and self.snapshot_dir is not None:
            automatic = (self.state_dir / "snapshots").resolve()
            if self.snapshot_dir.resolve().is_relative_to(automatic):
                raise ValueError(
                    f"snapshot-dir: expected a directory of its own, got {self.snapshot_dir}, "
                    "where automatic snapshots are made and removed; leave it out for "
                    f"{self.state_dir / 'saved'}"
                )
        host, page_host = self.server.host, self.page_host
        is_safe = self.tls is not None and self.auth_tokens is not None
        if not self.force and not is_safe and not ports.is_loopback(host):
            raise ValueError(
                f"host: expected an address of the loopback, such as 127.0.0.1, got {host}: "
                "whoever reaches the server may use it and read all sessions; take --tls-cert, "
                "--tls-key and --auth-tokens, or --force if nobody else reaches it"
            )
        if not self.force and not ports.is_loopback(page_host):
            raise ValueError(
                f"metrics-host: expected an address of the loopback, got {page_host}: the page "
                "shows all tenants' sessions to whoever reaches it; put something that asks for a "
                "password before it, or take --force if nobody else does"
            )

    @property
    def page_host(self) -> str:
        """Where page and metrics are."""
        if self.metrics_host is not None:
            return self.metrics_host
        return self.server.host if ports.is_loopback(self.server.host) else "127.0.0.1"


def run(options: ServeOptions, *, cache_dir: pathlib.Path, out: Console, log: Console) -> None:
    """Serve until a signal comes; the one line on `out` says that clients may come.

    Raises:
      PortTakenError, ValueError, CapacityError, RuntimeError: the message says what is wrong.
    """
    asyncio.run(_run(options, cache_dir, out, log))


async def _run(options: ServeOptions, cache_dir: pathlib.Path, out: Console, log: Console) -> None:
    host, page_host = options.server.host, options.page_host
    credentials = options.tls.credentials() if options.tls else None
    access = _access(options)
    ports.check_free(host, options.server.port, "port")
    server = GrpcServer(options.server, access=access, credentials=credentials)
    page = LivePage(host=page_host, port=options.metrics_port)
    served = None
    try:
        port = await server.start()
        stop = _stop_on_signals(log, options.server.grace_s)
        load = asyncio.create_task(asyncio.to_thread(_load, options, access, cache_dir, log))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({load, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not load.done():
            terminal.say(log, "ended before the model was loaded")
            os._exit(0)  # a compilation cannot be interrupted, and nobody needs what it makes
        served = load.result()
        _stop_on_failure(served.service, stop)
        await server.open(served)
        page.open(served.service, served.name, access)
        terminal.say(
            out,
            f"ready: {served.name} on {_address(host, port)}, page and metrics on "
            f"http://{_address(page_host, page.port)}/",
        )
        await stopping
        page.drain()
    finally:
        await server.stop()
        await asyncio.to_thread(page.close)
        if served is not None:
            await asyncio.to_thread(served.service.close)
    if served.service.failure is not None:
        raise RuntimeError(f"the worker ended: {served.service.failure!r}")
    terminal.say(log, "drained")


def _access(options: ServeOptions) -> Access | None:
    """Read who may call; ValueError where some never could."""
    if options.auth_tokens is None:
        return None
    access = Access(options.auth_tokens)
    if access.asks_for_certificates and (options.tls is None or options.tls.client_ca is None):
        raise ValueError(
            f"tls-client-ca: expected who signs the certificates that {options.auth_tokens} asks "
            "for, got none"
        )
    return access


def _load(
    options: ServeOptions, access: Access | None, cache_dir: pathlib.Path, log: Console
) -> Served:
    """Go from a name to a running service, saying what it takes before it is taken."""
    path = local_model.path_of(options.model, cache_dir, log)
    model = loading.read_config(path, DtypePolicy.named(options.dtype))
    config = options.sizes.engine_config(model)
    terminal.say(log, serve_sizes.memory(model, config, is_float=options.weights == "float"))
    loaded = local_model.load(
        options.model, dtype=options.dtype, weights=options.weights, cache_dir=cache_dir,
        console=log,
    ).loaded  # fmt: skip
    kept = _kept(options, loaded.fingerprint)
    with terminal.CompileProgress(log) as compiling:
        engine = Engine(
            loaded.params, loaded.config, config, tokenizer=loaded.tokenizer, progress=compiling
        )
    service = LocalService(
        engine, quota_of=access.quota if access else None, max_registered=options.max_registered,
        max_headers=options.max_headers, **kept,
    )  # fmt: skip
    if kept:
        count = len(service.describe_all())
        terminal.say(log, f"{count} sessions are there from before, in {options.state_dir}")
    return Served(
        service=service, tokenizer=loaded.tokenizer,
        name=options.served_model_name or loaded.name,
        snapshots=_snapshots(options, access, loaded.fingerprint),
    )  # fmt: skip


def _snapshots(
    options: ServeOptions, access: Access | None, fingerprint: str
) -> SnapshotStore | None:
    directory = options.snapshot_dir
    if directory is None and options.state_dir is not None:
        directory = options.state_dir / "saved"
    if directory is None:
        return None
    quota_of = access.quota if access else None
    return SnapshotStore(directory, fingerprint=fingerprint, quota_of=quota_of)


def _kept(options: ServeOptions, fingerprint: str) -> dict[str, Any]:
    """Open what keeps sessions, before anything is compiled for them."""
    if options.state_dir is None or options.durability == "off":
        return {}
    return {
        "journal": Journal(
            options.state_dir / "journal.db", durability=options.durability,
            fingerprint=fingerprint,
        ),
        "snapshots": Snapshots(options.state_dir / "snapshots", fingerprint=fingerprint),
    }  # fmt: skip


def _stop_on_signals(log: Console, grace_s: float) -> asyncio.Event:
    """Return what the first signal sets; the second one does what it does by default."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for one in _SIGNALS:
            loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_DFL)
        terminal.say(
            log, f"draining: calls under way have {grace_s:g} s; a second signal ends them at once"
        )
        stop.set()

    for one in _SIGNALS:
        loop.add_signal_handler(one, on_signal)
    return stop


def _stop_on_failure(service: LocalService, stop: asyncio.Event) -> None:
    """Have the end of the worker, which nobody asked for, end the server."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if service.failure is not None:
            loop.call_soon_threadsafe(stop.set)

    service.listen(look)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
