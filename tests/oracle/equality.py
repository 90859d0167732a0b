"""The rule of equality: what counts as the same answer, in one table.

Bitwise equal are cells that were not written, the same executable on the same inputs, and arrays
saved and loaded. Everything else (other chunking, bucket, batch, page size, device count) is
compared as `Rule` says.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a logit may lie from the reference.

    Attributes:
      absolute: in logits.
      relative: times the largest absolute logit of the distribution; added to `absolute`.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, logits: np.ndarray) -> float:
        """Return the largest allowed difference to a distribution's logits."""
        return self.absolute + self.relative * float(np.abs(logits).max())


TOLERANCES = {
    # Sums in another order: 1e-6 of a logit per layer at these sizes, 1e-4 in a model of 30 layers.
    "float32": Tolerance(absolute=1e-3),
    # Eight bits of mantissa in weights, activations and cells; errors grow with the logits.
    "bfloat16": Tolerance(relative=2e-2),
}

NEAR_TIE_LOGITS = 2.0
"""Greedy ids may differ where the reference's top-2 gap is below this many tolerances: 2e-3 in
f32, since both logits may be off by one tolerance in opposite directions."""

MAX_NEAR_TIE_SHARE = 0.005
"""Largest share of greedy sequences in which a near-tie may excuse another id.

Near-ties at which the ids agree excuse nothing and are only counted: tiny random models have many.
"""


class Mismatch(AssertionError):
    """The product and the reference disagree."""


def require(condition: bool, message: str) -> None:
    """Raise a Mismatch unless the condition holds."""
    if not condition:
        raise Mismatch(message)


@dataclasses.dataclass
class Tally:
    """What has been compared so far.

    Attributes:
      distributions: next-token distributions compared.
      largest_error: largest difference of a logit or log-probability seen, in tolerances.
      sequences: greedy sequences compared.
      near_ties: sequences in which the reference's gap was below the near-tie limit somewhere.
      diverged: near-ties at which the ids did differ.
      events: how often each thing worth testing came about.
    """

    distributions: int = 0
    largest_error: float = 0.0
    sequences: int = 0
    near_ties: int = 0
    diverged: int = 0
    events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: Tally) -> None:
        """Count what another tally counted."""
        self.distributions += other.distributions
        self.largest_error = max(self.largest_error, other.largest_error)
        self.sequences += other.sequences
        self.near_ties += other.near_ties
        self.diverged += other.diverged
        self.events += other.events

    def report(self, name: str) -> str:
        """Describe the tally in two lines."""
        events = ", ".join(f"{name} {count}" for name, count in sorted(self.events.items()))
        return (
            f"{name}: {self.distributions} distributions, largest error "
            f"{self.largest_error:.2g} of the tolerance; {self.sequences} greedy sequences, "
            f"{self.near_ties} near-ties, {self.diverged} of them with other ids\n{events}"
        )

    def check_near_ties(self) -> None:
        """Require that ids rarely differ; one is always allowed, whatever the sample's size."""
        allowed = max(1.0, MAX_NEAR_TIE_SHARE * self.sequences)
        require(
            self.diverged <= allowed,
            f"expected other ids in at most {allowed:.1f} of {self.sequences} greedy sequences, "
            f"got {self.diverged}",
        )


class Rule:
    """Compares distributions and greedy sequences of one dtype, and keeps a tally."""

    def __init__(self, dtype: str = "float32"):
        """Compare by the row `dtype` of TOLERANCES."""
        self._tolerance = TOLERANCES[dtype]
        self.tally = Tally()

    def tolerance(self, want: np.ndarray) -> float:
        """Return the allowed difference to the logits `want`, [vocab]."""
        return self._tolerance.of(want)

    def close(self, got, want, allowed: float, what: str) -> None:
        """Compare numbers or arrays within an allowed difference."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        require(got.shape == want.shape, f"{what}: expected shape {want.shape}, got {got.shape}")
        if not got.size:
            return
        error = np.abs(got - want)
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        require(
            bool(error[worst] <= allowed),
            f"{what}: expected {want[worst]:.6g} within {allowed:.2g}, got {got[worst]:.6g}"
            + (f" at {tuple(int(i) for i in worst)}" if worst else ""),
        )
        self.tally.largest_error = max(self.tally.largest_error, float(error[worst]) / allowed)

    def logits(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        """Compare one distribution, [vocab] each."""
        self.tally.distributions += 1
        self.close(got, want, self.tolerance(want), f"{what}: logits")

    def logprobs(self, got: dict[int, float], want: np.ndarray, what: str) -> None:
        """Compare some tokens' log-probabilities with the reference's logits, [vocab].

        A log-probability is a logit minus a log-sum-exp, each off by at most one tolerance.
        """
        self.tally.distributions += 1
        ids = np.asarray(list(got), np.int64)
        self.close(
            list(got.values()),
            log_softmax(want)[ids],
            2 * self.tolerance(want),
            f"{what}: logprobs of tokens {ids.tolist()}",
        )

    def top_logprobs(self, got: dict[int, float], want: np.ndarray, count: int, what: str) -> None:
        """Compare the `count` most likely tokens, which may trade places only in near-ties."""
        require(len(got) == count, f"{what}: expected {count} top logprobs, got {len(got)}")
        if not got:
            return
        self.logprobs(got, want, what)
        values = list(got.values())
        require(values == sorted(values, reverse=True), f"{what}: top logprobs are not descending")
        left_out = np.delete(log_softmax(want), list(got))
        if left_out.size:
            require(
                left_out.max() <= values[-1] + self.near_tie(want),
                f"{what}: a token of logprob {left_out.max():.6g} is missing from the top "
                f"{count}, which end at {values[-1]:.6g}",
            )

    def near_tie(self, want: np.ndarray) -> float:
        """Return the top-2 gap below which either token may be drawn."""
        return NEAR_TIE_LOGITS * self.tolerance(want)

    def greedy_token(self, got: int, want: np.ndarray, what: str) -> bool:
        """Compare one greedy choice; returns whether the reference was near a tie."""
        gap = top_gap(want)
        behind = float(want.max() - want[got])
        tied = gap < self.near_tie(want)
        require(
            behind <= (self.near_tie(want) if tied else 0.0),
            f"{what}: expected token {int(want.argmax())}, which leads by {gap:.6g}, got {got}, "
            f"which is {behind:.6g} behind",
        )
        self.tally.diverged += behind > 0
        return tied

    def greedy(self, got: Sequence[int], wants: Sequence[np.ndarray], what: str) -> None:
        """Compare a greedy sequence with the reference's logits behind the same tokens.

        The reference is given the product's own tokens, so that a near-tie ends nothing: what
        follows it is compared as well.
        """
        self.tally.sequences += 1
        tied = False
        for index, (token_id, want) in enumerate(zip(got, wants, strict=True)):
            tied |= self.greedy_token(token_id, want, f"{what}: token {index}")
        self.tally.near_ties += tied


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64, along the last axis."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def top_gap(logits: np.ndarray) -> float:
    """Return the largest minus the second largest logit of [vocab]."""
    second, first = np.sort(logits)[-2:]
    return float(first - second)
