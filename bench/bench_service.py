"""A server over gRPC: many clients, wrong requests, and what the wire costs.

    python bench/bench_service.py [--quick] [--only soak|idle|stream|fuzz] [--out FILE]

`jaxstate serve` in a process of its own, on loopback, with the model of 1.1M parameters that was
trained for candles; clients run on the same processors. bench/README.md says what every bar means.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import common
import grpc
import hostile_messages
import numpy as np
import service_host
import service_probe
import service_soak
from common import Limit, Report
from served import CALL_S, LOCALHOST, serving, tokens

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

NONE = Limit(op="==", value=0)
FLASH, FLASH_P99, STREAM = (Limit(op="<=", value=value) for value in (2.0, 50.0, 0.5))
GROWTH = 0.05  # of resident memory, that still is flat
PARTS = ("soak", "idle", "stream", "fuzz")
STREAM_TOKENS = 128
MEANINGLESS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="A server over gRPC.")
    parser.add_argument("--quick", action="store_true", help="a minute instead of ten")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    parts = [args.only] if args.only else PARTS
    command = "python bench/bench_service.py" + (" --quick" if args.quick else "")
    command += f" --only {args.only}" if args.only else ""
    report = Report("service", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    with tempfile.TemporaryDirectory(prefix="jaxstate-bench-") as scratch:
        directory = pathlib.Path(scratch)
        if "idle" in parts:
            idle(report, directory, count=50 if args.quick else 1000)
        if "stream" in parts:
            stream(report, rounds=3 if args.quick else 30)
        if "soak" in parts:
            soak(
                loading.load(common.TASK_MODEL), report, directory,
                seconds=15 if args.quick else 180, samples=30 if args.quick else 400,
            )  # fmt: skip
        if "fuzz" in parts:
            fuzz(report, directory, messages=500 if args.quick else 10_000, raw=500)
    report.table()


def soak(
    model: LoadedModel,
    report: Report,
    directory: pathlib.Path,
    *,
    seconds: float,
    samples: int,
) -> None:
    """Many clients for some minutes, and one who asks a registered question meanwhile."""
    found = service_soak.soak(
        common.TASK_MODEL, model.config.vocab_size, directory, seconds=seconds, seed=0
    )
    config = EngineConfig(num_pages=32, page_size=64, context_len=1024, evict_quantum=64)
    engine = Engine(model.params, model.config, config)
    different = service_soak.compute_again(engine, found.tally.answers, samples, seed=0)
    tally = found.tally
    for text in tally.unexpected[:20]:
        common.note(f"unexpected: {text}")
    report.bar(
        "service.soak", different + len(tally.unexpected) + len(found.left), NONE,
        unit="wrong answers, wrong statuses, kinds of things left behind",
        n=sum(tally.calls.values()), sound=found.growth <= GROWTH and bool(tally.answers),
        clients=service_soak.CLIENTS, seconds=seconds, busy=found.busy, different=different,
        checked=min(samples, len(tally.answers)), answers=len(tally.answers),
        sources=dict(_sources(tally.answers)), calls=dict(tally.calls), ended=dict(tally.ended),
        unexpected=tally.unexpected[:20], left=found.left, memory_growth=found.growth,
        memory_mib=[min(found.resident_mib), max(found.resident_mib)],
    )  # fmt: skip
    report.bar(
        "flash.grpc_p99_ms", float(np.percentile(found.flash_ms, 99)), FLASH_P99, unit="ms",
        n=len(found.flash_ms), p50_ms=common.median(found.flash_ms), busy=found.busy,
    )  # fmt: skip


def _sources(answers: list) -> collections.Counter[str]:
    return collections.Counter(pb.Source.Name(one.answer.source) for one in answers)


def idle(report: Report, directory: pathlib.Path, *, count: int) -> None:
    """Ask a registered question on a server that does nothing else."""
    with serving(common.TASK_MODEL, log=directory / "log") as server:
        service_probe.prepare(server.stub)
        times = []
        for _ in range(count):
            took, answer = service_probe.ask(server.stub)
            assert answer.source == pb.SOURCE_FLASH, answer
            times.append(took)
    report.bar(
        "flash.grpc_ms", common.median(times), FLASH, unit="ms", n=count,
        p99_ms=float(np.percentile(times, 99)),
    )  # fmt: skip


def stream(report: Report, *, rounds: int) -> None:
    """Stream long answers over gRPC and in process, from the same engine, in turns."""
    program = pathlib.Path(service_host.__file__)
    process = subprocess.Popen(
        [sys.executable, str(program), str(common.TASK_MODEL)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        with grpc.insecure_channel(f"{LOCALHOST}:{port}") as channel:
            stub = JaxStateStub(channel)
            question = pb.Question(
                prompt=tokens(service_host.PROMPT), max_new_tokens=STREAM_TOKENS,
                ignore_model_eos=True,
            )  # fmt: skip
            request = pb.QueryRequest(
                session_id=service_host.SESSION, question=question, top_logprobs=0
            )
            wire, here = [], []
            for _ in range(rounds + 1):
                process.stdin.write(f"{STREAM_TOKENS}\n")
                process.stdin.flush()
                here.append(float(process.stdout.readline()))
                drawn = (
                    token
                    for part in stub.Query(request, timeout=CALL_S)
                    for token in part.delta.tokens
                )
                wire.append(service_host.between(drawn))
        process.stdin.close()
    extra = [
        (over - inside) / (STREAM_TOKENS - 1)
        for over, inside in list(zip(wire, here, strict=True))[1:]  # the first warms up
    ]
    report.bar(
        "stream.overhead_ms", common.median(extra), STREAM, unit="ms a token", n=rounds,
        in_process_ms=common.median(here[1:]) / (STREAM_TOKENS - 1),
        over_grpc_ms=common.median(wire[1:]) / (STREAM_TOKENS - 1),
    )  # fmt: skip


def fuzz(report: Report, directory: pathlib.Path, *, messages: int, raw: int) -> None:
    """Send what somebody may try; every status has a meaning, and the server lives on."""
    rng = random.Random(0)
    statuses: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    sizes = ("--max-model-len", 128, "--kv-cells", 2048)
    kept = ("--state-dir", directory / "state")
    with serving(common.TASK_MODEL, *sizes, *kept, log=directory / "log") as server:
        methods = hostile_messages.METHODS
        order = [False] * messages + [True] * raw
        rng.shuffle(order)
        began = time.perf_counter()
        for number, is_raw in enumerate(order):
            method = methods[number % len(methods)]
            if number % 50 == 0:
                _have_session(server.stub)
            if is_raw:
                requests = [rng.randbytes(rng.randint(1, 200))]
            else:
                requests = [hostile_messages.message(method, rng) for _ in range(2)]
            try:
                timeout_s = 0.1 if method.name == "WatchAnswers" else 5.0
                hostile_messages.call(server.channel, method, requests, timeout_s=timeout_s)
                statuses["OK"] += 1
            except grpc.RpcError as error:
                statuses[error.code().name] += 1
                if error.code() in MEANINGLESS:
                    bad.append(f"{method.name}: {error.details()}")
            if number % 2000 == 1999:
                common.note(f"fuzz: {number + 1} in {time.perf_counter() - began:.0f} s")
        is_alive = server.process.poll() is None
        before = _sessions(server.stub)
        server.kill()
    with serving(common.TASK_MODEL, *sizes, *kept, log=directory / "log") as server:
        after = _sessions(server.stub)
    for text in bad[:1]:
        common.note(f"fuzz: {text}\n{(directory / 'log').read_text()[-4000:]}")
    report.bar(
        "fuzz", len(bad), NONE, unit="UNKNOWN or INTERNAL", n=messages + raw,
        sound=is_alive and before == after, statuses=dict(statuses), bad=bad[:20],
        sessions=len(before), same_after_a_kill=before == after,
    )  # fmt: skip


def _sessions(stub: JaxStateStub) -> dict[str, tuple[int, int, int]]:
    """Return how all sessions stand."""
    listed = stub.ListSessions(pb.ListSessionsRequest(), timeout=CALL_S)
    assert not listed.next_page_token
    return {
        one.session_id: (one.version, one.context_tokens, one.flash_queries)
        for one in listed.sessions
    }


def _have_session(stub: JaxStateStub) -> None:
    """Open the session that most requests name, unless it is open."""
    request = pb.CreateSessionRequest(
        session_id=hostile_messages.SESSION, prefix=tokens([1 + n % 9 for n in range(12)])
    )
    try:
        stub.CreateSession(request, timeout=CALL_S)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise


if __name__ == "__main__":
    main()
