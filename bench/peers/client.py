"""A peer engine in a process of its own, see worker.py."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

WORKER = pathlib.Path(__file__).with_name("worker.py")
MODEL_FILE = "smollm2-135m-f32.gguf"
ENGINES = ("llamacpp", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as the peer itself timed it."""

    first_token_ms: float
    total_ms: float
    answer_ids: list[int]
    tokens_forwarded: int


class Peer:
    """A worker process; one context, one prefix cache."""

    def __init__(self, directory: pathlib.Path, engine: str, *, threads: int):
        """Start the process and wait until its model is loaded.

        Args:
          directory: what setup.sh made.
          engine: one of ENGINES.
        Raises:
          RuntimeError: it did not start.
        """
        self.engine = engine
        python = directory / engine / "bin" / "python"
        command = [str(python), str(WORKER), engine, str(directory / MODEL_FILE)]
        try:
            self._process = subprocess.Popen(
                [*command, "--threads", str(threads)], text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            raise RuntimeError(
                f"{engine}: expected its environment at {directory}, got {error}; run "
                "bench/peers/setup.sh"
            ) from error
        self.version = self._reply()["ready"]

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def append(self, ids: list[int]) -> None:
        """Add tokens to the context; the peer computes nothing yet."""
        self._do(do="append", ids=ids)

    def warm(self) -> Asked:
        """Send a request for 1 token, so that the prefix cache holds the context, and no more."""
        return Asked(**self._do(do="warm"))

    def ask(self, ids: list[int], max_new_tokens: int, *, reuse: bool = True) -> Asked:
        """Ask a question about the context."""
        reply = self._do(do="ask", ids=ids, max_new_tokens=max_new_tokens, reuse=reuse)
        return Asked(**reply)

    def clear(self) -> None:
        """Forget context and cache."""
        self._do(do="clear")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _do(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; _reply says so
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.engine}: expected a reply, got the end of process {self.pid} with status "
                f"{self._process.wait()}; its last words are on stderr"
            )
        return json.loads(line)
