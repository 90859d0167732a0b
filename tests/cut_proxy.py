"""A proxy in front of a server, whose connections can be held up and cut like a bad network's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards bytes to a port of this machine, and back unless they are held."""

    def __init__(self, target: int):
        self._target = target
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0

    def hold_answers(self) -> None:
        """Let nothing back to clients from now on."""
        self._passing.clear()

    def cut(self) -> None:
        """End all connections, with what was held, and let new ones through."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._passing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()  # the server is not there
                continue
            self.num_connections += 1
            self._sockets += [client, server]
            for source, sink, back in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, back), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                if back:
                    self._passing.wait()
                    if source not in self._sockets:
                        break  # held when it was cut
                sink.sendall(received)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def before(port: int) -> Iterator[Proxy]:
    """Run a proxy; its connections are cut at the end."""
    proxy = Proxy(port)
    threading.Thread(target=proxy._accept, daemon=True).start()
    yield proxy
    with contextlib.suppress(OSError):
        proxy._listener.shutdown(socket.SHUT_RDWR)
    proxy._listener.close()
    proxy.cut()
