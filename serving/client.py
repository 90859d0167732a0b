"""A client of a server, with the verbs of the engine in process.

    with Client("localhost:50051") as client:
        with client.create(prefix="Candles:\\n", when_full="slide") as session:
            session.append(frame)                     # rows of a DataFrame
            for token in session.query("Trend?", max_new_tokens=20):
                print(token.text, end="")
            answer = session.query("Up?", choices=["yes", "no"]).result()

What goes wrong raises the errors of jaxstate.errors, as in process. Calls that can be are tried
again while the server is not there. Needs no JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxstate.answer import Token
from jaxstate.errors import ClosedError, InputError
from jaxstate.serving import client_errors, client_rows, client_types, client_verbs
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.client_channel import MAX_MESSAGE_BYTES, SERVICE, Target, Tls
from jaxstate.serving.client_requests import From, Prompt, Stale, Wanted, WhenFull
from jaxstate.serving.client_session import Number, Series, SessionState
from jaxstate.serving.client_stream import AnswerParts, AnswerUnderWay, Watching, noting
from jaxstate.serving.client_verbs import Call, blocking
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

T = TypeVar("T")


class AnswerStream(AnswerUnderWay):
    """An answer under way: iteration yields its tokens, `result()` waits for its end.

    Leaving the loop, or `cancel()`, ends it on the server at the next step.
    """

    def __iter__(self) -> Iterator[Token]:
        """Yield tokens as they are drawn."""
        try:
            for part in self._call:
                yield from self._parts.take(part)
        except grpc.RpcError as failed:
            raise client_errors.error_of(failed) from failed
        finally:
            self._call.cancel()

    def result(self) -> client_types.Answer:
        """Wait for the end and return the answer."""
        if not self._parts.is_over:
            for _ in self:
                pass
        return self._parts.answer


class Client:
    """A connection to a server, for any number of threads."""

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
        """Say where the server is; it is connected to by the first call.

        Args:
          address: "host:port".
          token: who calls, where the server asks.
          tls: encryption; None = none.
          timeout_s: deadline of calls that do not say one, and have an end; None = none.
          retry: calls that can be are tried again while the server is not there or too busy.
          max_message_bytes: largest message either way; larger ones are refused.
        Raises:
          InputError: a token that others could read, or that cannot be sent.
        """
        self._target = Target(
            address=address, token=token, tls=tls, timeout_s=timeout_s, retry=retry,
            max_message_bytes=max_message_bytes,
        )  # fmt: skip
        self._channels: dict[bool, tuple[Any, JaxStateStub]] = {}  # by whether they try again
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Client:
        """Use as a context manager, which closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """See close."""
        self.close()

    def close(self) -> None:
        """Disconnect; calls under way are cancelled, sessions stay."""
        with self._lock:
            self._is_closed = True
            for channel, _ in self._channels.values():
                channel.close()

    # Sessions

    def create(
        self,
        prefix: Prompt = (),
        *,
        session_id: str = "",
        when_full: WhenFull = "error",
        keep: bool = False,
    ) -> Session:
        """Open a session.

        Args:
          prefix: the beginning of its context, which is never evicted.
          session_id: "" = the server chooses.
          when_full: "slide" = the oldest tokens behind the prefix are dropped.
          keep: leaving the session's `with` block does not close it.
        """
        info = self._run(client_verbs.create(prefix, session_id, when_full))
        return Session(self, info.session_id, version=info.version, is_owned=not keep)

    def session(self, session_id: str) -> Session:
        """Return a handle on a session that is there, which leaving a `with` does not close."""
        return Session(self, session_id)

    def sessions(self) -> list[client_types.SessionInfo]:
        """Describe all open sessions, by id."""
        found, token = self._run(client_verbs.page(""))
        while token:
            more, token = self._run(client_verbs.page(token))
            found += more
        return found

    def restore(self, name: str, *, session_id: str = "") -> Session:
        """Open a session from a snapshot, or have it replace an open one, all or nothing.

        Args:
          session_id: of the session; "" = as it was.
        """
        info = self._run(client_verbs.restore(name, session_id))
        return Session(self, info.session_id, version=info.version)

    snapshots = blocking(client_verbs.snapshots)
    delete_snapshot = blocking(client_verbs.delete_snapshot)

    # Without a session

    def generate(
        self,
        prompt: Prompt,
        *,
        stop: tuple[str, ...] = (),
        top_logprobs: int | None = None,
        deadline_s: float | None = None,
        **wanted: Unpack[Wanted],
    ) -> AnswerStream:
        """Answer a prompt; see Session.query."""
        request = client_verbs.generate_request(
            prompt, stop=stop, top_logprobs=top_logprobs, **wanted
        )
        parts = AnswerParts(lambda answer: None)
        return self._stream("Generate", request, parts, deadline_s=deadline_s)

    tokenize = blocking(client_verbs.tokenize)
    detokenize = blocking(client_verbs.detokenize)
    render_template = blocking(client_verbs.render_template)
    model_info = blocking(client_verbs.model_info)
    stats = blocking(client_verbs.stats)

    @property
    def address(self) -> str:
        """Where its server is."""
        return self._target.address

    def is_serving(self) -> bool:
        """Say whether the server's model is ready for calls.

        Raises:
          UnavailableError: nobody answers.
        """
        self._method("GetStats")  # connects
        check = health_pb2_grpc.HealthStub(self._channels[self._target.retry][0]).Check
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        found = self._call(check, request, None)
        return found.status == health_pb2.HealthCheckResponse.SERVING

    def _run(self, call: Call[T]) -> T:
        return call.read(self._call(self._method(call.method), call.request, call.deadline_s))

    def _call(self, begin: Callable[..., Any], request: Any, deadline_s: float | None) -> Any:
        timeout = self._target.timeout_s if deadline_s is None else deadline_s
        try:
            return begin(request, timeout=timeout, metadata=self._target.metadata)
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
    ) -> AnswerStream:
        timeout = self._target.timeout_s if deadline_s is None else deadline_s
        begin = self._method(method, once=once)
        call = begin(request, timeout=timeout, metadata=self._target.metadata)
        return AnswerStream(call, parts)

    def _watch(self, request: pb.WatchAnswersRequest) -> Any:
        begin = self._method("WatchAnswers")
        return begin(request, metadata=self._target.metadata)

    def _method(self, name: str, *, once: bool = False) -> Callable[..., Any]:
        """Return what makes a call.

        Args:
          once: it must not be tried again, whatever others are.
        """
        retry = self._target.retry and not once
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"the client of {self._target.address} is closed")
            if retry not in self._channels:
                channel = self._target.open(grpc, retry=retry)
                self._channels[retry] = channel, JaxStateStub(channel)
            return getattr(self._channels[retry][1], name)


