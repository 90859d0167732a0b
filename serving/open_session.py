"""What a service has of an open session beside the engine's record of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxstate.answer import Answer
from jaxstate.errors import CapacityError
from jaxstate.flash import FlashBoard, FlashQuery, Question
from jaxstate.prepositioning import Entry, Prepositions
from jaxstate.serving.answer_log import AnswerLog, FreshAnswer
from jaxstate.serving.write_memory import WriteMemory

MAX_REGISTERED = 64
MAX_HEADERS = 16
"""Registered questions and declared headers of a session, unless told otherwise."""


@dataclasses.dataclass(kw_only=True)
class OpenSession:
    """One of them; callers read it, and the worker changes it, as LocalService says.

    Attributes:
      version: the newest that is computed; no answer of one before is served as current.
      board: its registered questions.
      prepositions: what is forwarded ahead of its questions.
      log: its newest answers.
      memory: its numbered verbs.
      looked_after: the version that needed no repacking, or got it.
      opener: for whom it was opened, who may take that back; None = nobody.
      opened: Session.used when it was opened.
    """

    version: int
    prepositions: Prepositions
    board: FlashBoard = dataclasses.field(default_factory=FlashBoard)
    log: AnswerLog = dataclasses.field(default_factory=AnswerLog)
    memory: WriteMemory = dataclasses.field(default_factory=WriteMemory)
    looked_after: int | None = None
    opener: object = None
    opened: int = 0

    @property
    def is_outdated(self) -> bool:
        """Whether something is to be computed for it in idle time."""
        return bool(self.board.outdated(self.version) or self.prepositions.outdated(self.version))

    def register(self, question: Question, risk: float | None, most: int) -> FlashQuery:
        """See LocalService.register; `most` there may be."""
        if self.board.find(question) is None:
            _check_count("registered questions", len(self.board.queries), most, "max_registered")
        return self.board.register(question, risk)

    def declare(self, header: Entry, most: int) -> None:
        """See LocalService.declare; `most` there may be."""
        if not self.prepositions.is_declared(header.token_ids):
            _check_count("declared headers", len(self.prepositions.declared), most, "max_headers")
        self.prepositions.declare(header)

    def look_up(self, question: Question, *, stale: bool = False) -> Answer | None:
        """See FlashBoard.look_up."""
        return self.board.look_up(question, self.version, stale=stale)

    def is_coming(self, question: Question) -> bool:
        """Whether a registered question is going to have an answer of the newest version."""
        return self.board.find(question) in self.board.outdated(self.version)

    def gated(self, query: FlashQuery, risk: float) -> Answer | None:
        """See FlashBoard.gated."""
        return self.board.gated(query, self.version, risk)

    def gated_by_header(
        self, query: FlashQuery, risk: float, text_of: Callable[[Sequence[int]], str]
    ) -> Answer | None:
        """Answer from the ready state of a declared header, if its gate fires.

        Raises:
          InputError: a risk that no gate can keep.
        """
        ready = self.prepositions.ready
        for header, gate in query.headers.items():
            answer = ready[header].answer(query.question) if header in ready else None
            if answer is None:
                continue
            age = self.version - answer.version
            evidence = gate.decide(risk, answer.certainty, age=age)
            if evidence:
                query.fires += 1
                text = text_of(answer.token_ids)
                return dataclasses.replace(answer, text=text, age=age, evidence=evidence)
        return None

    def answers(self, cursor: str) -> tuple[list[FreshAnswer], str]:
        """See LocalService.answers."""
        found = self.log.since(cursor) if cursor else self.log.newest(self.board.queries)
        aged = [
            dataclasses.replace(
                one, answer=dataclasses.replace(one.answer, age=self.version - one.answer.version)
            )
            for one in found
        ]
        return aged, self.log.cursor


def _check_count(what: str, count: int, most: int, limit: str) -> None:
    """Raise CapacityError where one more would be too many."""
    if count >= most:
        raise CapacityError(
            f"{what}: expected at most {most} in a session, got {count} and 1 more; use another "
            f"session or have {limit} raised"
        )
