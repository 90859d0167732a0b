"""Kernels: their proofs without a device, and what the block selector keeps and loses.

    python bench/bench_kernels.py [--quick] [--out FILE]

What only a device can tell is measured there, by bench/device_check.py. bench/README.md says what
every bar means.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import common
import oracle_checks
import selection_checks
from common import Limit, Report

from jaxstate.models import sources

MODEL = "smollm2-135m"
CI_MINUTES = Limit(op="<=", value=5)
PROOFS = "interpret or lowers_for_"
ORACLE = "engine_verbs_equal_history_with_interpreted_kernels"
QUICK = "left out by --quick"
ON_DEVICE = {
    "h200.decode": (Limit(op=">=", value=0.70), "of the measured copy bandwidth, 64 rows x 8k"),
    "h200.group": (Limit(op="<=", value=4), "x one row, 64 rows over one shared 8k context"),
    "h200.gate": (Limit(op=">=", value=0.80), "of the floor, reading the output matrix once"),
    "h200.step": (Limit(op="<=", value=1.35), "x weights / bandwidth, one row"),
}


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Proofs of the kernels, and selection.")
    parser.add_argument("--quick", action="store_true", help="what a few minutes allow")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/bench_kernels.py" + (" --quick" if args.quick else "")
    report = Report("kernels", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    lines = selection_checks.quality(sources.resolve(MODEL), report, quick=args.quick)
    proofs(report, quick=args.quick)
    oracle(report, quick=args.quick)
    for bar, (limit, unit) in ON_DEVICE.items():
        reason = "no H200 here; python bench/device_check.py --part kernels on one measures it"
        report.no_bar(bar, limit, unit=unit, reason=reason)
    selection_checks.table(lines)
    report.table()


def proofs(report: Report, *, quick: bool) -> None:
    """Time the tests that `make test` proves the kernels by, and see that they pass."""
    unit = "minutes of make test: kernels in interpreters, and lowered for tpu and cuda"
    if quick:
        report.no_bar("kernels.ci_min", CI_MINUTES, unit=unit, reason=QUICK)
        return
    common.note("proving the kernels, some minutes")
    began = time.perf_counter()
    passed, failed = oracle_checks.run_tests("tests", "-m", "not long", "-k", PROOFS)
    minutes = (time.perf_counter() - began) / 60
    report.bar(
        "kernels.ci_min", minutes, CI_MINUTES, unit=unit, n=passed + failed,
        sound=failed == 0 and passed > 0, passed=passed, failed=failed,
    )  # fmt: skip


def oracle(report: Report, *, quick: bool) -> None:
    """Run the oracle's random sequences of verbs on engines whose kernels are interpreted."""
    unit = "engines that differ from the history-true reference"
    if quick:
        report.no_bar("kernels.oracle", oracle_checks.ALL_PASS, unit=unit, reason=QUICK)
        return
    common.note("running the oracle on interpreted kernels, some minutes")
    passed, failed = oracle_checks.run_tests(
        "tests/test_kernels_attention.py", "-k", ORACLE, "--dist", "load"
    )
    report.bar(
        "kernels.oracle", failed, oracle_checks.ALL_PASS, unit=unit, n=passed + failed,
        sound=passed > 0, passed=passed,
    )  # fmt: skip


if __name__ == "__main__":
    main()
