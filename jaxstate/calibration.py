"""When may a stale answer stand for the fresh one? A threshold on its gap, with a measured risk.

A shadow sample compares, at one version of a session, what the summary of an older version would
have answered with the model's own full fresh answer. From such samples `calibrate` takes the
smallest threshold τ above which stale answers disagree with the fresh ones at most as often as the
caller's risk, with 95 % confidence. `check` watches afterwards whether that stays true.

**Fixed sequence.** The thresholds of `TAUS` are tested from the strictest down, each at the full
95 %, until one fails; the last that passed is taken. To take a wrong τ, the first wrong one that is
tested must pass: all tests together err in 5 % of calibrations, however many there are.

**Where it begins.** Few samples clear the strictest thresholds, and a test that nothing could pass
would end the sequence at once. So it begins at the first threshold that enough samples clear for
ten disagreements to be forgiven, or a third of the samples if that is less, but no fewer than can
pass at all. This looks at gaps, never at answers, and all it knows of the sample is that few
cleared the threshold before: where larger gaps disagree less often, no lucky mix. Where they
disagree more often it may be one; the simulation has such streams.

**Effective samples.** Disagreements come in runs, and a run says little more than one sample. So
samples are cut into blocks of consecutive versions, whose length is measured (`block_length`). If
all m samples of a block that clear τ were alike, n of them would say as much as n² / Σ m²
independent ones (Kish's effective size). This is the n of the Clopper-Pearson bound; disagreements
are scaled with it. It is conservative twice: samples of a block are not all alike, and what is left
of a disagreement is rounded up.

Source: fixed-sequence testing, arXiv:2110.01052; Clopper and Pearson, doi:10.1093/biomet/26.4.404;
effective size, Kish, "Survey Sampling" (1965). Proof by simulation: bench/bench_gate.py.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy  # loads `special` when first used, 0.2 s that importing this would cost

from jaxstate import drift
from jaxstate.answer import Evidence
from jaxstate.drift import Drift
from jaxstate.errors import InputError, SnapshotError

CONFIDENCE = 0.95
TAUS = (*(32 * 2 ** (-i / 4) for i in range(33)), 0.0)
"""Thresholds in logits, strictest first. They depend on nothing that was measured."""

FEWEST_EFFECTIVE = 59
"""The least n for which no disagreement at all shows 5 % or less: 0.95**59 < 0.05."""

LONGEST_RUN = 32
"""Length of blocks where no disagreement tells it, and how far correlation is looked for, in
samples. Simulated validity holds for runs of up to 20 samples in the mean."""

_ERRORS_AT_START = 16.96  # expected of a wrong threshold; ten or fewer are then seen in 5 %
_FEWEST_ERRORS = 6  # above a threshold, to measure runs there and not just above looser ones
_RUN_CONFIDENCE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowSample:
    """What the summary of an older version would have answered, beside the fresh answer.

    Attributes:
      gap: the stale summary's top-1 minus top-2 logit.
      agreed: its answer is the one of the model's own full fresh evaluation.
      stale_version: the session's version that the summary saw; that of the fresh answer where
        the summary is another's: of a header, or of the first token alone.
      version: the one that the fresh answer saw.
    """

    gap: float
    agreed: bool
    stale_version: int
    version: int

    def __post_init__(self):
        """Refuse what cannot have been measured."""
        if not isinstance(self.agreed, bool):
            raise InputError(f"agreed: expected True or False, got {self.agreed!r}")
        if not 0 <= self.gap < math.inf:
            raise InputError(f"gap: expected a finite number of logits from 0 on, got {self.gap}")
        if not 0 <= self.stale_version <= self.version:
            raise InputError(
                f"stale_version: expected one from 0 up to version {self.version}, got "
                f"{self.stale_version}"
            )


class ShadowStore:
    """The newest shadow samples of one question, in order of version."""

    def __init__(self, capacity: int):
        """Start empty; the oldest sample goes when there are more than `capacity`.

        Raises:
          InputError: a capacity with which no gate would ever fire.
        """
        if capacity < FEWEST_EFFECTIVE:
            raise InputError(f"capacity: expected at least {FEWEST_EFFECTIVE}, got {capacity}")
        self.capacity = capacity
        self._samples: collections.deque[ShadowSample] = collections.deque(maxlen=capacity)

    @property
    def samples(self) -> tuple[ShadowSample, ...]:
        """All samples, oldest first."""
        return tuple(self._samples)

    @property
    def newest(self) -> int:
        """Version of the last sample; -1 without any."""
        return self._samples[-1].version if self._samples else -1

    def add(self, sample: ShadowSample) -> None:
        """Keep a sample.

        Raises:
          InputError: not of a later version than the last.
        """
        if sample.version <= self.newest:
            raise InputError(
                f"sample: expected a version after {self.newest}, got {sample.version}; a version "
                "is sampled once, in order"
            )
        self._samples.append(sample)

    def to_json(self) -> dict[str, Any]:
        """Return what json can write, a list per attribute."""
        names = [field.name for field in dataclasses.fields(ShadowSample)]
        columns = {name: [getattr(one, name) for one in self._samples] for name in names}
        return {"capacity": self.capacity, **columns}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> ShadowStore:
        """Return the store that `to_json` wrote.

        Raises:
          SnapshotError: it did not write this.
        """
        try:
            store = cls(saved["capacity"])
            names = [field.name for field in dataclasses.fields(ShadowSample)]
            for row in zip(*(saved[name] for name in names), strict=True):
                store.add(ShadowSample(**dict(zip(names, row, strict=True))))
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"shadow samples: damaged, {error}; drop them") from error
        return store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A question's gate: what was found, and what the checks since then have shown.

    Attributes:
      tau: the gate fires on gaps above it, in logits; None = never.
      risk: largest share of disagreement that was asked for.
      bound: 95 % upper bound of the share of disagreement above tau, at most the risk; without a
        tau that of the first threshold tested, 1 if none was. Trust the risk with 95 %, and this
        number, that of the last threshold that passed, a little less.
      num_effective: effective samples above tau; without a tau those of the loosest threshold.
      block_len: samples that count as one where all of them clear the threshold.
      num_samples: shadow samples it was made from.
      version: of the newest of them.
      checks: see drift.Drift.
    """

    tau: float | None
    risk: float
    bound: float
    num_effective: int
    block_len: int
    num_samples: int
    version: int
    checks: Drift = Drift()

    def to_json(self) -> dict[str, Any]:
        """Return what json can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Calibration:
        """Return the calibration that `to_json` wrote.

        Raises:
          SnapshotError: it did not write this.
        """
        try:
            fields: dict[str, Any] = saved | {"checks": Drift(**saved["checks"])}
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise SnapshotError(f"calibration: damaged, {error}; calibrate again") from error


def calibrate(
    samples: Iterable[ShadowSample],
    risk: float,
    *,
    after: int = -1,
    longest_run: int = LONGEST_RUN,
) -> Calibration:
    """Choose the smallest threshold that keeps a risk, or none.

    The confidence is that of one calibration. Whoever calibrates after every sample until the gate
    opens errs more often; wait until there are twice as many samples as the last time.

    Args:
      samples: one per version, in any order.
      risk: largest share of disagreement with the fresh answer, 0.001 to 0.3.
      after: only samples of later versions count: `checks.closed_at` of a gate that closed.
      longest_run: see `block_length`.
    Raises:
      InputError: out of range, or two samples of one version.
    """
    drift.check_risk(risk)
    if longest_run < 1:
        raise InputError(f"longest_run: expected at least 1 sample, got {longest_run}")
    used = sorted(
        (sample for sample in samples if sample.version > after), key=lambda sample: sample.version
    )
    for one, other in zip(used, used[1:], strict=False):
        if one.version == other.version:
            raise InputError(
                f"samples: expected one per version, got two of {one.version}; leave one out"
            )
    found = fixed_sequence(
        np.array([sample.gap for sample in used], np.float64),
        np.array([not sample.agreed for sample in used], bool),
        risk,
        longest_run=longest_run,
    )
    return dataclasses.replace(found, version=used[-1].version if used else after)


def decide(calibration: Calibration, gap: float) -> bool:
    """Return whether a stale summary of this gap (in logits) may answer."""
    tau = calibration.tau
    return tau is not None and calibration.checks.closed_at is None and gap > tau


def evidence(calibration: Calibration, gap: float, *, age: int) -> Evidence:
    """Return what an answer must say that the gate gave.

    Args:
      age: versions between the summary and the session.
    Raises:
      InputError: the gate does not fire on this gap, or a negative age.
    """
    if calibration.tau is None or not decide(calibration, gap):
        raise InputError(f"gap: expected one that the gate fires on, got {gap}; ask decide first")
    if age < 0:
        raise InputError(f"age: expected at least 0 versions, got {age}")
    return Evidence(
        gap=gap,
        tau=calibration.tau,
        risk=calibration.risk,
        bound=calibration.bound,
        num_effective=calibration.num_effective,
        age=age,
    )


def check(calibration: Calibration, sample: ShadowSample) -> Calibration:
    """Take a later shadow sample; the gate closes where disagreements are too frequent.

    Give every sample, also of gaps the gate does not fire on: blocks are counted in samples. A
    closed gate stays closed; calibrate anew `after` its `checks.closed_at`.

    Raises:
      InputError: the version is not later than all that were seen.
    """
    newest = max(calibration.version, calibration.checks.newest)
    if sample.version <= newest:
        raise InputError(
            f"sample: expected a version after {newest}, got {sample.version}; a version is "
            "sampled once, in order"
        )
    checks = drift.observe(
        calibration.checks,
        risk=calibration.risk,
        block_len=calibration.block_len,
        clears=calibration.tau is not None and sample.gap > calibration.tau,
        disagreed=not sample.agreed,
        version=sample.version,
    )
    return dataclasses.replace(calibration, checks=checks)


def fixed_sequence(
    gaps: np.ndarray, disagreed: np.ndarray, risk: float, *, longest_run: int = LONGEST_RUN
) -> Calibration:
    """Test thresholds from the strictest down on samples in order of version.

    Args:
      gaps: [samples] float, in logits.
      disagreed: [samples] bool.
      risk: see `calibrate`.
      longest_run: see `block_length`.
    Returns:
      a calibration of version -1.
    """
    block_len = block_length(gaps, disagreed, longest_run=longest_run)
    clears = gaps > np.array(TAUS)[:, None]  # [thresholds, samples]
    counts = clears.sum(1)
    effective = counts**2 // np.maximum(_block_squares(clears, block_len), 1)
    errors = (clears & disagreed).sum(1)
    least = max(FEWEST_EFFECTIVE, math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-risk)))
    start = max(least, min(math.ceil(_ERRORS_AT_START / risk), effective[-1] // 3))
    tau, bound, num_effective = None, 1.0, int(effective[-1])
    for i in np.flatnonzero(effective >= start):
        scaled = -(-errors[i] * effective[i] // counts[i])  # rounded up
        found = upper_bound(int(scaled), int(effective[i]))
        if found > risk:
            bound = found if tau is None else bound
            break
        tau, bound, num_effective = TAUS[i], found, int(effective[i])
    return Calibration(
        tau=tau,
        risk=risk,
        bound=bound,
        num_effective=num_effective,
        block_len=block_len,
        num_samples=len(gaps),
        version=-1,
    )


def upper_bound(disagreements: int, num_effective: int) -> float:
    """Return the one-sided 95 % Clopper-Pearson bound of a share, from a count out of n."""
    if disagreements >= num_effective:
        return 1.0
    return float(
        scipy.special.betaincinv(disagreements + 1, num_effective - disagreements, CONFIDENCE)
    )


def block_length(gaps: np.ndarray, disagreed: np.ndarray, *, longest_run: int = LONGEST_RUN) -> int:
    """Measure how many consecutive samples say as much as one, from their disagreements.

    T = 1 + 2 Σ autocorrelation is what n is to be divided by. The sum is over `longest_run` lags
    and not up to the first that is small, since few disagreements leave holes in a run. Few also
    leave T uncertain: as if the length of runs were geometric, the chance that a run goes on is
    replaced by its 80 % upper bound. T is measured above every fourth threshold and the result
    does justice to the largest: frequent disagreements of small gaps must not hide the runs of the
    rare ones of large gaps.

    What nobody has seen cannot be measured. Without any disagreement blocks are `longest_run` long,
    so that no gate opens before 59 times as many samples have cleared it and agreed.

    Args:
      gaps: [samples] float, in logits, in order of version.
      disagreed: [samples] bool.
      longest_run: length of runs to be prepared for, in samples.
    """
    length, measured = 1, False
    for tau in TAUS[::-4]:  # from 0 up
        clears = gaps > tau
        count, errors = int(clears.sum()), int((clears & disagreed).sum())
        if not (_FEWEST_ERRORS if measured else 1) <= errors < count:
            continue
        inflation = _inflation((disagreed - errors / count) * clears, errors, longest_run)
        wanted = count * (inflation - 0.25)  # the noise of independent samples
        while length < len(gaps) and _block_squares(clears, length) < wanted:
            length += max(1, length // 8)
        measured = True
    return length if measured else longest_run


def _inflation(centred: np.ndarray, errors: int, longest_run: int) -> float:
    """What a number of samples is to be divided by; `centred` is [samples], 0 below a threshold."""
    lags = min(longest_run, len(centred) // 4)
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    ends = np.minimum(np.arange(1, len(centred) + 1) + lags, len(centred))
    following = sums[ends] - sums[1:]  # [samples], sum of the next `lags`
    inflation = 1 + 2 * float(centred @ following) / float(centred @ centred)
    # Subtracting the mean has taken about inflation / samples from the correlation at every lag.
    inflation = max(1.0, inflation + 2 * lags / len(centred) * max(1.0, inflation))
    runs = max(errors / ((inflation + 1) / 2), 0.5)  # runs of mean length L inflate by 2 L - 1
    goes_on = scipy.special.betaincinv(max(errors - runs, 0) + 1, runs, _RUN_CONFIDENCE)
    return 2 / (1 - float(goes_on)) - 1


def _block_squares(clears: np.ndarray, block_len: int) -> np.ndarray:
    """Return Σ m² over blocks, m of whose samples clear a threshold; `clears` is [..., samples]."""
    if not clears.shape[-1]:
        return np.zeros(clears.shape[:-1], np.int64)
    starts = np.arange(0, clears.shape[-1], block_len)
    return (np.add.reduceat(clears, starts, axis=-1, dtype=np.int64) ** 2).sum(-1)
