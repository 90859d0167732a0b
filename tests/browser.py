"""Headless Chromium, told what to do over its debugging pipe; needs nothing but the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

WAIT_S = 60
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_EXEC = """
import fcntl, os, sys
commands, messages = (fcntl.fcntl(int(file), fcntl.F_DUPFD, 10) for file in sys.argv[1:3])
os.dup2(commands, 3)  # which it reads
os.dup2(messages, 4)  # which it writes
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page of a browser."""

    def __init__(self, commands: int, messages: int):
        self._commands, self._messages = commands, messages
        self._read = b""
        self._count = 0
        self._session: str | None = None
        self.problems: list[dict] = []  # exceptions, errors on the console, what was refused
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                received = os.read(self._messages, 1 << 20)
                assert received, "the browser has gone"
                self._read += received
            found, _, self._read = self._read.partition(b"\0")
            answer = json.loads(found)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(answer["params"])
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return what a script comes to in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until a script says yes."""
        until = time.monotonic() + WAIT_S
        while not self.evaluate(script):
            assert time.monotonic() < until, self.evaluate("document.body.innerText")
            time.sleep(0.05)

    def show(self, url: str, *, width: int = 1100, height: int = 700, scheme: str = "light"):
        """Load a page in a window of this size and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=False,
            deviceScaleFactor=1,
        )  # fmt: skip
        self.scheme(scheme)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState == 'complete'")

    def scheme(self, scheme: str) -> None:
        """Prefer light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: pathlib.Path) -> bytes:
        """Draw the page into a PNG and return its bytes."""
        found = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(found)
        return found


@contextlib.contextmanager
def opened(profile: pathlib.Path) -> Iterator[Page]:
    """Start a browser with an empty profile, if there is one."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: expected one of {', '.join(_NAMES)}")
    read_commands, commands = os.pipe()
    messages, write_messages = os.pipe()
    command = [
        sys.executable, "-ISc", _EXEC, str(read_commands), str(write_messages),
        found, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update",
        "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(read_commands, write_messages), stderr=subprocess.DEVNULL
    )
    os.close(read_commands)
    os.close(write_messages)
    with process:
        try:
            yield Page(commands, messages)
        finally:
            process.kill()
            os.close(commands)
            os.close(messages)
