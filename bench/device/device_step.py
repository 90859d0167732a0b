"""The whole step of a model with random weights: right, compile seconds, decode, first token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import device_model
import device_scans
import jax
import numpy as np
from common import Limit
from device_model import Model
from device_report import Bar
from device_run import Job, Run
from device_sizes import Sizes
from device_timing import measure

from jaxstate.kernels_pallas import dispatch
from jaxstate.models import params as params_module
from jaxstate.models.config import DtypePolicy
from jaxstate.state import StepShape

QUERY_TOKENS = 32
_CLOSE = Limit(op="<=", value=1e-3)  # hidden states and logits in f32, the rule of equality
_DECODE_ONE = StepShape(num_tokens=1, block_tokens=1, num_rows=1)
_QUERY = StepShape(num_tokens=QUERY_TOKENS, block_tokens=QUERY_TOKENS, num_rows=1)


def check(run: Run) -> None:
    """Compare two layers in f32 with the plain-XLA step: decode rows, and a query."""
    sizes = run.sizes
    config = dataclasses.replace(
        sizes.model, layers=sizes.model.layers[:2], dtypes=DtypePolicy.named("float32")
    )
    run.require("kernel", config.head_dim, "float32")
    context = sizes.contexts[0]
    model = device_model.build(config, context, 4, context)
    decode = StepShape(num_tokens=4, block_tokens=1, num_rows=4)
    for shape, count in ((decode, model.num_rows), (_QUERY, 1)):
        groups = device_model.rows_apart(model, count, shape.num_tokens // shape.num_rows, context)
        found = []
        for implementation in (run.kernels, "xla"):
            step, _ = model.compile(shape, implementation, logits=False)
            outputs = step(model.pack(groups, shape, implementation))
            found.append(jax.tree.map(lambda x, count=count: np.asarray(x)[:count], outputs))
        kernel, plain = found
        hidden = float(np.abs(kernel.hidden - plain.hidden).max())
        summary = device_scans.difference(kernel.summary, plain.summary)
        run.report.check(
            f"step {shape.num_tokens} tokens", max(hidden, summary), _CLOSE,
            unit="largest difference", of_hidden=hidden, of_summary=summary,
        )  # fmt: skip


def jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs; between the first and the last of them the model fills the memory."""
    models: list[Model] = []

    def prepare(run: Run) -> None:
        began = time.perf_counter()
        model = device_model.build(sizes.model, sizes.context, max(sizes.rows), max(sizes.queries))
        models[:] = [model]
        run.report.line(
            arm="model", params=params_module.num_params(sizes.model), rows=model.num_rows,
            weight_bytes=device_model.weight_bytes(model.params), num_pages=model.num_pages,
            page_size=device_model.PAGE_SIZE, table_len=device_model.TABLE_LEN,
            init_s=time.perf_counter() - began,
        )  # fmt: skip

    def job(what: str, name: str, seconds: float, function: Callable[..., None], *args: Any) -> Job:
        def work(run: Run) -> None:
            if not models:
                raise NotImplementedError("the model's weights are not there, see their line")
            models[0].restore()
            function(run, models[0], name, *args)

        return Job(name=f"step {what} {name}", seconds=seconds, work=work)

    return [
        Job(name="step weights", work=prepare, seconds=30),
        job("decode one row", "kernel", 60, _decode, 1),
        job("query", "kernel", 60, _first_tokens),
        job("decode all rows", "kernel", 60, _decode, None),
        # Beside them plain XLA, where time is left for the grid that follows.
        job("decode one row", "xla", 200, _decode, 1),
        job("query", "xla", 200, _first_tokens),
        job("decode all rows", "xla", 200, _decode, None),
        Job(name="step end", work=lambda _: models.clear(), seconds=0, always=True),
    ]


def _logits(implementation: str) -> bool:
    """Whether an engine's steps compute logits, which a scan of hidden states does without."""
    return not dispatch.scans_hidden(implementation)


def _decode(run: Run, model: Model, name: str, count: int | None) -> None:
    """Time decoding steps of rows with contexts of their own; None = as many as there are."""
    run.require(name, model.config.head_dim, "bfloat16")
    implementation = run.implementation(name)
    count = count or model.num_rows
    shape = _DECODE_ONE
    if count > 1:
        shape = StepShape(num_tokens=count, block_tokens=1, num_rows=count)
    step, times = model.compile(shape, implementation, logits=_logits(implementation))
    groups = device_model.rows_apart(model, count, 1, model.context)
    packed = jax.device_put(model.pack(groups, shape, implementation))
    timing = measure(lambda: step(packed).summary)
    weights = device_model.weight_bytes(model.params)
    cells = count * model.context * model.config.bytes_per_cell
    run.report.timing(
        _decode_name(name, count), timing, run.floor_ms(weights + cells),
        implementation=implementation, rows=count, context=model.context, **times,
        tokens_per_s=count / (timing.ms / 1e3), weights_floor_ms=run.floor_ms(weights),
        weight_bytes=weights, cell_bytes=cells,
    )  # fmt: skip


def _first_tokens(run: Run, model: Model, name: str) -> None:
    """Time one query after another, from the host's arrays to the summary on the host."""
    run.require(name, model.config.head_dim, "bfloat16")
    implementation = run.implementation(name)
    step, times = model.compile(_QUERY, implementation, logits=_logits(implementation))
    for context in run.sizes.queries:
        key = f"step query {name} {QUERY_TOKENS} behind {context}"
        if context > model.cells:
            run.report.skipped(key, f"the pool that fits the memory has {model.cells} cells")
            continue
        packed = model.pack(
            device_model.rows_apart(model, 1, QUERY_TOKENS, context), _QUERY, implementation
        )
        timing = measure(lambda packed=packed: jax.device_get(step(packed).summary), dispatches=1)
        weights = device_model.weight_bytes(model.params)
        cells = context * model.config.bytes_per_cell
        run.report.timing(
            key, timing, run.floor_ms(weights + cells), implementation=implementation,
            context=context, tokens=QUERY_TOKENS, **times,
        )  # fmt: skip
        times = {}


def _decode_name(name: str, rows: int) -> str:
    return f"step decode {name} {rows} rows"


def bar(found: dict[str, dict[str, Any]]) -> Bar | None:
    """h200.step: beside reading the weights once."""
    part = found.get(_decode_name("kernel", 1))
    if part is None:
        return None
    return Bar(value=part["ms"] / part["weights_floor_ms"], n=part["n"], detail=part)
