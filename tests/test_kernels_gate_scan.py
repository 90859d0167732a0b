"""The gate summary against numpy in float64: two best, log-sum-exp, entropy, allowed sets."""

from __future__ import annotations

import functools

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreted import options_for
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import gate_scan_gpu, gate_scan_tpu, gate_scan_xla
from jaxstate.kernels_pallas.gate_scan_xla import gate_scan

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
F32, BF16 = np.float32, ml_dtypes.bfloat16
CAPPED = {"scale": 0.5, "softcap": 20.0}
ROWS, VOCAB = 3, 70  # the last word of a bitmask is partly used
_scan = jax.jit(gate_scan)
SCANS = {
    "xla": (gate_scan_xla, {}),
    "interpret_gpu": (gate_scan_gpu, {"interpret": True}),
    "interpret_tpu": (gate_scan_tpu, {"interpret": pltpu.InterpretParams(detect_races=True)}),
}
scans = pytest.mark.parametrize("name", SCANS)


@functools.cache
def _jitted(name, of, scale=1.0, softcap=None):
    module, options = SCANS[name]
    scan = functools.partial(getattr(module, of), scale=scale, softcap=softcap, **options)
    return jax.jit(scan, compiler_options=options_for(name))


def _bits(allowed):
    """Pack [sets, vocab] bool; bits past the vocabulary's end are set, and must not matter."""
    vocab = allowed.shape[1]
    padded = np.ones((len(allowed), -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


def _run(scan, *operands, allowed):
    """Run a scan; allowed: [sets, vocab] bool, row r uses set r modulo the sets."""
    index = (np.arange(len(operands[0])) % len(allowed)).astype(np.int32)
    with jax.numpy_dtype_promotion("strict"):
        summary = jax.device_get(scan(*operands, _bits(allowed), index))
    # The TPU interpreter leaves its findings here, and raises where a read is out of bounds.
    assert tpu_interpreter.races is None or not tpu_interpreter.races.races_found
    return summary


def _summary(logits, allowed, scan=_scan):
    return _run(scan, logits.astype(np.float32), allowed=allowed)


def _best_two(row, allowed):
    """Ids by falling logit, then rising id, of those allowed."""
    ids = [idx for idx in range(len(row)) if allowed[idx]]
    return sorted(ids, key=lambda idx: (-row[idx], idx))[:2]


def _entropy(wide):
    """Log-sum-exp and entropy of a row in f64."""
    lse = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    logprobs = wide[wide > -np.inf] - lse
    return lse, -(np.exp(logprobs) * logprobs).sum()


ALL = np.ones((1, VOCAB), bool)
ALL_4500 = np.ones((1, 4500), bool)


@SETTINGS
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 3.0, 40.0]))
def test_summary_equals_numpy(seed, scale):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((ROWS, VOCAB)) * scale).astype(np.float32)
    allowed = rng.random((ROWS, VOCAB)) < 0.3
    allowed[:, rng.integers(0, VOCAB, 2)] = True
    summary = _summary(logits, allowed)
    for row in range(ROWS):
        wide = logits[row].astype(np.float64)
        best = _best_two(wide, ALL[0])
        assert summary.top_ids[row].tolist() == best
        np.testing.assert_array_equal(summary.top_logits[row], logits[row, best])
        lse, entropy = _entropy(wide)
        np.testing.assert_allclose(summary.lse[row], lse, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(summary.entropy[row], entropy, rtol=1e-4, atol=1e-5)
        best = _best_two(wide, allowed[row])
        if len(best) == 2:
            assert summary.allowed_ids[row].tolist() == best
            np.testing.assert_array_equal(summary.allowed_logits[row], logits[row, best])


@SETTINGS
@hypothesis.given(st.lists(st.integers(0, 3), min_size=VOCAB, max_size=VOCAB))
def test_ties_go_to_the_lowest_ids(values):
    logits = np.tile(np.asarray(values, np.float32), (ROWS, 1))
    allowed = np.arange(VOCAB) % 3 == np.arange(ROWS)[:, None]
    summary = _summary(logits, allowed)
    for row in range(ROWS):
        assert summary.top_ids[row].tolist() == _best_two(values, ALL[0])
        assert summary.allowed_ids[row].tolist() == _best_two(values, allowed[row])


def test_all_equal_logits_give_ids_zero_and_one_and_full_entropy():
    summary = _summary(np.zeros((ROWS, VOCAB)), ALL)
    assert summary.top_ids.tolist() == [[0, 1]] * ROWS
    np.testing.assert_allclose(summary.entropy, np.log(VOCAB), rtol=1e-6)


def test_impossible_tokens_count_for_nothing():
    logits = np.full((ROWS, VOCAB), -np.inf)
    logits[:, 5], logits[:, 9] = 1.0, 1.0 + np.log(3.0)
    summary = _summary(logits, ALL)
    assert summary.top_ids.tolist() == [[9, 5]] * ROWS
    np.testing.assert_allclose(summary.lse, 1 + np.log(4.0), rtol=1e-6)
    quarter = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(summary.entropy, quarter, rtol=1e-6)


@pytest.mark.parametrize("member", [0, 1, 31, 32, VOCAB - 1])
def test_allowed_set_of_one_has_no_second(member):
    allowed = np.zeros((1, VOCAB), bool)
    allowed[0, member] = True
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB)).astype(np.float32)
    summary = _summary(logits, allowed)
    assert summary.allowed_ids[:, 0].tolist() == [member] * ROWS
    np.testing.assert_array_equal(summary.allowed_logits[:, 0], logits[:, member])
    assert (summary.allowed_logits[:, 1] == -np.inf).all()


