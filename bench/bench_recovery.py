"""A server that dies at any moment, on a disk that fails: is anything lost, doubled or wrong?

    python bench/bench_recovery.py [--quick] [--only kill|fsync|faults|restore] [--out FILE]

Over gRPC, `jaxstate serve` in a process of its own, on the model of 1.1M parameters that was
trained for candles; restoring on SmolLM2-135M. bench/README.md says what every bar means.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import tempfile

import common
import recovery_fsync
import recovery_restore
from common import Limit, Report
from recovery_faults import FaultRun
from recovery_kill import kill_again_and_again

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.models.config import DtypePolicy
from jaxstate.models.loaded_model import LoadedModel

NONE = Limit(op="==", value=0)
ALL = Limit(op="==", value=1.0)
RESTORE = Limit(op="<=", value=0.05)
PARTS = ("kill", "fsync", "faults", "restore")
SERVERS = 2  # that are killed at the same time, each on sessions of its own


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="A server that dies at any moment.")
    parser.add_argument("--quick", action="store_true", help="a minute instead of twenty")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    parts = [args.only] if args.only else PARTS
    command = "python bench/bench_recovery.py" + (" --quick" if args.quick else "")
    command += f" --only {args.only}" if args.only else ""
    report = Report("recovery", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    small = loading.load(common.TASK_MODEL)
    with tempfile.TemporaryDirectory(prefix="jaxstate-bench-") as scratch:
        directory = pathlib.Path(scratch)
        if "restore" in parts:
            restore(report, directory, rounds=1 if args.quick else 5)
        if "fsync" in parts:
            fsync(small, report, directory, appends=10 if args.quick else 200)
        if "faults" in parts:
            faults(small, report, directory, flips=2 if args.quick else 20)
        if "kill" in parts:
            kill(small, report, directory, kills=4 if args.quick else 200)
    report.table()


def _engine(model: LoadedModel) -> Engine:
    """Return what computes answers again."""
    config = EngineConfig(num_pages=32, page_size=64, context_len=512, evict_quantum=64)
    return Engine(model.params, model.config, config)


def kill(model: LoadedModel, report: Report, directory: pathlib.Path, *, kills: int) -> None:
    """Kill servers while clients write."""
    with concurrent.futures.ThreadPoolExecutor(SERVERS) as pool:
        runs = []
        for seed in range(SERVERS):
            (own := directory / f"kill-{seed}").mkdir()
            runs.append(
                pool.submit(
                    kill_again_and_again, common.TASK_MODEL, model.config.vocab_size,
                    _engine(model), own, kills=kills // SERVERS, seed=seed,
                )
            )  # fmt: skip
        found = [run.result() for run in runs]
    ready = [seconds for one in found for seconds in one.ready_s]
    losses = [one.losses for one in found]
    report.bar(
        "recovery.kill", sum(one.count for one in losses), NONE,
        unit="verbs lost or doubled, sessions corrupt", n=sum(one.kills for one in found),
        lost=sum(one.lost for one in losses), doubled=sum(one.doubled for one in losses),
        corrupt=sum(one.corrupt for one in losses), checked=sum(one.checked for one in losses),
        kills_at_start=sum(one.at_start for one in found), drains=sum(one.drains for one in found),
        acknowledged=sum(one.acknowledged for one in found),
        asked=sum(one.asked for one in found), ready_p50_s=common.median(ready),
        ready_p90_s=common.p90(ready), servers_at_once=SERVERS,
    )  # fmt: skip


def fsync(model: LoadedModel, report: Report, directory: pathlib.Path, *, appends: int) -> None:
    """Trace what `--durability` promises."""
    if recovery_fsync.find_strace() is None:
        report.no_bar("recovery.fsync", ALL, unit="share", reason="strace is not installed")
        return
    found = {
        durability: recovery_fsync.trace(
            common.TASK_MODEL, model.config.vocab_size, directory, durability, appends
        )
        for durability in ("full", "normal", "off")
    }
    full, off = found["full"], found["off"]
    report.bar(
        "recovery.fsync", full.synchronised / full.appends, ALL,
        unit="share of acknowledgements behind a sync of the journal", n=appends,
        sound=off.syncs == 0, full=dataclasses.asdict(full),
        normal=dataclasses.asdict(found["normal"]), off=dataclasses.asdict(off),
    )  # fmt: skip


def faults(model: LoadedModel, report: Report, directory: pathlib.Path, *, flips: int) -> None:
    """Break what a server keeps."""
    run = FaultRun(
        common.TASK_MODEL, model.config.vocab_size, _engine(model), directory, seed=0
    )  # fmt: skip
    run.full_disk()
    run.short_write()
    run.flipped_bits(journals=flips, snapshots=flips)
    run.flipped_bits_in_saved(flips)
    found = run.found
    report.bar(
        "recovery.faults", found.losses.count, NONE,
        unit="wrong answers, lost or doubled verbs, wrong statuses", n=found.losses.checked,
        sound=not found.not_run, outcomes=dict(found.outcomes), not_run=found.not_run,
    )  # fmt: skip


def restore(report: Report, directory: pathlib.Path, *, rounds: int) -> None:
    """Restore a session of SmolLM2-135M that a server has never seen, and compute it again."""
    path = sources.resolve("smollm2-135m")
    vocab_size = loading.read_config(path, DtypePolicy.named("float32")).vocab_size
    found = recovery_restore.measure(path, vocab_size, directory, rounds=rounds)
    ratios = [
        restored / computed
        for restored, computed in zip(found["restored_s"], found["computed_s"], strict=True)
    ]
    report.bar(
        "restore.ratio", common.median(ratios), RESTORE,
        unit="restored to first token / computed to first token", n=rounds,
        tokens=recovery_restore.CONTEXT, ratios=ratios, restored_s=found["restored_s"],
        computed_s=found["computed_s"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
