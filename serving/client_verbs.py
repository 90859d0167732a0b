"""The verbs of a client: each is one request and how to read its response.

Verbs are written once; `blocking` and `awaited` make methods of them for the two kinds of client.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack

from jaxstate.serving import client_requests, client_types
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.client_requests import From, Prompt, Stale, Wanted, WhenFull
from jaxstate.serving.client_session import Number, SessionState

T = TypeVar("T")
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """A call to make.

    Attributes:
      method: its name in jaxstate.proto.
      read: makes a result of the response.
      deadline_s: seconds that it may take; None = the client's.
      writes: it is numbered, and those of a session run one after another.
    """

    method: str
    request: Any
    read: Callable[[Any], T]
    deadline_s: float | None = None
    writes: bool = False


def blocking(build: Callable[Concatenate[Any, P], Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a verb as a method that waits for its result."""

    @functools.wraps(build)
    def verb(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(build(self, *args, **kwargs))

    return verb


def awaited(
    build: Callable[Concatenate[Any, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a verb as a coroutine."""

    @functools.wraps(build)
    async def verb(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(build(self, *args, **kwargs))

    return verb


# Sessions


def create(prefix: Prompt, session_id: str, when_full: WhenFull) -> Call[client_types.SessionInfo]:
    """Open a session."""
    request = client_requests.message(
        pb.CreateSessionRequest, session_id=session_id,
        prefix=client_requests.prompt(prefix, "prefix"),
        when_full=client_requests.named(pb.WhenFull, when_full, "when_full"),
    )  # fmt: skip
    return Call(method="CreateSession", request=request, read=client_types.session_info)


def fork(session: SessionState, new_id: str) -> Call[client_types.SessionInfo]:
    """Open a session with another's context."""
    request = pb.ForkRequest(session_id=session.session_id, new_session_id=new_id)
    return Call(method="Fork", request=request, read=client_types.session_info)


def restore(name: str, session_id: str) -> Call[client_types.SessionInfo]:
    """Open a session from a snapshot."""
    request = pb.RestoreRequest(name=name, session_id=session_id)
    return Call(method="Restore", request=request, read=client_types.session_info)


def page(token: str) -> Call[tuple[list[client_types.SessionInfo], str]]:
    """List sessions behind a token; the next token is "" behind the last."""

    def read(response: pb.ListSessionsResponse) -> tuple[list[client_types.SessionInfo], str]:
        found = [client_types.session_info(one) for one in response.sessions]
        return found, response.next_page_token

    request = pb.ListSessionsRequest(page_token=token)
    return Call(method="ListSessions", request=request, read=read)


def describe(session: SessionState) -> Call[client_types.SessionInfo]:
    """Say how the session stands."""
    request = pb.GetSessionRequest(session_id=session.session_id)
    return Call(method="GetSession", request=request, read=client_types.session_info)


def close(session: SessionState) -> Call[None]:
    """Close the session and free its cells.

    Raises:
      SessionError: it is closed already, or an append is being computed.
    """

    def read(response: pb.CloseSessionResponse) -> None:
        session.is_closed = True

    request = pb.CloseSessionRequest(session_id=session.session_id)
    return Call(method="CloseSession", request=request, read=read)


def snapshot(session: SessionState, name: str = "") -> Call[client_types.SavedSnapshot]:
    """Save the session on the server: context, registered questions and calibrations.

    Args:
      name: of what is saved, which is never overwritten; "" = the server chooses.
    """
    request = pb.SnapshotRequest(session_id=session.session_id, name=name)
    read = functools.partial(client_types.copied, client_types.SavedSnapshot)
    return Call(method="Snapshot", request=request, read=read)


def snapshots(client: Any) -> Call[client_types.SavedSnapshots]:
    """List what is saved, by name."""

    def read(response: pb.ListSnapshotsResponse) -> client_types.SavedSnapshots:
        copied = functools.partial(client_types.copied, client_types.SavedSnapshot)
        return client_types.SavedSnapshots(
            saved=tuple(map(copied, response.snapshots)), damaged=tuple(response.damaged)
        )

    return Call(method="ListSnapshots", request=pb.ListSnapshotsRequest(), read=read)


def delete_snapshot(client: Any, name: str) -> Call[None]:
    """Forget what was saved."""
    request = pb.DeleteSnapshotRequest(name=name)
    return Call(method="DeleteSnapshot", request=request, read=_nothing)


# Durable verbs


def append(
    session: SessionState, prompt: pb.Prompt, number: Number | None, deadline_s: float | None
) -> Call[int]:
    """Append once; the result is the new version."""
    request = pb.AppendRequest(session_id=session.session_id, prompt=prompt)
    return _write(session, "Append", request, number, deadline_s)


def update(
    session: SessionState,
    prompt: Prompt,
    *,
    number: Number | None = None,
    deadline_s: float | None = None,
) -> Call[int]:
    """Have the session hold this behind its prefix; only what differs is computed.

    Args:
      number, deadline_s: see append.
    Returns:
      the new version.
    """
    request = pb.UpdateRequest(
        session_id=session.session_id, prompt=client_requests.prompt(prompt, "update")
    )
    return _write(session, "Update", request, number, deadline_s)


def rollback(
    session: SessionState,
    count: int,
    *,
    number: Number | None = None,
    deadline_s: float | None = None,
) -> Call[int]:
    """Drop the session's last tokens; returns the new version."""
    request = client_requests.message(
        pb.RollbackRequest, session_id=session.session_id, tokens=count
    )
    return _write(session, "Rollback", request, number, deadline_s)


def _write(
    session: SessionState, method: str, request: Any, number: Number | None,
    deadline_s: float | None,
) -> Call[int]:  # fmt: skip
    if number is not None:
        request.writer, request.sequence = number
    return Call(
        method=method, request=request, read=session.note, deadline_s=deadline_s, writes=True
    )


# Asking


def query_request(
    session: SessionState,
    question: Prompt,
    *,
    stop: Sequence[str] = (),
    top_logprobs: int | None = None,
    commit: bool = False,
    stale: Stale = "compute",
    risk: float | None = None,
    entry: From = "question",
    min_version: int | Literal["mine"] = 0,
    **wanted: Unpack[Wanted],
) -> pb.QueryRequest:
    """Return a query; see Session.query."""
    return client_requests.message(
        pb.QueryRequest, session_id=session.session_id, stop=stop, top_logprobs=top_logprobs,
        question=client_requests.question(question, **wanted), commit=commit, risk=risk,
        stale=client_requests.named(pb.Stale, stale, "stale"),
        entry=client_requests.named(pb.Entry, entry, "entry"),
        min_version=session.version if min_version == "mine" else min_version,
    )  # fmt: skip


def generate_request(
    prompt: Prompt, *, stop: Sequence[str] = (), top_logprobs: int | None = None,
    **wanted: Unpack[Wanted],
) -> pb.GenerateRequest:  # fmt: skip
    """Return a prompt without a session; see Client.generate."""
    return client_requests.message(
        pb.GenerateRequest, question=client_requests.question(prompt, **wanted), stop=stop,
        top_logprobs=top_logprobs,
    )  # fmt: skip


def register(
    session: SessionState, question: Prompt, *, risk: float | None = None, **wanted: Unpack[Wanted]
) -> Call[client_types.FlashQuery]:
    """Have a question answered in idle time, now and after every change of the session.

    Args:
      risk: of queries that do not say one, see query.
      wanted: see query; a query with the same question and the same of these gets its answer.
    """
    request = client_requests.message(
        pb.RegisterRequest, session_id=session.session_id, risk=risk,
        question=client_requests.question(question, **wanted),
    )  # fmt: skip
    return Call(method="Register", request=request, read=client_types.flash_query)


def unregister(session: SessionState, flash_id: int) -> Call[None]:
    """Forget a registered question."""
    request = pb.UnregisterRequest(session_id=session.session_id, flash_id=flash_id)
    return Call(method="Unregister", request=request, read=_nothing)


def flash_queries(session: SessionState) -> Call[list[client_types.FlashQuery]]:
    """List the registered questions as they stand, oldest first."""

    def read(response: pb.ListFlashQueriesResponse) -> list[client_types.FlashQuery]:
        return [client_types.flash_query(one) for one in response.queries]

    request = pb.ListFlashQueriesRequest(session_id=session.session_id)
    return Call(method="ListFlashQueries", request=request, read=read)


def advance(
    session: SessionState,
    header: Prompt,
    *,
    max_new_tokens: int = 0,
    min_gap: float = 0.0,
    eos_ids: Iterable[int] = (),
    slot_ids: Iterable[int] = (),
    deadline_s: float | None = None,
) -> Call[client_types.PaidAhead]:
    """Pay for what questions will begin with, once, in idle time.

    Args:
      max_new_tokens: how far to decode ahead behind it; min_gap, eos_ids, slot_ids: where to stop,
        see Header in jaxstate.proto.
    """

    def read(response: pb.AdvanceResponse) -> client_types.PaidAhead:
        return client_types.copied(client_types.PaidAhead, response)

    request = pb.AdvanceRequest(
        session_id=session.session_id,
        header=client_requests.header(header, max_new_tokens, min_gap, eos_ids, slot_ids),
    )
    return Call(method="Advance", request=request, read=read, deadline_s=deadline_s)


def declare(
    session: SessionState,
    header: Prompt,
    *,
    max_new_tokens: int = 0,
    min_gap: float = 0.0,
    eos_ids: Iterable[int] = (),
    slot_ids: Iterable[int] = (),
) -> Call[None]:
    """Have what questions begin with paid for in idle time, now and after every change.

    Args: see advance.
    """
    request = pb.DeclareRequest(
        session_id=session.session_id,
        header=client_requests.header(header, max_new_tokens, min_gap, eos_ids, slot_ids),
    )
    return Call(method="Declare", request=request, read=_nothing)


# Text, the server


def tokenize(
    client: Any,
    text: str,
    *,
    parse_special: bool = False,
    add_bos: bool = False,
    continues: bool = False,
) -> Call[tuple[int, ...]]:
    """Return a text's token ids; see TokenizeRequest in jaxstate.proto."""
    request = pb.TokenizeRequest(
        text=text, parse_special=parse_special, add_bos=add_bos, continues=continues
    )
    return Call(method="Tokenize", request=request, read=lambda found: tuple(found.token_ids))


def detokenize(client: Any, token_ids: Iterable[int], *, skip_special: bool = False) -> Call[str]:
    """Return the text of token ids."""
    request = client_requests.message(
        pb.DetokenizeRequest, token_ids=token_ids, skip_special=skip_special
    )
    return Call(method="Detokenize", request=request, read=lambda found: found.text)


def render_template(
    client: Any,
    messages: Iterable[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Call[client_types.Rendered]:
    """Render a conversation in the model's chat template."""
    chat = pb.Chat(
        messages=[client_requests.message(pb.Message, **one) for one in messages],
        without_generation_prompt=not add_generation_prompt,
        tools_json=json.dumps(list(tools)) if tools else "",
        variables_json=json.dumps(dict(variables)) if variables else "",
    )

    def read(response: pb.RenderTemplateResponse) -> client_types.Rendered:
        return client_types.copied(client_types.Rendered, response)

    return Call(method="RenderTemplate", request=pb.RenderTemplateRequest(chat=chat), read=read)


def model_info(client: Any) -> Call[client_types.ModelInfo]:
    """Describe the model and the engine's sizes."""

    def read(response: pb.ModelInfo) -> client_types.ModelInfo:
        return client_types.copied(client_types.ModelInfo, response)

    return Call(method="GetModelInfo", request=pb.GetModelInfoRequest(), read=read)


def stats(client: Any) -> Call[client_types.Stats]:
    """Say what the server has done and holds."""
    return Call(method="GetStats", request=pb.GetStatsRequest(), read=client_types.stats)


def _nothing(response: Any) -> None:
    """Read a response that says nothing."""