def test_empty_allowed_set_has_neither():
    logits = np.ones((ROWS, VOCAB))
    summary = _summary(logits, np.zeros((1, VOCAB), bool))
    assert (summary.allowed_logits == -np.inf).all()


def test_row_of_nothing_possible_has_no_mass_and_no_entropy():
    summary = _summary(np.full((ROWS, VOCAB), -np.inf), ALL)
    assert (summary.lse == -np.inf).all()
    assert (summary.entropy == 0).all()
    assert (summary.top_logits == -np.inf).all()
    assert (summary.top_ids == 0).all()


def _check(summary, wide, allowed, tolerance):
    """Compare with capped logits in f64, ties and all; ids of what is -inf are 0."""
    for row in range(len(wide)):
        some = allowed[row % len(allowed)]
        for ids, logits, among in (
            (summary.top_ids[row], summary.top_logits[row], np.ones_like(some)),
            (summary.allowed_ids[row], summary.allowed_logits[row], some),
        ):
            best = [idx for idx in _best_two(wide[row], among) if wide[row, idx] > -np.inf]
            best_logits = [*wide[row, best], -np.inf, -np.inf][:2]
            np.testing.assert_allclose(logits, best_logits, rtol=tolerance, atol=tolerance)
            assert ids.tolist() == [*best, 0, 0][:2]
        lse, entropy = _entropy(wide[row])
        np.testing.assert_allclose(summary.lse[row], lse, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(summary.entropy[row], entropy, rtol=1e-4, atol=1e-4)


def _integers(rows, vocab, hidden_size, dtype, seed=0):
    """Operands whose products are exact in every dtype, so that many logits are equal."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(-1, 2, (rows, hidden_size)).astype(dtype)
    matrix = rng.integers(-1, 2, (vocab, hidden_size)).astype(dtype)
    return hidden, matrix, hidden.astype(np.float64) @ matrix.astype(np.float64).T


def _sparse_sets(vocab):
    """Sets of about 1/64 of the vocabulary, of its last token alone, and of none."""
    some = np.random.default_rng(9).random((3, vocab)) < 1 / 64
    some[1:] = False
    some[1, -1] = True
    return some


@scans
@pytest.mark.parametrize(
    "dtype, of_matrix, rows, vocab, hidden_size",
    [(F32, F32, 3, 333, 64), (F32, BF16, 3, 333, 64), (BF16, BF16, 1, 4500, 48),
     (BF16, BF16, 70, 300, 128)],
)  # fmt: skip
def test_scan_of_hidden_states_equals_numpy(name, dtype, of_matrix, rows, vocab, hidden_size):
    hidden, matrix, exact = _integers(rows, vocab, hidden_size, dtype)
    if of_matrix != dtype:
        # Only a product in the dtype of the hidden states keeps the quarter of a thousandth.
        hidden += np.float32(2**-12)
        exact += 2**-12 * matrix.astype(np.float64).sum(axis=1)
    matrix = matrix.astype(of_matrix)
    allowed = _sparse_sets(vocab)
    summary = _run(_jitted(name, "gate_scan_hidden", **CAPPED), hidden, matrix, allowed=allowed)
    _check(summary, 20.0 * np.tanh(0.5 * exact / 20.0), allowed, 1e-5)


@scans
@pytest.mark.parametrize("dtype, rows, vocab", [(F32, 2, 4500), (BF16, 70, 300)])
def test_scan_of_logits_equals_numpy_with_impossible_tokens(name, dtype, rows, vocab):
    logits = _integers(rows, vocab, 64, dtype)[2].astype(dtype)
    logits[:, np.random.default_rng(1).random(vocab) < 0.3] = -np.inf
    logits[-1, : 2100 if vocab > 2100 else 0] = -np.inf  # a whole tile
    allowed = _sparse_sets(vocab)
    summary = _run(_jitted(name, "gate_scan", **CAPPED), logits, allowed=allowed)
    wide = 20.0 * np.tanh(0.5 * logits.astype(np.float64) / 20.0)
    _check(summary, np.where(logits == -np.inf, -np.inf, wide), allowed, 1e-5)


@scans
@pytest.mark.parametrize("level", [-500.0, 500.0])
def test_logits_far_from_zero_lose_nothing(name, level):
    """Tiles of nothing possible beside tiles whose best is below 0, and above what exp() takes."""
    logits = np.full((2, 4500), -np.inf, np.float32)
    logits[:, 2050:2060] = level - 0.25 * np.arange(10)
    logits[1, 4400:] = level - 0.5
    _check(_run(_jitted(name, "gate_scan"), logits, allowed=ALL_4500), logits, ALL_4500, 1e-6)


@scans
def test_row_of_nothing_possible_is_the_same_everywhere(name):
    logits = np.full((2, 4500), -np.inf, np.float32)
    summary = _run(_jitted(name, "gate_scan"), logits, allowed=ALL_4500)
    assert (summary.lse == -np.inf).all() and (summary.entropy == 0).all()
    assert (summary.top_ids == 0).all() and (summary.top_logits == -np.inf).all()


@scans
def test_broken_row_shows_in_its_own_summary_alone(name):
    hidden, matrix, _ = _integers(3, 333, 64, np.float32)
    scan = _jitted(name, "gate_scan_hidden", **CAPPED)
    whole = _run(scan, hidden, matrix, allowed=_sparse_sets(333))
    hidden[1] = np.nan
    broken = _run(scan, hidden, matrix, allowed=_sparse_sets(333))
    assert np.isnan(broken.lse[1]) and np.isnan(broken.entropy[1])
    others = [0, 2]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[others], b[others]), whole, broken)


@pytest.mark.parametrize("name", ["interpret_gpu", "interpret_tpu"])
def test_a_second_run_is_bitwise_equal(name):
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((3, 64)).astype(np.float32)
    matrix = rng.standard_normal((333, 64)).astype(np.float32)
    scan = _jitted(name, "gate_scan_hidden", **CAPPED)
    first, second = (_run(scan, hidden, matrix, allowed=_sparse_sets(333)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_row_alone_is_bitwise_what_it_is_in_a_batch_of_its_block_in_interpret_mode():
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((3, 64)).astype(np.float32)
    matrix = rng.standard_normal((333, 64)).astype(np.float32)
    scan = _jitted("interpret_gpu", "gate_scan_hidden", **CAPPED)
    allowed = _sparse_sets(333)[:1]
    batch = _run(scan, hidden, matrix, allowed=allowed)
    alone = _run(scan, hidden[:1], matrix, allowed=allowed)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:1], b), batch, alone)
