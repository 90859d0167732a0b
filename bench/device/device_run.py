"""Running the device script's jobs one after another, before a deadline that holds."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import jax.numpy as jnp
from common import Limit
from device_report import Report
from device_sizes import Sizes
from device_timing import Floors

from jaxstate.kernels_pallas import dispatch

_GRACE_S = 3.0  # for writing the last lines
_THREADS = 8


KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
"""Implementations of our own, by jax's name of the platform; see kernels_pallas.dispatch."""
INTERPRETED = "pallas_gpu_interpret"


@dataclasses.dataclass(kw_only=True)
class Run:
    """What all jobs share; the first job measures the floors.

    Attributes:
      kernels: the implementation that is checked and timed.
    """

    report: Report
    kernels: str
    sizes: Sizes
    floors: Floors | None = None

    def implementation(self, name: str) -> str:
        """Return what "kernel" stands for; other names stand for themselves."""
        return self.kernels if name == "kernel" else name

    def require(self, name: str, head_dim: int, dtype: str) -> None:
        """Raise NotImplementedError, with the reason, if an attention cannot run here."""
        implementation: Any = self.implementation(name)
        # Kernels of Pallas are not kept in files: the folder is not used.
        folder = pathlib.Path(tempfile.gettempdir())
        dispatch.choose(implementation, head_dim, jnp.dtype(dtype), folder)

    def floor_ms(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the least time for moving these bytes while computing this."""
        if self.floors is None:
            raise RuntimeError("floors: expected them measured by the first job, they are not")
        return self.floors.ms(num_bytes, flops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One or a few measurements.

    Attributes:
      seconds: what should be left before the deadline to begin it.
      always: whether `--only` cannot leave it out.
    """

    name: str
    work: Callable[[Run], None]
    seconds: float
    always: bool = False


def run_jobs(
    run: Run,
    jobs: Sequence[Job],
    finish: Callable[[], int],
    *,
    began: float,
    deadline_s: float,
    only: Sequence[str],
) -> int:
    """Run jobs until the deadline; whatever does not run gets a line that says why.

    A job that hangs, in a compiler for instance, cannot be interrupted: then the lines that are
    left are written from another thread, and the process ends.

    Args:
      finish: writes bars and table, returns the exit code.
      began: perf_counter() when the process started.
      only: beginnings of names to run; empty = all.
    """
    report = run.report
    todo = list(jobs)
    ended = False

    def left() -> float:
        return deadline_s - (time.perf_counter() - began)

    def late() -> None:
        with report.lock:
            if ended:
                return
            report.failed.append(f"{todo[0].name}: still running at the deadline")
            code = 1
            try:
                for job in todo:
                    report.skipped(job.name, f"the deadline passed while {todo[0].name} ran")
                code = finish()
            finally:
                os._exit(code)

    watchdog = threading.Timer(max(left() - _GRACE_S, 0), late)
    watchdog.daemon = True
    watchdog.start()
    while todo:
        job = todo[0]
        if only and not job.always and not job.name.startswith(tuple(only)):
            report.skipped(job.name, "left out by --only")
        elif left() < job.seconds:
            reason = f"begun only with {job.seconds:.0f} s left, {left():.0f} s were"
            report.skipped(job.name, reason)
        else:
            common.note(f"{time.perf_counter() - began:6.1f} s  {job.name}")
            attempt(report, job.name, job.work, run)
        with report.lock:
            del todo[0]
            ended = not todo
    watchdog.cancel()
    return finish()


def attempt(report: Report, name: str, work: Callable[..., Any], *args: Any) -> Any:
    """Call; write a line instead of raising, so that one failure does not end the run.

    Returns:
      what was returned, None after an error.
    """
    try:
        return work(*args)
    except (NotImplementedError, MemoryError) as error:
        report.skipped(name, str(error))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            report.skipped(name, f"out of device memory: {error}")
        else:
            traceback.print_exc()
            report.raised(name, error)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Something that must be right.

    Attributes:
      lower: returns the programs to compile, traced for their inputs.
      compare: runs them, compiled; returns what `limit` is about.
    """

    name: str
    lower: Callable[[], Sequence[Any]]
    compare: Callable[..., float]
    limit: Limit
    unit: str
    detail: dict[str, Any]


def run_checks(run: Run, checks: Sequence[Check]) -> None:
    """Trace all, compile all side by side, then run and compare one after another."""

    def compile_all(lowered: Sequence[Any]) -> list[Any]:
        return [one.compile() for one in lowered]

    def compare(check: Check, future: Any) -> None:
        measured = check.compare(*future.result())
        run.report.check(check.name, measured, check.limit, unit=check.unit, **check.detail)

    with ThreadPoolExecutor(_THREADS) as pool:
        futures = []
        for check in checks:
            lowered = attempt(run.report, check.name, check.lower)
            futures.append(pool.submit(compile_all, lowered) if lowered else None)
        for check, future in zip(checks, futures, strict=True):
            if future is not None:
                attempt(run.report, check.name, compare, check, future)
