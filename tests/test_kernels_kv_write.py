"""Writing keys and values into pool pages: the named cells, nothing else, in place."""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreted import OPTIONS
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import kv_write_gpu, kv_write_tpu
from jaxstate.kernels_pallas.kv_write_xla import kv_write

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM = 2, 3, 16, 8
NUM_CELLS = PAGES * PAGE_SIZE
_write = jax.jit(kv_write, donate_argnums=(0,))


def _pages(seed, dtype=np.float32):
    shape = (KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _new(seed, count):
    shape = (count, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _run(pages, new, cells):
    with jax.numpy_dtype_promotion("strict"):
        return np.asarray(_write(jnp.asarray(pages), new, np.asarray(cells, np.int32)))


def _expected(pages, new, cells):
    wanted = pages.copy()
    for token, cell in enumerate(cells):
        if cell < NUM_CELLS:
            wanted[:, cell // PAGE_SIZE, cell % PAGE_SIZE] = new[token].astype(pages.dtype)
    return wanted


@SETTINGS
@hypothesis.given(st.data(), st.sampled_from([1, 2, 6]), st.sampled_from(["f32", "bf16"]))
def test_named_cells_are_written_and_the_rest_is_bitwise_as_before(data, count, name):
    dtype = np.float32 if name == "f32" else ml_dtypes.bfloat16
    cells = data.draw(st.permutations(range(NUM_CELLS)))[:count]
    for token in data.draw(st.sets(st.integers(0, count - 1))):
        cells[token] = data.draw(st.sampled_from([NUM_CELLS, NUM_CELLS + 1, 2**31 - 1]))
    pages, new = _pages(1, dtype), _new(2, count)
    found = _run(pages, new, cells)
    assert found.dtype == dtype
    assert found.tobytes() == _expected(pages, new, cells).tobytes()


@pytest.mark.parametrize("count", [1, 3])
def test_dropped_tokens_write_nothing_not_even_the_last_cell(count):
    pages = _pages(3)
    found = _run(pages, _new(4, count), [NUM_CELLS] * count)
    np.testing.assert_array_equal(found, pages)


@pytest.mark.parametrize("count", [1, 3])
def test_donated_pages_are_gone(count):
    old = jnp.asarray(_pages(5))
    _write(old, _new(6, count), np.arange(count, dtype=np.int32))
    assert old.is_deleted()


@pytest.mark.parametrize("count", [1, 3])
def test_write_makes_no_copy_of_the_pool(count):
    pages = jax.ShapeDtypeStruct((KV_HEADS, 512, PAGE_SIZE, HEAD_DIM), jnp.float32)
    new = jax.ShapeDtypeStruct((count, KV_HEADS, HEAD_DIM), jnp.float32)
    cells = jax.ShapeDtypeStruct((count,), jnp.int32)
    memory = jax.jit(kv_write, donate_argnums=(0,)).lower(pages, new, cells).compile()
    assert memory.memory_analysis().temp_size_in_bytes < pages.size * 4 // 8


def _jitted(write, interpret):
    write = functools.partial(write, interpret=interpret)
    return jax.jit(write, donate_argnums=(0, 1), compiler_options=OPTIONS)


KERNELS = {
    "interpret_gpu": _jitted(kv_write_gpu.kv_write, True),
    "interpret_tpu": _jitted(kv_write_tpu.kv_write, True),
}
_watched = _jitted(kv_write_tpu.kv_write, pltpu.InterpretParams(detect_races=True))
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def _check_kernel(write, count, dtype, cells):
    """Both pools at once; what is dropped is NaN, and so is half of what lies in the pages."""
    pages, new = [_pages(1, dtype), _pages(2, dtype)], [_new(3, count), _new(4, count)]
    for one in pages:
        one[:, :, ::2] = np.nan
    for one in new:
        one[np.asarray(cells) >= NUM_CELLS] = np.nan
    with jax.numpy_dtype_promotion("strict"):
        found = write(*map(jnp.asarray, pages), *new, np.asarray(cells, np.int32))
    for got, before, values in zip(found, pages, new, strict=True):
        assert got.dtype == dtype
        assert np.asarray(got).tobytes() == _expected(before, values, cells).tobytes()


@kernels
@hypothesis.settings(SETTINGS, max_examples=30)
@hypothesis.given(st.data(), st.sampled_from([1, 2, 17]), st.sampled_from(["f32", "bf16"]))
def test_kernel_in_interpret_mode_writes_the_named_cells_and_nothing_else(
    kernel, data, count, name
):
    cells = data.draw(st.permutations(range(NUM_CELLS)))[:count]
    for token in data.draw(st.sets(st.integers(0, count - 1))):
        cells[token] = data.draw(st.sampled_from([NUM_CELLS, NUM_CELLS + 1, 2**31 - 1]))
    _check_kernel(kernel, count, np.float32 if name == "f32" else ml_dtypes.bfloat16, cells)


@pytest.mark.parametrize(
    "cells",
    [
        list(range(5, 22)),  # a chunk over a page's edge
        [40, 3, 41, 2**31 - 1, 4, 47, 0, *[NUM_CELLS] * 10],  # tiles left and come back to
        [NUM_CELLS] * 17,
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_tpu_interpreter_finds_no_race_and_no_read_out_of_bounds(cells, dtype):
    _check_kernel(_watched, len(cells), dtype, cells)
    assert tpu_interpreter.races is not None
    assert not tpu_interpreter.races.races_found


@kernels
def test_kernel_in_interpret_mode_takes_donated_pages(kernel):
    old = [jnp.asarray(_pages(seed)) for seed in (5, 6)]
    kernel(*old, _new(7, 3), _new(8, 3), np.arange(3, dtype=np.int32))
    assert all(one.is_deleted() for one in old)
