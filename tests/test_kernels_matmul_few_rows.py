"""The CPU kernel for products of few rows with f32 matrices against numpy in float64."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
import pytest
import tiny_engine

from jaxstate.kernels_pallas import cpu_library, dispatch, matmul_few_rows_cpu

CACHE_DIR = pathlib.Path(platformdirs.user_cache_path("jaxstate")) / "kernels"
ROWS = matmul_few_rows_cpu.ROWS
# (inputs, outputs): less than a vector, whole vectors, remainders of both, several stretches and
# tasks, and enough bytes for several threads.
SIZES = [(1, 1), (3, 5), (16, 16), (18, 33), (67, 130), (64, 256), (130, 515), (576, 1537)]
LAYOUTS = pytest.mark.parametrize("outputs_first", [False, True], ids=["inputs", "outputs"])
TOLERANCE = 2e-6  # of the largest number: f32 sums of at most 576 products


@pytest.fixture(scope="module")
def product():
    if reason := cpu_library.unsupported():
        pytest.skip(reason)
    matmul_few_rows_cpu.build(CACHE_DIR)
    return jax.jit(matmul_few_rows_cpu.product, static_argnames="outputs_first")


def _drawn(rows: int, inputs: int, outputs: int, outputs_first: bool):
    """Return x, the matrix as it lies in memory, and their product in float64."""
    rng = np.random.default_rng(inputs * outputs)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    matrix = rng.standard_normal((inputs, outputs)).astype(np.float32)
    expected = x.astype(np.float64) @ matrix.astype(np.float64)
    return x, matrix.T.copy() if outputs_first else matrix, expected


def _assert_close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@LAYOUTS
@pytest.mark.parametrize("inputs, outputs", SIZES)
def test_few_rows_of_any_size_are_the_product_in_float64(product, inputs, outputs, outputs_first):
    x, matrix, expected = _drawn(max(ROWS), inputs, outputs, outputs_first)
    for rows in (2, 3, 7, 8, 12, 13, 16):
        result = np.asarray(product(x[:rows], matrix, outputs_first=outputs_first))
        assert result.shape == (rows, outputs)
        _assert_close(result, expected[:rows])


@LAYOUTS
@pytest.mark.parametrize("inputs, outputs", [(67, 130), (576, 1537)])
def test_a_row_is_bitwise_the_same_among_any_others(product, inputs, outputs, outputs_first):
    x, matrix, _ = _drawn(max(ROWS), inputs, outputs, outputs_first)
    whole = np.asarray(product(x, matrix, outputs_first=outputs_first))
    for rows in ROWS:
        for chosen in (np.arange(rows), np.arange(16)[::-1][:rows]):
            result = np.asarray(product(x[chosen], matrix, outputs_first=outputs_first))
            np.testing.assert_array_equal(result, whole[chosen])


@LAYOUTS
def test_an_output_is_bitwise_the_same_in_any_place(product, outputs_first):
    x, matrix, _ = _drawn(8, 130, 515, outputs_first)
    whole = np.asarray(product(x, matrix, outputs_first=outputs_first))
    for begin, end in [(1, 2), (3, 40), (200, 515)]:
        part = matrix[begin:end] if outputs_first else matrix[:, begin:end]
        result = np.asarray(product(x, part, outputs_first=outputs_first))
        np.testing.assert_array_equal(result, whole[:, begin:end])


@LAYOUTS
def test_what_is_not_a_number_stays_in_its_row_and_its_output(product, outputs_first):
    x, matrix, clean = _drawn(7, 67, 130, outputs_first)
    x[5, 66] = np.nan
    matrix[(129, 66) if outputs_first else (66, 129)] = np.inf
    result = np.asarray(product(x, matrix, outputs_first=outputs_first))
    assert np.isnan(result[5]).all() and not np.isfinite(result[:, 129]).any()
    others = [0, 1, 2, 3, 4, 6]
    _assert_close(result[others, :129], clean[others, :129])


ON_ONE_THREAD = """
import os, pathlib, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import jax, numpy as np
from jaxstate.kernels_pallas import matmul_few_rows_cpu
matmul_few_rows_cpu.build(pathlib.Path(sys.argv[1]))
with np.load(sys.argv[2]) as given:
    x, first, last = given["x"], given["inputs_first"], given["outputs_first"]
