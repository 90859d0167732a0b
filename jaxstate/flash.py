"""Registered questions of a session and their answers, kept by version."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from jaxstate import gate as gate_module
from jaxstate.answer import Answer, Source
from jaxstate.calibration import ShadowSample
from jaxstate.constraint import Constraint
from jaxstate.errors import InputError, UnknownQuestionError
from jaxstate.gate import Gate
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
      constraint: what a free answer has to be; see Constraint.
    Raises:
      InputError: choices and a constraint.
    """

    token_ids: tuple[int, ...]
    max_new_tokens: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    eos_ids: tuple[int, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    constraint: Constraint | None = None

    def __post_init__(self):
        """Check that it is one question."""
        if self.choices and self.constraint:
            raise InputError(
                f"{self.constraint.kind}: expected none with choices; ask for one of both"
            )

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
        return self.token_ids, self.max_new_tokens, self.eos_ids, drawn, self.constraint


@dataclasses.dataclass(kw_only=True)
class FlashQuery:
    """A registered question.

    Attributes:
      flash_id: its id within the session.
      question: see Question.
      answer: the newest there is, of whatever version; None before the first.
      answered_at: seconds on the caller's clock.
      risk: with which its gate may fire where a query does not say; None = it may not.
      stale: the gate of answers of older versions.
      first: the gate of choices that their first tokens decide.
      headers: the gate of what each declared header leads to, by its tokens.
      hits: how often it was served.
      stale_hits: how often so from an older version, by the caller's wish.
      fires: how often a gate answered; unchecked of those came since the last evaluation.
      disagreements: how often that was not the fresh answer.
      evaluations: how often it was computed.
      served: how often its answer was given; wasted are the tokens of those that never were.
      error: why it could not be computed, since the session last changed.
    """

    flash_id: int
    question: Question
    answer: Answer | None = None
    answered_at: float = 0.0
    risk: float | None = None
    stale: Gate = dataclasses.field(default_factory=Gate)
    first: Gate = dataclasses.field(default_factory=Gate)
    headers: dict[tuple[int, ...], Gate] = dataclasses.field(default_factory=dict)
    hits: int = 0
    stale_hits: int = 0
    fires: int = 0
    unchecked: int = 0
    disagreements: int = 0
    evaluations: int = 0
    served: int = 0
    wasted: int = 0
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

    def register(self, question: Question, risk: float | None = None) -> FlashQuery:
        """Add a question; of one that is there already the risk alone changes."""
        if question.key not in self._by_key:
            self._by_key[question.key] = FlashQuery(flash_id=self._next_id, question=question)
            self._next_id += 1
        query = self._by_key[question.key]
        query.risk = risk
        return query

    def recall(self, query: FlashQuery) -> None:
        """Take a question back that was registered before the service started."""
        self._by_key[query.question.key] = query
        self._next_id = max(self._next_id, query.flash_id + 1)

    @property
    def last_id(self) -> int:
        """The highest id that a question had, registered or not; 0 = none."""
        return self._next_id - 1

    def recall_id(self, flash_id: int) -> None:
        """Give no question an id up to this one any more."""
        self._next_id = max(self._next_id, flash_id + 1)

    def unregister(self, flash_id: int) -> None:
        """Forget a question and its answer.

        Raises:
          UnknownQuestionError: there is none with this id.
        """
        for key, query in self._by_key.items():
            if query.flash_id == flash_id:
                del self._by_key[key]
                return
        known = ", ".join(str(query.flash_id) for query in self.queries) or "none"
        raise UnknownQuestionError(
            f"flash_id: expected one of the registered ({known}), got {flash_id}"
        )

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

    def note(self, query: FlashQuery, answer: Answer, now: float) -> bool:
        """Keep an answer and let the gates learn from it; False if it is of no newer version."""
        query.evaluations += 1
        old = query.answer
        if old is not None and answer.version <= old.version:
            return False
        if old is not None:
            sample = gate_module.stale_sample(old, answer)
            query.stale.add(sample)
            query.disagreements += 0 if sample.agreed else query.unchecked
            query.unchecked = 0
        first = answer.first_token
        if first and max(map(len, query.question.choices)) > 1:
            query.first.add(
                ShadowSample(
                    gap=first.gap,
                    agreed=first.choice == answer.choice,
                    stale_version=answer.version,
                    version=answer.version,
                )
            )
        if old is not None and not query.served:
            query.wasted += old.tokens_forwarded
        query.served = 0
        query.answer, query.answered_at = answer, now
        return True

    def look_up(self, question: Question, version: int, *, stale: bool = False) -> Answer | None:
        """Return the answer of this version, or with `stale` the newest; None if there is none.

        Its source is FLASH, and no token was forwarded for it.
        """
        query = self._by_key.get(question.key)
        if query is None or query.answer is None:
            return None
        age = version - query.answer.version
        if age and not stale:
            return None
        query.hits += 1
        query.served += 1
        query.stale_hits += age > 0
        return dataclasses.replace(query.answer, source=Source.FLASH, tokens_forwarded=0, age=age)

    def gated(self, query: FlashQuery, version: int, risk: float) -> Answer | None:
        """Return the answer of an older version if its gate fires, else None; source GATED.

        Raises:
          InputError: a risk that no gate can keep.
        """
        if query.answer is None:
            return None
        age = version - query.answer.version
        evidence = query.stale.decide(risk, query.answer.certainty, age=age)
        if evidence is None:
            return None
        query.fires += 1
        query.unchecked += 1
        query.served += 1
        return dataclasses.replace(
            query.answer, source=Source.GATED, tokens_forwarded=0, age=age, evidence=evidence
        )
