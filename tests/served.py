"""`jaxstate serve` in a process of its own, on a tiny real model."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import command_line
import grpc
import grpc_service

from jaxstate.serving import jaxstate_pb2_grpc

WAIT_S = 120
PROGRAM = "import sys; from jaxstate.serving import cli; sys.exit(cli.main())"
SMALL = ("--max-model-len", 16, "--kv-cells", 512, "--page-size", 8)


def write_model(directory: pathlib.Path) -> pathlib.Path:
    return command_line.write_tiny_gguf(
        directory / "tiny.gguf", max_positions=128, chat_template=grpc_service.TEMPLATE
    )


@dataclasses.dataclass(kw_only=True)
class Serving:
    """A process and where it serves."""

    process: subprocess.Popen
    log: pathlib.Path
    ready: str = ""

    @property
    def port(self) -> int:
        return int(re.findall(r":(\d+)", self.ready)[0])

    @property
    def page_port(self) -> int:
        return int(re.findall(r":(\d+)", self.ready)[1])

    def wait_for_log(self, text: str) -> str:
        """Wait until the process has said something on stderr; return all that it has said."""
        until = time.monotonic() + WAIT_S
        while text not in (said := self.log.read_text()):
            assert time.monotonic() < until and self.process.poll() is None, said
            time.sleep(0.01)
        return said

    @contextlib.contextmanager
    def connected(self) -> Iterator[tuple[grpc.Channel, jaxstate_pb2_grpc.JaxStateStub]]:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield channel, jaxstate_pb2_grpc.JaxStateStub(channel)


@contextlib.contextmanager
def started(log: pathlib.Path, model: object, *arguments: object) -> Iterator[Serving]:
    """Start a server; killed at the end if it has not ended by itself."""
    command = [sys.executable, "-c", PROGRAM, "serve", model, *SMALL, *arguments]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    with process:
        try:
            yield Serving(process=process, log=log)
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def ready(log: pathlib.Path, model: object, *arguments: object) -> Iterator[Serving]:
    """Start a server on free ports and wait until it serves."""
    with started(log, model, "--port", 0, "--metrics-port", 0, *arguments) as serving:
        assert serving.process.stdout is not None
        serving.ready = serving.process.stdout.readline()
        assert serving.ready.startswith("ready: "), log.read_text()
        yield serving
