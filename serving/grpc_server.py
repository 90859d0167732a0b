"""The gRPC server: bound before the model is there, drained before it goes.

server = GrpcServer(ServerConfig(port=50051))
await server.start()                     # bound; health says NOT_SERVING
server.open(Served(service=…, tokenizer=…, name=…))
…
await server.stop()                      # calls under way end first
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxstate.serving import rpc_handlers
from jaxstate.serving.auth import Access
from jaxstate.serving.rpc_calls import Backend, Served

logger = logging.getLogger(__name__)

MIN_PING_S = 10

_Status = health_pb2.HealthCheckResponse.ServingStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how to serve.

    Attributes:
      host: address or name to bind; other machines reach nothing on the default.
      port: 0 = any that is free.
      max_message_bytes: largest message either way; larger ones get RESOURCE_EXHAUSTED.
      grace_s: how long calls under way may go on when the server stops.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message_bytes: int = 16 << 20
    grace_s: float = 30.0

    def __post_init__(self):
        """Check ranges."""
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: expected 0 to 65535, got {self.port}")
        if self.max_message_bytes < 1 << 10:
            raise ValueError(
                f"max_message_bytes: expected at least 1024, got {self.max_message_bytes}"
            )
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s: expected 0 or more, got {self.grace_s}")


class GrpcServer:
    """Serves a LocalService; all of it runs in one event loop.

    Health is told to everybody, since probes have no tokens, and so is what .proto files say, by
    reflection; both know nothing of tenants.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        access: Access | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ):
        """Made within the event loop.

        Args:
          access: who may call; None = whoever reaches it, all as one tenant.
          credentials: for TLS; None = none.
        """
        self._config = config
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        self._backend = Backend(self._note_lost, access)
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),  # a port that is taken is taken
                # Clients that only listen may ask whether it is still there.
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_S * 1000),
            )
        )
        self._server.add_generic_rpc_handlers((rpc_handlers.generic_handler(self._backend),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (rpc_handlers.SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self) -> int:
        """Bind and answer health checks; returns the port.

        Raises:
          RuntimeError: the port is taken, or the host is none of this machine.
        """
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        if self._credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        await self._set_health(_Status.NOT_SERVING)
        await self._server.start()
        logger.info("bound %s:%d", self._config.host, port)
        return port

    async def open(self, served: Served) -> None:
        """Answer calls from now on."""
        self._backend.open(served)
        await self._set_health(_Status.SERVING)

    async def stop(self) -> None:
        """Refuse new calls, let those under way end, cancel what then is left, and unbind.

        The service goes on; stopped twice is stopped.
        """
        await self._health.enter_graceful_shutdown()
        self._backend.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.grace_s
        while self._backend.num_calls and loop.time() < until:
            await asyncio.sleep(0.02)
        await self._server.stop(0)
        self._backend.close()

    async def wait_until_stopped(self) -> None:
        """Return when it has been stopped."""
        await self._server.wait_for_termination()

    def _note_lost(self) -> None:
        """Say that nothing is served any more."""
        self._losing = asyncio.ensure_future(self._set_health(_Status.NOT_SERVING))

    async def _set_health(self, status: _Status) -> None:
        for name in ("", rpc_handlers.SERVICE.full_name):
            await self._health.set(name, status)
