"""What a session must be, by the reference, and what its verbs must do or refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxstate.config import EngineConfig
from jaxstate.errors import CapacityError
from oracle.history import Context

Refusal = type[Exception] | None
"""The error a verb must raise; None = it must be done."""


@dataclasses.dataclass(kw_only=True)
class Mirror:
    """A session of the reference.

    Attributes:
      context: its records, frozen ones first.
      frozen_len: how many of them are never evicted.
      when_full: "error" or "slide".
      evicted: stream tokens dropped so far.
      floor: length of the stream, evicted tokens included, at the last eviction.
      version: number of durable operations.
      paid: tokens of each tail forwarded ahead, and how many of them are its entry.
    """

    context: Context
    frozen_len: int
    when_full: str
    evicted: int = 0
    floor: int = 0
    version: int = 0
    paid: list[tuple[list[int], int]] = dataclasses.field(default_factory=list)

    @property
    def kept(self) -> int:
        """Stream tokens in the context."""
        return len(self.context) - self.frozen_len

    @property
    def stream_len(self) -> int:
        """Stream tokens kept or evicted, rolled back ones excluded."""
        return self.evicted + self.kept

    def overflow(self, count: int, sizes: EngineConfig) -> tuple[Refusal, int]:
        """Return how an append of `count` tokens must be refused, or how many it evicts."""
        overflow = len(self.context) + count - sizes.context_len
        if overflow <= 0:
            return None, 0
        if self.when_full == "error" or count > sizes.context_len - self.frozen_len:
            return CapacityError, 0
        quanta = math.ceil(overflow / sizes.evict_quantum)
        return None, min(quanta * sizes.evict_quantum, self.kept)

    def evict(self, count: int) -> None:
        """Drop the oldest stream records."""
        self.floor = self.stream_len
        self.context = self.context[: self.frozen_len] + self.context[self.frozen_len + count :]
        self.evicted += count

    def skipped(self, question: Sequence[int]) -> int:
        """Count the tokens of a question that paid tails save.

        The last one only behind an entry's end: distributions before it were not kept.
        """
        best = 0
        for paid, entry_len in self.paid:
            common = common_len(paid, question)
            if common == len(question) < entry_len:
                common -= 1
            best = max(best, common)
        return best

    def ahead(self, question: Sequence[int]) -> int:
        """Count the tokens of the greedy answer that were forwarded before it was asked."""
        tails = [paid for paid, entry_len in self.paid if len(question) >= entry_len]
        behind = [
            len(paid) - len(question) for paid in tails if paid[: len(question)] == list(question)
        ]
        return max(behind, default=0)


def common_len(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the longest common prefix."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
