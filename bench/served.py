"""`jaxstate serve` in a process of its own: started, asked, killed, and started again."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

PROGRAM = "import sys; from jaxstate.serving import cli; sys.exit(cli.main())"
LOCALHOST = "127.0.0.1"
START_S, CALL_S = 600.0, 300.0
LARGEST = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]


def spawn(
    model: object, *arguments: object, log: pathlib.Path, trace: Sequence[object] = ()
) -> subprocess.Popen[str]:
    """Start a server on free ports; what it says goes behind what the log has.

    Args:
      trace: a command that runs it.
    """
    own = ["serve", model, "--port", 0, "--metrics-port", 0, *arguments]
    command = [*trace, sys.executable, "-c", PROGRAM, *own]
    with log.open("a") as stderr:
        return subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=stderr, text=True
        )


class Server:
    """One process; `ready_s` is what it took from being started to being ready."""

    def __init__(self, model: object, *arguments: object, log: pathlib.Path, **how: Any):
        """Start it, see spawn, and wait until it is ready.

        Raises:
          RuntimeError: it has ended; the message is the end of what it said.
        """
        self._log = log
        began = time.perf_counter()
        self.process = spawn(model, *arguments, log=log, **how)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready: "):
            self.status = self.process.wait(START_S)
            raise RuntimeError(self.said())
        self.ready_s = time.perf_counter() - began
        self.port, self._page_port = map(int, re.findall(r":(\d+)", line)[:2])
        self.channel = grpc.insecure_channel(f"{LOCALHOST}:{self.port}", options=LARGEST)
        self.stub = JaxStateStub(self.channel)

    @property
    def pid(self) -> int:
        """Of the server itself, also where another command runs it."""
        path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split()
        return int(children[0]) if children else self.process.pid

    def said(self) -> str:
        """Return the last thing it said."""
        return self._log.read_text().strip().splitlines()[-1]

    def metrics(self) -> dict[str, float]:
        """Return what it counts, by name with labels."""
        url = f"http://{LOCALHOST}:{self._page_port}/metrics"
        with urllib.request.urlopen(url, timeout=CALL_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def kill(self) -> None:
        """End it as a power cut would, but for what the system still writes."""
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def stop(self) -> None:
        """Let it drain."""
        self.channel.close()
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
            self.process.wait(START_S)


@contextlib.contextmanager
def serving(model: object, *arguments: object, log: pathlib.Path, **how: Any) -> Iterator[Server]:
    """Start a server and end it whatever happens."""
    server = Server(model, *arguments, log=log, **how)
    try:
        yield server
        server.stop()
    finally:
        if server.process.poll() is None:
            server.process.kill()


def tokens(ids: Sequence[int]) -> pb.Prompt:
    """Say token ids."""
    return pb.Prompt(tokens=pb.TokenIds(ids=ids))


def answer_of(stream: Any) -> pb.Answer:
    """Read a stream to its end."""
    return list(stream)[-1].answer
