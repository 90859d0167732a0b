"""The whole step of a model with random weights: right, compile seconds, decode, first token."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import device_problem
import jax
import jax.numpy as jnp
import numpy as np
from common import Limit
from device_report import Bar
from device_run import Job, Run
from device_sizes import Sizes
from device_timing import free_bytes, measure, noise

from jaxstate import rows as rows_module
from jaxstate.config import EngineConfig
from jaxstate.kernels_pallas import dispatch
from jaxstate.models import params as params_module
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.params import Params, ParamSpec
from jaxstate.rows import Group, RowInput
from jaxstate.state import LayerPages, Outputs, Pool, StepShape
from jaxstate.step import step

QUERY_TOKENS = 32
_PAGE_SIZE = 64
_TABLE_LEN = 1024
_SLACK_BYTES = 6e9  # for what a step keeps beside weights and pool
_CLOSE = Limit(op="<=", value=1e-3)  # logits in f32, the rule of equality
_DECODE_ONE = StepShape(num_tokens=1, block_tokens=1, num_rows=1)
_QUERY = StepShape(num_tokens=QUERY_TOKENS, block_tokens=QUERY_TOKENS, num_rows=1)


@dataclasses.dataclass(kw_only=True)
class Model:
    """Weights, pool and compiled steps, kept from job to job; the pool is donated and rebound.

    Attributes:
      num_rows: rows with `context` cells each; as many as fit.
      cells: of all contexts.
    """

    config: ModelConfig
    context: int
    num_rows: int
    cells: int
    num_pages: int
    params: Params
    pool: Pool
    steps: dict[tuple[str, StepShape], Any] = dataclasses.field(default_factory=dict)

    @property
    def engine(self) -> EngineConfig:
        """Sizes as an engine has them."""
        return EngineConfig(
            num_pages=self.num_pages, page_size=_PAGE_SIZE, context_len=self.context,
            evict_quantum=1, table_capacity=_TABLE_LEN,
        )  # fmt: skip

    def pack(self, groups: Sequence[Group], shape: StepShape, implementation: str) -> Any:
        """Lay rows out for a step; arrays of the host."""
        stretches = dispatch.stretch_cells(implementation, self.num_pages * _PAGE_SIZE)
        config = dataclasses.replace(self.engine, stretch_cells=stretches, step_shapes=(shape,))
        return rows_module.pack(groups, shape, config)

    def compiled(self, shape: StepShape, implementation: str) -> tuple[Any, dict[str, float]]:
        """Return the step, and how long tracing and compiling took."""
        known = self.steps.get((implementation, shape))
        if known is not None:
            return known, {}
        packed = self.pack([], shape, implementation)
        function = functools.partial(
            step, config=self.config, shape=shape, implementation=implementation
        )
        began = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=(1,)).lower(
            self.params, self.pool, packed, self.allowed_bits
        )
        traced = time.perf_counter()
        known = self.steps[(implementation, shape)] = lowered.compile()
        times = {"trace_s": traced - began, "compile_s": time.perf_counter() - traced}
        return known, times

    @property
    def allowed_bits(self) -> jax.Array:
        """One set that allows all tokens."""
        words = -(-self.config.vocab_size // 32)
        return jnp.full((1, words), 0xFFFFFFFF, jnp.uint32)

    def run(self, compiled: Any, packed: Any, bits: jax.Array) -> Outputs:
        """Run a step and rebind the pool."""
        self.pool, outputs = compiled(self.params, self.pool, packed, bits)
        return outputs


def build(config: ModelConfig, context: int, num_rows: int, longest: int) -> Model:
    """Draw weights and a pool on the device.

    Args:
      context: cells of each row.
      num_rows: rows, fewer if the memory says so.
      longest: cells of the longest query's context.
    Raises:
      MemoryError: not even the weights and one row fit.
    """
    abstract = params_module.abstract_params(config)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    cells = max(num_rows * context, longest)
    free = free_bytes()
    if free is not None:
        cells = min(cells, int((free - weights - _SLACK_BYTES) // config.bytes_per_cell))
    if cells < context:
        raise MemoryError(f"weights of {weights / 1e9:.1f} GB and one row do not fit")
    num_rows = min(num_rows, cells // context)
    num_pages = -(-cells // _PAGE_SIZE) + num_rows  # what a step writes is behind all contexts
    seeds = iter(range(1, 10**6))

    def draw(_: str, spec: ParamSpec) -> jax.Array:
        dtype = jnp.dtype(spec.dtype(config.dtypes)).name
        if spec.kind != "matrix":
            return jnp.full(spec.shape, float(spec.kind == "norm"), dtype)
        scale = np.float32(spec.fan_in**-0.5)
        return noise(np.uint32(next(seeds)), scale, shape=spec.shape, dtype=dtype)

    params = params_module.map_specs(draw, config)
    of_pages = (config.num_kv_heads, num_pages, _PAGE_SIZE, config.head_dim)
    dtype = jnp.dtype(config.dtypes.cache_dtype).name

    def pages() -> jax.Array:
        return noise(np.uint32(next(seeds)), np.float32(1), shape=of_pages, dtype=dtype)

    pool = tuple(LayerPages(k_pages=pages(), v_pages=pages()) for _ in range(config.num_layers))
    jax.block_until_ready((params, pool))
    return Model(
        config=config, context=context, num_rows=num_rows, cells=cells, num_pages=num_pages,
        params=params, pool=pool,
    )  # fmt: skip


def _rows(model: Model, count: int, tokens: int, context: int) -> list[Group]:
    """Rows behind contexts of their own, each writing to a page behind all contexts."""
    free = model.num_pages - 1 - np.arange(count)  # pages
    rng = np.random.default_rng(context)
    return [
        Group(
            rows=[
                RowInput(
                    token_ids=rng.integers(0, model.config.vocab_size, tokens),
                    positions=context + np.arange(tokens),
                    cells=free[index] * _PAGE_SIZE + np.arange(tokens),
                    shifts=np.zeros(tokens, np.int32),
                    context=[device_problem.stretch(index * context, context)],
                    wanted=(tokens - 1,),
                )
            ]
        )
        for index in range(count)
    ]


def check(run: Run) -> None:
    """Compare logits of two layers in f32 with the plain-XLA step's: decode rows, and a query."""
    sizes = run.sizes
    config = dataclasses.replace(
        sizes.model, layers=sizes.model.layers[:2], dtypes=DtypePolicy.named("float32")
    )
    run.kernels.require(config.head_dim, jnp.float32)
    model = build(config, sizes.contexts[0], 4, sizes.contexts[0])
    for shape, count in (
        (StepShape(num_tokens=4, block_tokens=1, num_rows=4), model.num_rows), (_QUERY, 1)
    ):  # fmt: skip
        groups = _rows(model, count, shape.num_tokens // shape.num_rows, sizes.contexts[0])
        logits = []
        for implementation in (run.kernels.attention, "xla"):
            compiled, _ = model.compiled(shape, implementation)
            packed = model.pack(groups, shape, implementation)
            outputs = model.run(compiled, packed, model.allowed_bits)
            logits.append(np.asarray(outputs.logits)[:count])
        run.report.check(
            f"step {shape.num_tokens} tokens", float(np.abs(logits[0] - logits[1]).max()), _CLOSE,
            unit="largest |logit difference|", largest_logit=float(np.abs(logits[1]).max()),
        )  # fmt: skip


def jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs; between the first and the last of them the model fills the memory."""
    models: list[Model] = []

    def prepare(run: Run) -> None:
        began = time.perf_counter()
        model = build(sizes.model, sizes.context, max(sizes.rows), max(sizes.queries))
        models[:] = [model]
        run.report.line(
            arm="model", params=params_module.num_params(sizes.model), rows=model.num_rows,
            weight_bytes=_weight_bytes(model), num_pages=model.num_pages, page_size=_PAGE_SIZE,
            table_len=_TABLE_LEN, init_s=time.perf_counter() - began,
        )  # fmt: skip

    def job(what: str, name: str, seconds: float, function: Callable[..., None], *args: Any) -> Job:
        def work(run: Run) -> None:
            if not models:
                raise NotImplementedError("the model's weights are not there, see their line")
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


def _implementation(run: Run, name: str) -> str:
    if name == "kernel":
        run.kernels.require(run.sizes.model.head_dim, jnp.bfloat16)
        return run.kernels.attention
    return name


def _weight_bytes(model: Model) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it looks up rows."""
    read = {name: part for name, part in model.params.items() if name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _decode(run: Run, model: Model, name: str, count: int | None) -> None:
    """Time decoding steps of rows with contexts of their own; None = as many as there are."""
    implementation = _implementation(run, name)
    count = count or model.num_rows
    shape = _DECODE_ONE
    if count > 1:
        shape = StepShape(num_tokens=count, block_tokens=1, num_rows=count)
    compiled, times = model.compiled(shape, implementation)
    groups = _rows(model, count, 1, model.context)
    packed = jax.device_put(model.pack(groups, shape, implementation))
    bits = model.allowed_bits
    timing = measure(lambda: model.run(compiled, packed, bits).summary)
    weights = _weight_bytes(model)
    cells = count * model.context * model.config.bytes_per_cell
    run.report.timing(
        _decode_name(name, count), timing, run.floor_ms(weights + cells),
        implementation=implementation, rows=count, context=model.context, **times,
        tokens_per_s=count / (timing.ms / 1e3), weights_floor_ms=run.floor_ms(weights),
        weight_bytes=weights, cell_bytes=cells,
    )  # fmt: skip


def _first_tokens(run: Run, model: Model, name: str) -> None:
    """Time one query after another, from the host's arrays to the summary on the host."""
    implementation = _implementation(run, name)
    compiled, times = model.compiled(_QUERY, implementation)
    bits = model.allowed_bits
    for context in run.sizes.queries:
        key = f"step query {name} {QUERY_TOKENS} behind {context}"
        if context > model.cells:
            run.report.skipped(key, f"the pool that fits the memory has {model.cells} cells")
            continue
        packed = model.pack(_rows(model, 1, QUERY_TOKENS, context), _QUERY, implementation)
        timing = measure(
            lambda packed=packed: jax.device_get(model.run(compiled, packed, bits).summary),
            dispatches=1,
        )
        weights = _weight_bytes(model)
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
