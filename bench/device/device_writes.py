"""Writing keys and values into the pool: right, and how long it takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import device_problem
import jax
import jax.numpy as jnp
import numpy as np
from common import Limit
from device_run import Check, Run, run_checks
from device_sizes import Heads
from device_timing import measure, noise, require_bytes

from jaxstate.kernels_pallas import dispatch

_PAGE_SIZE = 64


def checks(run: Run, dtypes: Sequence[str], heads: Heads, num_pages: int) -> None:
    """Compare with XLA's scatter: one token and many, of the pool's dtype and of f32."""
    pairs = [(dtype, of_new) for dtype in dtypes for of_new in sorted({dtype, "float32"})]
    run_checks(
        run,
        [
            _check(run, heads, num_pages, tokens, dtype, of_new)
            for tokens in (1, 40)
            for dtype, of_new in pairs
        ],
    )


def huge_check(run: Run, heads: Heads, num_pages: int) -> None:
    """The same in a pool whose offsets pass 32 bits."""
    copies = 6 * heads.num_kv_heads * num_pages * _PAGE_SIZE * heads.head_dim * 2
    require_bytes(copies, "writing to a pool of more than 2^31 elements, and comparing")
    run_checks(run, [_check(run, heads, num_pages, 40, "bfloat16", "bfloat16")])


def _check(run: Run, heads: Heads, num_pages: int, tokens: int, dtype: str, of_new: str) -> Check:
    """Every cell of both pools afterwards; a quarter of the tokens are dropped."""
    inputs: list[Any] = []

    def lower() -> list[Any]:
        shape = (heads.num_kv_heads, num_pages, _PAGE_SIZE, heads.head_dim)
        pools = [noise(np.uint32(s), np.float32(1), shape=shape, dtype=dtype) for s in (1, 2)]
        new = [
            noise(
                np.uint32(seed), np.float32(1),
                shape=(tokens, heads.num_kv_heads, heads.head_dim), dtype=of_new,
            )
            for seed in (3, 4)
        ]  # fmt: skip
        inputs[:] = [*pools, *new, _cells(tokens, num_pages * _PAGE_SIZE)]
        return [
            device_problem.lower(
                functools.partial(dispatch.kv_write, run.kernels), *inputs, donate_argnums=(0, 1)
            ),
            device_problem.lower(functools.partial(dispatch.kv_write, "xla"), *inputs),
        ]

    def compare(kernel: Any, plain: Any) -> float:
        expected = plain(*inputs)
        found = kernel(*inputs)  # the pools are gone now
        inputs.clear()
        return sum(int(_num_different(*pair)) for pair in zip(found, expected, strict=True))

    return Check(
        name=f"kv_write {tokens} tokens {dtype} from {of_new} {num_pages} pages",
        lower=lower, compare=compare, limit=Limit(op="==", value=0), unit="numbers that differ",
        detail={"head_dim": heads.head_dim, "num_kv_heads": heads.num_kv_heads},
    )  # fmt: skip


def _cells(tokens: int, num_cells: int) -> jax.Array:
    """Draw cells to write, none twice, the pool's last among them; every fourth is dropped."""
    rng = np.random.default_rng(tokens)
    cells = rng.choice(num_cells - 1, tokens, replace=False)
    cells[0] = num_cells - 1
    cells[3::4] = num_cells + np.arange(len(cells[3::4]))
    return jnp.asarray(cells, jnp.int32)


@jax.jit
def _num_different(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Count elements whose bits differ."""
    width = jnp.uint16 if found.dtype.itemsize == 2 else jnp.uint32
    bits = (jax.lax.bitcast_convert_type(x, width) for x in (found, expected))
    return jnp.not_equal(*bits).sum(dtype=jnp.int32)


def timings(run: Run, heads: Heads, num_pages: int, tokens: int) -> None:
    """Time a step's write, the kernel and plain XLA in turn."""
    shape = (heads.num_kv_heads, num_pages, _PAGE_SIZE, heads.head_dim)
    new = [
        noise(
            np.uint32(seed), np.float32(1),
            shape=(tokens, heads.num_kv_heads, heads.head_dim), dtype="bfloat16",
        )
        for seed in (3, 4)
    ]  # fmt: skip
    cells = _cells(tokens, num_pages * _PAGE_SIZE)
    moved = 2 * sum(one.nbytes for one in new)
    for name in ("kernel", "xla"):
        function = functools.partial(dispatch.kv_write, run.implementation(name))
        pools = [noise(np.uint32(s), np.float32(1), shape=shape, dtype="bfloat16") for s in (1, 2)]
        write = device_problem.lower(function, *pools, *new, cells, donate_argnums=(0, 1)).compile()

        def call(pools: list[Any] = pools, write: Any = write) -> Any:
            pools[:] = write(*pools, *new, cells)
            return pools

        run.report.timing(
            f"kv_write {name} {tokens}", measure(call), run.floor_ms(moved),
            tokens=tokens, floor_bytes=moved,
        )  # fmt: skip
