"""The oracle's long random sequences of verbs, run on every model family."""

from __future__ import annotations

import re
import subprocess
import sys

import common
from common import Limit, Report

ALL_PASS = Limit(op="==", value=0)
_TEST = "tests/test_oracle_engine.py"
_CHOICE = "every_family and for_long"


def families(report: Report, *, quick: bool) -> None:
    """Count families in which some sequence of verbs differs from the history-true forward."""
    unit = "families that differ from the history-true reference"
    if quick:
        report.no_bar("oracle.families", ALL_PASS, unit=unit, reason="left out by --quick")
        return
    common.note("running the oracle on every family, some minutes")
    passed, failed = run_tests(_TEST, "-m", "long", "-k", _CHOICE, "--dist", "load")
    report.bar(
        "oracle.families",
        failed,
        ALL_PASS,
        unit=unit,
        n=passed + failed,
        sound=passed > 0,
        passed=passed,
    )


def run_tests(*choice: str) -> tuple[int, int]:
    """Run tests as `make test` does: how many passed, how many failed.

    Raises:
      RuntimeError: pytest itself did not come through.
    """
    workers = ("--numprocesses", "2", "--dist", "loadfile")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", *workers, *choice]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=common.ROOT)
    passed, failed = (
        len(re.findall(f"^({words}) ", done.stdout, re.MULTILINE))
        for words in ("PASSED", "FAILED|ERROR")
    )
    if done.returncode not in (0, 1) or (done.returncode == 1) != (failed > 0):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return passed, failed
