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
    command = [sys.executable, "-m", "pytest", _TEST, "-q", "-k", _CHOICE, "-m", "long", "-rA"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=common.ROOT)
    passed = len(re.findall(r"^PASSED ", done.stdout, re.MULTILINE))
    failed = len(re.findall(r"^FAILED |^ERROR ", done.stdout, re.MULTILINE))
    report.bar(
        "oracle.families", failed, ALL_PASS, unit=unit, n=passed + failed,
        sound=done.returncode == 0 and passed > 0, passed=passed,
    )
