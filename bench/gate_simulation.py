"""Streams of shadow samples whose true disagreement above every threshold is known.

A sample's gap is drawn from a Gamma(2, 2) distribution, 4 logits in the mean. Its chance to
disagree is a constant or falls or rises with the gap. What makes errors come in runs is the hidden
number that is compared with this chance: it stays the same over stretches of versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxstate import calibration, drift

Errors = Literal["independent", "runs", "patches"]
Gaps = Literal["informative", "uninformative", "lasting", "misleading"]

EDGE = 3.0  # logits; above it the true disagreement of informative gaps is just the risk
JUST_ABOVE = 1.02  # times the risk, where every threshold is wrong
_MEAN_SHARES = 400_000  # gaps drawn to compute the true disagreement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of stream.

    Attributes:
      errors: "independent"; "runs": disagreements in a row; "patches": stretches in which every
        second sample disagrees.
      length: mean length of a run or patch, in versions.
      gaps: whether large gaps disagree less, as often, or more; "lasting" gaps are informative and
        stay the same over stretches as long as the runs.
      risk: what is asked for.
      easiness: the true disagreement is divided by it; 1 is the hardest, just above the risk.
    """

    errors: Errors
    length: int
    gaps: Gaps
    risk: float
    easiness: float = 1.0

    def __str__(self):
        """Name it in a line."""
        runs = "" if self.errors == "independent" else f" of {self.length}"
        return f"{self.errors}{runs}, {self.gaps} gaps, risk {self.risk:.0%}"


def _stretches(rng: np.random.Generator, shape: tuple[int, int], length: int) -> np.ndarray:
    """[streams, versions] uniform numbers, each of which stays for `length` versions on average."""
    drawn = rng.random(shape)
    if length == 1:
        return drawn
    begins = rng.random(shape) < 1 / length
    begins[:, 0] = True
    since = np.maximum.accumulate(np.where(begins, np.arange(shape[1]), 0), axis=1)
    return np.take_along_axis(drawn, since, axis=1)


def _gaps(uniform: np.ndarray) -> np.ndarray:
    """Gamma(2, 2) numbers of uniform ones, by interpolation."""
    at = np.linspace(0, 60, 6001)
    return np.interp(uniform, 1 - (1 + at / 2) * np.exp(-at / 2), at)


def _shape(kind: Kind, gaps: np.ndarray) -> np.ndarray:
    """Chance to disagree, up to a factor."""
    if kind.gaps == "uninformative":
        return np.ones_like(gaps)
    if kind.gaps == "misleading":
        return 1 + gaps / 4
    return np.exp(-gaps / 2)


