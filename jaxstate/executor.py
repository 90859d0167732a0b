"""Everything that is compiled, and the pool it runs on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs

from jaxstate import page_copy, sampling
from jaxstate import rows as rows_module
from jaxstate.config import EngineConfig
from jaxstate.errors import CapacityError, PoolLostError
from jaxstate.kernels_pallas import dispatch
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary
from jaxstate.models import decoder
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params, num_params
from jaxstate.models.quantized import QuantizedMatrix
from jaxstate.models.sharding import Sharding, place
from jaxstate.page_copy import Part
from jaxstate.rows import Group
from jaxstate.sampling import Sampling
from jaxstate.state import Outputs, Pool, StepShape, init_pool
from jaxstate.step import step

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str, float], None]
"""progress(done, total, name, seconds): called after each executable is compiled."""

MAX_TOP_LOGPROBS = 20
_PAIRS = 64  # (row, token id) pairs looked up at once when choices are scored


class StepResult:
    """Outputs of a step's rows; `summary` is on the host, logits stay on the device.

    Where the step did without logits they are computed when first asked for.
    """

    def __init__(self, executor: Executor, outputs: Outputs):
        """Keep what the step returned."""
        self.summary: GateSummary = jax.device_get(outputs.summary)
        self._executor = executor
        self._first = 0
        self._kept = {"outputs": outputs}  # shared by views of the same step

    def rows_from(self, first: int) -> StepResult:
        """View the outputs from a row on: its row 0 is this one's row `first`."""
        view = copy.copy(self)
        view.summary = jax.tree.map(lambda x: x[first:], self.summary)
        view._first = self._first + first
        return view

    def row_logits(self, row: int) -> jax.Array:
        """Return one row's logits, [vocab] f32, on the device."""
        return self._executor.call("take_row", self._logits, np.int32(self._first + row))

    def logprobs_at(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return the log-probability of each (row, token id)."""
        found: list[float] = []
        for begin in range(0, len(pairs), _PAIRS):
            part = np.zeros((_PAIRS, 2), np.int32)
            given = pairs[begin : begin + _PAIRS]
            part[: len(given)] = given
            logits = self._executor.call(
                "take_logits", self._logits, part[:, 0] + np.int32(self._first), part[:, 1]
            )
            logprobs = np.asarray(logits) - np.asarray(self.summary.lse)[part[:, 0]]
            found += logprobs[: len(given)].tolist()
        return found

    @property
    def _logits(self) -> jax.Array:
        outputs = self._kept["outputs"]
        logits = outputs.logits
        if logits is None:
            logits = self._executor.project(outputs.hidden)
            self._kept["outputs"] = dataclasses.replace(outputs, logits=logits)
        return logits


class Executor:
    """Owns parameters, pool and executables; the pool is donated to every step and rebound."""

    def __init__(
        self,
        params: Params,
        model: ModelConfig,
        config: EngineConfig,
        *,
        sharding: Sharding | None = None,
        progress: Progress | None = None,
    ):
        """Allocate the pool and compile every executable, so that nothing compiles later."""
        cache_dir = config.kernel_cache_dir or platformdirs.user_cache_path("jaxstate") / "kernels"
        self.implementation = dispatch.choose(
            config.implementation, model.head_dim, model.dtypes.cache_dtype,
            pathlib.Path(cache_dir), page_size=config.page_size,
            selects=config.selector is not None,
        )  # fmt: skip
        if config.stretch_cells is None:
            stretches = dispatch.stretch_cells(self.implementation, config.num_cells)
            config = dataclasses.replace(config, stretch_cells=stretches)
        self.model = model
        self.config = config
        self.tokens_forwarded = 0
        self.steps = 0
        self.pools_lost = 0
        self.on_pool_lost: Callable[[], None] = lambda: None
        # FLOPs: two per parameter, four per cell, layer and element of the query heads.
        width = model.num_heads * model.head_dim * model.num_layers
        self._token_cells = num_params(model) / (2 * width)
        self._sharding = sharding
        self._everywhere = None if sharding is None else sharding.named()
        self._params = params if sharding is None else place(params, model, sharding)
        matrix = decoder.output_matrix(self._params, model)
        self._scans_hidden = (
            dispatch.scans_hidden(self.implementation)
            and sharding is None
            and not isinstance(matrix, QuantizedMatrix)
        )
        self._pool = self._new_pool()
        words = -(-model.vocab_size // 32)
        everywhere = self._everywhere
        self._allowed_bits = jnp.full((1, words), 0xFFFFFFFF, jnp.uint32, device=everywhere)
        self._no_bias = jnp.zeros(model.vocab_size, jnp.float32, device=everywhere)
        self._steps: dict[StepShape, Any] = {}
        self._calls: dict[tuple, Any] = {}
        self._copies: dict[str, Any] = {}
        self._compile(progress)

    @property
    def num_executables(self) -> int:
        """Compiled programs this executor holds."""
        return len(self._steps) + len(self._calls) + len(self._copies)

    @property
    def longest_step(self) -> int:
        """Most tokens one step takes."""
        return self.config.step_shapes[-1].num_tokens

    def run(self, groups: Sequence[Group]) -> StepResult:
        """Forward the groups' tokens in one step.

        Raises:
          CapacityError: no compiled shape holds them.
          PoolLostError: it failed on the device. The pool was donated to it, so there is a new one
            with nothing in it, which `on_pool_lost` has been told of.
        """
        shape = rows_module.choose_shape(groups, self.config.step_shapes, self._token_cells)
        if shape is None:
            raise CapacityError(
                "no compiled step shape holds these rows; forward fewer tokens or outputs at once, "
                f"the largest is {self.config.step_shapes[-1]}"
            )
        packed = rows_module.pack(groups, shape, self.config)
        try:
            self._pool, outputs = self._steps[shape](
                self._params, self._pool, packed, self._allowed_bits
            )
            result = StepResult(self, outputs)
        except Exception as error:
            raise self._lost_pool(f"step of {shape.num_tokens} tokens", error) from error
        self.steps += 1
        self.tokens_forwarded += sum(len(row.token_ids) for group in groups for row in group.rows)
        return result

    def cost(self, groups: Sequence[Group]) -> float:
        """Estimate what the groups cost in one step, see rows.step_cost; inf = too much."""
        return min(
            rows_module.step_cost(groups, shape, self._token_cells)
            for shape in self.config.step_shapes
        )

    def wait(self) -> None:
        """Block until the device has finished all steps."""
        jax.block_until_ready(self._pool)

    def read_cells(self, cells: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copy cells out of the pool, for tests and snapshots: per layer k, v [heads, n, D]."""
        page, cell = cells // self.config.page_size, cells % self.config.page_size
        return [
            (np.asarray(layer.k_pages)[:, page, cell], np.asarray(layer.v_pages)[:, page, cell])
            for layer in self._pool
        ]

    @property
    def page_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each array that `page_copy.take` gives."""
        taken = jax.eval_shape(page_copy.take, self._pool, self._copied_pages)
        return [(array.shape, np.dtype(array.dtype)) for array in taken]

    def read_pages(self, pages: Sequence[int]) -> Iterator[list[np.ndarray]]:
        """Copy pages to host memory part by part, see page_copy.padded and page_copy.take."""
        for part in self.store_pages(pages):
            yield [np.asarray(array) for array in part]

    def store_pages(self, pages: Sequence[int]) -> Iterator[Part]:
        """Like read_pages, in the form that is the fastest to write back."""
        in_host_memory = jax.default_backend() == "cpu" and self._sharding is None
        for part in page_copy.padded(pages):
            taken = self._copies["take"](self._pool, part)
            # Turning numpy's arrays into JAX's takes 2 µs each, a tenth of the time of the copy.
            yield jax.block_until_ready(taken) if in_host_memory else jax.device_get(taken)

    def write_pages(self, pages: Sequence[int], parts: Iterable[Part]) -> None:
        """Write what `read_pages` or `store_pages` copied to pages of the pool, maybe others.

        Raises:
          PoolLostError: as of run.
        """
        for index, part in zip(page_copy.padded(pages), parts, strict=True):
            try:
                self._pool = self._copies["put"](self._pool, index, list(part))
            except Exception as error:
                raise self._lost_pool(f"copy to {len(pages)} pages", error) from error

    def draw(self, logits: jax.Array, settings: Sampling, token_index: int) -> int:
        """Draw a token from [vocab] logits; see Sampling."""
        bias: Any = self._no_bias
        if settings.logit_bias:
            bias = np.zeros(self.model.vocab_size, np.float32)
            for token_id, value in settings.logit_bias.items():
                bias[token_id] = value
        token = self.call(
            "draw",
            logits,
            bias,
            np.float32(settings.temperature),
            np.int32(settings.top_k),
            np.float32(settings.top_p),
            np.float32(settings.min_p),
            np.uint32(settings.seed),
            np.int32(token_index),
        )
        return int(token)

    def restrict(self, logits: jax.Array, allowed_bits: np.ndarray) -> tuple[jax.Array, Any]:
        """See sampling.restrict; the logits stay on the device, the rest comes to the host."""
        masked, *rest = self.call("restrict", logits, allowed_bits)
        return masked, jax.device_get(rest)

    def top_logits(self, logits: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the largest logits of [vocab] and their ids."""
        return jax.device_get(self.call("top_logits", logits))

    def project(self, hidden) -> jax.Array:
        """Compute the logits of final hidden states [rows, hidden_size]: [rows, vocab] f32."""
        return self._calls[("project", hidden.shape)](hidden, self._params)

    def call(self, name: str, *args):
        """Run a compiled helper; `logits` arrays of different row counts have one each."""
        return self._calls[(name, args[0].shape)](*args)

    def _lost_pool(self, what: str, error: Exception) -> PoolLostError:
        """Start with an empty pool, tell of it, and return what the caller raises."""
        self._pool = self._new_pool()
        self.pools_lost += 1
        self.on_pool_lost()
        return PoolLostError(
            f"{what} failed on the device: {error}; ask again, what the pool held is rebuilt"
        )

    def _new_pool(self) -> Pool:
        config = self.config
        return init_pool(
            self.model, config.num_pages, config.page_size, self._sharding,
            bounds=config.selector is not None,
        )  # fmt: skip

    def _compile(self, progress: Progress | None) -> None:
        """Compile helpers and steps; XLA reports nothing itself, hence the callback."""
        jobs = [(f"step {shape.num_tokens}", shape) for shape in self.config.step_shapes]
        helpers = self._helpers()
        copies = ["take", "put"]
        total = len(jobs) + len(helpers) + len(copies)
        done = 0
        for name, job in [*helpers.items(), *jobs, *((name, None) for name in copies)]:
            began = time.perf_counter()
            if isinstance(job, StepShape):
                self._steps[job] = self._compile_step(job)
            elif job is None:
                self._copies[str(name)] = self._compile_copy(str(name))
                name = f"{name} pages"
            else:
                function, args = job
                lowered = jax.jit(function).lower(*args)
                self._calls[(str(name[0]), args[0].shape)] = lowered.compile()
                name = str(name[0])
            done += 1
            seconds = time.perf_counter() - began
            logger.info("compiled %s, %d/%d, %.1f s", name, done, total, seconds)
            if progress:
                progress(done, total, str(name), seconds)

    def _compile_step(self, shape: StepShape):
        function = functools.partial(
            step, config=self.model, shape=shape, implementation=self.implementation,
            sharding=self._sharding, logits=not self._scans_hidden, selector=self.config.selector,
        )  # fmt: skip
        packed = rows_module.pack([], shape, self.config)

        def abstract(x):
            placed = getattr(x, "sharding", None) if self._sharding else None
            return self._abstract(x.shape, x.dtype, placed)

        args = jax.tree.map(abstract, (self._params, self._pool, packed, self._allowed_bits))
        placed = None
        if self._sharding is not None:
            placed = (jax.tree.map(lambda x: x.sharding, self._pool), self._everywhere)
        jitted = jax.jit(function, donate_argnums=(1,), out_shardings=placed)
        return jitted.lower(*args).compile()

    @property
    def _copied_pages(self) -> jax.ShapeDtypeStruct:
        return self._abstract((page_copy.PAGES_AT_ONCE,), jnp.int32)

    def _compile_copy(self, name: str):
        placed = jax.tree.map(lambda x: x.sharding, self._pool) if self._sharding else None
        kernel = None if self._sharding else dispatch.page_copy(self.implementation)
        if name == "take":
            take = jax.jit(functools.partial(page_copy.take, kernel=kernel))
            return take.lower(self._pool, self._copied_pages).compile()
        # What comes in is on the host.
        parts = [jax.ShapeDtypeStruct(*one) for one in self.page_shapes]
        put = functools.partial(page_copy.put, kernel=kernel)
        jitted = jax.jit(put, donate_argnums=(0,), out_shardings=placed)
        return jitted.lower(self._pool, self._copied_pages, parts).compile()

    def _abstract(self, shape: tuple[int, ...], dtype, placed=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed or self._everywhere)

    def _logits_of(self, hidden: jax.Array, params: Params) -> jax.Array:
        return decoder.logits(params, self.model, hidden)

    def _helpers(self) -> dict[tuple, tuple[Callable, tuple]]:
        vocab = self.model.vocab_size

        array = self._abstract

        def scalar(dtype):
            return array((), dtype)

        row = array((vocab,), jnp.float32)
        helpers: dict[tuple, tuple[Callable, tuple]] = {
            ("draw", vocab): (
                sampling.draw,
                (
                    row,
                    row,
                    scalar(jnp.float32),
                    scalar(jnp.int32),
                    scalar(jnp.float32),
                    scalar(jnp.float32),
                    scalar(jnp.uint32),
                    scalar(jnp.int32),
                ),
            ),
            ("restrict", vocab): (sampling.restrict, (row, array((-(-vocab // 32),), jnp.uint32))),
            ("top_logits", vocab): (
                functools.partial(sampling.top_logits, count=min(MAX_TOP_LOGPROBS, vocab)),
                (row,),
            ),
        }
        for num_rows in sorted({shape.num_rows for shape in self.config.step_shapes}):
            logits = array((num_rows, vocab), jnp.float32)
            pairs = array((_PAIRS,), jnp.int32)
            helpers[("take_row", num_rows)] = (sampling.take_row, (logits, scalar(jnp.int32)))
            helpers[("take_logits", num_rows)] = (sampling.take_logits, (logits, pairs, pairs))
            if self._scans_hidden:
                hidden = array((num_rows, self.model.hidden_size), self.model.dtypes.compute_dtype)
                params = jax.tree.map(lambda x: array(x.shape, x.dtype), self._params)
                helpers[("project", num_rows)] = (self._logits_of, (hidden, params))
        return helpers


def compile_probe() -> None:
    """Have XLA compile a program of no use, for whoever listens whether it does."""
    jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
