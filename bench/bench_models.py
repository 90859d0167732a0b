"""Models, loading and text: what the engine computes of other people's checkpoints.

    python bench/bench_models.py [--gguf-dir DIR] [--quick] [--out FILE]

DIR holds gemma3-270m.gguf and qwen2.5-0.5b.gguf; without one Gemma comes from the user's cache,
where `jaxstate pull gemma3-270m` puts it, and Qwen is left out. bench/README.md says what every
bar means.
"""

from __future__ import annotations

import argparse
import pathlib

import common
import engine_checks
import family_checks
import load_checks
import oracle_checks
import text_checks
from common import Report

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.state import StepShape

RECORDS = {
    "parity.gemma": engine_checks.RECORDS / "gemma3-270m.json",
    "parity.qwen": common.ROOT / "tests" / "data" / "qwen2.5-0.5b.json",
}
QUICK = "left out by --quick"


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Models, loading and text.")
    parser.add_argument("--gguf-dir", type=pathlib.Path, help="directory with Gemma and Qwen")
    parser.add_argument("--quick", action="store_true", help="what one minute allows")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/bench_models.py"
    command += " --gguf-dir DIR" if args.gguf_dir else ""
    command += " --quick" if args.quick else ""
    report = Report("models", command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **common.machine_facts())
    for bar, record in RECORDS.items():
        parity(bar, record, args.gguf_dir, args.quick, report)
    family_checks.families(report)
    text_checks.bars(report, args.gguf_dir, quick=args.quick)
    oracle_checks.families(report, quick=args.quick)
    load_checks.bars(report, quick=args.quick)
    report.table()


def parity(
    bar: str, record: pathlib.Path, directory: pathlib.Path | None, quick: bool, report: Report
) -> None:
    """Compare a real model with Hugging Face's recorded answers."""
    name = record.stem
    path = model_path(name, directory)
    if quick or path is None:
        reason = QUICK if quick else f"no {name}.gguf; give its directory with --gguf-dir"
        report.no_bar(bar, engine_checks.PARITY, unit="largest |logit difference|", reason=reason)
        return
    common.note(f"loading {path}")
    loaded = loading.load(path)
    shapes = tuple(StepShape(num_tokens=n, block_tokens=n, num_rows=1) for n in (1, 32))
    config = EngineConfig(
        num_pages=8, page_size=64, context_len=256, evict_quantum=64, step_shapes=shapes
    )
    engine = Engine(loaded.params, loaded.config, config)
    engine_checks.parity(engine, report, bar=bar, record=record)


def model_path(name: str, directory: pathlib.Path | None) -> pathlib.Path | None:
    """Return a GGUF file of the directory or of the user's cache, or None."""
    if directory is not None and (directory / f"{name}.gguf").is_file():
        return directory / f"{name}.gguf"
    cached = sources.default_cache_dir() / f"{name}.gguf"
    return cached if cached.is_file() else None


if __name__ == "__main__":
    main()
