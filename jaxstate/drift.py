"""Does a calibrated gate still keep its risk? A test that may be looked at after every check.

A gambler bets that disagreements are more frequent than the risk. While they are not, no way of
betting makes his purse grow on average, so it ever reaches 20 times its start with a probability
of 5 % at most, however long he plays (Ville's inequality). When it does, the gate closes.

He does not know when a drift begins. So the purse is split once and for all: a part for every block
of checks at which one may begin, and each part is bet from its block on.

Disagreements come in runs, so a bet is on the share of a whole block, whose length the calibration
measured. Neighbouring blocks may still share a run, therefore every second one rests.

Source: betting on means, arXiv:2010.09686; starting anew at every time, arXiv:2203.03532.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy  # loads `special` when first used, 0.2 s that importing this would cost

from jaxstate.errors import InputError

FALSE_ALARM = 0.05
"""Largest probability that a gate ever closes whose disagreement never exceeds its risk."""

DRIFT = 3
"""The bets are those which grow fastest when disagreements are this many times the risk."""

_PATIENCE = 200  # blocks; parts of the purse are nearly equal up to here, then fall as 1 / block²


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """What the shadow samples after a calibration have shown.

    Attributes:
      wealth: of the parts of the purse that are being bet; the whole purse is 1 at the start.
      blocks: finished blocks that held a check.
      samples: since the last block ended.
      checks: samples of the unfinished block that the gate would have answered.
      disagreements: checks whose stale answer was not the fresh one.
      newest: version of the last sample.
      closed_at: version at which the gate closed; None while it is open.
    """

    wealth: float = 0.0
    blocks: int = 0
    samples: int = 0
    checks: int = 0
    disagreements: int = 0
    newest: int = -1
    closed_at: int | None = None


def observe(
    drift: Drift, *, risk: float, block_len: int, clears: bool, disagreed: bool, version: int
) -> Drift:
    """Take one more shadow sample; a closed gate stays closed.

    Args:
      risk: the calibration's.
      block_len: the calibration's, in samples.
      clears: the gate fires on the sample's gap: it is a check. A block without one is no bet.
      disagreed: the stale answer was not the fresh one.
      version: the session's at the fresh answer.
    """
    if drift.closed_at is not None:
        return drift
    samples = drift.samples + 1
    counts = clears and samples > samples_per_block(block_len) - block_len
    checks = drift.checks + counts
    disagreements = drift.disagreements + (counts and disagreed)
    if samples < samples_per_block(block_len):
        return dataclasses.replace(
            drift, samples=samples, checks=checks, disagreements=disagreements, newest=version
        )
    if not checks:
        return dataclasses.replace(drift, samples=0, newest=version)
    wealth, alarm = bet(drift.wealth, drift.blocks, disagreements / checks, risk)
    return Drift(
        wealth=float(wealth),
        blocks=drift.blocks + 1,
        newest=version,
        closed_at=version if alarm else None,
    )


def samples_per_block(block_len: int) -> int:
    """Return how many shadow samples a bet takes: those that rest and those of the block."""
    return 2 * block_len if block_len > 1 else 1


def bet(
    wealth: float | np.ndarray, blocks: int, share: float | np.ndarray, risk: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bet on one block, of one gate or of many.

    Args:
      wealth: see Drift, before the block.
      blocks: blocks before it.
      share: disagreements per check of the block.
      risk: the calibration's.
    Returns:
      wealth after the block, and whether that closes the gate.
    """
    factor = 1 + _stake(risk) * (np.asarray(share) - risk)
    after = (wealth + _part(blocks)) * factor
    purse = after + _PATIENCE / (_PATIENCE + blocks + 1)  # with the parts that are not yet bet
    return after, purse >= 1 / FALSE_ALARM


def blocks_to_notice(
    risk: float, *, times: float = DRIFT, chance: float = 0.95, quiet_blocks: int = 0
) -> int:
    """Return within how many blocks a drift closes the gate; each takes `samples_per_block`.

    It is a bound, not an estimate: it asks when a single part of the purse has grown enough, in
    independent blocks of one check. All parts together take about half as long.

    Args:
      times: how many times the risk disagreements are from now on.
      chance: probability with which the gate has closed by then; 0.5 gives a median.
      quiet_blocks: blocks that came before the drift.
    Raises:
      InputError: out of range, or a drift so small that the bets do not gain by it.
    """
    check_risk(risk)
    if not 1 < times <= 1 / risk or not 0 < chance < 1 or quiet_blocks < 0:
        raise InputError(
            f"drift: expected times above 1 and at most {1 / risk:g}, a chance between 0 and 1 and "
            f"quiet_blocks of at least 0, got {times}, {chance} and {quiet_blocks}"
        )
    stake, rate = _stake(risk), times * risk
    up, down = math.log1p(stake * (1 - risk)), math.log1p(-stake * risk)
    if rate * up + (1 - rate) * down <= 0:
        raise InputError(
            f"times: expected a drift that the bets gain by, got {times}; they are laid for "
            f"{DRIFT} times the risk"
        )
    wanted = -math.log(FALSE_ALARM * _part(quiet_blocks))
    longest = 64
    while True:
        blocks = np.arange(1, longest + 1)
        needed = np.ceil((wanted - blocks * down) / (up - down))  # disagreements
        noticed = scipy.special.bdtrc(needed - 1, blocks, rate)  # P(at least `needed` of `blocks`)
        enough = np.flatnonzero((needed <= blocks) & (noticed >= chance))
        if enough.size:
            return int(blocks[enough[0]])
        longest *= 2


def check_risk(risk: float) -> None:
    """Refuse what is no risk that a gate can keep.

    Raises:
      InputError: not between 0.001 and 0.3.
    """
    if not 0.001 <= risk <= 0.3:
        raise InputError(f"risk: expected a share between 0.001 and 0.3, got {risk}")


def _stake(risk: float) -> float:
    """What is bet on a disagreement: it makes a block's factor the likelihood ratio of a drift."""
    return (DRIFT * risk - risk) / (risk * (1 - risk))


def _part(block: int) -> float:
    """Share of the purse that is bet from a block on; all of them sum to 1."""
    return _PATIENCE / ((_PATIENCE + block) * (_PATIENCE + block + 1))
