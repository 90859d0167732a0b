"""The gate summary against numpy in float64: two best, log-sum-exp, entropy, allowed sets."""

from __future__ import annotations

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate.kernels_pallas.gate_scan_xla import gate_scan

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
ROWS, VOCAB = 3, 70  # the last word of a bitmask is partly used
_scan = jax.jit(gate_scan)


def _summary(logits, allowed):
    """Run the scan; allowed: [sets, vocab] bool, row r uses set r modulo the sets."""
    padded = np.zeros((len(allowed), -(-VOCAB // 32) * 32), bool)
    padded[:, :VOCAB] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view("<u4")
    index = (np.arange(len(logits)) % len(allowed)).astype(np.int32)
    with jax.numpy_dtype_promotion("strict"):
        return jax.device_get(_scan(logits.astype(np.float32), bits, index))


def _best_two(row, allowed):
    """Ids by falling logit, then rising id, of those allowed."""
    ids = [idx for idx in range(len(row)) if allowed[idx]]
    return sorted(ids, key=lambda idx: (-row[idx], idx))[:2]


ALL = np.ones((1, VOCAB), bool)


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
        lse = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        probs = np.exp(wide - lse)
        entropy = -(probs * (wide - lse)).sum()
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
