"""Products of few rows with f32 matrices on CPUs by our own compiled kernel: building, calling."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import cpu_library

SOURCE = pathlib.Path(__file__).with_name("matmul_few_rows_cpu.cc")
TARGET = "jaxstate_matmul_few_rows_cpu"

ROWS = range(2, 17)
"""Numbers of rows that it multiplies faster than XLA, which reads a matrix fastest for one."""


def build(cache_dir: pathlib.Path) -> None:
    """Compile the kernel once per machine and source, and register it with JAX.

    Raises:
      RuntimeError: the compiler failed; carries its message.
    """
    cpu_library.build(SOURCE, "JaxstateMatmulFewRows", TARGET, cache_dir)


def product(x: jax.Array, matrix: jax.Array, *, outputs_first: bool) -> jax.Array | None:
    """Multiply rows by a matrix: [rows, outputs] f32; None for what is not f32 or not in ROWS.

    A row's result depends on no other row, nor on the number of threads.

    Args:
      x: [rows, inputs].
      matrix: [outputs, inputs] if outputs_first, else [inputs, outputs].
    """
    if x.shape[0] not in ROWS or x.dtype != jnp.float32 or matrix.dtype != jnp.float32:
        return None
    shape = (x.shape[0], matrix.shape[0 if outputs_first else 1])
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(x, matrix, outputs_first=outputs_first)
