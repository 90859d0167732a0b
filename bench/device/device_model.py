"""A model with random weights and a full pool on the device, and rows for its steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import device_problem
import jax
import jax.numpy as jnp
import numpy as np
from device_timing import free_bytes, noise

from jaxstate import rows as rows_module
from jaxstate.config import EngineConfig
from jaxstate.kernels_pallas import dispatch
from jaxstate.models import params as params_module
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params, ParamSpec
from jaxstate.rows import Group, RowInput
from jaxstate.state import LayerPages, Outputs, Pool, Rows, StepShape
from jaxstate.step import step

PAGE_SIZE = 64
TABLE_LEN = 1024
SLACK_BYTES = 6e9  # for what a step keeps beside weights and pool


@dataclasses.dataclass(kw_only=True)
class Model:
    """Weights and pool, kept from job to job; every step takes the pool, which is then rebound.

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

    def pack(self, groups: Sequence[Group], shape: StepShape, implementation: str) -> Rows:
        """Lay rows out for a step as an engine does; arrays of the host."""
        stretches = dispatch.stretch_cells(implementation, self.num_pages * PAGE_SIZE)
        config = EngineConfig(
            num_pages=self.num_pages, page_size=PAGE_SIZE, context_len=self.context,
            evict_quantum=1, table_capacity=TABLE_LEN, stretch_cells=stretches,
            step_shapes=(shape,),
        )  # fmt: skip
        return rows_module.pack(groups, shape, config)

    def compile(
        self, shape: StepShape, implementation: str, *, logits: bool
    ) -> tuple[Callable[[Rows], Outputs], dict[str, float]]:
        """Return a step that rebinds the pool, and how long tracing and compiling took."""
        bits = jnp.full((1, -(-self.config.vocab_size // 32)), 0xFFFFFFFF, jnp.uint32)
        function = functools.partial(
            step, config=self.config, shape=shape, implementation=implementation, logits=logits
        )
        began = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=(1,)).lower(
            self.params, self.pool, self.pack([], shape, implementation), bits
        )
        traced = time.perf_counter()
        compiled = lowered.compile()
        times = {"trace_s": traced - began, "compile_s": time.perf_counter() - traced}

        def run(rows: Rows) -> Outputs:
            self.pool, outputs = compiled(self.params, self.pool, rows, bits)
            return outputs

        return run, times

    def restore(self) -> None:
        """Draw the pool anew where a step that failed has taken it."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool)):
            self.pool = ()
            self.pool = _draw_pool(self.config, self.num_pages)


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
        cells = min(cells, int((free - weights - SLACK_BYTES) // config.bytes_per_cell))
    if cells < context:
        raise MemoryError(f"weights of {weights / 1e9:.1f} GB and one row do not fit")
    num_rows = min(num_rows, cells // context)
    num_pages = -(-cells // PAGE_SIZE) + num_rows  # what a step writes is behind all contexts
    params = draw_params(config)
    pool = _draw_pool(config, num_pages)
    jax.block_until_ready((params, pool))
    return Model(
        config=config, context=context, num_rows=num_rows, cells=cells, num_pages=num_pages,
        params=params, pool=pool,
    )  # fmt: skip


def draw_params(config: ModelConfig) -> Params:
    """Draw weights on the device."""
    seeds = iter(range(1, 10**6))

    def draw(_: str, spec: ParamSpec) -> jax.Array:
        dtype = jnp.dtype(spec.dtype(config.dtypes)).name
        if spec.kind != "matrix":
            return jnp.full(spec.shape, float(spec.kind == "norm"), dtype)
        scale = np.float32(spec.fan_in**-0.5)
        return noise(np.uint32(next(seeds)), scale, shape=spec.shape, dtype=dtype)

    return params_module.map_specs(draw, config)


def weight_bytes(params: Params) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it looks up rows."""
    read = {name: part for name, part in params.items() if name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _draw_pool(config: ModelConfig, num_pages: int) -> Pool:
    shape = (config.num_kv_heads, num_pages, PAGE_SIZE, config.head_dim)
    dtype = jnp.dtype(config.dtypes.cache_dtype).name
    seeds = iter(range(10**6, 2 * 10**6))

    def pages() -> jax.Array:
        return noise(np.uint32(next(seeds)), np.float32(1), shape=shape, dtype=dtype)

    return tuple(LayerPages(k_pages=pages(), v_pages=pages()) for _ in range(config.num_layers))


def rows_apart(model: Model, count: int, tokens: int, context: int) -> list[Group]:
    """Rows behind contexts of their own, each writing to a page behind all contexts."""
    free = model.num_pages - 1 - np.arange(count)  # pages
    rng = np.random.default_rng(context)
    return [
        Group(
            rows=[
                RowInput(
                    token_ids=rng.integers(0, model.config.vocab_size, tokens),
                    positions=context + np.arange(tokens),
                    cells=free[index] * PAGE_SIZE + np.arange(tokens),
                    shifts=np.zeros(tokens, np.int32),
                    context=[device_problem.stretch(index * context, context)],
                    wanted=(tokens - 1,),
                )
            ]
        )
        for index in range(count)
    ]
