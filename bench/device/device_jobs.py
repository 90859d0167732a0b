"""What the device script does, most important first."""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import device_attention
import device_kernels
import device_scans
import device_sessions
import device_step
import device_writes
import jax
from device_report import BARS, Bar, Report
from device_run import INTERPRETED, KERNELS, Job, Run, run_jobs
from device_sizes import FULL, TINY, Sizes
from device_timing import measure_floors

DEADLINES_S = {"kernels": 480.0, "sessions": 360.0}


def main(began: float, arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and run; returns the exit code.

    Args:
      began: perf_counter() when the process started, from which the deadline counts.
      arguments: None = the process's own.
    """
    parser = argparse.ArgumentParser(description="What is right and how fast on this device.")
    parser.add_argument("--part", choices=[*DEADLINES_S], default="kernels", help="what to run")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    parser.add_argument("--only", nargs="+", default=[], help="jobs whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, kernels interpreted")
    parser.add_argument("--deadline-s", type=float, help="for the whole run")
    parser.add_argument("--commit", help="of this checkout, where git does not know it")
    args = parser.parse_args(arguments)
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        # An 8B model beside 64 long contexts needs more than the three quarters that jax takes.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.92"
    command = f"python bench/device_check.py --part {args.part}" + " --tiny" * args.tiny
    report = Report(command=command, commit=args.commit, path=args.out, part=args.part)
    kernels = INTERPRETED if args.tiny else KERNELS.get(jax.default_backend())
    if kernels is None:
        return report.finish({}, "no accelerator")
    run = Run(report=report, kernels=kernels, sizes=TINY if args.tiny else FULL)
    deadline_s = args.deadline_s or DEADLINES_S[args.part]
    return run_jobs(
        run, jobs(run.sizes, args.part), functools.partial(_finish, run, args.part), began=began,
        deadline_s=deadline_s, only=args.only,
    )  # fmt: skip


def jobs(sizes: Sizes, part: str) -> list[Job]:
    """Return what there is to do in a part, most important first."""
    floors = Job(name="floors", work=_floors, seconds=0, always=True)
    if part == "sessions":
        return [floors, *device_sessions.jobs(sizes.sessions)]
    return [floors, *_checks(sizes), *_of_bars(sizes), *device_step.jobs(sizes), *_grid(sizes)]


def _job(name: str, seconds: float, function: Callable[..., None], *args, **options) -> Job:
    return Job(name=name, seconds=seconds, work=lambda run: function(run, *args, **options))


def _checks(sizes: Sizes) -> list[Job]:
    """Whatever must be right, at small sizes and at real ones."""
    attention, writes, scans = (
        device_kernels.attention_checks, device_writes.checks, device_scans.checks,
    )  # fmt: skip
    small, real = sizes.small_dtypes, sizes.real_dtypes
    found = [
        _job(f"check attention small {dtype} {heads.head_dim}", 10, attention, heads, dtype,
             real=False)
        for heads in sizes.small
        for dtype in small
    ]  # fmt: skip
    found += [
        _job("check kv_write small", 10, writes, small, sizes.small[0], 3),
        _job("check gate small", 10, scans, small, 3, 333, 64),
    ]
    found += [
        _job(f"check attention real {dtype}", 20, attention, sizes.real, dtype, real=True)
        for dtype in real
    ]
    if real:
        pages, vocabulary = sizes.huge_pages + 1, sizes.vocabularies[0]
        found += [
            _job("check kv_write real", 10, writes, real, sizes.real, sizes.real_pages),
            _job("check kv_write huge", 15, device_writes.huge_check, sizes.real, pages),
            _job("check gate real", 20, scans, real, max(sizes.rows), *vocabulary),
        ]
    found.append(_job("check step", 40, device_step.check))
    return found


def _of_bars(sizes: Sizes) -> list[Job]:
    """Timings that bars are made of, but for the step's."""
    rows, context = max(sizes.rows), sizes.context
    decode, group, scan = (
        device_attention.decode, device_attention.group, device_scans.hidden_timing,
    )  # fmt: skip
    return [
        _job(f"decode kernel {rows}x{context}", 10, decode, "kernel", rows, context),
        *(
            _job(f"group kernel {count}", 10, group, "kernel", count, context)
            for count in sizes.group_rows
        ),
        *(
            _job(f"gate hidden kernel {vocab}", 10, scan, "kernel", vocab, hidden_size)
            for vocab, hidden_size in sizes.vocabularies
        ),
    ]


def _grid(sizes: Sizes) -> list[Job]:
    """All other timings: first our kernels, then what stands beside them."""
    most, context = max(sizes.rows), sizes.context
    attention, scans = device_attention, device_scans
    grid = [(rows, cells) for cells in sizes.contexts for rows in sizes.rows]
    found = [
        _job(f"decode kernel {rows}x{cells}", 8, attention.decode, "kernel", rows, cells)
        for rows, cells in grid
        if (rows, cells) != (most, context)
    ]
    found.append(_job("one context, apart", 8, attention.ungrouped, most, context))
    for name in ("kernel", "xla"):
        found += [
            _job(f"gate logits {name} {vocab}", 8, scans.logits_timing, name, vocab)
            for vocab, _ in sizes.vocabularies
        ]
        tokens = sizes.real_tokens
        found.append(_job(f"prefill {name}", 8, attention.prefill, name, tokens, context))
    found.append(_job("kv_write", 8, device_writes.timings, sizes.real, sizes.real_pages, most))
    found += [
        _job(f"gate hidden xla {vocab}", 8, scans.hidden_timing, "xla", vocab, hidden_size)
        for vocab, hidden_size in sizes.vocabularies
    ]
    dot_product = attention.dot_product
    for rows, cells in grid:
        at = f"{rows}x{cells}"
        found += [
            _job(f"decode dot_product {at}", 10, dot_product, rows, cells, shared=False),
            _job(f"decode xla {at}", 10, attention.decode, "xla", rows, cells),
        ]
    for rows in sizes.group_rows:
        found += [
            _job(f"group dot_product {rows}", 10, dot_product, rows, context, shared=True),
            _job(f"group xla {rows}", 10, attention.group, "xla", rows, context),
        ]
    return found


def _floors(run: Run) -> None:
    """Measure what everything else is compared with."""
    run.floors, detail = measure_floors(run.sizes.copy_bytes, run.sizes.square)
    run.report.line(
        arm="device", platform=jax.default_backend(), devices=len(jax.devices()),
        copy_bytes_per_s=run.floors.copy_bytes_per_s, flops_per_s=run.floors.flops_per_s,
        memory_stats=jax.devices()[0].memory_stats(), **detail,
    )  # fmt: skip


def _finish(run: Run, part: str) -> int:
    found, sizes = run.report.found, run.sizes
    if part == "sessions":
        bars = {"h200.flash16": device_sessions.bar(run)}
    else:
        bars = _kernel_bars(found, sizes)
    assert bars.keys() == BARS[part].keys()
    return run.report.finish(bars, "what it is made of was not measured, see those lines")


def _kernel_bars(found: dict[str, dict[str, Any]], sizes: Sizes) -> dict[str, Bar | None]:
    return {
        "h200.decode": device_attention.decode_bar(found, sizes),
        "h200.group": device_attention.group_bar(found, sizes),
        "h200.gate": device_scans.bar(found, sizes),
        "h200.step": device_step.bar(found),
    }
