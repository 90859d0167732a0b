"""Requests of every method with values that somebody may try, and bytes that are no message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxstate.serving import jaxstate_pb2

SERVICE = jaxstate_pb2.DESCRIPTOR.services_by_name["JaxState"]
METHODS: Sequence[MethodDescriptor] = list(SERVICE.methods)
SESSION = "s"  # the one that most of them name
_DEEPEST = 6
_VALUES: dict[int, Sequence[Any]] = {
    FieldDescriptor.CPPTYPE_STRING: ("", SESSION, "\0", "ü" * 300, "<|im_start|>", "[[[["),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 40, 96, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 0.05, -1.0, 1e308, float("inf"), float("nan")),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 77, -1),
}


def message(method: MethodDescriptor, rng: random.Random) -> Message:
    """Return a well-formed request."""
    return _fill(GetMessageClass(method.input_type)(), rng, 0)


def call(
    channel: grpc.Channel,
    method: MethodDescriptor,
    requests: Sequence[Message | bytes],
    *,
    timeout_s: float,
) -> None:
    """Make a call and read what comes; of a method that takes one request, with the first.

    Raises:
      grpc.RpcError: its status.
    """
    kinds = {True: "stream", False: "unary"}
    kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
    make: Callable[..., Callable[..., Any]] = getattr(channel, kind)
    function = make(
        f"/{SERVICE.full_name}/{method.name}",
        lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
        GetMessageClass(method.output_type).FromString,
    )
    answer = function(iter(requests) if method.client_streaming else requests[0], timeout=timeout_s)
    if method.server_streaming:
        for _ in answer:
            pass


def _fill(given: Message, rng: random.Random, depth: int) -> Message:
    for field in given.DESCRIPTOR.fields:
        if field.name == "session_id" and rng.random() < 0.8:
            setattr(given, field.name, SESSION)
        elif rng.random() < 0.35 or depth > _DEEPEST:
            continue
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(given, field.name)[rng.choice((0, 5, 2**32 - 1))] = rng.choice((0.0, 1e308))
        elif field.message_type is not None:
            value = getattr(given, field.name)
            _fill(value.add() if _is_repeated(value) else value, rng, depth + 1)
        else:
            values = _VALUES[field.cpp_type]
            if _is_repeated(getattr(given, field.name)):
                getattr(given, field.name).extend(rng.choices(values, k=rng.randint(0, 4)))
            else:
                setattr(given, field.name, rng.choice(values))
    return given


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "extend")
