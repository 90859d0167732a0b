"""The gate of a question: agreement opens it, drift closes it, later samples open it again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxstate.answer import Answer, FinishReason, FirstToken, Source
from jaxstate.calibration import ShadowSample
from jaxstate.errors import SnapshotError
from jaxstate.gate import Gate, same_answer, stale_sample

RISK = 0.2


def _feed(gate, count, wrong, *, first=1, age=1, seed=0):
    """Give samples of gap 5, a share of which disagrees."""
    rng = np.random.default_rng(seed)
    for version in range(first, first + count):
        agreed = bool(rng.random() >= wrong)
        gate.add(ShadowSample(gap=5.0, agreed=agreed, stale_version=version - age, version=version))


def _answer(version, *, choice=None, logprobs=None, token_ids=(1, 2), gap=1.5, first=None):
    return Answer(
        token_ids=token_ids, text="", finish_reason=FinishReason.LENGTH, source=Source.COMPUTED,
        version=version, context_len=8, tokens_forwarded=5, gap=gap, choice=choice,
        choice_logprobs=logprobs, first_token=first,
    )  # fmt: skip


def test_a_gate_without_samples_never_fires():
    assert Gate().decide(RISK, 100.0, age=0) is None


def test_a_gate_opens_once_enough_samples_agree():
    gate = Gate()
    assert gate.decide(RISK, 5.0, age=1) is None
    _feed(gate, 40, 0.05)
    assert gate.decide(RISK, 5.0, age=1) is None
    _feed(gate, 600, 0.05, first=41, seed=1)
    found = gate.decide(RISK, 5.0, age=1)
    assert found is not None
    assert (found.gap, found.risk, found.age) == (5.0, RISK, 1)
    assert found.bound <= RISK and found.num_effective >= 59 and found.tau < 5.0


def test_a_gate_does_not_fire_on_smaller_gaps_or_on_what_is_older_than_its_samples():
    gate = Gate()
    _feed(gate, 600, 0.05, age=2, first=2)
    found = gate.decide(RISK, 5.0, age=2)
    assert found is not None
    assert gate.decide(RISK, found.tau, age=2) is None
    assert gate.decide(RISK, 5.0, age=3) is None


def test_drift_closes_a_gate_and_later_samples_open_it_again():
    gate = Gate()
    _feed(gate, 600, 0.05)
    assert gate.decide(RISK, 5.0, age=1)
    _feed(gate, 20, 0.8, first=601)
    assert gate.decide(RISK, 5.0, age=1) is None
    _feed(gate, 1200, 0.05, first=621)
    again = gate.decide(RISK, 5.0, age=1)
    assert again is not None and again.num_effective < 1400


def test_every_risk_has_a_threshold_of_its_own():
    gate = Gate()
    _feed(gate, 600, 0.15)
    assert gate.decide(0.3, 5.0, age=1) is not None
    assert gate.decide(0.05, 5.0, age=1) is None


def test_a_saved_gate_decides_and_goes_on_alike():
    gate = Gate()
    gate.decide(RISK, 5.0, age=1)
    _feed(gate, 600, 0.05)
    copy = Gate.from_json(json.loads(json.dumps(gate.to_json())))
    assert copy.decide(RISK, 5.0, age=1) == gate.decide(RISK, 5.0, age=1)
    for one in (gate, copy):
        _feed(one, 300, 0.9, first=601)
    assert copy.to_json() == gate.to_json()
    assert copy.decide(RISK, 5.0, age=1) is None


def test_a_version_that_was_sampled_before_the_session_was_saved_tells_nothing_new():
    gate = Gate()
    _feed(gate, 3, wrong=0.0)
    saved = Gate.from_json(json.loads(json.dumps(gate.to_json())))
    _feed(saved, 2, wrong=1.0, first=2)
    assert saved.samples == gate.samples
    _feed(saved, 1, wrong=1.0, first=4)
    assert [sample.agreed for sample in saved.samples] == [True, True, True, False]


def test_a_damaged_gate_is_refused():
    with pytest.raises(SnapshotError, match="gate: damaged"):
        Gate.from_json({"samples": Gate().to_json()["samples"]})


def test_answers_are_the_same_by_choice_or_by_tokens():
    old = _answer(3, choice=0, logprobs=(-0.1, -2.3), token_ids=(1,))
    fresh = _answer(4, choice=1, logprobs=(-2.3, -0.1), token_ids=(2,))
    assert not same_answer(old, fresh)
    assert same_answer(_answer(3), _answer(4))
    assert not same_answer(_answer(3), _answer(4, token_ids=(1, 3)))
    sample = stale_sample(old, fresh)
    assert (sample.stale_version, sample.version, sample.agreed) == (3, 4, False)
    assert sample.gap == pytest.approx(2.2)


def test_certainty_is_the_lead_of_what_was_answered():
    assert _answer(1).certainty == 1.5
    assert _answer(1, choice=0, first=FirstToken(choice=0, gap=3.0)).certainty == 3.0
    assert _answer(1, choice=0, logprobs=(0.0, -float("inf"))).certainty == 1e4
