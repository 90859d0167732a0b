"""A gate opens only where stale answers are shown to agree, and what it says is what was seen."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import strategies as st

from jaxstate import calibration
from jaxstate.calibration import Calibration, ShadowSample, ShadowStore
from jaxstate.drift import Drift
from jaxstate.errors import InputError, SnapshotError

RISK = 0.05


def _samples(gaps, disagreed, first=1):
    return [
        ShadowSample(gap=float(gap), agreed=not bad, stale_version=at - 1, version=at)
        for at, (gap, bad) in enumerate(zip(gaps, disagreed, strict=True), start=first)
    ]


def _runs(rng, chances, length):
    """Disagreements that come with these chances, in runs: a Markov chain, step by step."""
    bad = np.zeros(len(chances), bool)
    hidden = rng.random()
    for at, chance in enumerate(chances):
        if rng.random() < 1 / length:
            hidden = rng.random()
        bad[at] = hidden < chance
    return bad


def _falling(rng, count, scale=0.5):
    """Gaps, and disagreements whose chance falls with them; independent."""
    gaps = rng.gamma(2, 2, count)
    return gaps, rng.random(count) < scale * np.exp(-gaps / 1.5)


@pytest.mark.parametrize("count", [59, 60, 153, 1000])
@pytest.mark.parametrize("disagreements", [0, 1, 3, 10, 58])
def test_bound_is_where_the_binomial_tail_is_five_percent(disagreements, count):
    inverted = scipy.optimize.brentq(
        lambda rate: scipy.stats.binom.cdf(disagreements, count, rate) - 0.05, 1e-9, 1 - 1e-9
    )
    assert calibration.upper_bound(disagreements, count) == pytest.approx(inverted, abs=1e-9)


def test_fifty_nine_agreements_are_the_fewest_that_show_five_percent():
    assert calibration.upper_bound(0, 59) <= 0.05 < calibration.upper_bound(0, 58)
    assert calibration.upper_bound(59, 59) == 1


@pytest.mark.parametrize("risk", [0.05, 0.1, 0.3])
def test_fewer_than_59_samples_never_open_the_gate(risk):
    for count, opens in ((0, False), (58, False), (59, True)):
        found = calibration.calibrate(_samples([5.0] * count, [False] * count), risk, longest_run=1)
        assert (found.tau is not None) == opens
        assert found.num_effective == count


def test_without_a_disagreement_each_sample_counts_as_a_part_of_the_longest_run():
    for count, opens in ((59 * 32 - 1, False), (59 * 32, True)):
        found = calibration.fixed_sequence(np.full(count, 5.0), np.zeros(count, bool), RISK)
        assert (found.tau is not None, found.block_len) == (opens, 32)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=118), st.data())
def test_whatever_was_seen_the_gate_needs_59_effective_samples(rows, data):
    gaps, disagreed = zip(*rows, strict=True) if rows else ((), ())
    risk = data.draw(st.sampled_from([0.01, 0.05, 0.3]))
    found = calibration.calibrate(_samples(gaps, disagreed), risk)
    assert found.num_effective <= len(rows)
    if found.tau is not None:
        above = [bad for gap, bad in rows if gap > found.tau]
        assert found.num_effective >= 59
        assert sum(above) / len(above) <= found.bound <= risk


def test_small_gaps_are_let_in_until_a_threshold_fails():
    gaps = np.repeat([12.0, 6.0, 3.0, 1.0], 400)
    disagreed = np.zeros(1600, bool)
    disagreed[400:1600:100] = True  # one in a hundred of the middle ones
    disagreed[1200::4] = True  # a quarter of the smallest
    mixed = np.random.default_rng(0).permutation(1600)
    found = calibration.calibrate(_samples(gaps[mixed], disagreed[mixed]), RISK)
    assert found.tau is not None and 1.0 <= found.tau < 3.0
    assert found.tau == pytest.approx(1.0)  # the loosest of the grid that keeps 1.0 out


def test_a_threshold_that_fails_ends_the_sequence_although_looser_ones_would_pass():
    gaps = np.concatenate([np.full(500, 20.0), np.full(3000, 2.0)])
    disagreed = np.zeros(3500, bool)
    disagreed[:500:10] = True  # every tenth of the largest gaps, 1.4 % of all
    mixed = np.random.default_rng(1).permutation(3500)
    found = calibration.calibrate(_samples(gaps[mixed], disagreed[mixed]), RISK, longest_run=1)
    assert calibration.upper_bound(50, 3500) < RISK
    assert found.tau is None
    assert found.bound > 0.1


def test_a_few_samples_at_the_strict_end_neither_stop_the_sequence_nor_open_the_gate():
    gaps = np.concatenate([np.full(10, 30.0), np.full(2000, 2.0)])
    disagreed = np.zeros(2010, bool)
    disagreed[:10] = True
    mixed = np.random.default_rng(2).permutation(2010)
    found = calibration.calibrate(_samples(gaps[mixed], disagreed[mixed]), RISK, longest_run=1)
    assert found.tau == 0.0
    assert found.num_effective >= 1000


def test_a_larger_risk_never_has_a_stricter_threshold():
    risks = (0.01, 0.02, 0.05, 0.1, 0.2)
    opened = 0
    for seed in range(40):
        gaps, disagreed = _falling(np.random.default_rng(seed), 2500)
        taus = [calibration.fixed_sequence(gaps, disagreed, risk).tau for risk in risks]
        order = [np.inf if tau is None else tau for tau in taus]
        assert order == sorted(order, reverse=True)
        opened += sum(tau is not None for tau in taus)
    assert opened > 100


def test_order_of_the_samples_does_not_matter():
    rng = np.random.default_rng(3)
    samples = _samples(*_falling(rng, 800))
    found = calibration.calibrate(samples, 0.1)
    assert found.tau is not None and found.version == 800 and found.num_samples == 800
    shuffled = [samples[at] for at in rng.permutation(len(samples))]
    assert calibration.calibrate(shuffled, 0.1) == found


def _violations(rng, streams, *, length, risk=RISK, count=1000):
    """Share of streams that open although disagreement is just above the risk everywhere."""
    opened = 0
    for _ in range(streams):
        gaps = rng.gamma(2, 2, count)
        disagreed = _runs(rng, np.full(count, 1.02 * risk), length)
        opened += calibration.fixed_sequence(gaps, disagreed, risk).tau is not None
    return opened / streams


@pytest.mark.parametrize("length", [1, 10])
def test_no_more_than_five_percent_of_calibrations_err(length):
    assert _violations(np.random.default_rng(4), 400, length=length) <= 0.05


def test_mutation_counting_runs_as_independent_samples_errs_often(monkeypatch):
    monkeypatch.setattr(calibration, "block_length", lambda *arrays, longest_run: 1)
    assert _violations(np.random.default_rng(4), 200, length=1) <= 0.05
    assert _violations(np.random.default_rng(4), 200, length=10) > 0.15


def test_trying_every_threshold_on_its_own_would_err_often():
    """Why the sequence stops: the best of many thresholds is a lucky one."""
    rng = np.random.default_rng(5)
    opened = 0
    for _ in range(200):
        gaps, disagreed = rng.gamma(2, 2, 1000), rng.random(1000) < 1.02 * RISK
        counts = [
            (int((disagreed & (gaps > tau)).sum()), int((gaps > tau).sum()))
            for tau in calibration.TAUS
        ]
        opened += any(
            calibration.upper_bound(bad, count) <= RISK for bad, count in counts if count >= 59
        )
    assert opened / 200 > 0.1


def test_where_gaps_inform_the_true_disagreement_above_the_threshold_keeps_the_risk():
    rng = np.random.default_rng(6)
    many, bad = _falling(np.random.default_rng(7), 2_000_000)
    violated = opened = 0
    for _ in range(200):
        tau = calibration.fixed_sequence(*_falling(rng, 1000), RISK).tau
        if tau is not None:
            opened += 1
            violated += bad[many > tau].mean() > RISK
    assert opened > 150
    assert violated <= 10


def test_blocks_are_as_long_as_disagreements_hold_together():
    rng = np.random.default_rng(8)
    lengths = []
    for length in (1, 3, 10, 20):
        measured = [
            calibration.block_length(np.full(2000, 5.0), _runs(rng, np.full(2000, 0.1), length))
            for _ in range(15)
        ]
        lengths.append(float(np.median(measured)))
    assert lengths[0] <= 2
    for length, measured in zip((3, 10, 20), lengths[1:], strict=True):
        assert 0.8 * (2 * length - 1) <= measured <= 2.5 * (2 * length - 1)


def test_frequent_disagreements_of_small_gaps_do_not_hide_runs_of_large_gaps():
    rng = np.random.default_rng(9)
    gaps = rng.choice([0.1, 9.0], 2000, p=[0.5, 0.5])
    runs = _runs(rng, np.full(2000, 0.1), 20)
    disagreed = np.where(gaps > 1, runs, rng.random(2000) < 0.5)
    assert calibration.block_length(gaps, disagreed) > 15
    alone = calibration.block_length(np.full(2000, 5.0), rng.random(2000) < 0.3)
    assert alone <= 2


def _gate(**changes):
    gate = Calibration(
        tau=2.0, risk=RISK, bound=0.031, num_effective=200, block_len=1, num_samples=400, version=9
    )
    return dataclasses.replace(gate, **changes)


def test_only_gaps_above_the_threshold_of_an_open_gate_fire():
    assert calibration.decide(_gate(), 2.0001)
    assert not calibration.decide(_gate(), 2.0)
    assert not calibration.decide(_gate(), float("nan"))
    assert not calibration.decide(_gate(tau=None), 100.0)
    assert not calibration.decide(_gate(checks=Drift(closed_at=20)), 100.0)


def test_an_answer_tells_gap_threshold_risk_bound_samples_and_age():
    said = calibration.evidence(_gate(), 3.5, age=2)
    assert dataclasses.asdict(said) == {
        "gap": 3.5,
        "tau": 2.0,
        "risk": RISK,
        "bound": 0.031,
        "num_effective": 200,
        "age": 2,
    }
    with pytest.raises(InputError, match="gap: expected one that the gate fires on, got 1.0"):
        calibration.evidence(_gate(), 1.0, age=2)
    with pytest.raises(InputError, match="age: expected at least 0 versions, got -1"):
        calibration.evidence(_gate(), 3.5, age=-1)


def test_a_closed_gate_opens_again_only_by_later_samples():
    rng = np.random.default_rng(10)
    gate = calibration.calibrate(_samples(*_falling(rng, 1500, 0.4)), 0.1)
    assert gate.tau is not None and calibration.decide(gate, 30.0)
    bad = _samples(np.full(3000, 30.0), rng.random(3000) < 0.5, first=1501)
    for sample in bad:
        gate = calibration.check(gate, sample)
    closed_at = gate.checks.closed_at
    assert closed_at is not None and closed_at < 1501 + 600
    good = _samples(*_falling(rng, 1500, 0.4), first=4501)
    closed = gate
    for sample in good[:200]:
        closed = calibration.check(closed, sample)
    assert not calibration.decide(closed, 30.0)
    assert calibration.calibrate(bad + good[:100], 0.1, after=closed_at).tau is None
    again = calibration.calibrate(bad + good, 0.1, after=bad[-1].version)
    assert again.tau is not None and again.num_samples == 1500 and calibration.decide(again, 30.0)


def test_checks_below_the_threshold_are_no_checks():
    gate = _gate()
    for sample in _samples([1.0] * 500, [True] * 500, first=10):
        gate = calibration.check(gate, sample)
    assert gate.checks == Drift(newest=509)


def test_a_store_keeps_the_newest_samples():
    store = ShadowStore(60)
    samples = _samples(np.arange(100), [False] * 100)
    for sample in samples:
        store.add(sample)
    assert store.samples == tuple(samples[40:])


def test_stores_and_gates_survive_json():
    rng = np.random.default_rng(11)
    store = ShadowStore(500)
    for sample in _samples(*_falling(rng, 600)):
        store.add(sample)
    again = ShadowStore.from_json(json.loads(json.dumps(store.to_json())))
    assert (again.samples, again.capacity) == (store.samples, 500)
    gate = calibration.calibrate(store.samples, 0.1)
    for sample in _samples(*_falling(rng, 50), first=601):
        gate = calibration.check(gate, sample)
    assert gate.checks.blocks > 0
    assert Calibration.from_json(json.loads(json.dumps(gate.to_json()))) == gate


@pytest.mark.parametrize(
    "change",
    [
        {"gap": [1.0]},
        {"gap": [1.0, -1.0]},
        {"agreed": [True, 3]},
        {"version": [5, 5]},
        {"capacity": "many"},
        {"stale_version": None},
    ],
)
def test_damaged_samples_are_refused(change):
    saved = {
        "capacity": 60,
        "gap": [1.0, 2.0],
        "agreed": [True, False],
        "stale_version": [1, 4],
        "version": [4, 5],
    }
    assert len(ShadowStore.from_json(saved).samples) == 2
    with pytest.raises(SnapshotError, match="shadow samples: damaged, .*; drop them"):
        ShadowStore.from_json(saved | change)


def test_damaged_gates_are_refused():
    saved = _gate().to_json()
    for damaged in ({}, saved | {"checks": {"colour": 1}}, saved | {"colour": 1}):
        with pytest.raises(SnapshotError, match="calibration: damaged, .*; calibrate again"):
            Calibration.from_json(damaged)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: calibration.calibrate([], 0.0), "risk: expected a share between 0.001 and 0.3"),
        (lambda: calibration.calibrate([], 0.5), "risk: expected a share between 0.001 and 0.3"),
        (lambda: calibration.calibrate([], float("nan")), "risk: expected a share between"),
        (lambda: calibration.calibrate([], 0.1, longest_run=0), "longest_run: expected at least 1"),
        (lambda: calibration.calibrate(2 * _samples([1], [True]), 0.1), "expected one per version"),
        (lambda: _samples([float("nan")], [True]), "gap: expected a finite number of logits"),
        (lambda: _samples([float("inf")], [True]), "gap: expected a finite number of logits"),
        (lambda: _samples([-1.0], [True]), "gap: expected a finite number of logits"),
        (
            lambda: ShadowSample(gap=1.0, agreed=True, stale_version=4, version=3),
            "stale_version: expected one from 0 up to version 3, got 4",
        ),
        (lambda: ShadowStore(58), "capacity: expected at least 59, got 58"),
        (
            lambda: calibration.check(_gate(), _samples([1.0], [True], first=9)[0]),
            "sample: expected a version after 9, got 9",
        ),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_version_is_stored_once():
    store = ShadowStore(60)
    store.add(_samples([1.0], [True], first=5)[0])
    with pytest.raises(InputError, match="sample: expected a version after 5, got 5"):
        store.add(_samples([1.0], [True], first=5)[0])
