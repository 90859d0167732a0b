"""What went wrong, as a gRPC status whose details name the field and say when to come again."""

from __future__ import annotations

import re
from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from jaxstate import errors
from jaxstate.serving import tenants

_ComeAgain = (
    errors.BusyError
    | errors.PoolFullError
    | errors.PoolLostError
    | errors.QuotaError
    | errors.UnavailableError
)
DOMAIN = "jaxstate.v1"
_LONGEST = 1000  # bytes of a message: they travel in headers, as many as three for one

CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (errors.UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownQuestionError, grpc.StatusCode.NOT_FOUND),
    (errors.SessionExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ConflictError, grpc.StatusCode.ABORTED),
    (errors.SessionError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.PoolFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CapacityError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.QuotaError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.DeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.PoolLostError, grpc.StatusCode.UNAVAILABLE),
    (errors.ExpiredError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ClosedError, grpc.StatusCode.UNAVAILABLE),
    (errors.CancelledError, grpc.StatusCode.ABORTED),  # by somebody else: its session was closed
    (errors.CursorError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.UnknownSnapshotError, grpc.StatusCode.NOT_FOUND),
    (errors.SnapshotExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.SnapshotSpaceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ForeignSnapshotError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SnapshotError, grpc.StatusCode.DATA_LOSS),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
)
"""By class, subclasses first."""

_FIELDS: Mapping[str, str] = {
    "frozen": "prefix",
    "append": "prompt",
    "update": "prompt",
    "rollback": "tokens",
    "question": "question.prompt",
    "choices": "question.choices",
    "max_new_tokens": "question.max_new_tokens",
    "logit_bias and eos_ids": "question.sampling.logit_bias",
    "entry": "header.prompt",
    "header": "header.prompt",
    "eos_ids": "header.eos_ids",
    "slot_ids": "header.slot_ids",
    **{
        name: f"question.sampling.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias")
    },
    **{name: f"question.{name}" for name in ("json_schema", "regex", "grammar")},
}
"""What verbs call their arguments, and where these are in a message; others have the same name."""


class SeriesError(errors.JaxStateError):
    """An append of a series failed behind others that were applied."""

    def __init__(self, cause: BaseException, *, applied: int, version: int):
        """Take the cause's message and status."""
        super().__init__(f"{_said(cause)}; {applied} appends before it were applied")
        self.cause = cause
        self.applied = applied
        self.version = version


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status of an error; INTERNAL for what nobody meant to raise."""
    if isinstance(error, SeriesError):
        return code_of(error.cause)
    for kind, code in CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def status_of(error: BaseException, request_id: str, tenant: str = "") -> status_pb2.Status:
    """Return the whole status of an error.

    Args:
      request_id: under which the server's log says more; told where that is worth reading.
      tenant: who is told; sessions are called what he calls them.
    """
    code = code_of(error)
    internal = code is grpc.StatusCode.INTERNAL
    message = _clipped(
        f"request {request_id} failed; the server's log says why"
        if internal
        else tenants.shown(tenant, _said(error))
    )
    return status_pb2.Status(
        code=code.value[0],
        message=message,
        details=[
            _packed(detail) for detail in _details(error, message, internal, request_id, tenant)
        ],
    )


def _said(error: BaseException) -> str:
    """Return what a client may read: not which sessions are open nor of files."""
    if isinstance(error, errors.UnknownSessionError):
        return f"session {error.session_id} is unknown or closed; see ListSessions"
    has_failed = isinstance(error, errors.ClosedError) and error.__cause__ is not None
    if has_failed or isinstance(error, errors.JournalError):
        return "the service has ended by a failure, which is in the server's log; come again later"
    return str(error)


def trailing_metadata(
    error: BaseException, status: status_pb2.Status
) -> tuple[tuple[str, str | bytes], ...]:
    """Return what goes behind a refused call: its status, and for clients that retry, when."""
    metadata: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString())
    ]
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(int(retry_after_s * 1e3))))
    elif code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED:
        metadata.append(("grpc-retry-pushback-ms", "-1"))  # it will not help
    return tuple(metadata)


def reason_of(kind: type[BaseException]) -> str:
    """Return what ErrorInfo calls a class of errors: POOL_FULL for PoolFullError."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).upper()


def _details(
    error: BaseException, message: str, internal: bool, request_id: str, tenant: str
):  # fmt: skip
    if internal:
        yield error_details_pb2.RequestInfo(request_id=request_id)
    metadata = {}
    if isinstance(error, SeriesError):
        metadata = {"applied": str(error.applied), "version": str(error.version)}
        error = error.cause
    if isinstance(error, errors.UnknownSessionError):
        name = tenants.shown(tenant, f"session {error.session_id}").removeprefix("session ")
        metadata["session_id"] = _clipped(name)
    if isinstance(error, errors.QuotaError):
        metadata |= {"quota": error.quota, "tenant": error.tenant}
    if isinstance(error, errors.JaxStateError):
        reason = reason_of(type(error))
        yield error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    if isinstance(error, errors.InputError):
        field, description = _field(message)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=description
        )
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, errors.QuotaError):
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{error.tenant}", description=message
        )
        yield error_details_pb2.QuotaFailure(violations=[violation])
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _retry_after_s(error: BaseException) -> float | None:
    """Return when what was refused may come again; None = that will not help."""
    if isinstance(error, SeriesError):
        error = error.cause
    if isinstance(error, _ComeAgain):
        return error.retry_after_s
    return None


def _field(message: str) -> tuple[str, str]:
    """Split "name: what is wrong with it"; the name is "" if the message has none."""
    match = re.match(r"([a-z_]+(?: and [a-z_]+)?(?:[.\[][a-z_0-9.\[\]]+)?): ", message)
    if match is None:
        return "", message
    return _FIELDS.get(match[1], match[1]), message[match.end() :]


def _clipped(text: str) -> str:
    encoded = text.encode()
    if len(encoded) <= _LONGEST:
        return text
    return encoded[: _LONGEST - len("…".encode())].decode(errors="ignore") + "…"


def _packed(message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
