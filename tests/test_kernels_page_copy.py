"""The CPU kernel that copies pages out of the pool and in, against numpy."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
import pytest
import tiny_engine

from jaxstate import page_copy
from jaxstate.kernels_pallas import cpu_library, dispatch, page_copy_cpu

CACHE_DIR = pathlib.Path(platformdirs.user_cache_path("jaxstate")) / "kernels"
# [heads, …]: pages of one number, of no whole line, of lines, of several kilobytes.
SHAPES = [(1, 1), (3, 5, 3), (2, 4, 16), (3, 16, 64)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8]


@pytest.fixture(scope="module")
def kernel():
    if reason := cpu_library.unsupported():
        pytest.skip(reason)
    page_copy_cpu.build(CACHE_DIR)
    return page_copy_cpu


def _drawn(rng, shape, dtype):
    return jnp.asarray(rng.integers(-100, 100, shape), dtype)


def _pages(rng, num_pages):
    """Some pages in any order, the last one repeated, see page_copy.padded."""
    some = rng.permutation(num_pages)[: rng.integers(1, num_pages + 1)]
    return np.append(some, [some[-1]] * 3).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_copied_out_and_in(kernel, dtype):
    rng = np.random.default_rng(0)
    take, put = jax.jit(kernel.take), jax.jit(kernel.put)
    for num_pages in (1, 7, 20):
        shapes = [(heads, num_pages, *page) for heads, *page in SHAPES]
        arrays, others = ([_drawn(rng, shape, dtype) for shape in shapes] for _ in range(2))
        before = [np.asarray(other).copy() for other in others]
        for _ in range(3):
            pages = _pages(rng, num_pages)
            parts = take(arrays, pages)
            written = put(others, pages, parts)
            for array, other, part, result in zip(arrays, before, parts, written, strict=True):
                np.testing.assert_array_equal(part, np.asarray(array)[:, pages])
                expected = other.copy()
                expected[:, pages] = part
                np.testing.assert_array_equal(result, expected)
        jax.tree.map(np.testing.assert_array_equal, others, before)  # they were not donated


def test_donated_arrays_are_written_in_place(kernel):
    arrays = [jnp.zeros((2, 8, 4, 16)), jnp.zeros((1, 8, 3))]
    places = [array.unsafe_buffer_pointer() for array in arrays]
    parts = [jnp.ones((2, 3, 4, 16)), jnp.ones((1, 3, 3))]
    put = jax.jit(kernel.put, donate_argnums=0)
    written = put(arrays, np.arange(3, dtype=np.int32), parts)
    assert all(array.is_deleted() for array in arrays)
    assert [one.unsafe_buffer_pointer() for one in written] == places
    assert [float(one.sum()) for one in written] == [2 * 3 * 4 * 16, 3 * 3]


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1])
def test_a_page_that_is_not_in_the_pool_is_refused(kernel, page):
    arrays, pages = [jnp.zeros((2, 8, 4))], np.array([0, page], np.int32)
    with pytest.raises(Exception, match="pages: expected pages of the pool"):
        jax.block_until_ready(jax.jit(kernel.take)(arrays, pages))
    with pytest.raises(Exception, match="pages: expected pages of the pool"):
        jax.block_until_ready(jax.jit(kernel.put)(arrays, pages, [jnp.zeros((2, 2, 4))]))


def test_an_engine_on_cpus_copies_with_it_and_others_without(monkeypatch):
    assert dispatch.page_copy("xla") is None
    calls = []
    for name in ("take", "put"):
        original = getattr(page_copy_cpu, name)
        monkeypatch.setattr(
            page_copy_cpu, name, lambda *args, of=original: calls.append(of) or of(*args)
        )
    engine = tiny_engine.build(num_pages=8, host_bytes=2**20, implementation="xla")
    assert engine.executor.implementation == "xla" and not calls
    engine = tiny_engine.build(num_pages=8, host_bytes=2**20)
    if engine.executor.implementation == "cpu":
        assert len(calls) == 2


def test_both_ways_copy_the_same(kernel):
    rng = np.random.default_rng(0)
    engine = tiny_engine.build(num_pages=24)
    pool = jax.tree.map(lambda x: _drawn(rng, x.shape, x.dtype), engine.executor._pool)
    for pages in page_copy.padded([3, 1, 23, 4, 0, 22, 9, 8, 2, 11]):
        part = jax.jit(page_copy.take)(pool, pages)
        own = jax.jit(lambda pool, pages: page_copy.take(pool, pages, kernel))(pool, pages)
        jax.tree.map(np.testing.assert_array_equal, own, part)
        elsewhere = (pages + 1) % 24
        put = jax.jit(page_copy.put)(pool, elsewhere, part)
        own = jax.jit(lambda *args: page_copy.put(*args, kernel))(pool, elsewhere, part)
        jax.tree.map(np.testing.assert_array_equal, own, put)
