"""The streaming-market workload: hourly candles arrive, a question is asked about them.

    python bench/bench_market.py [--peers DIR] [--quick] [--out FILE]

Ten rounds append 14 candles (about 560 tokens) and ask one question for 4 greedy tokens, while the
context grows from 2.2k to 7.2k tokens. With --peers the same is asked of other engines in the same
run, one after another within each round; bench/README.md says what every arm and bar means.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time

import common
import engine_checks
import market_bars
import market_run
from common import Report

from jaxstate import config as config_module
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.serving import market

MODEL = "smollm2-135m"
QUICK_ROUNDS = 2
QUICK_TOKENS = (1, 16, 24, 32, 512)
FLOOR_CELLS = 1024  # that an attention product of the floors reads at once


def engine_config(quick: bool) -> EngineConfig:
    """Sizes for a session of 7.2k tokens and the same context once more beside it."""
    shapes = config_module.DEFAULT_STEP_SHAPES
    if quick:
        shapes = tuple(shape for shape in shapes if shape.num_tokens in QUICK_TOKENS)
    return EngineConfig(
        num_pages=288, page_size=64, context_len=7680, evict_quantum=512, step_shapes=shapes
    )


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="The streaming-market benchmark.")
    parser.add_argument("--peers", type=pathlib.Path, help="directory made by peers/setup.sh")
    parser.add_argument("--quick", action="store_true", help="two rounds, few bars, one minute")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    parser.add_argument("--model", default=MODEL, help=f"name or path, {MODEL} if not given")
    parser.add_argument("--compile-probe", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile_probe:
        found = engine_checks.compile_probe(args.model, engine_config(False), args.compile_probe)
        print(json.dumps(found))
        return
    command = "python bench/bench_market.py"
    command += " --peers DIR" if args.peers else ""
    command += " --quick" if args.quick else ""
    report = Report("market", command=command, quick=args.quick, path=args.out)
    bench(args.model, args.peers, args.quick, report)
    report.table()


def bench(model_name: str, directory: pathlib.Path | None, quick: bool, report: Report) -> None:
    """Run everything, in an order that keeps the memory small and the timings undisturbed."""
    began = time.perf_counter()
    loaded = loading.load(sources.resolve(model_name))
    workload = market.tokenize(loaded.tokenizer)
    config = engine_config(quick)
    compiled = common.CompileCount()
    common.note("measuring the machine")
    longest = max(map(len, workload.questions))
    floors = common.measure_floors(loaded.config, longest, FLOOR_CELLS)
    report.line(arm="machine", **common.machine_facts(), **dataclasses.asdict(floors))

    def progress(done: int, total: int, name: str, seconds: float) -> None:
        common.note(f"compiled {done}/{total} {name} in {seconds:.1f} s")

    started = time.perf_counter()
    engine = Engine(loaded.params, loaded.config, config, progress=progress)
    report.line(
        arm="engine", model=loaded.name, fingerprint=loaded.fingerprint, dtype="float32",
        config=dataclasses.asdict(engine.executor.config),
        attention=engine.executor.implementation, executables=engine.executor.num_executables,
        ready_s=time.perf_counter() - started,
    )
    ready = compiled.count
    record = engine_checks.RECORDS / f"{MODEL}.json"
    engine_checks.parity(engine, report, bar="parity.smollm2", record=record)
    peers = market_run.start_peers(directory, report) if directory else {}
    for peer in peers.values():
        peer.append(list(workload.start))
        peer.warm()
    session = market_run.OurSession(engine, workload.start)
    ours = market_run.Arm(
        name="computed", ask=session.ask, repeats=market_run.REPEATS,
        prepare=lambda new: session.append(new) if new else None,
    )
    run = market_run.Run(
        engine=engine, workload=workload, session=session, peers=peers,
        arms=[ours, *market_run.peer_arms(peers)], report=report,
        load=common.OtherLoad(lambda: [peer.pid for peer in peers.values()]),
    )
    rounds = QUICK_ROUNDS if quick else market.ROUNDS
    for round_idx in range(rounds):
        market_run.run_round(run, round_idx)
        if not quick:
            market_run.ask_for_slope(run, round_idx)
    if not quick:
        market_run.ask_without_reuse(run, rounds - 1)
        before = compiled.count
        floors = floors.best(common.measure_floors(loaded.config, longest, FLOOR_CELLS))
        report.line(arm="machine", best_of=2, **dataclasses.asdict(floors))
        ready += compiled.count - before  # the floors' own programs do not count
    market_bars.market_bars(run, floors, quick)
    market_bars.micro_bars(run, quick)
    engine_checks.fork(engine, session.session_id, report)
    for peer in peers.values():
        peer.close()
    after_ready = compiled.count - ready
    executables = engine.executor.num_executables
    report.bar(
        "compile.count", executables, engine_checks.EXECUTABLES,
        unit="executables, none compiled after ready", n=1, sound=after_ready == 0,
        executables=executables, compiled_after_ready=after_ready,
    )
    engine_checks.memory_cycles(report)
    if quick:
        for name, limit in (
            ("compile.cold_s", engine_checks.COLD), ("compile.warm_s", engine_checks.WARM),
        ):
            report.no_bar(name, limit, unit="s until ready", reason=market_bars.QUICK)
    else:
        del engine, run, session, ours
        engine_checks.compile_times(pathlib.Path(__file__).resolve(), model_name, report)
    report.line(arm="done", wall_s=time.perf_counter() - began)


if __name__ == "__main__":
    main()
