"""From a status of gRPC back to what would have been raised in process."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

from jaxstate import errors
from jaxstate.serving import rpc_errors

_KINDS: dict[str, type[errors.JaxStateError]] = {
    rpc_errors.reason_of(kind): kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.JaxStateError)
}
_BY_CODE: dict[grpc.StatusCode, type[errors.JaxStateError]] = {
    **{code: kind for kind, code in reversed(rpc_errors.CODES) if kind in _KINDS.values()},
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityError,  # the message is too long
    grpc.StatusCode.CANCELLED: errors.CancelledError,
}
"""What gRPC itself says, or a server that does not name its error: by status alone."""


def error_of(failed: grpc.RpcError) -> errors.JaxStateError:
    """Return the error of a call that failed, with the details that the server gave.

    Its `field` is that of the request; `retry_after_s` says when to come again, if that may help;
    `applied` is told of a series of appends. Statuses that no error stands for are RemoteError.
    """
    assert isinstance(failed, grpc.Call | grpc.aio.AioRpcError)
    code, message = failed.code(), failed.details() or ""
    details = _details(failed)
    kind = _BY_CODE.get(code, errors.RemoteError)
    info = details.get("ErrorInfo")
    if isinstance(info, error_details_pb2.ErrorInfo) and info.domain == rpc_errors.DOMAIN:
        kind = _KINDS.get(info.reason, kind)
    if kind is errors.RemoteError or not message:
        message = f"{message or 'no reason was given'} ({code.name})"
    error = kind.__new__(kind, message)  # __init__ takes what only the server knows
    Exception.__init__(error, message)
    if isinstance(error, errors.UnavailableError):
        error.retry_after_s = 1.0
    _describe(error, details)
    return error


def _describe(error: errors.JaxStateError, details: dict[str, object]) -> None:
    for detail in details.values():
        match detail:
            case error_details_pb2.BadRequest(field_violations=[violation, *_]):
                error.field = violation.field
            case error_details_pb2.RetryInfo(retry_delay=delay):
                error.retry_after_s = delay.ToNanoseconds() / 1e9
            case error_details_pb2.ErrorInfo(metadata=metadata):
                error.applied = int(metadata.get("applied", 0))
                for name in ("session_id", "quota", "tenant"):
                    if name in metadata:
                        setattr(error, name, metadata[name])


def _details(failed: grpc.Call | grpc.aio.AioRpcError) -> dict[str, object]:
    """Return the google.rpc details of a failed call by their names."""
    metadata = dict(failed.trailing_metadata() or ())
    packed = metadata.get("grpc-status-details-bin", b"")
    assert isinstance(packed, bytes)
    found = {}
    for detail in status_pb2.Status.FromString(packed).details:
        name = detail.type_url.rpartition(".")[2]
        kind = getattr(error_details_pb2, name, None)
        if kind is not None and detail.Is(kind.DESCRIPTOR):
            found[name] = kind.FromString(detail.value)
    return found
