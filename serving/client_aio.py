"""The client for an event loop: client.Client with `await`.

async with AsyncClient("localhost:50051") as client:
    async with await client.create(prefix="Candles:\\n") as session:
        await session.append(row)
        async for token in session.query("Trend?", max_new_tokens=20):
            print(token.text, end="")
        answer = await session.query("Up?", choices=["yes", "no"]).result()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, TypeVar, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxstate.answer import Token
from jaxstate.errors import CancelledError, ClosedError, InputError, JaxStateError
from jaxstate.serving import client_errors, client_rows, client_types, client_verbs
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.client_channel import MAX_MESSAGE_BYTES, SERVICE, Target, Tls
from jaxstate.serving.client_requests import From, Prompt, Stale, Wanted, WhenFull
from jaxstate.serving.client_session import Number, Series, SessionState
from jaxstate.serving.client_stream import AnswerParts, AnswerUnderWay, Watching, noting
from jaxstate.serving.client_verbs import Call, awaited
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

T = TypeVar("T")


class AsyncAnswerStream(AnswerUnderWay):
    """An answer under way, see client.AnswerStream."""

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yield tokens as they are drawn."""
        try:
            async for part in self._call:
                for token in self._parts.take(part):
                    yield token
        except grpc.RpcError as failed:
            raise client_errors.error_of(failed) from failed
        except asyncio.CancelledError:
            # gRPC raises this of a cancelled call too, and only a cancelled task may end by it.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise CancelledError(await self._call.details()) from None
        finally:
            self._call.cancel()

    async def result(self) -> client_types.Answer:
        """Wait for the end and return the answer."""
        if not self._parts.is_over:
            async for _ in self:
                pass
        return self._parts.answer


class AsyncClient:
    """A connection to a server, for one event loop; see client.Client."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
        retry: bool = True,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ):
        """Say where the server is; see Client. It belongs to the event loop of its first call."""
        self._target = Target(
            address=address, token=token, tls=tls, timeout_s=timeout_s, retry=retry,
            max_message_bytes=max_message_bytes,
        )  # fmt: skip
        self._channels: dict[bool, tuple[Any, JaxStateStub]] = {}
        self._is_closed = False

    async def __aenter__(self) -> AsyncClient:
        """Use as a context manager, which closes it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """See close."""
        await self.close()

    async def close(self) -> None:
        """Disconnect; calls under way are cancelled, sessions stay."""
        self._is_closed = True
        for channel, _ in self._channels.values():
            await channel.close()

    # Sessions

    async def create(
        self,
        prefix: Prompt = (),
        *,
        session_id: str = "",
        when_full: WhenFull = "error",
        keep: bool = False,
    ) -> AsyncSession:
        """Open a session; see Client.create."""
        info = await self._run(client_verbs.create(prefix, session_id, when_full))
        return AsyncSession(self, info.session_id, version=info.version, is_owned=not keep)

    def session(self, session_id: str) -> AsyncSession:
        """Return a handle on a session that is there; see Client.session."""
        return AsyncSession(self, session_id)

    async def sessions(self) -> list[client_types.SessionInfo]:
        """Describe all open sessions, by id."""
        found, token = await self._run(client_verbs.page(""))
        while token:
            more, token = await self._run(client_verbs.page(token))
            found += more
        return found

    async def restore(self, name: str, *, session_id: str = "") -> AsyncSession:
        """Open a session from a snapshot; see Client.restore."""
        info = await self._run(client_verbs.restore(name, session_id))
        return AsyncSession(self, info.session_id, version=info.version)

    snapshots = awaited(client_verbs.snapshots)
    delete_snapshot = awaited(client_verbs.delete_snapshot)

    # Without a session

    def generate(
        self,
        prompt: Prompt,
        *,
        stop: tuple[str, ...] = (),
        top_logprobs: int | None = None,
        deadline_s: float | None = None,
        **wanted: Unpack[Wanted],
    ) -> AsyncAnswerStream:
        """Answer a prompt; see Session.query."""
        request = client_verbs.generate_request(
            prompt, stop=stop, top_logprobs=top_logprobs, **wanted
        )
        parts = AnswerParts(lambda answer: None)
        return self._stream("Generate", request, parts, deadline_s=deadline_s)

    tokenize = awaited(client_verbs.tokenize)
    detokenize = awaited(client_verbs.detokenize)
    render_template = awaited(client_verbs.render_template)
    model_info = awaited(client_verbs.model_info)
    stats = awaited(client_verbs.stats)

    async def is_serving(self) -> bool:
        """Say whether the server's model is ready for calls; see Client.is_serving."""
        self._method("GetStats")  # connects
        check = health_pb2_grpc.HealthStub(self._channels[self._target.retry][0]).Check
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        found = await self._call(check, request, None)
        return found.status == health_pb2.HealthCheckResponse.SERVING

    async def _run(self, call: Call[T]) -> T:
        begin = self._method(call.method)
        return call.read(await self._call(begin, call.request, call.deadline_s))

    async def _call(self, begin: Callable[..., Any], request: Any, deadline_s: float | None) -> Any:
        timeout = self._target.timeout_s if deadline_s is None else deadline_s
        try:
            return await begin(request, timeout=timeout, metadata=self._target.metadata)
        except grpc.RpcError as failed:
            raise client_errors.error_of(failed) from failed

    def _stream(
        self,
        method: str,
        request: Any,
        parts: AnswerParts,
        *,
        deadline_s: float | None,
        once: bool = False,
    ) -> AsyncAnswerStream:
        timeout = self._target.timeout_s if deadline_s is None else deadline_s
        begin = self._method(method, once=once)
        call = begin(request, timeout=timeout, metadata=self._target.metadata)
        return AsyncAnswerStream(call, parts)

    def _watch(self, request: pb.WatchAnswersRequest) -> Any:
        begin = self._method("WatchAnswers")
        return begin(request, metadata=self._target.metadata)

    def _method(self, name: str, *, once: bool = False) -> Callable[..., Any]:
        """Return what makes a call; see Client."""
        retry = self._target.retry and not once
        if self._is_closed:
            raise ClosedError(f"the client of {self._target.address} is closed")
        if retry not in self._channels:
            channel = self._target.open(grpc.aio, retry=retry)
            self._channels[retry] = channel, JaxStateStub(channel)
        return getattr(self._channels[retry][1], name)


