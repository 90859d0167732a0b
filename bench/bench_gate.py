"""The calibrated gate: does its bound hold, and how soon is a drift noticed?

    python bench/bench_gate.py [--quick] [--out FILE]

For gate.valid streams are simulated, so that the true disagreement above every threshold is known;
gate_simulation.py says what they are like. For gate.table models answer, see gate_table.py.
"""

from __future__ import annotations

import dataclasses
import zlib

import common
import gate_simulation
import gate_table
from common import Limit, Report
from gate_simulation import Found, Kind

from jaxstate import drift
from jaxstate.models import loading, sources

RISKS = (0.01, 0.05, 0.1)
VERSIONS = (300, 1000, 1900, 3000)  # 1,900 is where streams without any disagreement may open it
STREAMS = 1000  # of a kind, a quarter of each length
BEFORE = 100  # blocks before a drift
QUIET_BLOCKS = 1000
VERSIONS_SMOLLM2 = 700
VERSIONS_TRAINED = 4000
USEFUL = 3  # times less disagreement than the risk

VALID = Limit(op="<=", value=0.05)
TABLE = Limit(op="<", value=1)


def main() -> None:
    """Measure and report."""
    args, report = common.start(
        "gate", "The calibrated gate, simulated.", quick="one risk, fewer and shorter streams"
    )
    valid(report, quick=args.quick)
    if not args.quick:
        beyond(report)
        useful(report)
        looks(report)
    live(report, quick=args.quick)
    report.table()


def live(report: Report, *, quick: bool) -> None:
    """Write bar gate.table."""
    smollm2 = loading.load(sources.resolve("smollm2-135m"))
    trained = loading.load(common.TASK_MODEL)
    streams = [
        gate_table.candles_1m(trained, 400 if quick else VERSIONS_TRAINED),
        gate_table.smollm2(smollm2, 40 if quick else VERSIONS_SMOLLM2),
    ]
    worth: dict[str, float] = {}
    for stream in streams:
        worth |= dict(gate_table.table(stream, gate_table.play(stream, report), report))
    unit = "x disagreement of always stale, at equal coverage, worst"
    if not worth:
        report.no_bar("gate.table", TABLE, unit=unit, reason="no gate opened on any stream")
        return
    worst = max(worth, key=lambda name: worth[name])
    report.bar(
        "gate.table", worth[worst], TABLE, unit=unit, n=len(worth), worst=worst, fired=worth
    )  # fmt: skip


def valid(report: Report, *, quick: bool) -> None:
    """Write bar gate.valid."""
    risks, streams = (RISKS[1:2], 400) if quick else (RISKS, STREAMS)
    versions = VERSIONS[:2] if quick else VERSIONS
    shares, of_one_length = {}, 0.0
    for kind in gate_simulation.kinds(risks):
        found, worst_length = calibrate(report, "valid", kind, streams=streams, versions=versions)
        shares[str(kind)] = found.violated / found.streams
        of_one_length = max(of_one_length, worst_length)
    watched = [watch(report, risk, length, streams) for risk in risks for length in (1, 3, 10, 20)]
    worst = max(shares, key=lambda name: shares[name])
    alarms = max(one.false_alarms for one in watched)
    report.bar(
        "gate.valid",
        shares[worst],
        VALID,
        unit="share of streams whose bound is violated, worst",
        n=streams * len(shares),
        sound=all(one.noticed >= 0.95 for one in watched) and alarms <= drift.FALSE_ALARM,
        worst=worst,
        worst_of_one_length=of_one_length,
        kinds=len(shares),
        streams_of_each=streams,
        versions=versions,
        false_alarms=alarms,
        noticed_in_time=min(one.noticed for one in watched),
        blocks_to_notice={f"risk {risk:.0%}": _stated(risk) for risk in risks},
    )


def _stated(risk: float) -> dict[str, int]:
    """What is promised of a drift to drift.DRIFT times the risk."""
    return {
        "median": drift.blocks_to_notice(risk, chance=0.5, quiet_blocks=BEFORE),
        "p95": drift.blocks_to_notice(risk, quiet_blocks=BEFORE),
    }


