"""Writing keys and values into pool pages: the named cells, nothing else, in place."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate.kernels_pallas.kv_write_xla import kv_write

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM = 2, 5, 4, 8
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
