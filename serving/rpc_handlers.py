"""From the methods of jaxstate.proto to the functions that run them, with errors as statuses.

Handlers are made from the service's descriptor, and not by generated code, for its deserializers
raise: what cannot be read would be UNKNOWN to the client. Here it is INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from jaxstate.errors import InputError
from jaxstate.serving import (
    jaxstate_pb2,
    rpc_errors,
    rpc_flash,
    rpc_questions,
    rpc_server,
    rpc_sessions,
    rpc_snapshots,
)
from jaxstate.serving.rpc_calls import Backend, Call

logger = logging.getLogger(__name__)

SERVICE = jaxstate_pb2.DESCRIPTOR.services_by_name["JaxState"]
_MODULES = (rpc_sessions, rpc_snapshots, rpc_questions, rpc_flash, rpc_server)
_requests = itertools.count(1)


class Malformed:
    """Bytes that are no message."""

    def __init__(self, name: str):
        """Remember what was expected."""
        self.name = name


def generic_handler(backend: Backend) -> grpc.GenericRpcHandler:
    """Return the handler of all methods of the service."""
    handlers = {method.name: _handler(method, backend) for method in SERVICE.methods}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _handler(method: MethodDescriptor, backend: Backend) -> grpc.RpcMethodHandler:
    function = _function(method.name)
    request_class = message_factory.GetMessageClass(method.input_type)

    def deserialize(received: bytes) -> Any:
        try:
            return request_class.FromString(received)
        except DecodeError:
            return Malformed(method.input_type.full_name)

    async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with _answering(method.name, backend, context) as call:
            given = _well_formed(request) if not method.client_streaming else _each(request)
            return await function(given, call)

    async def streaming(request: Any, context: grpc.aio.ServicerContext) -> None:
        async with _answering(method.name, backend, context) as call:
            async with contextlib.aclosing(function(_well_formed(request), call)) as parts:
                async for part in parts:
                    await context.write(part)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return make(
        streaming if method.server_streaming else unary,
        request_deserializer=deserialize,
        response_serializer=lambda message: message.SerializeToString(),
    )


def _function(name: str) -> Callable[..., Any]:
    """Find what runs a method: WatchAnswers is watch_answers of one of the modules."""
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return next(getattr(module, snake) for module in _MODULES if hasattr(module, snake))


def _well_formed(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise InputError(f"expected a message of {request.name}, got bytes that are none")
    return request


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _well_formed(request)


@contextlib.asynccontextmanager
async def _answering(
    method: str, backend: Backend, context: grpc.aio.ServicerContext
) -> AsyncIterator[Call]:
    """Admit a call and turn what it raises into its status."""
    request_id = f"{next(_requests)}"
    backend.num_calls += 1
    call = None
    try:
        call = Call(backend, context)
        with backend.access.under_way(call.tenant) if backend.access else contextlib.nullcontext():
            yield call
    except asyncio.CancelledError:
        raise
    except Exception as error:
        status = rpc_errors.status_of(error, request_id, call.tenant if call else "")
        if status.code == grpc.StatusCode.INTERNAL.value[0]:
            logger.exception("request %s: %s failed", request_id, method)
        await context.abort(
            rpc_errors.code_of(error),
            status.message,
            rpc_errors.trailing_metadata(error, status),
        )
    finally:
        backend.num_calls -= 1
