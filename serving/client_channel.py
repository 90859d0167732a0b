"""How a client reaches a server: channel, credentials, and what is tried again."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import grpc

from jaxstate.errors import InputError
from jaxstate.serving import jaxstate_pb2, ports

SERVICE = jaxstate_pb2.DESCRIPTOR.services_by_name["JaxState"].full_name
MAX_MESSAGE_BYTES = 16 << 20

_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 30, 10
# Reading, declaring twice what is declared, and durable verbs, which are numbered. Questions may be
# asked again before their first part has come; a turn that is committed goes a way of its own.
_ANY_TIME = (
    "GetSession", "ListSessions", "ListSnapshots", "Append", "AppendStream", "Update", "Rollback",
    "Query", "Generate", "Register", "ListFlashQueries", "Advance", "Declare", "Tokenize",
    "Detokenize", "RenderTemplate", "GetModelInfo", "GetStats",
)  # fmt: skip
_IF_REFUSED = ("CreateSession", "Fork", "Snapshot", "Restore")  # nothing came of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """Encryption: who is trusted, and who one is.

    Attributes:
      ca: PEM file of the authorities that the server's certificate has to come from; None = those
        that gRPC trusts.
      cert, key: PEM files of one's own certificate, where the server asks for one.
      server_name: name in the server's certificate, if it is not the host of the address.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self):
        """Refuse half a certificate."""
        if (self.cert is None) != (self.key is None):
            raise InputError("tls: expected a certificate and its key, got one of them alone")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
          OSError: one cannot be read.
        """
        ca, cert, key = (
            None if path is None else pathlib.Path(path).read_bytes()
            for path in (self.ca, self.cert, self.key)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server and how to speak to it; see Client.

    Attributes:
      address: "host:port", or any name gRPC resolves.
    """

    address: str
    token: str | None = None
    tls: Tls | None = None
    timeout_s: float | None = None
    retry: bool = True
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self):
        """Refuse to send a token that cannot be sent, or where others can read it.

        Raises:
          InputError: a token that is no line of printable ASCII, or one without TLS to another
            machine; it is not in the message.
        """
        if self.token is not None and not re.fullmatch("[ -~]*", self.token):
            raise InputError(
                "token: expected one line of printable ASCII, got line breaks or other characters "
                "in it; pass the token alone, as `jaxstate token` printed it"
            )
        host = self.address.removeprefix("dns:").strip("/").rpartition(":")[0].strip("[]")
        is_local = self.address.startswith("unix:") or ports.is_loopback(host)
        if self.token is not None and self.tls is None and not is_local:
            raise InputError(
                f"token: expected tls to {self.address}, got none, so that others on the way could "
                "read it; pass tls=Tls(ca=…)"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def open(self, api: Any, *, retry: bool) -> Any:
        """Return a channel.

        Args:
          api: grpc or grpc.aio.
          retry: what may be tried again is.
        """
        options = _options(self, retry=retry)
        if self.tls is None:
            return api.insecure_channel(self.address, options)
        return api.secure_channel(self.address, self.tls.credentials(), options)


def _options(target: Target, *, retry: bool) -> list[tuple[str, Any]]:
    options = [
        ("grpc.max_receive_message_length", target.max_message_bytes),
        ("grpc.max_send_message_length", target.max_message_bytes),
        # A connection that is gone without a word is noticed while something is awaited.
        ("grpc.keepalive_time_ms", _KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnect about as soon as a server is back.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5000),
        ("grpc.enable_retries", int(retry)),
        # Answers are read by whoever waits for them, not by one more thread: 0.5 ms less of each.
        ("SingleThreadedUnaryStream", 1),
    ]
    if retry:
        options += [
            ("grpc.service_config", service_config()),
            ("grpc.per_rpc_retry_buffer_size", target.max_message_bytes),
        ]
    if target.tls is not None and target.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", target.tls.server_name))
    return options


def service_config() -> str:
    """Return what is tried again, as gRPC's service config (JSON).

    How long to wait the server says with the refusal; else it doubles and more from 0.2 s.
    """
    return json.dumps(
        {
            "methodConfig": [
                _method_config(_ANY_TIME, ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]),
                _method_config(_IF_REFUSED, ["RESOURCE_EXHAUSTED"]),
            ]
        }
    )


def _method_config(methods: tuple[str, ...], codes: list[str]) -> dict[str, Any]:
    return {
        "name": [{"service": SERVICE, "method": method} for method in methods],
        "retryPolicy": {
            "maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s",
            "backoffMultiplier": 3, "retryableStatusCodes": codes,
        },
    }  # fmt: skip
