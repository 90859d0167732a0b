"""Many clients of one server for some minutes, and whether anything went wrong or stayed behind."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import common
import grpc.aio
from served import CALL_S, LARGEST, LOCALHOST, Server, serving
from service_clients import ANSWER, Client, Given, Pace, Tally

from jaxstate.engine import Engine
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

CLIENTS = 64
BUSY, STEER_S = 0.7, 5.0  # share of the time in which steps run
SIZES = ("--max-model-len", 1024, "--kv-cells", 40_960, "--host-bytes", 1 << 29)
PROBE = pathlib.Path(__file__).with_name("service_probe.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soaked:
    """What came of it.

    Attributes:
      busy: share of the time in which steps ran.
      left: sessions and cells that were not given back, by name; empty if none.
      resident_mib: of the server, one a second.
      flash_ms: what a client of its own, who asked a registered question, waited each time.
    """

    tally: Tally
    busy: float
    left: dict[str, float]
    resident_mib: Sequence[float]
    flash_ms: Sequence[float]

    @property
    def growth(self) -> float:
        """Resident memory of the last quarter over that of the second one, minus one."""
        quarter = len(self.resident_mib) // 4
        early = sorted(self.resident_mib[quarter : 2 * quarter])
        late = sorted(self.resident_mib[-quarter:])
        return late[len(late) // 2] / early[len(early) // 2] - 1


def soak(
    model: object, vocab_size: int, directory: pathlib.Path, *, seconds: float, seed: int
) -> Soaked:
    """Let clients call a server for some seconds."""
    with serving(model, *SIZES, log=directory / "log") as server:
        over = threading.Event()
        memory: list[float] = []
        watch = threading.Thread(target=_watch_memory, args=(server.pid, memory, over))
        address = f"{LOCALHOST}:{server.port}"
        probe = subprocess.Popen(
            [sys.executable, str(PROBE), address, str(seconds)], stdout=subprocess.PIPE, text=True
        )
        watch.start()
        try:
            tally, busy = asyncio.run(_run(server, address, vocab_size, seconds, seed))
        finally:
            over.set()
            said, _ = probe.communicate(timeout=CALL_S)
            watch.join()
        return Soaked(
            tally=tally, busy=busy, left=_left(server), resident_mib=memory,
            flash_ms=[float(word) for word in said.split()],
        )  # fmt: skip


async def _run(
    server: Server, address: str, vocab_size: int, seconds: float, seed: int
) -> tuple[Tally, float]:
    """Return what clients saw, and the share of the time in which steps ran."""
    tally, pace, over = Tally(), Pace(think_s=0.5), asyncio.Event()
    async with grpc.aio.insecure_channel(address, options=LARGEST) as channel:
        stub: Any = JaxStateStub(channel)
        clients = [
            Client(f"c{n}", stub, tally, vocab_size=vocab_size, seed=seed * 1000 + n)
            for n in range(CLIENTS)
        ]
        tasks = [asyncio.create_task(client.run(pace, over)) for client in clients]
        began, first = time.perf_counter(), await _busy_seconds(stub)
        at, before = began, first
        while (now := time.perf_counter()) < began + seconds:
            await asyncio.sleep(min(STEER_S, began + seconds - now))
            ran = await _busy_seconds(stub)
            share = max((ran - before) / (time.perf_counter() - at), 0.1)
            at, before = time.perf_counter(), ran
            pace.think_s *= (share / BUSY) ** 0.5
        busy = (before - first) / (at - began)
        over.set()
        await asyncio.gather(*tasks)
    return tally, busy


async def _busy_seconds(stub: Any) -> float:
    return (await stub.GetStats(pb.GetStatsRequest(), timeout=CALL_S)).busy_seconds


def _watch_memory(pid: int, memory: list[float], over: threading.Event) -> None:
    while not over.wait(1.0):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        memory.append(int(found[1]) / 1024)


def _left(server: Server) -> dict[str, float]:
    """Return what no session and no question has any more, and that is still there."""
    stats = server.stub.GetStats(pb.GetStatsRequest(), timeout=CALL_S)
    left = {"sessions": float(stats.sessions)}
    for name, value in server.metrics().items():
        if name.startswith("jaxstate:resident_cells") and 'owner="prefixes"' not in name:
            left[name] = value
    return {name: value for name, value in left.items() if value}


def compute_again(engine: Engine, given: Sequence[Given], count: int, seed: int) -> int:
    """Compute some of the answers again from their tokens; returns how many differ."""
    chosen = random.Random(seed).sample(list(given), min(count, len(given)))
    different = 0
    for one in chosen:
        session = engine.create(list(one.context))
        again = engine.query(session, list(one.question), max_new_tokens=ANSWER, top_logprobs=2)
        engine.close(session)
        sure = common.sure_len(again)
        different += list(one.answer.token_ids[:sure]) != list(again.token_ids[:sure])
    return different
