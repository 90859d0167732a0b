"""Pages of the pool copied out and in on CPUs by our own compiled kernel: building, calling."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax

from jaxstate.kernels_pallas import cpu_library

SOURCE = pathlib.Path(__file__).with_name("page_copy_cpu.cc")
TAKE, PUT = "jaxstate_take_pages_cpu", "jaxstate_put_pages_cpu"


def build(cache_dir: pathlib.Path) -> None:
    """Compile the kernel once per machine and source, and register it with JAX.

    Raises:
      RuntimeError: the compiler failed; carries its message.
    """
    cpu_library.build(SOURCE, "JaxstateTakePages", TAKE, cache_dir)
    cpu_library.build(SOURCE, "JaxstatePutPages", PUT, cache_dir)


def take(arrays: Sequence[jax.Array], pages: jax.Array) -> list[jax.Array]:
    """Copy pages out: of each array [heads, count, …].

    Args:
      arrays: [heads, num_pages, …] each, of the pool.
      pages: [count] int32; it fails when it runs if one is not in the pool.
    """
    shapes = [(array.shape[0], pages.shape[0], *array.shape[2:]) for array in arrays]
    results = [
        jax.ShapeDtypeStruct(shape, array.dtype)
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    return jax.ffi.ffi_call(TAKE, results)(pages, *arrays)


def put(
    arrays: Sequence[jax.Array], pages: jax.Array, parts: Sequence[jax.Array]
) -> list[jax.Array]:
    """Write what `take` copied to pages; of equal neighbours in `pages` the first counts.

    In place where the arrays may be overwritten, else in copies.
    """
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    in_place = {1 + index: index for index in range(len(arrays))}
    return jax.ffi.ffi_call(PUT, results, input_output_aliases=in_place)(pages, *arrays, *parts)