class AsyncSession(SessionState):
    """A handle on a session, see client.Session; what it writes goes one after another."""

    def __init__(
        self, client: AsyncClient, session_id: str, *, version: int = 0, is_owned: bool = False
    ):
        """Made by AsyncClient.create, session, restore and AsyncSession.fork."""
        super().__init__(session_id, version=version)
        self._client = client
        self._is_owned = is_owned
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> AsyncSession:
        """Use as a context manager, which closes a session that this handle has opened."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the session if this handle has opened it, and was not told to keep it."""
        if self._is_owned and not self.is_closed:
            await self.close()

    describe = awaited(client_verbs.describe)
    close = awaited(client_verbs.close)
    snapshot = awaited(client_verbs.snapshot)

    async def fork(self, *, new_id: str = "", keep: bool = False) -> AsyncSession:
        """Open a session with the same context; registered questions stay with this one."""
        info = await self._client._run(client_verbs.fork(self, new_id))
        return AsyncSession(self._client, info.session_id, version=info.version, is_owned=not keep)

    # Durable verbs

    async def append(
        self,
        rows: Any,
        *,
        batch_rows: int = 1,
        number: Number | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Append to the context; see Session.append.

        Args:
          rows: also an asynchronous iterable of rows; other iterables are read in the event loop.
        """
        if number is not None and hasattr(rows, "__aiter__"):
            raise InputError("number: expected none for more than one append, got one")
        if hasattr(rows, "__aiter__"):
            return await self._append_each(rows, batch_rows, deadline_s)
        found = client_rows.appends(rows, batch_rows)
        if isinstance(found, list) and len(found) == 1:
            return await self._run(client_verbs.append(self, found[0], number, deadline_s))
        if number is not None:
            raise InputError("number: expected none for more than one append, got one")
        series = Series(self, iter(found))
        async with self._writing:
            while series.has_more():
                await self._append_series(series, deadline_s)
        return self.version

    async def _append_each(
        self, rows: AsyncIterator[Any], batch_rows: int, deadline_s: float | None
    ) -> int:
        batch: list[pb.Prompt] = []
        applied = 0

        async def send() -> None:
            nonlocal applied
            for prompt in client_rows.gathered(batch, batch_rows):
                try:
                    await self._run(client_verbs.append(self, prompt, None, deadline_s))
                except JaxStateError as error:
                    error.applied = applied
                    raise
                applied += 1
            batch.clear()

        async for row in rows:
            batch.append(client_rows.row(row))
            if len(batch) >= batch_rows:
                await send()
        await send()
        return self.version

    async def _append_series(self, series: Series, deadline_s: float | None) -> None:
        begin = self._client._method("AppendStream")
        metadata = self._client._target.metadata
        try:
            series.note(await begin(series.requests(), timeout=deadline_s, metadata=metadata))
        except grpc.RpcError as failed:
            error = client_errors.error_of(failed)
            error.applied += series.applied
            raise error from failed

    update = awaited(client_verbs.update)
    rollback = awaited(client_verbs.rollback)

    # Asking

    def query(
        self,
        question: Prompt,
        *,
        stop: tuple[str, ...] = (),
        top_logprobs: int | None = None,
        commit: bool = False,
        stale: Stale = "compute",
        risk: float | None = None,
        entry: From = "question",
        min_version: int | Literal["mine"] = 0,
        deadline_s: float | None = None,
        **wanted: Unpack[Wanted],
    ) -> AsyncAnswerStream:
        """Ask; see Session.query."""
        request = client_verbs.query_request(
            self, question, stop=stop, top_logprobs=top_logprobs, commit=commit, stale=stale,
            risk=risk, entry=entry, min_version=min_version, **wanted,
        )  # fmt: skip
        parts = AnswerParts(noting(self, commit))
        return self._client._stream("Query", request, parts, deadline_s=deadline_s, once=commit)

    advance = awaited(client_verbs.advance)
    declare = awaited(client_verbs.declare)

    # Flash Queries

    register = awaited(client_verbs.register)
    unregister = awaited(client_verbs.unregister)
    flash_queries = awaited(client_verbs.flash_queries)

    async def watch(self, cursor: str | None = None) -> AsyncIterator[client_types.FreshAnswer]:
        """Yield the fresh answers to registered questions, without end; see client.AnswerWatch.

        Args:
          cursor: of the last one that was seen; None = begin with the newest of every question.
        """
        watching = Watching(self.session_id, cursor)
        while True:
            call = self._client._watch(watching.request())
            try:
                async for message in call:
                    if (fresh := watching.take(message)) is not None:
                        yield fresh
            except grpc.RpcError as failed:
                await asyncio.sleep(watching.resume(client_errors.error_of(failed)))
            finally:
                call.cancel()

    async def _run(self, call: Call[T]) -> T:
        if not call.writes:
            return await self._client._run(call)
        async with self._writing:
            self.number(call.request)
            return await self._client._run(call)
