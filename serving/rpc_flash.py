"""Calls about registered questions and their fresh answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages, rpc_questions
from jaxstate.serving.rpc_calls import Call


async def register(request: pb.RegisterRequest, call: Call) -> pb.FlashQuery:
    """Register a question."""
    found = await call.run(
        call.service.register,
        call.session_id(request.session_id),
        await rpc_questions.question(request.question, call),
        risk=request.risk if request.HasField("risk") else None,
    )
    return messages.flash_query(found, call.tenant)


async def unregister(request: pb.UnregisterRequest, call: Call) -> pb.UnregisterResponse:
    """Forget a registered question."""
    name = call.session_id(request.session_id)
    await call.run(call.service.unregister, name, request.flash_id)
    return pb.UnregisterResponse()


async def list_flash_queries(
    request: pb.ListFlashQueriesRequest, call: Call
) -> pb.ListFlashQueriesResponse:
    """Describe a session's registered questions."""
    name = call.session_id(request.session_id)
    found = await call.run(call.service.flash_queries, name)
    queries = [messages.flash_query(one, call.tenant) for one in found]
    return pb.ListFlashQueriesResponse(queries=queries)


async def watch_answers(
    request: pb.WatchAnswersRequest, call: Call
) -> AsyncIterator[pb.FreshAnswer]:
    """Yield fresh answers as they come, until the client or the server goes away."""
    name, cursor = call.session_id(request.session_id), request.cursor
    while True:
        change = call.change()  # also what happens while the client takes these answers
        fresh, cursor = call.service.answers(name, cursor)
        for one in fresh:
            yield pb.FreshAnswer(
                cursor=one.cursor,
                flash_id=one.flash_id,
                answer=messages.answer(one.answer, one.prompt_len),
            )
        await change
        call.check_served()
