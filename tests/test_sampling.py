"""Drawing tokens: each filter against numpy, frequencies, seeds, ties."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate import sampling
from jaxstate.errors import InputError
from jaxstate.sampling import Sampling

SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
VOCAB, DRAWS = 12, 2000
_draw = jax.jit(sampling.draw)
_restrict = jax.jit(sampling.restrict)
_draw_many = jax.jit(jax.vmap(sampling.draw, in_axes=(None,) * 7 + (0,)))


def _arguments(logits, settings: Sampling):
    bias = np.zeros(len(logits), np.float32)
    for token_id, value in settings.logit_bias.items():
        bias[token_id] = value
    return (
        np.asarray(logits, np.float32),
        bias,
        np.float32(settings.temperature),
        np.int32(settings.top_k),
        np.float32(settings.top_p),
        np.float32(settings.min_p),
        np.uint32(settings.seed),
    )


def _one(logits, settings, index=0) -> int:
    with jax.numpy_dtype_promotion("strict"):
        return int(_draw(*_arguments(logits, settings), np.int32(index)))


def _many(logits, settings) -> np.ndarray:
    """Draws at indices 0 … DRAWS - 1."""
    return np.asarray(_draw_many(*_arguments(logits, settings), np.arange(DRAWS, dtype=np.int32)))


def _distribution(logits, settings: Sampling) -> np.ndarray:
    """Probabilities in float64, filters written out one after the other."""
    scaled = np.asarray(logits, np.float32).astype(np.float64)
    for token_id, value in settings.logit_bias.items():
        scaled[token_id] += value
    scaled /= settings.temperature
    order = sorted(range(len(scaled)), key=lambda idx: (-scaled[idx], idx))
    if settings.top_k:
        order = order[: settings.top_k]
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    kept = []
    for rank, token_id in enumerate(order):
        if probs[:rank].sum() < settings.top_p and probs[rank] >= settings.min_p * probs[0]:
            kept.append(token_id)
    result = np.zeros(len(scaled))
    result[kept] = np.exp(scaled[kept] - scaled[kept[0]])
    return result / result.sum()


def _assert_drawn_from(tokens, probs):
    """No token of probability 0, and a chi-square far from impossible (5 standard deviations)."""
    counts = np.bincount(tokens, minlength=VOCAB)
    assert (counts[probs == 0] == 0).all()
    expected = probs * len(tokens)
    likely = expected >= 5
    counts = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(len(counts) - 1, 1)
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom) + 5


LOGITS = np.asarray([0.3, 2.0, -1.0, 1.9, 0.0, 2.0, 1.0, -3.0, 0.5, 1.2, -0.2, 0.9])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.45},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"logit_bias": {7: 5.5, 1: -4.0}},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.3, "temperature": 1.5},
        {"top_k": 100},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(changes):
    settings = Sampling(**({"temperature": 1.0, "seed": 11} | changes))
    _assert_drawn_from(_many(LOGITS, settings), _distribution(LOGITS, settings))


@SETTINGS
@hypothesis.given(
    st.integers(0, 2**32 - 1),
    st.floats(0.3, 3),
    st.integers(0, VOCAB),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
)
def test_only_tokens_that_pass_every_filter_are_drawn(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 2
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    # At a boundary rounding decides; ask a little less of the two thresholds.
    loose = dataclasses.replace(settings, top_p=min(1, top_p + 1e-5), min_p=max(0, min_p - 1e-5))
    probs = _distribution(logits, loose)
    assert (probs[_many(logits, settings)] > 0).all()


def test_top_p_keeps_the_token_that_reaches_it():
    logits = np.log(np.asarray([0.5, 0.3, 0.15, 0.05] + [1e-9] * 8))
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
        settings = Sampling(temperature=1.0, top_p=top_p)
        assert set(_many(logits, settings).tolist()) == kept


def test_min_p_is_relative_to_the_most_likely():
    logits = np.log(np.asarray([0.5, 0.3, 0.15, 0.05] + [1e-9] * 8))
    for min_p, kept in ((0.7, {0}), (0.5, {0, 1}), (0.2, {0, 1, 2}), (0.05, {0, 1, 2, 3})):
        settings = Sampling(temperature=1.0, min_p=min_p)
        assert set(_many(logits, settings).tolist()) == kept


def test_top_k_ties_go_to_the_lowest_ids():
    settings = Sampling(temperature=1.0, top_k=2)
    assert set(_many(np.zeros(VOCAB), settings).tolist()) == {0, 1}


def test_same_seed_and_index_draw_the_same_token():
    settings = Sampling(temperature=1.0, seed=5)
    first = _many(LOGITS, settings)
    np.testing.assert_array_equal(first, _many(LOGITS, settings))
    assert [_one(LOGITS, settings, index) for index in range(20)] == first[:20].tolist()


def test_other_seeds_and_other_indices_draw_apart():
    first = _many(LOGITS, Sampling(temperature=1.0, seed=5))
    second = _many(LOGITS, Sampling(temperature=1.0, seed=6))
    probs = _distribution(LOGITS, Sampling(temperature=1.0))
    alike = (probs**2).sum()  # how often two independent draws agree
    for left, right in ((first, second), (first[1:], first[:-1])):
        assert abs((left == right).mean() - alike) < 5 * np.sqrt(alike / len(left))


def test_largest_seed_is_accepted():
    assert 0 <= _one(LOGITS, Sampling(temperature=1.0, seed=2**32 - 1)) < VOCAB


@SETTINGS
@hypothesis.given(st.lists(st.integers(-3, 3), min_size=VOCAB, max_size=VOCAB), st.integers(0, 99))
def test_greedy_takes_the_lowest_of_the_best_whatever_the_seed(values, seed):
    logits = np.asarray(values, np.float32)
    assert _one(logits, Sampling(seed=seed)) == int(np.argmax(logits))


def test_greedy_ignores_filters_but_not_the_bias():
    settings = Sampling(top_k=5, top_p=0.2, min_p=0.5, logit_bias={4: 9.0})
    assert _one(LOGITS, settings) == 4
    assert not settings.is_plain_greedy
    assert Sampling(top_k=5).is_plain_greedy


def test_bias_of_minus_infinity_bans_a_token():
    settings = Sampling(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB - 2), -np.inf))
    assert set(_many(LOGITS, settings).tolist()) == {VOCAB - 2, VOCAB - 1}


def test_low_temperature_approaches_greedy_without_overflow():
    settings = Sampling(temperature=1e-5)
    logits = LOGITS * 100
    logits[3] = 300
    assert set(_many(logits, settings).tolist()) == {3}


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name}: expected .* got {value}"):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    "name, value", [("top_k", 2**31), ("top_k", 1.5), ("seed", 1.5), ("logit_bias", {1: np.nan})]
)
def test_settings_that_cannot_reach_the_device_are_refused(name, value):
    with pytest.raises(InputError, match=name):
        Sampling(**{name: value})


@hypothesis.given(
    st.lists(st.integers(-3, 3), min_size=40, max_size=40),
    st.sets(st.integers(0, 39), min_size=1),
)
@SETTINGS
def test_restricted_logits_are_those_of_the_allowed_ties_by_lowest_id(values, allowed):
    logits = np.asarray(values, np.float32)
    bits = np.zeros(2, np.uint32)
    for token_id in allowed:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    with jax.numpy_dtype_promotion("strict"):
        masked, top_ids, best, lse = map(np.asarray, _restrict(logits, bits))
    expected = [value if idx in allowed else -np.inf for idx, value in enumerate(values)]
    assert masked.tolist() == expected
    ranked = sorted(allowed, key=lambda idx: (-values[idx], idx))[:2]
    assert top_ids[: len(ranked)].tolist() == ranked
    assert best.tolist() == [values[idx] for idx in ranked] + [-np.inf] * (2 - len(ranked))
    assert lse == pytest.approx(np.log(sum(np.exp(values[idx]) for idx in allowed)), abs=1e-5)


def test_top_logits_come_largest_first_ties_by_lowest_id():
    values, ids = jax.jit(lambda x: sampling.top_logits(x, 4))(LOGITS.astype(np.float32))
    wanted = sorted(range(VOCAB), key=lambda idx: (-LOGITS[idx], idx))[:4]
    assert ids.tolist() == wanted
    np.testing.assert_array_equal(values, LOGITS.astype(np.float32)[wanted])