def calibrate(
    report: Report, arm: str, kind: Kind, *, streams: int, versions: tuple[int, ...]
) -> tuple[Found, float]:
    """Calibrate on streams of a kind, as many of each length, and write a line.

    Returns:
      what was found, and the share of violations at the worst length.
    """
    by_versions = {
        count: gate_simulation.calibrations(
            kind, num_streams=streams // len(versions), versions=count, seed=_seed(kind, count)
        )
        for count in versions
    }
    found = list(by_versions.values())
    whole = Found(
        streams=sum(one.streams for one in found),
        violated=sum(one.violated for one in found),
        fired=sum(one.fired for one in found),
        coverage=sum(one.coverage for one in found) / len(found),
        block_len=common.median(one.block_len for one in found),
    )
    report.line(
        arm=arm,
        **dataclasses.asdict(kind),
        **_shares(whole),
        by_versions={str(count): _shares(one) for count, one in by_versions.items()},
    )
    return whole, max(one.violated / one.streams for one in found)


def _shares(found: Found) -> dict[str, float]:
    """Fields of a line."""
    return {
        "streams": found.streams,
        "violated": found.violated / found.streams,
        "fired": found.fired / found.streams,
        "coverage": found.coverage,
        "block_len": found.block_len,
    }


def _seed(kind: Kind, versions: int) -> int:
    """A seed of its own for each kind and length, the same in every run."""
    return zlib.crc32(f"{kind} {kind.easiness} {versions}".encode())


def watch(report: Report, risk: float, length: int, streams: int) -> gate_simulation.Watched:
    """Let gates of the block length that is measured on such runs watch, and write a line."""
    errors = "runs" if length > 1 else "independent"
    kind = Kind(errors=errors, length=length, gaps="uninformative", risk=risk)
    measured = gate_simulation.calibrations(kind, num_streams=100, versions=1000, seed=length)
    block_len = round(measured.block_len)
    watched = gate_simulation.watch(
        risk,
        length=length,
        block_len=block_len,
        num_streams=streams,
        quiet_blocks=QUIET_BLOCKS,
        before=BEFORE,
        seed=length,
    )
    report.line(
        arm="drift",
        risk=risk,
        length=length,
        block_len=block_len,
        samples_per_block=drift.samples_per_block(block_len),
        before=BEFORE,
        **dataclasses.asdict(watched),
    )
    return watched


def beyond(report: Report) -> None:
    """Show what runs longer than those that are promised do."""
    for gaps in ("uninformative", "informative"):
        for length in (30, 60, 100):
            kind = Kind(errors="runs", length=length, gaps=gaps, risk=0.05)
            calibrate(report, "beyond", kind, streams=400, versions=VERSIONS)


def useful(report: Report) -> None:
    """Show how often the gate opens where the risk is kept with room to spare."""
    for risk in RISKS:
        for gaps in ("uninformative", "informative"):
            for length in (1, 3, 10):
                kind = Kind(
                    errors="runs" if length > 1 else "independent",
                    length=length,
                    gaps=gaps,
                    risk=risk,
                    easiness=USEFUL,
                )
                calibrate(report, "useful", kind, streams=200, versions=VERSIONS)


def looks(report: Report) -> None:
    """Show what calibrating again and again until the gate opens does to its confidence."""
    for every in ("doubled", 100):
        lengths = (375, 750, 1500, 3000) if every == "doubled" else range(100, 3001, 100)
        for gaps in ("uninformative", "informative"):
            kind = Kind(errors="independent", length=1, gaps=gaps, risk=0.05)
            violated = gate_simulation.first_to_open(
                kind, num_streams=300, lengths=tuple(lengths), seed=_seed(kind, 0)
            )
            report.line(arm="looks", every=every, gaps=gaps, risk=kind.risk, violated=violated)


if __name__ == "__main__":
    main()