class Session(SessionState):
    """A handle on a session. What it writes goes one after another, from whatever thread."""

    def __init__(
        self, client: Client, session_id: str, *, version: int = 0, is_owned: bool = False
    ):
        """Made by Client.create, session, restore and Session.fork."""
        super().__init__(session_id, version=version)
        self._client = client
        self._is_owned = is_owned
        self._writing = threading.Lock()

    def __enter__(self) -> Session:
        """Use as a context manager, which closes a session that this handle has opened."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session if this handle has opened it, and was not told to keep it."""
        if self._is_owned and not self.is_closed:
            self.close()

    describe = blocking(client_verbs.describe)
    close = blocking(client_verbs.close)
    snapshot = blocking(client_verbs.snapshot)

    def fork(self, *, new_id: str = "", keep: bool = False) -> Session:
        """Open a session with the same context; registered questions stay with this one."""
        info = self._client._run(client_verbs.fork(self, new_id))
        return Session(self._client, info.session_id, version=info.version, is_owned=not keep)

    # Durable verbs

    def append(
        self,
        rows: Any,
        *,
        batch_rows: int = 1,
        number: Number | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Append to the context.

        Args:
          rows: text, token ids or messages; a pandas.DataFrame, pyarrow.Table or RecordBatch, as
            lines of CSV without header; a mapping, as a line of JSON; or an iterable of rows, each
            text, a mapping or token ids, and an append of its own. An iterable is read from
            another thread, as rows are wanted.
          batch_rows: rows of an iterable that become one append.
          number: writer and sequence, where it is to be known as the same when it is sent again;
            None = those of this handle.
          deadline_s: how long a call may take; an iterable takes many, which have none unless
            said. An append that is late may yet be applied.
        Returns:
          the newest version that this handle has written.
        Raises:
          JaxStateError: as in process; `applied` = appends of an iterable that were, each of
            batch_rows rows.
        """
        found = client_rows.appends(rows, batch_rows)
        if isinstance(found, list) and len(found) == 1:
            return self._run(client_verbs.append(self, found[0], number, deadline_s))
        if number is not None:
            raise InputError("number: expected none for more than one append, got one")
        series = Series(self, iter(found))
        with self._writing:
            while series.has_more():
                self._append_series(series, deadline_s)
        return self.version

    def _append_series(self, series: Series, deadline_s: float | None) -> None:
        method = self._client._method("AppendStream")
        try:
            series.note(
                method(
                    series.requests(), timeout=deadline_s, metadata=self._client._target.metadata
                )
            )
        except grpc.RpcError as failed:
            error = client_errors.error_of(failed)
            error.applied += series.applied
            raise error from failed

    update = blocking(client_verbs.update)
    rollback = blocking(client_verbs.rollback)

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
    ) -> AnswerStream:
        """Ask; the stream that is returned yields tokens, and its `result()` is the Answer.

        Args:
          stop: texts that end the answer and are not part of it.
          top_logprobs: also log-probabilities: of the token drawn and of this many likely ones.
          commit: question and answer become part of the session; not tried again.
          stale, risk, entry: see LocalService.query.
          min_version: wait until the session is of this version; "mine" = of this handle's own
            last write.
          deadline_s: how long it may take; None = the client's timeout_s.
          wanted: see client_requests.Wanted.
        """
        request = client_verbs.query_request(
            self, question, stop=stop, top_logprobs=top_logprobs, commit=commit, stale=stale,
            risk=risk, entry=entry, min_version=min_version, **wanted,
        )  # fmt: skip
        parts = AnswerParts(noting(self, commit))
        return self._client._stream("Query", request, parts, deadline_s=deadline_s, once=commit)

    advance = blocking(client_verbs.advance)
    declare = blocking(client_verbs.declare)

    # Flash Queries

    register = blocking(client_verbs.register)
    unregister = blocking(client_verbs.unregister)
    flash_queries = blocking(client_verbs.flash_queries)

    def watch(self, cursor: str | None = None) -> AnswerWatch:
        """Return the fresh answers to registered questions, without end.

        Args:
          cursor: of the last one that was seen; None = begin with the newest of every question.
        """
        return AnswerWatch(self._client, Watching(self.session_id, cursor))

    def _run(self, call: Call[T]) -> T:
        if not call.writes:
            return self._client._run(call)
        with self._writing:
            self.number(call.request)
            return self._client._run(call)


class AnswerWatch:
    """Fresh answers as they come, over restarts of the server: none missed unless it says so."""

    def __init__(self, client: Client, watching: Watching):
        """Made by Session.watch."""
        self._client = client
        self._watching = watching
        self._call: Any = None
        self._ended = threading.Event()

    @property
    def cursor(self) -> str:
        """Where the next one comes from; goes on with `session.watch(cursor)`."""
        return self._watching.cursor

    def __iter__(self) -> Iterator[client_types.FreshAnswer]:
        """Yield them; leaving the loop ends the call."""
        try:
            while not self._ended.is_set():
                yield from self._connected()
        finally:
            self.cancel()

    def _connected(self) -> Iterator[client_types.FreshAnswer]:
        """Yield what comes over one connection, and wait before the next."""
        self._call = self._client._watch(self._watching.request())
        if self._ended.is_set():
            self._call.cancel()
        try:
            for message in self._call:
                if (fresh := self._watching.take(message)) is not None:
                    yield fresh
        except grpc.RpcError as failed:
            if not self._ended.is_set():
                delay = self._watching.resume(client_errors.error_of(failed))
                self._ended.wait(delay)

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        self._ended.set()
        if self._call is not None:
            self._call.cancel()
