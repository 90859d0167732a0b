"""A small web server: a page that shows a running service, and what Prometheus scrapes.

page = LivePage(host="127.0.0.1", port=50052)    # bound; says that the model is loading
page.open(service, "smollm2-135m")
…
page.close()

    /          one HTML file, which loads nothing else
    /events    what it shows, as server-sent events; ?tenant=NAME shows that tenant's sessions alone
    /metrics   see Exporter
"""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import importlib.resources
import json
import logging
import re
import socket
import socketserver
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from jaxstate.errors import ClosedError
from jaxstate.serving import live_state, ports, prometheus
from jaxstate.serving.auth import Access
from jaxstate.serving.live_feed import Feed
from jaxstate.serving.local_service import LocalService

logger = logging.getLogger(__name__)

MOST_VIEWERS = 32  # each holds a thread
_PATIENCE_S = 30.0  # with a client that neither sends nor takes


class LivePage:
    """Serves the page of one service, in threads of its own."""

    def __init__(self, *, host: str, port: int):
        """Bind and say that nothing is served yet.

        Args:
          host: address or name; on one of the loopback, other names are answered by 403, so that
            no page of the web can have a browser read this one under a name of its own.
          port: 0 = any that is free.
        Raises:
          PortTakenError: somebody has it.
          OSError: it is no address of this machine.
        """
        self.service: LocalService | None = None
        self.feed: Feed | None = None
        self.exporter: prometheus.Exporter | None = None
        self.model_name = ""
        self.phase = "loading"
        self.is_closed = False
        self.opened = threading.Event()
        self.viewers = threading.Semaphore(MOST_VIEWERS)
        self.hosts = None
        if ports.is_loopback(host):
            self.hosts = {"localhost", "127.0.0.1", "::1", host}
        ports.check_free(host, port, "metrics-port")
        self._server = _Server(host, port, self)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="jaxstate-page", daemon=True
        )
        self._thread.start()

    def open(self, service: LocalService, model_name: str, access: Access | None = None) -> None:
        """Show a service from now on; `access`: see Exporter."""
        self.model_name = model_name
        self.exporter = prometheus.Exporter(service, model_name, access)
        self.feed = Feed(service)
        self.service = service
        self.phase = "ready"
        self.opened.set()

    def drain(self) -> None:
        """Say that the server is going down."""
        self.phase = "draining"

    def close(self) -> None:
        """End what is being watched, and unbind; the service goes on."""
        self.is_closed = True
        self.opened.set()
        if self.feed and self.exporter:
            self.feed.close()
            self.exporter.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def states(self, tenant: str | None) -> Iterator[dict[str, Any]]:
        """Yield what the page is to show, see live_state.state, until the service ends."""
        while not self.opened.is_set():
            yield {"state": self.phase, "tenant": tenant, "sessions": []}
            self.opened.wait(1.0)
        if self.is_closed or self.feed is None or self.service is None:
            return
        text = functools.lru_cache(4096)(self.service.text)
        for overview in self.feed.overviews():
            found = live_state.state(overview, lambda ids: text(tuple(ids)), tenant)
            yield {"state": self.phase, "model": self.model_name, **found}


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Like http.server's, which asks for the machine's name in the network first."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, page: LivePage):
        self.page = page
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a client did not wait for quietly, a fault of ours with its traceback."""
        if isinstance(sys.exception(), OSError):
            logger.debug("%s went away", client_address)
        else:
            logger.exception("a request of %s failed", client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "jaxstate", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        """Answer."""
        page = self.server.page
        url = urllib.parse.urlsplit(self.path)
        host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if page.hosts is not None and host not in page.hosts:
            self._say(403, f"expected a name of the loopback, got {host}")
        elif url.path == "/":
            body, policy = _html()
            self._send(200, "text/html; charset=utf-8", body, policy)
        elif url.path == "/metrics":
            self._metrics(page)
        elif url.path == "/events":
            asked = urllib.parse.parse_qs(url.query, keep_blank_values=True).get("tenant")
            self._events(page, asked[0] if asked else None)
        else:
            self._say(404, "expected /, /events or /metrics")

    def _metrics(self, page: LivePage) -> None:
        if page.exporter is None:
            self._say(503, "the model is not loaded yet")
            return
        try:
            body = page.exporter.exposition()
        except ClosedError as error:
            self._say(503, str(error))
            return
        self._send(200, prometheus.CONTENT_TYPE, body)

    def _events(self, page: LivePage, tenant: str | None) -> None:
        if not page.viewers.acquire(blocking=False):
            self._say(503, f"{MOST_VIEWERS} watch already, which is the limit")
            return
        try:
            self.close_connection = True  # it has no length
            self._begin(200, "text/event-stream; charset=utf-8")
            self.send_header("Connection", "close")
            self.end_headers()
            for state in page.states(tenant):
                self.wfile.write(f"data: {json.dumps(state)}\n\n".encode())
        finally:
            page.viewers.release()

    def _say(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes, policy: str = "") -> None:
        self._begin(status, content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy or "default-src 'none'")
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: int, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests out of stderr."""
        logger.debug("%s: " + format, self.client_address[0], *args)


@functools.cache
def _html() -> tuple[bytes, str]:
    """Return the page and a policy that lets a browser run its own script and nothing else."""
    body = importlib.resources.files("jaxstate.serving").joinpath("data/live.html").read_bytes()
    allowed = {
        kind: base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        for kind in ("script", "style")
        if (found := re.search(rf"<{kind}>(.*?)</{kind}>".encode(), body, re.DOTALL))
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; "
        f"style-src 'sha256-{allowed['style']}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return body, policy
