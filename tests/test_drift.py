"""A gate that keeps its risk stays open, one that does not closes in time and stays closed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from jaxstate import drift
from jaxstate.drift import Drift
from jaxstate.errors import InputError

RISKS = (0.01, 0.05, 0.1, 0.3)


def _closings(shares, risk, wealth=0.0):
    """Block after which each stream closes its gate, or infinity; `shares` is [blocks, streams]."""
    closed = np.full(shares.shape[1], np.inf)
    for block, share in enumerate(shares):
        wealth, alarm = drift.bet(wealth, block, share, risk)
        closed = np.where(alarm, np.minimum(closed, block + 1), closed)
    return closed


def _watch(disagreed, *, risk, block_len, clears=None):
    state = Drift()
    for at, bad in enumerate(disagreed):
        state = drift.observe(
            state,
            risk=risk,
            block_len=block_len,
            clears=clears is None or bool(clears[at]),
            disagreed=bool(bad),
            version=at + 1,
        )
    return state


def _runs(rng, count, rate, length):
    hidden, bad = rng.random(), np.zeros(count, bool)
    begins, drawn = rng.random(count) < 1 / length, rng.random(count)
    for at in range(count):
        hidden = drawn[at] if begins[at] else hidden
        bad[at] = hidden < rate
    return bad


@pytest.mark.parametrize("risk", RISKS)
def test_bets_are_fair_where_disagreement_is_the_risk(risk):
    """The expected purse after a block is the purse before it, whatever happened."""
    wealth, unbet = 0.37, 1.0
    for block in range(300):
        lost, _ = drift.bet(wealth, block, 0.0, risk)
        won, _ = drift.bet(wealth, block, 1.0, risk)
        part = float(lost) / (1 - 2 / (1 - risk) * risk) - wealth  # a loss leaves 1 - stake * risk
        assert risk * won + (1 - risk) * lost == pytest.approx(wealth + part)
        unbet -= part
        wealth = float(lost)
    assert unbet == pytest.approx(200 / 500)  # never more than the whole purse is bet


@pytest.mark.parametrize("risk", [0.05, 0.1])
def test_gates_that_keep_the_risk_close_in_five_percent_at_most(risk):
    rng = np.random.default_rng(0)
    closed = _closings(rng.random((3000, 1000)) < risk, risk)
    assert (closed < np.inf).mean() <= 0.05


def test_mutation_a_bet_on_more_than_the_risk_closes_good_gates(monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(drift, "_part", lambda block: 1.0)  # a whole purse anew at every block
    closed = _closings(rng.random((3000, 200)) < 0.05, 0.05)
    assert (closed < np.inf).mean() > 0.5


@pytest.mark.parametrize("risk, quiet", [(0.05, 0), (0.05, 300), (0.1, 100), (0.01, 50)])
def test_a_drift_is_noticed_within_the_stated_number_of_blocks(risk, quiet):
    rng = np.random.default_rng(1)
    within = drift.blocks_to_notice(risk, quiet_blocks=quiet)
    median = drift.blocks_to_notice(risk, quiet_blocks=quiet, chance=0.5)
    before = rng.random((quiet, 500)) < risk / 2
    after = rng.random((within, 500)) < drift.DRIFT * risk
    waited = _closings(np.concatenate([before, after]), risk) - quiet
    assert (waited <= within).mean() >= 0.95
    assert np.median(waited) <= median < within


@pytest.mark.parametrize("risk", RISKS)
@pytest.mark.parametrize("chance", [0.5, 0.95])
def test_stated_blocks_are_the_fewest_at_which_one_part_has_grown_enough(risk, chance):
    """Redone count by count: the likelihood ratio against the binomial tail."""

    def grown(blocks):
        wins = next(
            wins
            for wins in itertools.count()
            if wins > blocks
            or wins * np.log(3) + (blocks - wins) * np.log((1 - 3 * risk) / (1 - risk))
            >= np.log(20 * 201)
        )
        return scipy.stats.binom.sf(wins - 1, blocks, 3 * risk)

    blocks = drift.blocks_to_notice(risk, chance=chance)
    assert grown(blocks) >= chance
    assert all(grown(fewer) < chance for fewer in range(1, min(blocks, 200)))


def test_larger_drifts_are_noticed_sooner_and_later_ones_later():
    times = [drift.blocks_to_notice(0.05, times=times) for times in (2.5, 3, 5, 10)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    quiet = [drift.blocks_to_notice(0.05, quiet_blocks=blocks) for blocks in (0, 100, 1000)]
    assert quiet == sorted(quiet) and quiet[0] < quiet[-1]


def test_runs_within_a_block_are_lost_once():
    rng = np.random.default_rng(2)
    streams = [_runs(rng, 6000, 0.05, 5) for _ in range(60)]
    closed = [_watch(bad, risk=0.05, block_len=10).closed_at is not None for bad in streams]
    mutated = [_watch(bad, risk=0.05, block_len=1).closed_at is not None for bad in streams]
    assert np.mean(closed) <= 0.05
    assert np.mean(mutated) > 0.5


def test_a_bet_is_on_the_checks_of_a_block_and_every_second_block_rests():
    # In blocks of 3: the first rests, then three samples, two of which clear the gate.
    clears = [True, True, True, True, False, True]
    disagreed = [True, True, True, True, True, False]
    state = _watch(disagreed, risk=0.1, block_len=3, clears=clears)
    expected, _ = drift.bet(0.0, 0, 0.5, 0.1)
    assert state == Drift(wealth=float(expected), blocks=1, newest=6)
    assert drift.samples_per_block(3) == 6
    assert drift.samples_per_block(1) == 1


def test_blocks_without_a_check_are_no_bets():
    state = _watch([True] * 60, risk=0.1, block_len=3, clears=[False] * 60)
    assert state == Drift(newest=60)


def test_a_gate_closes_at_the_sample_that_shows_it_and_stays_closed():
    state = _watch([True] * 20, risk=0.05, block_len=1)
    assert state.closed_at is not None and state.closed_at < 10
    longer = _watch([True] * 20 + [False] * 5000, risk=0.05, block_len=1)
    assert longer == state


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: drift.blocks_to_notice(0.5), "risk: expected a share between 0.001 and 0.3"),
        (lambda: drift.blocks_to_notice(0.1, times=1), "drift: expected times above 1 and at most"),
        (
            lambda: drift.blocks_to_notice(0.1, times=11),
            "drift: expected times above 1 and at most",
        ),
        (lambda: drift.blocks_to_notice(0.1, chance=1), "a chance between 0 and 1"),
        (lambda: drift.blocks_to_notice(0.1, quiet_blocks=-1), "quiet_blocks of at least 0"),
        (lambda: drift.blocks_to_notice(0.1, times=1.1), "times: expected a drift that the bets"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, message):
    with pytest.raises(InputError, match=message):
        call()
