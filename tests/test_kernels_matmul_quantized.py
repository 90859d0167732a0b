"""The CPU kernel for products with quantized matrices against numpy in float64."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import platformdirs
import pytest

from jaxstate.kernels_pallas import cpu_library, dispatch, matmul_quantized_cpu

CACHE_DIR = pathlib.Path(platformdirs.user_cache_path("jaxstate")) / "kernels"
INPUTS, OUTPUTS = 96, 37  # neither a whole number of tiles
ROWS = range(1, 18)
# (bits, inputs per scale, with offsets)
FORMS = [
    (8, 96, False),
    (8, 16, False),
    (8, 32, True),
    (8, 48, False),
    (4, 32, True),
    (4, 96, True),
]
TOLERANCE = 1e-6  # of the largest number: f32 sums of 96 products


@pytest.fixture(scope="module")
def product():
    if reason := cpu_library.unsupported():
        pytest.skip(reason)
    matmul_quantized_cpu.build(CACHE_DIR)
    return jax.jit(matmul_quantized_cpu.product)


@functools.cache
def _matrix(bits: int, group: int, with_offsets: bool, outputs: int = OUTPUTS):
    """Return codes, scales, offsets, and the matrix they stand for in float64."""
    rng = np.random.default_rng(bits * 100 + group)
    values = (
        rng.integers(0, 16, (outputs, INPUTS))
        if bits == 4
        else (rng.integers(-128, 128, (outputs, INPUTS)))
    )
    values[0, :16] = -128 if bits == 8 else 15
    codes = values.astype(np.int8)
    if bits == 4:
        codes = np.empty((outputs, INPUTS // 2), np.uint8)
        for at in range(INPUTS // 2):
            block, place = divmod(at, 16)
            low, high = values[:, 32 * block + place], values[:, 32 * block + 16 + place]
            codes[:, at] = low + 16 * high
    scales = rng.standard_normal((outputs, INPUTS // group)).astype(np.float32)
    offsets = rng.standard_normal(scales.shape).astype(np.float32) if with_offsets else None
    matrix = values * np.repeat(scales.astype(np.float64), group, axis=1)
    if offsets is not None:
        matrix += np.repeat(offsets, group, axis=1)
    return codes, scales, offsets, matrix


def _assert_close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_number_of_rows_is_the_product_in_float64(product, form):
    codes, scales, offsets, matrix = _matrix(*form)
    x = np.random.default_rng(1).standard_normal((max(ROWS), INPUTS)).astype(np.float32)
    for rows in ROWS:
        result = np.asarray(product(x[:rows], codes, scales, offsets))
        assert result.shape == (rows, OUTPUTS)
        _assert_close(result, x[:rows].astype(np.float64) @ matrix.T)


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5, 8])
def test_any_number_of_outputs_is_written_and_no_more(product, outputs):
    codes, scales, offsets, matrix = _matrix(8, 32, True, outputs)
    x = np.ones((5, INPUTS), np.float32)
    _assert_close(np.asarray(product(x, codes, scales, offsets)), x @ matrix.T)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_not_a_number_stays_in_its_row_and_its_output(product, form):
    codes, scales, offsets, matrix = _matrix(*form)
    x = np.random.default_rng(2).standard_normal((6, INPUTS)).astype(np.float32)
    clean = x.astype(np.float64) @ matrix.T
    x[4, 95], scales = np.nan, scales.copy()
    scales[36, -1] = np.nan
    result = np.asarray(product(x, codes, scales, offsets))
    assert np.isnan(result[4]).all() and np.isnan(result[:, 36]).all()
    _assert_close(result[[0, 1, 2, 3, 5], :36], clean[[0, 1, 2, 3, 5], :36])


@pytest.mark.parametrize("rows", [1, 3, 70, 300])
def test_work_shared_by_threads_and_blocks_of_rows_is_complete(product, rows):
    inputs, outputs = 1024, 1030
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (outputs, inputs), np.int8)
    scales = rng.uniform(0.5, 1, (outputs, 1)).astype(np.float32)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    matrix = codes * scales.astype(np.float64)
    _assert_close(np.asarray(product(x, codes, scales, None)), x.astype(np.float64) @ matrix.T)


@pytest.mark.parametrize(
    "codes, groups, message",
    [(np.zeros((4, 96), np.int8), 12, "multiple of 16"), (np.zeros((4, 48), np.uint8), 6, "of 32")],
)
def test_groups_that_share_a_vector_are_refused(product, codes, groups, message):
    scales = np.ones((4, groups), np.float32)
    with pytest.raises(Exception, match=message):
        product(np.ones((1, 96), np.float32), codes, scales, scales)


def test_plain_xla_has_no_kernel_of_its_own():
    assert dispatch.product("xla") is None
    assert dispatch.product("cpu") is matmul_quantized_cpu.product
