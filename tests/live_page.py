"""A client of the live page: plain HTTP, and server-sent events as a browser reads them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

WAIT_S = 60


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, dict(response.headers), response.read()
    connection.close()
    return found


def events(port: int, path: str = "/events") -> Iterator[dict]:
    """Yield what the page is told, until the server ends it; close it to go away."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for line in response:
            if line.strip():
                assert line.startswith(b"data: ")
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def until(stream: Iterator[dict], condition) -> dict:
    """Return the first event of which something is true."""
    return next(event for event in stream if condition(event))
