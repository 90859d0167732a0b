"""Calls that open, change and close sessions."""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

from jaxstate.errors import BusyError, InputError, JaxStateError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages, tenants
from jaxstate.serving.pending import Pending
from jaxstate.serving.rpc_calls import Call, Undo
from jaxstate.serving.rpc_errors import SeriesError
from jaxstate.serving.write_memory import Number

_DEFAULT_PAGE = 256  # sessions
_FLYING = 32  # appends of a stream that wait for the worker; the client's others wait for these


async def create_session(request: pb.CreateSessionRequest, call: Call) -> pb.Session:
    """Open a session; one whose client has gone away meanwhile is closed again."""
    service = call.service
    opener = object()
    undo = functools.partial(service.take_back, opener=opener)
    pending = await call.begin(
        service.begin_create,
        await call.ids(request.prefix, "prefix", begins=True),
        session_id=call.new_session_id(request.session_id),
        when_full=messages.when_full(request.when_full),
        tenant=call.tenant,
        opener=opener,
        undo=undo,
    )
    name = await call.result(pending, undo=undo)
    return await _described(call, name, undo)


async def get_session(request: pb.GetSessionRequest, call: Call) -> pb.Session:
    """Describe a session."""
    name = call.session_id(request.session_id)
    return messages.session(await call.run(call.service.describe, name))


async def list_sessions(request: pb.ListSessionsRequest, call: Call) -> pb.ListSessionsResponse:
    """Describe the caller's sessions behind a page token, which is the last id of the page."""
    found = await call.run(call.service.describe_all)
    mine = [
        info
        for info in found
        if info.tenant == call.tenant
        and (tenants.unqualified(call.tenant, info.session_id) or "") > request.page_token
    ]
    count = min(request.page_size or _DEFAULT_PAGE, _DEFAULT_PAGE)
    page = [messages.session(info) for info in mine[:count]]
    return pb.ListSessionsResponse(
        sessions=page,
        next_page_token=page[-1].session_id if len(mine) > count else "",
    )


async def fork(request: pb.ForkRequest, call: Call) -> pb.Session:
    """Open a session with another's context."""
    service = call.service
    opener = object()
    undo = functools.partial(service.take_back, opener=opener)
    pending = await call.begin(
        service.begin_fork,
        call.session_id(request.session_id),
        new_id=call.new_session_id(request.new_session_id, "new_session_id"),
        opener=opener,
        undo=undo,
    )
    name = await call.result(pending, undo=undo)
    return await _described(call, name, undo)


async def close_session(request: pb.CloseSessionRequest, call: Call) -> pb.CloseSessionResponse:
    """Close a session and free its cells."""
    await call.run(call.service.close_session, call.session_id(request.session_id))
    return pb.CloseSessionResponse()


async def append(request: pb.AppendRequest, call: Call) -> pb.AppendResponse:
    """Append and answer when it is computed."""
    token_ids = await call.ids(request.prompt, "prompt")
    number = _number(request)
    pending = await call.begin(
        call.service.append, call.session_id(request.session_id), token_ids, number=number
    )
    version = await call.result(pending, cancels=number is None)
    return pb.AppendResponse(version=version, tokens=len(token_ids))


async def append_stream(
    requests: AsyncIterator[pb.AppendRequest], call: Call
) -> pb.AppendStreamResponse:
    """Append message by message; behind one that fails none is applied."""
    flying: collections.deque[tuple[Pending, int]] = collections.deque()
    done = pb.AppendStreamResponse()
    name, behind = "", None

    async def land() -> None:
        pending, count = flying[0]
        done.version = await call.result(pending, cancels=False)
        flying.popleft()
        done.appends += 1
        done.tokens += count

    try:
        async for request in requests:
            call.check_caller()
            name = _same_session(name, request.session_id)
            token_ids = await call.ids(request.prompt, "prompt")
            while len(flying) >= _FLYING:
                await land()
            append = functools.partial(
                call.begin, call.service.append, call.session_id(name), token_ids,
                number=_number(request), behind=behind,
            )  # fmt: skip
            behind = await _patiently(append)
            flying.append((behind, len(token_ids)))
        while flying:
            await land()
    except JaxStateError as error:
        first = error
        try:
            while flying:  # what was taken before it is applied, and counts
                await land()
        except JaxStateError as earlier:
            first = earlier
        raise SeriesError(first, applied=done.appends, version=done.version) from first
    finally:
        for pending, _ in flying:
            call.cancel(pending)
    return done


async def update(request: pb.UpdateRequest, call: Call) -> pb.UpdateResponse:
    """Replace a session's stream."""
    pending = await call.begin(
        call.service.update,
        call.session_id(request.session_id),
        await call.ids(request.prompt, "prompt"),
        number=(number := _number(request)),
    )
    return pb.UpdateResponse(version=await call.result(pending, cancels=number is None))


async def rollback(request: pb.RollbackRequest, call: Call) -> pb.RollbackResponse:
    """Drop a session's last tokens."""
    pending = await call.begin(
        call.service.rollback,
        call.session_id(request.session_id),
        request.tokens,
        number=(number := _number(request)),
    )
    return pb.RollbackResponse(version=await call.result(pending, cancels=number is None))


async def _described(call: Call, name: str, undo: Undo) -> pb.Session:
    """Describe a session that the client does not know yet: that is undone if he goes away."""
    try:
        return messages.session(await call.run(call.service.describe, name))
    except asyncio.CancelledError:
        call.later(undo, name)
        raise


def _number(request: pb.AppendRequest | pb.UpdateRequest | pb.RollbackRequest) -> Number | None:
    if not request.sequence:
        return None
    return messages.writer(request.writer), request.sequence


def _same_session(before: str, given: str) -> str:
    if before and given not in ("", before):
        raise InputError(
            f'session_id: expected "{before}" in all messages of a stream, got "{given[:128]}"; '
            "open a stream for each session"
        )
    return before or given


async def _patiently(begin: Callable[[], Awaitable[Pending]]) -> Pending:
    """Begin an append as soon as there is room for it in the queue."""
    while True:
        try:
            return await begin()
        except BusyError as error:
            await asyncio.sleep(error.retry_after_s)
