"""Lines of the device script: checks, timings beside their floors, bars, and a table of them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import common
import jax
import numpy as np
from common import Limit
from device_timing import Timing

REASON_CHARS = 600  # compilers answer with pages

BARS: dict[str, dict[str, tuple[Limit, str]]] = {
    "kernels": {
        "h200.decode": (Limit(op=">=", value=0.70), "share of copy bandwidth, 64 rows x 8k"),
        "h200.group": (Limit(op="<=", value=4), "x one row, 64 rows over one shared 8k context"),
        "h200.gate": (
            Limit(op=">=", value=0.80),
            "share of copy bandwidth, the output matrix once",
        ),
        "h200.step": (Limit(op="<=", value=1.35), "x weights / bandwidth, decode at batch 1"),
    },
    "sessions": {
        "h200.flash16": (Limit(op="<=", value=4), "x one question, all registered together, 8k"),
    },
}
"""By part of the script."""
DECIDED_ON = "H200"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar's number, whether all else that it asks for is true, and what it was made of."""

    value: float
    n: int
    detail: dict[str, Any]
    sound: bool = True


class Report:
    """Writes one JSON object per line, each with device, jax version and commit.

    Attributes:
      found: what was timed, by name: "ms", "floor_ms", rounds "n", and details.
      waits: samples of what callers wait for, by name, milliseconds.
      failed: names of checks that do not hold and of work that raised.
      lock: for whoever changes or reads these, or writes: two threads may.
    """

    def __init__(self, *, command: str, commit: str | None, path: pathlib.Path | None, part: str):
        """Start a report on a part; `commit` is for checkouts that git does not know."""
        device = jax.devices()[0]
        known = commit or (common.commit() if shutil.which("git") else "unknown")
        self._facts = {
            "device": repr(device), "device_kind": device.device_kind, "jax": jax.__version__,
            "commit": known,
        }  # fmt: skip
        self._command = command
        self._out: list[TextIO] = [sys.stdout]
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out.append(path.open("w", encoding="utf-8"))
        self.lock = threading.RLock()
        self.found: dict[str, dict[str, Any]] = {}
        self.waits: dict[str, Sequence[float]] = {}
        self.limits: Mapping[str, tuple[Limit, str]] = BARS[part]
        self.failed: list[str] = []
        self._checks = 0
        self._bars: list[dict[str, Any]] = []
        self._skipped: list[str] = []

    def line(self, **fields: Any) -> None:
        """Write anything."""
        fields = {"bench": "device", **fields, **self._facts, "utc": common.utc()}
        text = json.dumps(_plain(fields))
        with self.lock:
            for out in self._out:
                print(text, file=out, flush=True)

    def check(self, name: str, measured: float, limit: Limit, *, unit: str, **detail: Any) -> None:
        """Write what a check found; NaN holds nothing."""
        holds = limit.holds(measured)
        with self.lock:
            self._checks += 1
            if not holds:
                self.failed.append(name)
            self.line(
                check=name, measured=measured, unit=unit, n=1, limit=str(limit), holds=holds,
                **detail,
            )  # fmt: skip

    def timing(self, name: str, timing: Timing, floor_ms: float, **detail: Any) -> None:
        """Write a timing beside its floor."""
        count = len(timing.samples_ms)
        with self.lock:
            self.found[name] = {"ms": timing.ms, "floor_ms": floor_ms, "n": count, **detail}
            self.line(
                timing=name, measured=timing.ms, unit="ms", n=count, dispatches=timing.dispatches,
                samples_ms=timing.samples_ms, floor=floor_ms, ratio=timing.ms / floor_ms, **detail,
            )  # fmt: skip

    def wait(self, name: str, samples_ms: Sequence[float], **detail: Any) -> None:
        """Write how long a caller waits for something."""
        p50, p90, p99 = (float(one) for one in np.percentile(samples_ms, (50, 90, 99)))
        with self.lock:
            self.waits[name] = samples_ms
            self.line(
                measure=name, measured=p50, unit="ms, p50", n=len(samples_ms), p90_ms=p90,
                p99_ms=p99, longest_ms=max(samples_ms), samples_ms=samples_ms, **detail,
            )  # fmt: skip

    def skipped(self, name: str, reason: str, **detail: Any) -> None:
        """Write what was not measured, and why."""
        self._skipped.append(f"{name}: {reason[:100]}")
        self.line(measure=name, measured=None, reason=reason[:REASON_CHARS], **detail)

    def raised(self, name: str, error: Exception) -> None:
        """Write what could not be measured because it failed."""
        self.failed.append(name)
        reason = f"{type(error).__name__}: {error}"
        self.line(measure=name, measured=None, holds=False, reason=reason[:REASON_CHARS])

    def finish(self, bars: dict[str, Bar | None], reason: str) -> int:
        """Write one line per bar and the table; return the exit code.

        Args:
          bars: what was found for each of the part's BARS, None where something of it is missing.
          reason: why it is.
        """
        for name, (limit, unit) in self.limits.items():
            found = bars.get(name)
            bar = {
                "bar": name, "measured": found and found.value, "unit": unit,
                "n": found.n if found else 0, "limit": str(limit), "holds": None,
                "command": self._command,
            }  # fmt: skip
            if found is None:
                bar["reason"] = reason
            elif DECIDED_ON not in self._facts["device_kind"]:
                bar["reason"] = f"decided on an {DECIDED_ON}, not on {self._facts['device_kind']}"
            else:
                bar["holds"] = found.sound and limit.holds(found.value)
            self.line(**bar, **({"detail": found.detail} if found else {}))
            self._bars.append(bar)
        self._table()
        return 1 if self.failed else 0

    def _table(self) -> None:
        """Print what was found for people to stderr."""
        note = common.note
        note(f"\n{self._facts['device_kind']}, jax {self._facts['jax']}, {self._facts['commit']}")
        note(f"{self._checks} checks; failed: {', '.join(self.failed) or 'none'}")
        for line in self._skipped:
            note(f"not measured: {line}")
        if self.found:
            note(f"\n{'timing':<44}{'ms':>10}{'floor':>10}{'ratio':>8}")
        for name, found in self.found.items():
            ratio = found["ms"] / found["floor_ms"]
            note(f"{name:<44}{found['ms']:>10.4f}{found['floor_ms']:>10.4f}{ratio:>8.2f}")
        if self.waits:
            note(f"\n{'wait':<44}{'n':>7}{'p50 ms':>10}{'p99 ms':>10}")
        for name, samples in self.waits.items():
            p50, p99 = np.percentile(samples, (50, 99))
            note(f"{name:<44}{len(samples):>7}{p50:>10.4f}{p99:>10.4f}")
        note(f"\n{'bar':<14}{'measured':>10}  {'limit':<8}{'':<6}unit")
        for bar in self._bars:
            verdict = {True: "ok", False: "MISS", None: "-"}[bar["holds"]]
            value = "-" if bar["measured"] is None else f"{bar['measured']:.3g}"
            reason = f"  ({bar['reason']})" if "reason" in bar else ""
            note(f"{bar['bar']:<14}{value:>10}  {bar['limit']:<8}{verdict:<6}{bar['unit']}{reason}")


def _plain(value: Any) -> Any:
    """Cut floats to five digits; what is no number becomes a word, which JSON can hold."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