product = jax.jit(matmul_few_rows_cpu.product, static_argnames="outputs_first")
results = [product(x, first, outputs_first=False), product(x, last, outputs_first=True)]
np.save(sys.argv[3], np.stack(results))
"""


def test_the_number_of_threads_does_not_change_a_bit(product, tmp_path):
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors, and to be bound to one of them")
    x, matrix, _ = _drawn(8, 576, 1537, False)
    turned = matrix.T.copy()
    np.savez(tmp_path / "given.npz", x=x, inputs_first=matrix, outputs_first=turned)
    paths = CACHE_DIR, tmp_path / "given.npz", tmp_path / "found.npy"
    subprocess.run([sys.executable, "-c", ON_ONE_THREAD, *map(str, paths)], check=True)
    first, last = np.load(tmp_path / "found.npy")
    np.testing.assert_array_equal(first, np.asarray(product(x, matrix, outputs_first=False)))
    np.testing.assert_array_equal(last, np.asarray(product(x, turned, outputs_first=True)))


MUTATIONS = [
    ("if (left) AddInputs", "if (false) AddInputs", False),
    ("p.inputs - i)", "(p.inputs - i) / 2)", True),
]


@pytest.mark.parametrize("right, wrong, outputs_first", MUTATIONS)
def test_a_mutation_of_the_kernel_is_noticed(product, tmp_path, right, wrong, outputs_first):
    for header in matmul_few_rows_cpu.SOURCE.parent.glob("*.h"):
        shutil.copy(header, tmp_path)
    text = matmul_few_rows_cpu.SOURCE.read_text()
    assert text.count(right) == 1
    source = tmp_path / f"mutated_{outputs_first}.cc"
    source.write_text(text.replace(right, wrong))
    cpu_library.build(source, "JaxstateMatmulFewRows", source.stem, tmp_path / "built")
    x, matrix, expected = _drawn(7, 67, 130, outputs_first)
    shape = jax.ShapeDtypeStruct(expected.shape, jnp.float32)
    mutated = jax.ffi.ffi_call(source.stem, shape)(x, matrix, outputs_first=outputs_first)
    with pytest.raises(AssertionError):
        _assert_close(np.asarray(mutated), expected)


def test_what_xla_multiplies_as_fast_is_left_to_it(product):
    matrix = np.ones((4, 4), np.float32)
    for rows in (1, max(ROWS) + 1):
        assert matmul_few_rows_cpu.product(jnp.ones((rows, 4)), matrix, outputs_first=True) is None
    wide, narrow = jnp.ones((4, 4)), jnp.ones((4, 4), jnp.bfloat16)
    assert matmul_few_rows_cpu.product(narrow, narrow, outputs_first=True) is None
    assert matmul_few_rows_cpu.product(wide, narrow, outputs_first=True) is None


def test_plain_xla_has_no_kernel_of_its_own():
    assert dispatch.few_rows("xla") is None
    assert dispatch.few_rows("cpu") is matmul_few_rows_cpu.product


def test_an_engine_multiplies_few_rows_by_the_kernel_and_one_by_xla(product):
    ids = np.random.default_rng(4).integers(0, tiny_engine.MODEL.vocab_size, 24).tolist()
    found = {}
    for implementation in ("cpu", "xla"):
        engine = tiny_engine.build(
            implementation=implementation, step_shapes=tiny_engine.SHAPES[:2]
        )
        session = engine.create()
        engine.append(session, ids[:20])
        found[implementation] = engine.advance(session, ids[20:]).ready.row_logits()
        for shape, compiled in engine.executor._steps.items():
            calls = compiled.as_text().count(f'custom_call_target="{matmul_few_rows_cpu.TARGET}"')
            assert (calls > 0) == (implementation == "cpu" and shape.num_tokens in ROWS)
    np.testing.assert_allclose(found["cpu"], found["xla"], rtol=0, atol=1e-5)
