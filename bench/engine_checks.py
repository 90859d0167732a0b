"""Bars of the engine itself: parity with Hugging Face, forks, compilation, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import common
import jax
import numpy as np
from common import Limit, Report

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, params, sources
from jaxstate.models.config import LayerConfig, ModelConfig
from jaxstate.models.rope import RopeConfig
from jaxstate.serving import compile_cache
from jaxstate.state import StepShape

RECORDS = common.ROOT / "serving" / "data" / "parity"
FORKS = 200
CYCLES = 1000
WARM_UP_CYCLES = 200

PARITY = Limit(op="<=", value=1e-2)
FORK = Limit(op="<", value=1.0)
EXECUTABLES = Limit(op="<=", value=24)
COLD = Limit(op="<=", value=60)
WARM = Limit(op="<=", value=10)
GROWTH = Limit(op="<=", value=0.5)


def parity(engine: Engine, report: Report, *, bar: str, record: pathlib.Path) -> None:
    """Compare greedy ids and the first step's top logits with Hugging Face's.

    Args:
      record: file with what it computed.
    """
    records = json.loads(record.read_text())
    errors, equal = [], []
    for case in records:
        answer = engine.generate(case["ids"], max_new_tokens=len(case["new"]))
        equal.append(list(answer.token_ids) == case["new"])
        session = engine.create()
        logits = np.asarray(engine.advance(session, case["ids"]).ready.row_logits())
        engine.close(session)
        top = np.argsort(-logits, kind="stable")[: len(case["top5"])].tolist()
        equal.append(top == [token_id for token_id, _ in case["top5"]])
        errors += [abs(float(logits[token_id]) - logit) for token_id, logit in case["top5"]]
    report.bar(
        bar, max(errors), PARITY, unit="largest |logit difference|, ids equal",
        n=len(records), sound=all(equal), greedy_ids_equal=equal[::2], top5_ids_equal=equal[1::2],
    )


def fork(engine: Engine, session: str, report: Report) -> None:
    """Time forks of a long session and see that no page and no step was spent."""
    held, steps = engine.cells_held, engine.executor.steps
    samples, copied = [], False
    for _ in range(FORKS):
        began = time.perf_counter()
        child = engine.fork(session)
        samples.append((time.perf_counter() - began) * 1e3)
        copied |= engine.cells_held != held
        engine.close(child)
    copied |= engine.executor.steps != steps
    report.bar(
        "fork.ms", common.median(samples), FORK, unit="ms, no KV copied", n=FORKS,
        sound=not copied, kv_copied=copied,
        p90_ms=common.p90(samples), context=engine.session(session).context_len,
    )


def compile_probe(model: str, config: EngineConfig, directory: pathlib.Path) -> dict[str, Any]:
    """Start an engine with a persistent cache in `directory`; run in a fresh process."""
    compile_cache.enable(directory / "xla")
    config = dataclasses.replace(config, kernel_cache_dir=str(directory / "kernels"))
    began = time.perf_counter()
    loaded = loading.load(sources.resolve(model))
    load_s = time.perf_counter() - began
    began = time.perf_counter()
    parts: dict[str, float] = {}

    def progress(done: int, total: int, name: str, seconds: float) -> None:
        parts[f"{done} {name}"] = seconds

    engine = Engine(loaded.params, loaded.config, config, progress=progress)
    ready_s = time.perf_counter() - began
    return {
        "ready_s": ready_s, "load_s": load_s, "executables": engine.executor.num_executables,
        "parts_s": parts,
    }


def compile_times(script: pathlib.Path, model: str, report: Report) -> None:
    """Time an engine's start with an empty and with a filled persistent cache."""
    load = common.OtherLoad(list)
    with tempfile.TemporaryDirectory() as directory:
        for name, limit in (("compile.cold_s", COLD), ("compile.warm_s", WARM)):
            common.note(f"starting an engine in a fresh process, {name}")
            command = [sys.executable, str(script), "--model", model, "--compile-probe", directory]
            load.end("between starts")
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            load.end(name)
            if done.returncode:
                reason = f"the fresh process ended with status {done.returncode}"
                report.no_bar(name, limit, unit="s until ready", reason=reason)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            report.bar(
                name, found.pop("ready_s"), limit, unit="s until ready", n=1,
                spoiled=load.reason(name), **found,
            )


def memory_cycles(report: Report) -> None:
    """Fork, append, ask and drop on a small model; see that nothing stays."""
    model = ModelConfig(
        family="llama", vocab_size=512, hidden_size=64, mlp_width=128, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_positions=256,
        layers=tuple(LayerConfig(rope=RopeConfig(theta=1e4)) for _ in range(2)),
        tied_embeddings=True,
    )
    shapes = tuple(
        StepShape(num_tokens=n, block_tokens=n, num_rows=1 if n == 1 else 4) for n in (1, 16, 64)
    )
    config = EngineConfig(
        num_pages=48, page_size=16, context_len=240, evict_quantum=32, step_shapes=shapes,
        stretch_cells=(128, 32),
    )
    engine = Engine(params.init_params(model, 0), model, config)
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(0, model.vocab_size, count).tolist()

    session = engine.create(ids(40))
    engine.append(session, ids(100))
    pool_bytes = _pool_bytes(model, config)
    held = engine.cells_held

    def cycle():
        child = engine.fork(session)
        engine.append(child, ids(20))
        engine.query(child, ids(12), max_new_tokens=3)
        with contextlib.closing(
            engine.stream(session, ids(12), max_new_tokens=8)
        ) as stream:  # dropped half-way
            next(stream)
        engine.close(child)

    for _ in range(WARM_UP_CYCLES):
        cycle()
    arrays, resident = len(jax.live_arrays()), common.resident_bytes()
    flat = True
    for _ in range(CYCLES):
        cycle()
        flat &= engine.cells_held == held
    growth_mb = (common.resident_bytes() - resident) / 1e6
    arrays_grown = len(jax.live_arrays()) - arrays
    bytes_agree = (
        pool_bytes == config.num_cells * model.bytes_per_cell
        and engine.bytes_held == engine.cells_held * model.bytes_per_cell
    )
    clean = flat and arrays_grown <= 0 and bytes_agree
    report.bar(
        "memory.cycles", growth_mb, GROWTH, unit="MB grown, cells and arrays flat", n=CYCLES,
        sound=clean, cells_flat=flat,
        live_arrays_grown=arrays_grown, cells_held=engine.cells_held,
        bytes_held=engine.bytes_held, bytes_are_cells=bytes_agree,
        resident_mb=resident / 1e6,
    )


def _pool_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the arrays on the device that have the shape of a layer's keys or values."""
    shape = (model.num_kv_heads, config.num_pages, config.page_size, model.head_dim)
    return sum(array.nbytes for array in jax.live_arrays() if array.shape == shape)
