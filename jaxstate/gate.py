"""The gate of one registered question: its shadow samples and what was calibrated from them."""

from __future__ import annotations

import statistics
from typing import Any

from jaxstate import calibration
from jaxstate.answer import Answer, Evidence
from jaxstate.calibration import Calibration, ShadowSample, ShadowStore
from jaxstate.errors import SnapshotError

CAPACITY = 4096  # samples
_FIRST_LOOK = 64  # samples; calibrated anew whenever there are twice as many, see calibrate


class Gate:
    """Decides whether an answer that is at hand may stand for the full fresh one.

    Calibrated for every risk that was asked for. A gate that drift has closed is calibrated anew
    from later samples alone.
    """

    def __init__(self, capacity: int = CAPACITY):
        """Start without samples: it never fires."""
        self._store = ShadowStore(capacity)
        self._found: dict[float, Calibration] = {}
        self._after: dict[float, int] = {}  # samples of later versions count
        self._due: dict[float, int] = {}  # how many of them there are when it is calibrated next

    @property
    def samples(self) -> tuple[ShadowSample, ...]:
        """All samples, oldest first."""
        return self._store.samples

    @property
    def longest_age(self) -> float:
        """Versions: as old as half of the samples were, so old may be what answers."""
        ages = [sample.version - sample.stale_version for sample in self.samples]
        return statistics.median(ages) if ages else 0

    @property
    def found(self) -> tuple[tuple[float, float | None, int, int | None], ...]:
        """Each risk that was asked for: (risk, tau, version of the calibration, of its closing)."""
        return tuple(
            (one.risk, one.tau, one.version, one.checks.closed_at) for one in self._found.values()
        )

    def add(self, sample: ShadowSample) -> None:
        """Take a sample, watch for drift, and calibrate where it is due.

        One that is not of a later version than the last tells nothing new: a session that was saved
        behind it is asked the same again when it is back.
        """
        if sample.version <= self._store.newest:
            return
        self._store.add(sample)
        for risk, found in self._found.items():
            self._found[risk] = calibration.check(found, sample)
        for risk in list(self._found):
            self._calibrate(risk)

    def decide(self, risk: float, gap: float, *, age: int) -> Evidence | None:
        """Return the evidence if the gate fires, else None.

        Args:
          risk: largest share of disagreement with the fresh answer.
          gap: see Answer.certainty.
          age: versions between what would answer and the session.
        Raises:
          InputError: a risk that no gate can keep.
        """
        found = self.calibration(risk)
        if not calibration.decide(found, gap) or age > self.longest_age:
            return None
        return calibration.evidence(found, gap, age=age)

    def calibration(self, risk: float) -> Calibration:
        """Return what was found for a risk; the first call for it calibrates."""
        if risk not in self._found:
            self._found[risk] = calibration.calibrate(self.samples, risk)
            self._after[risk] = -1
            self._due[risk] = max(_FIRST_LOOK, 2 * len(self.samples))
        return self._found[risk]

    def _calibrate(self, risk: float) -> None:
        """Calibrate anew where samples have doubled since the last time."""
        closed_at = self._found[risk].checks.closed_at
        if closed_at is not None:  # what came before says nothing any more
            self._found[risk] = calibration.calibrate((), risk, after=closed_at)
            self._after[risk], self._due[risk] = closed_at, _FIRST_LOOK
        after = self._after[risk]
        count = sum(sample.version > after for sample in self.samples)
        if count >= self._due[risk]:
            self._found[risk] = calibration.calibrate(self.samples, risk, after=after)
            self._due[risk] = 2 * count

    def to_json(self) -> dict[str, Any]:
        """Return what json can write."""
        return {
            "samples": self._store.to_json(),
            "calibrations": [found.to_json() for found in self._found.values()],
            "after": list(self._after.values()),
            "due": list(self._due.values()),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Gate:
        """Return the gate that `to_json` wrote.

        Raises:
          SnapshotError: it did not write this.
        """
        gate = cls()
        try:
            gate._store = ShadowStore.from_json(saved["samples"])
            columns = (saved["calibrations"], saved["after"], saved["due"])
            for one, after, due in zip(*columns, strict=True):
                found = Calibration.from_json(one)
                gate._found[found.risk] = found
                gate._after[found.risk], gate._due[found.risk] = int(after), int(due)
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"gate: damaged, {error}; calibrate again") from error
        return gate


def same_answer(one: Answer, other: Answer) -> bool:
    """Tell whether two answers to one question say the same."""
    if one.choice is not None:
        return one.choice == other.choice
    return one.token_ids == other.token_ids


def stale_sample(old: Answer, fresh: Answer) -> ShadowSample:
    """What an older version's answer would have been worth."""
    return ShadowSample(
        gap=old.certainty,
        agreed=same_answer(old, fresh),
        stale_version=old.version,
        version=fresh.version,
    )