def _chances(kind: Kind, gaps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each sample's chance to disagree, and the true disagreement above every threshold."""
    grid = _gaps((np.arange(_MEAN_SHARES) + 0.5) / _MEAN_SHARES)
    shape = _shape(kind, grid)
    above = [shape[grid > tau] for tau in calibration.TAUS]
    if kind.gaps in ("informative", "lasting"):
        factor = kind.risk / shape[grid > EDGE].mean()
    else:
        factor = kind.risk * JUST_ABOVE / shape.mean()
    factor /= kind.easiness
    rates = [np.minimum(factor * one, 1).mean() if one.size else 0.0 for one in above]
    return np.minimum(factor * _shape(kind, gaps), 1), np.array(rates)


def kinds(risks: tuple[float, ...]) -> list[Kind]:
    """Return the kinds of stream on which a bound must hold, the hardest of each."""
    errors: list[tuple[Errors, int]] = [
        ("independent", 1),
        ("runs", 3),
        ("runs", 10),
        ("runs", 20),
        ("patches", 20),
    ]
    extra: list[tuple[Errors, int, Gaps]] = [
        ("runs", 10, "lasting"),
        ("runs", 20, "lasting"),
        ("independent", 1, "misleading"),
        ("runs", 10, "misleading"),
    ]
    every: tuple[Gaps, ...] = ("uninformative", "informative")
    usual = [
        Kind(errors=name, length=length, gaps=gaps, risk=risk)
        for gaps in every
        for name, length in errors
        for risk in risks
    ]
    return usual + [
        Kind(errors=name, length=length, gaps=gaps, risk=risk)
        for name, length, gaps in extra
        for risk in risks
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Simulated streams of one kind.

    Attributes:
      gaps: [streams, versions], logits.
      disagreed: [streams, versions] bool.
      rates: [thresholds], the true disagreement above each of calibration.TAUS.
    """

    gaps: np.ndarray
    disagreed: np.ndarray
    rates: np.ndarray


def streams(kind: Kind, *, num_streams: int, versions: int, seed: int) -> Streams:
    """Draw streams."""
    rng = np.random.default_rng(seed)
    shape = (num_streams, versions)
    length = 1 if kind.errors == "independent" else kind.length
    gaps = _gaps(_stretches(rng, shape, length if kind.gaps == "lasting" else 1))
    chances, rates = _chances(kind, gaps)
    hidden = _stretches(rng, shape, length)
    if kind.errors == "patches":
        inside = hidden < np.minimum(2 * chances, 1)
        disagreed = inside & (rng.random(shape) < np.maximum(chances, 0.5))
    else:
        disagreed = hidden < chances
    return Streams(gaps=gaps, disagreed=disagreed, rates=rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What calibrations of many streams of a kind came to.

    Attributes:
      streams: how many.
      violated: of those, how many whose true disagreement above the chosen threshold is too large.
      fired: of those, how many that chose one.
      coverage: share of all samples that the chosen thresholds let pass.
      block_len: median.
    """

    streams: int
    violated: int
    fired: int
    coverage: float
    block_len: float


def calibrations(kind: Kind, *, num_streams: int, versions: int, seed: int) -> Found:
    """Calibrate on every stream."""
    drawn = streams(kind, num_streams=num_streams, versions=versions, seed=seed)
    rates = dict(zip(calibration.TAUS, drawn.rates, strict=True))
    found = [
        calibration.fixed_sequence(gaps, disagreed, kind.risk)
        for gaps, disagreed in zip(drawn.gaps, drawn.disagreed, strict=True)
    ]
    taus = [one.tau for one in found]
    passed = [
        float((gaps > tau).mean())
        for gaps, tau in zip(drawn.gaps, taus, strict=True)
        if tau is not None
    ]
    return Found(
        streams=num_streams,
        violated=sum(tau is not None and bool(rates[tau] > kind.risk) for tau in taus),
        fired=len(passed),
        coverage=sum(passed) / num_streams,
        block_len=float(np.median([one.block_len for one in found])),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """What the checks of many gates came to.

    Attributes:
      false_alarms: share of gates that closed though disagreements are exactly as frequent as the
        risk, within `quiet_blocks`.
      noticed: share of gates that closed within `within` blocks of a drift.
      median: blocks until half of the gates had closed.
      stated_median: what drift.blocks_to_notice says of it.
      within: what drift.blocks_to_notice says for 95 %.
      quiet_blocks: blocks watched for false alarms.
    """

    false_alarms: float
    noticed: float
    median: float
    stated_median: int
    within: int
    quiet_blocks: int


def watch(
    risk: float,
    *,
    length: int,
    block_len: int,
    num_streams: int,
    quiet_blocks: int,
    before: int,
    seed: int,
) -> Watched:
    """Let gates watch a steady stream, and another that drifts to drift.DRIFT times the risk.

    Args:
      length: mean length of runs of disagreements, in checks.
      block_len: checks of a block.
      before: blocks before the drift, with half the risk.
    """
    rng = np.random.default_rng(seed)
    sizes = {"length": length, "block_len": block_len}
    steady = _shares(rng, num_streams, [(risk, quiet_blocks)], **sizes)
    within = drift.blocks_to_notice(risk, quiet_blocks=before)
    phases = [(risk / 2, before), (drift.DRIFT * risk, 4 * within)]
    closed = _closings(_shares(rng, num_streams, phases, **sizes), risk) - before
    return Watched(
        false_alarms=float((_closings(steady, risk) < np.inf).mean()),
        noticed=float((closed <= within).mean()),
        median=float(np.median(closed)),
        stated_median=drift.blocks_to_notice(risk, chance=0.5, quiet_blocks=before),
        within=within,
        quiet_blocks=quiet_blocks,
    )


def _shares(
    rng: np.random.Generator,
    num_streams: int,
    phases: list[tuple[float, int]],
    *,
    length: int,
    block_len: int,
) -> Iterator[np.ndarray]:
    """Yield [streams], the share of a block's checks that disagree, block after block."""
    hidden = rng.random(num_streams)
    for rate, blocks in phases:
        for _ in range(blocks):
            disagreed = np.zeros(num_streams)
            for left in reversed(range(drift.samples_per_block(block_len))):
                begins = rng.random(num_streams) < 1 / length
                hidden = np.where(begins, rng.random(num_streams), hidden)
                disagreed += (hidden < rate) & (left < block_len)
            yield disagreed / block_len


def _closings(shares: Iterator[np.ndarray], risk: float) -> np.ndarray:
    """[streams], the number of blocks after which each gate closed; infinite if it did not."""
    wealth: float | np.ndarray = 0.0
    closed = None
    for block, share in enumerate(shares):
        wealth, alarm = drift.bet(wealth, block, share, risk)
        closed = np.full(share.shape, np.inf) if closed is None else closed
        closed = np.where(alarm, np.minimum(closed, block + 1), closed)
    return np.array([]) if closed is None else closed


def first_to_open(kind: Kind, *, num_streams: int, lengths: tuple[int, ...], seed: int) -> float:
    """Calibrate on growing parts of every stream until one chooses a threshold.

    Returns:
      share of streams whose first threshold violates the risk.
    """
    drawn = streams(kind, num_streams=num_streams, versions=lengths[-1], seed=seed)
    rates = dict(zip(calibration.TAUS, drawn.rates, strict=True))
    violated = 0
    for gaps, disagreed in zip(drawn.gaps, drawn.disagreed, strict=True):
        found = (
            calibration.fixed_sequence(gaps[:length], disagreed[:length], kind.risk).tau
            for length in lengths
        )
        tau = next((one for one in found if one is not None), None)
        violated += tau is not None and bool(rates[tau] > kind.risk)
    return violated / num_streams
