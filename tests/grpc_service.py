"""A real server on loopback over a tiny real model, and what calls to it come to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
import threading
import time
from collections.abc import Iterator

import command_line
import grpc
import tiny_engine
import tiny_service
from google.rpc import error_details_pb2, status_pb2

from jaxstate import models
from jaxstate.engine import Engine
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import jaxstate_pb2_grpc
from jaxstate.serving.auth import Access
from jaxstate.serving.grpc_server import GrpcServer, ServerConfig
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.rpc_calls import Served
from jaxstate.serving.snapshot_store import SnapshotStore
from jaxstate.serving.tls import Tls

WAIT_S = 60
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}:"


def load(directory: pathlib.Path) -> models.LoadedModel:
    """A tiny random model with tokenizer and chat template."""
    path = directory / "tiny.gguf"
    return models.load(
        command_line.write_tiny_gguf(path, max_positions=128, chat_template=TEMPLATE)
    )


def engine_of(model: models.LoadedModel, **sizes) -> Engine:
    config = tiny_engine.engine_config(num_pages=96, **sizes)
    return Engine(model.params, model.config, config, tokenizer=model.tokenizer)


class Loop:
    """An event loop in a thread of its own."""

    def __enter__(self) -> Loop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def submit(self, coroutine) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine):
        return self.submit(coroutine).result(WAIT_S)


@dataclasses.dataclass(kw_only=True)
class Running:
    """A running server, a client's stub, and what is behind."""

    loop: Loop
    server: GrpcServer
    service: LocalService
    channel: grpc.Channel
    stub: jaxstate_pb2_grpc.JaxStateStub
    port: int


@contextlib.contextmanager
def bound(
    *, access: Access | None = None, tls: Tls | None = None, **config
) -> Iterator[tuple[Loop, GrpcServer, grpc.Channel, int]]:
    """A server without anything to serve yet, stopped in the end."""

    async def start():
        credentials = tls.credentials() if tls else None
        server = GrpcServer(ServerConfig(**config), access=access, credentials=credentials)
        return server, await server.start()

    with Loop() as loop:
        server, port = loop.run(start())
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield loop, server, channel, port
        loop.run(server.stop())


@contextlib.contextmanager
def serving(
    engine: Engine,
    tokenizer,
    *,
    max_waiting: int = 1024,
    access: Access | None = None,
    journal: Journal | None = None,
    snapshots: SnapshotStore | None = None,
    **config,
) -> Iterator[Running]:
    """A server of an engine, which it leaves as empty as it was."""
    with (
        tiny_engine.left_empty(engine),
        bound(access=access, **config) as (loop, server, channel, port),
    ):
        quota_of = access.quota if access else None
        service = LocalService(engine, max_waiting=max_waiting, journal=journal, quota_of=quota_of)
        served = Served(service=service, tokenizer=tokenizer, name="tiny", snapshots=snapshots)
        loop.run(server.open(served))
        yield Running(
            loop=loop, server=server, service=service, channel=channel,
            stub=jaxstate_pb2_grpc.JaxStateStub(channel), port=port,
        )  # fmt: skip
        service.close()


class As:
    """A client's stub with a token."""

    def __init__(self, stub: jaxstate_pb2_grpc.JaxStateStub, token: str):
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, method: str):
        call = getattr(self._stub, method)
        return functools.partial(call, metadata=self._metadata, timeout=WAIT_S)


@contextlib.contextmanager
def held(service: LocalService) -> Iterator[None]:
    """Hold the worker up between two steps."""
    release = tiny_service.hold(service)
    try:
        yield
    finally:
        release.set()


def slow_down(service: LocalService, seconds: float = 0.01) -> None:
    """Let every step take longer."""
    step = service._scheduler.step

    def slowly(*args):
        time.sleep(seconds)
        return step(*args)

    service._scheduler.step = slowly


def wait_until(condition) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def tokens(ids) -> pb.Prompt:
    return pb.Prompt(tokens=pb.TokenIds(ids=ids))


def text(given: str) -> pb.Prompt:
    return pb.Prompt(text=pb.Text(text=given))


@contextlib.contextmanager
def refused(code: grpc.StatusCode) -> Iterator[list]:
    """Expect a status; its details are in the list afterwards."""
    found: list = []
    try:
        yield found
    except grpc.RpcError as error:
        assert error.code() is code, (error.code(), error.details())
        found.append(error)
    else:
        raise AssertionError(f"expected {code}, got an answer")


def detail(error: grpc.RpcError, name: str):
    """The one google.rpc detail of this name."""
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = getattr(error_details_pb2, name)()
    assert [packed.Unpack(found) for packed in status.details].count(True) == 1
    return found


def parts(stream) -> tuple[pb.PromptInfo, list[pb.Token], pb.Answer]:
    """Take a stream of an answer apart; first the prompt, last the answer."""
    messages = list(stream)
    kinds = [message.WhichOneof("part") for message in messages]
    assert kinds == ["prompt", *["delta"] * (len(kinds) - 2), "answer"]
    drawn = [token for message in messages[1:-1] for token in message.delta.tokens]
    return messages[0].prompt, drawn, messages[-1].answer
