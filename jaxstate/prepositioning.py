"""What of a session's next requests to forward in idle time, before they come.

Entries are headers that were declared and beginnings that questions turn out to have: a question
that was asked twice as a whole, of others what they have in common.

Source: speculative pre-positioning (arXiv:2606.29565).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.choices import ChoiceTree
from jaxstate.flash import Question
from jaxstate.generation import first_token
from jaxstate.session import PaidTail, common_len
from jaxstate.tail import NextToken

REMEMBERED = 32  # questions
FEWEST_TOKENS = 4  # of a beginning that is worth a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Tokens to pay for, and how far to decode ahead behind them; see Engine.advance."""

    token_ids: tuple[int, ...]
    max_new_tokens: int = 0
    min_gap: float = 0.0
    eos_ids: tuple[int, ...] = ()
    slot_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """The state that an entry leads to: what was decoded ahead, and the distribution before it.

    Attributes:
      version: the session's that it saw.
      context_len: likewise.
      next_token: the distribution after the entry.
      token_ids: decoded greedily behind it.
    """

    version: int
    context_len: int
    next_token: NextToken
    token_ids: tuple[int, ...]

    def answer(self, question: Question) -> Answer | None:
        """Say what this state alone answers to a question; None where it does not reach.

        Choices are decided by their first tokens: one scan of the kept distribution. A free answer
        has to be decoded ahead, but for its first token. The source is GATED, there is no text.
        """
        common: dict[str, Any] = {
            "text": "",
            "source": Source.GATED,
            "version": self.version,
            "context_len": self.context_len,
            "tokens_forwarded": 0,
            "gap": self.next_token.gap,
        }
        if question.choices:
            first = ChoiceTree(question.choices).first_tokens()
            row = np.asarray(self.next_token.row_logits())
            decided = first_token(row[first].tolist()) if first else None
            if decided is None:
                return None
            return Answer(
                token_ids=question.choices[decided.choice], finish_reason=FinishReason.CHOICE,
                choice=decided.choice, first_token=decided, **common,
            )  # fmt: skip
        token_ids = self.token_ids[: question.max_new_tokens] or (self.next_token.top_id,)
        ends = [index for index, one in enumerate(token_ids) if one in question.eos_ids]
        token_ids = token_ids[: ends[0] + 1] if ends else token_ids
        is_plain_greedy = question.sampling.is_plain_greedy and not question.constraint
        if not is_plain_greedy or (not ends and len(token_ids) < question.max_new_tokens):
            return None
        reason = FinishReason.EOS if ends else FinishReason.LENGTH
        return Answer(token_ids=token_ids, finish_reason=reason, **common)


class Prepositions:
    """The entries of one session."""

    def __init__(self, most: int):
        """Start empty.

        Args:
          most: entries taken from received questions; 0 = only what is declared.
        """
        self.ready: dict[tuple[int, ...], Ready] = {}
        self._most = most
        self._found: list[Entry] | None = None  # until something is declared or received
        self._declared: dict[tuple[int, ...], Entry] = {}
        self._received: collections.OrderedDict[tuple[int, ...], int] = collections.OrderedDict()
        self._failed: dict[tuple[int, ...], int] = {}

    def declare(self, entry: Entry) -> None:
        """Pay for an entry after every change of the session; one of equal tokens is replaced."""
        self._found = None
        self._declared[entry.token_ids] = entry
        self.ready.pop(entry.token_ids, None)

    @property
    def declared(self) -> list[Entry]:
        """The headers that were declared."""
        return list(self._declared.values())

    def is_declared(self, token_ids: Sequence[int]) -> bool:
        """Whether a header of these tokens was declared."""
        return tuple(token_ids) in self._declared

    def receive(self, question: Sequence[int]) -> None:
        """Note a question that was asked."""
        if not self._most:
            return
        self._found = None
        key = tuple(question)
        self._received[key] = self._received.get(key, 0) + 1
        self._received.move_to_end(key)
        if len(self._received) > REMEMBERED:
            self._received.popitem(last=False)

    def entries(self) -> list[Entry]:
        """All that is worth paying for: what was declared, then what was asked of late."""
        if self._found is None:
            received = self._worth_paying()
            self._found = [*self._declared.values(), *(Entry(token_ids=one) for one in received)]
        return self._found

    def _worth_paying(self) -> list[tuple[int, ...]]:
        """Beginnings of questions that were asked, the newest first."""
        shared = self._shared_lens()
        found: list[tuple[int, ...]] = []
        for question, times in reversed(self._received.items()):
            length = len(question) if times > 1 else shared[question]
            begin = question[:length]
            if length < FEWEST_TOKENS or len(found) == self._most:
                continue
            if not any(one[:length] == begin for one in (*self._declared, *found)):
                found.append(begin)
        return found

    def _shared_lens(self) -> dict[tuple[int, ...], int]:
        """Tokens that each question has in common with another: in order, with a neighbour."""
        ordered = sorted(self._received)
        shared = dict.fromkeys(ordered, 0)
        for one, other in itertools.pairwise(ordered):
            common = common_len(np.asarray(one, np.int64), np.asarray(other, np.int64))
            shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
        return shared

    def outdated(self, version: int) -> list[Entry]:
        """Entries that are not paid for at this version, and may be."""

        def lacks(entry: Entry) -> bool:
            ready = self.ready.get(entry.token_ids)
            return (ready is None or ready.version != version) and (
                self._failed.get(entry.token_ids) != version
            )

        return [entry for entry in self.entries() if lacks(entry)]

    def note(self, entry: Entry, version: int, context_len: int, paid: PaidTail) -> None:
        """Keep what an entry led to; of older versions the newest stays, without its cells."""
        count = len(entry.token_ids)
        self.ready[entry.token_ids] = Ready(
            version=version,
            context_len=context_len,
            next_token=paid.behind(count)[0],
            token_ids=paid.token_ids[count:],
        )
        wanted = {one.token_ids for one in self.entries()}
        for token_ids in [one for one in self.ready if one not in wanted]:
            del self.ready[token_ids]

    def fail(self, entry: Entry, version: int) -> None:
        """Do not try an entry again before the session changes."""
        self._failed = {entry.token_ids: version} | {
            token_ids: at for token_ids, at in self._failed.items() if at == version
        }
