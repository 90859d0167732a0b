"""A server that is killed again and again while clients write."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import threading
import time

from recovery_writers import PREFIX, Losses, Writer, check, compare
from served import Server, spawn

from jaxstate.engine import Engine

SESSIONS = 4
LONGEST_LIFE_S, START_S = 1.5, 3.0
SIZES = ("--max-model-len", 512, "--kv-cells", 4096)


@dataclasses.dataclass(kw_only=True)
class Killed:
    """What came of it.

    Attributes:
      kills: of them `at_start` before the server was ready.
      drains: ends in peace between them, which leave snapshots behind.
      acknowledged, asked: verbs.
      ready_s: from start to ready, with the sessions there, by start.
    """

    kills: int = 0
    at_start: int = 0
    drains: int = 0
    acknowledged: int = 0
    asked: int = 0
    ready_s: list[float] = dataclasses.field(default_factory=list)
    losses: Losses = dataclasses.field(default_factory=Losses)


def kill_again_and_again(
    model: object,
    vocab_size: int,
    engine: Engine,
    directory: pathlib.Path,
    *,
    kills: int,
    seed: int,
) -> Killed:
    """Run a server for up to some seconds, kill it, compare, and again; raises any other error."""
    rng = random.Random(seed)
    found = Killed()
    writers = [
        Writer(
            session=f"s{n}", prefix=[rng.randrange(vocab_size) for _ in range(PREFIX)],
            vocab_size=vocab_size,
        )
        for n in range(SESSIONS)
    ]  # fmt: skip
    arguments = (*SIZES, "--state-dir", directory / "state")
    log = directory / "log"
    first = True
    while found.kills < kills:
        if not first and rng.random() < 0.1:
            starting = spawn(model, *arguments, log=log)
            time.sleep(rng.uniform(0.2, START_S))
            starting.kill()
            starting.wait()
            found.kills += 1
            found.at_start += 1
        server = Server(model, *arguments, log=log)
        try:
            found.ready_s.append(server.ready_s)
            for writer in writers:
                if first:
                    writer.open(server.stub)
                check(writer, server.stub, found.losses)
                compare(writer, server.stub, engine, rng, found.losses)
            first = False
            over = threading.Event()
            threads = [
                threading.Thread(
                    target=writer.write, args=(server.stub, random.Random(rng.random()), over)
                )
                for writer in writers
            ]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0, LONGEST_LIFE_S))
            if rng.random() < 0.1:
                over.set()
                for thread in threads:
                    thread.join()
                server.stop()
                found.drains += 1
            else:
                server.kill()
                found.kills += 1
                for thread in threads:
                    thread.join()
        finally:
            server.process.kill()
        for writer in writers:
            if writer.failure is not None:
                raise writer.failure
    found.acknowledged = sum(writer.acknowledged for writer in writers)
    found.asked = sum(writer.asked for writer in writers)
    return found
