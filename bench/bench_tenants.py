"""Many sessions on one engine: do they harm each other, and does anything stay behind?

    python bench/bench_tenants.py [--quick] [--only soak|phase|overload] [--out FILE]

In process, on the model of 1.1M parameters that was trained for candles; once on SmolLM2-135M.
bench/README.md says what every bar means.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Any

import common
import numpy as np
import tenants_phase
import tenants_soak
from common import Limit, Report
from tenants_phase import Waits
from tenants_soak import Found, Size

from jaxstate.models import loading, sources
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.plan import AGE_S

NONE = Limit(op="==", value=0)
WITHIN = Limit(op="<=", value=1.0)
P99, LONGEST, AGE = (Limit(op="<=", value=value) for value in (8, 20, 1.0))
PARTS = ("soak", "phase", "overload")


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Many sessions on one engine.")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    parts = [args.only] if args.only else PARTS
    command = "python bench/bench_tenants.py" + (" --quick" if args.quick else "")
    command += f" --only {args.only}" if args.only else ""
    report = Report("tenants", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    small = loading.load(common.TASK_MODEL)
    load = common.OtherLoad(list)
    if "soak" in parts:
        soaks(small, report, load, quick=args.quick)
    if "phase" in parts:
        phase(small, report, load, count=30 if args.quick else 100)
    if "overload" in parts:
        overload(small, report, load, seconds=10 if args.quick else 60)
    report.table()


def soaks(small: LoadedModel, report: Report, load: common.OtherLoad, *, quick: bool) -> None:
    """Both soaks; waiting is judged on the first, where there are many sessions."""
    size = Size(
        sessions=64, tokens=4096, context_len=7680, host_share=1.0, preposition=0,
        trial_s=5 if quick else 20, seconds=15 if quick else 180, samples=20 if quick else 200,
    )  # fmt: skip
    few = Size(
        sessions=8, tokens=2048, context_len=4096, host_share=0.25, preposition=4,
        trial_s=5 if quick else 20, seconds=10 if quick else 60, samples=8 if quick else 40,
    )  # fmt: skip
    found = soak(small, size, "", report, load)
    waits(found, report, load.reason("soak"))
    soak(loading.load(sources.resolve("smollm2-135m")), few, ".smollm2", report, load)


def soak(
    model: LoadedModel, size: Size, name: str, report: Report, load: common.OtherLoad
) -> Found:
    """Run one and write its bar: answers that differ, and what stayed behind."""
    with tempfile.TemporaryDirectory() as swap_dir:
        found = tenants_soak.soak(model, size, pathlib.Path(swap_dir), seed=0)
    load.end(f"soak{name}")
    report.bar(
        f"tenants.soak{name}", found.different, NONE, unit="answers that differ", n=found.checked,
        sound=not found.left, near_ties=found.near_ties, left=found.left, sources=found.sources,
        busy=found.busy, verbs=found.done, per_s=found.rate, moved_out=found.moved_out,
        brought_back=found.brought_back, seconds=size.seconds,
    )  # fmt: skip
    return found


def waits(found: Found, report: Report, spoiled: str | None) -> None:
    """Write how unequally verbs of a class are served."""
    tail, longest, aged, by_class = {}, {}, {}, {}
    for job_class, times in found.times.items():
        name = job_class.name
        p50, p99 = (float(np.percentile(times.sojourn_s, one)) for one in (50, 99))
        tail[name], longest[name] = p99 / p50, max(times.sojourn_s) / p50
        aged[name] = max(times.wait_s) / AGE_S[job_class]
        seconds = {"p50_s": p50, "p99_s": p99, "longest_s": max(times.sojourn_s)}
        by_class[name] = {"n": len(times.sojourn_s), **seconds}
    n = sum(len(times.sojourn_s) for times in found.times.values())
    bars = (
        ("p99", tail, P99, "x p50 of the class, worst"),
        ("longest", longest, LONGEST, "x p50 of the class, worst"),
        ("age", aged, AGE, "x the class's limit, longest wait for the first step, worst"),
    )
    for name, measured, limit, unit in bars:
        report.bar(
            f"tenants.wait.{name}", max(measured.values()), limit, unit=unit, n=n,
            spoiled=spoiled, by_class=measured, sojourn=by_class, busy=found.busy,
        )  # fmt: skip


def phase(model: LoadedModel, report: Report, load: common.OtherLoad, *, count: int) -> None:
    """Write the worst wait of a question beside a long append."""
    waits = tenants_phase.phases(model, count)
    load.end("phase")
    report.bar(
        "tenants.phase", max(waits.first_s) / (waits.idle_s + waits.step_s), WITHIN,
        unit="x (idle + the longest step), to the first token, worst", n=count,
        spoiled=load.reason("phase"), **beside(waits),
    )  # fmt: skip


def overload(model: LoadedModel, report: Report, load: common.OtherLoad, *, seconds: float) -> None:
    """Write how questions fare beside too many appends, and what became of those."""
    found = tenants_phase.overload(model, seconds)
    load.end("overload")
    waits = found.waits
    bounded = found.deepest <= tenants_phase.MAX_WAITING
    report.bar(
        "overload", float(np.percentile(waits.first_s, 99)) / (waits.idle_s + waits.step_s),
        WITHIN, unit="x (idle + the longest step), to the first token, p99",
        n=len(waits.first_s), spoiled=load.reason("overload"),
        sound=bounded and not found.lost and found.refused > 0 and found.least_hint_s > 0,
        **beside(waits), capacity_per_s=found.capacity, accepted=found.accepted,
        refused=found.refused, least_hint_s=found.least_hint_s, deepest_queue=found.deepest,
        max_waiting=tenants_phase.MAX_WAITING, sessions_that_lost=found.lost, seconds=seconds,
    )  # fmt: skip


def beside(waits: Waits) -> dict[str, Any]:
    """Name what a bar of waiting was made of."""
    return {
        "idle_s": waits.idle_s, "step_s": waits.step_s, "first_p50_s": common.median(waits.first_s),
        "first_longest_s": max(waits.first_s), "begun_p50_s": common.median(waits.begun_s),
        "begun_longest_s": max(waits.begun_s),
    }  # fmt: skip


if __name__ == "__main__":
    main()
