"""Registered questions of a session and their answers, kept by version."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from jaxstate.answer import Answer, Source
from jaxstate.errors import InputError
from jaxstate.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, and how it is to be answered; equal keys have equal answers.

    Attributes:
      token_ids: the question.
      max_new_tokens: longest answer; not used with choices.
      choices: token ids of fixed answers, of which the most probable is taken; empty = free.
      eos_ids: tokens that end a free answer.
      sampling: how tokens are drawn.
    """

    token_ids: tuple[int, ...]
    max_new_tokens: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    eos_ids: tuple[int, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    @property
    def key(self) -> Hashable:
        """Equal for questions that have the same answer."""
        sampling = self.sampling
        drawn = (
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
            tuple(sorted(sampling.logit_bias.items())),
        )  # fmt: skip
        if self.choices:
            return self.token_ids, self.choices
        return self.token_ids, self.max_new_tokens, self.eos_ids, drawn


@dataclasses.dataclass(kw_only=True)
class FlashQuery:
    """A registered question.

    Attributes:
      flash_id: its id within the session.
      question: see Question.
      answer: the newest there is, of whatever version; None before the first.
      answered_at: seconds on the caller's clock.
      hits: how often it was served.
      evaluations: how often it was computed.
      error: why it could not be, since the session last changed.
    """

    flash_id: int
    question: Question
    answer: Answer | None = None
    answered_at: float = 0.0
    hits: int = 0
    evaluations: int = 0
    error: BaseException | None = None


class FlashBoard:
    """The registered questions of one session. A look-up is a dictionary's.

    Source: Flash Queries (arXiv:2606.29565): answers computed in idle time, before they are asked.
    """

    def __init__(self):
        """Start without questions."""
        self._by_key: dict[Hashable, FlashQuery] = {}
        self._next_id = 1

    @property
    def queries(self) -> list[FlashQuery]:
        """All of them, oldest first."""
        return list(self._by_key.values())

    def register(self, question: Question) -> FlashQuery:
        """Add a question; one that is there already is returned as it is."""
        if question.key not in self._by_key:
            self._by_key[question.key] = FlashQuery(flash_id=self._next_id, question=question)
            self._next_id += 1
        return self._by_key[question.key]

    def unregister(self, flash_id: int) -> None:
        """Forget a question and its answer.

        Raises:
          InputError: there is none with this id.
        """
        for key, query in self._by_key.items():
            if query.flash_id == flash_id:
                del self._by_key[key]
                return
        known = ", ".join(str(query.flash_id) for query in self.queries) or "none"
        raise InputError(f"flash_id: expected one of the registered ({known}), got {flash_id}")

    def find(self, question: Question) -> FlashQuery | None:
        """Return a question as it is registered, if it is."""
        return self._by_key.get(question.key)

    def outdated(self, version: int) -> list[FlashQuery]:
        """Questions without an answer of this version, that may have one."""
        return [
            query
            for query in self.queries
            if query.error is None and (query.answer is None or query.answer.version != version)
        ]

    def forget_errors(self) -> None:
        """Let questions be tried again: the session has changed."""
        for query in self.queries:
            query.error = None

    def note(self, query: FlashQuery, answer: Answer, now: float) -> None:
        """Keep an answer, unless a newer one is there."""
        query.evaluations += 1
        if query.answer is None or answer.version >= query.answer.version:
            query.answer, query.answered_at = answer, now

    def look_up(self, question: Question, version: int, *, stale: bool = False) -> Answer | None:
        """Return the answer of this version, or with `stale` the newest; None if there is none.

        Its source is FLASH, and no token was forwarded for it.
        """
        query = self._by_key.get(question.key)
        if query is None or query.answer is None:
            return None
        if query.answer.version != version and not stale:
            return None
        query.hits += 1
        return dataclasses.replace(query.answer, source=Source.FLASH, tokens_forwarded=0)
