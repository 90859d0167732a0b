"""How a service's questions are answered: from what is at hand, by others' work, or computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxstate import checks
from jaxstate.answer import Answer, Evidence
from jaxstate.errors import InputError
from jaxstate.flash import FlashQuery, Question
from jaxstate.plan import JobClass
from jaxstate.prepositioning import Entry, Prepositions
from jaxstate.scheduler import Scheduler, Ticket
from jaxstate.serving.commands import Commands
from jaxstate.serving.evaluations import Evaluation, Evaluations
from jaxstate.serving.open_session import OpenSession
from jaxstate.serving.pending import Pending
from jaxstate.serving.submissions import Submissions
from jaxstate.verbs import Verbs

Stale = Literal["compute", "wait", "serve"]
"""What a query does whose registered answer is not of the newest version: compute it now, wait for
the one that is coming, or take the old one, which says its version."""

From = Literal["question", "header"]
"""What may answer at a risk: older answers to the question, or also the ready state that a declared
header leads to, whatever is asked."""


class Questions:
    """Looks answers up for callers' own threads, and submits questions; else used by the worker.

    Attributes:
      advancing: entries that are being paid for: whose, and at which version.
    """

    def __init__(
        self,
        verbs: Verbs,
        sessions: dict[str, OpenSession],
        scheduler: Scheduler,
        commands: Commands,
        submissions: Submissions,
        evaluations: Evaluations,
        clock: Callable[[], float],
    ):
        """Start with none."""
        self._verbs = verbs
        self._sessions = sessions
        self._scheduler = scheduler
        self._commands = commands
        self._submissions = submissions
        self._evaluations = evaluations
        self._clock = clock
        self.advancing: dict[Ticket, tuple[Prepositions, Entry, int]] = {}

    # At hand; who asks holds `Commands.changed`

    def at_hand(
        self,
        session_id: str,
        question: Question,
        query: FlashQuery | None,
        stale: Stale,
        risk: float | None,
        entry: From,
    ) -> Answer | None:
        """Return the answer that is there, for which "wait" waits; None if there is none.

        Args:
          query: the question as it is registered, if it is.
        Raises:
          InputError: a risk that no gate can keep.
        """
        answer = self.look_up(session_id, question)
        if answer is None and query and risk is not None:
            answer = self._gated(session_id, query, risk, entry)
        if answer is None and stale == "serve":
            answer = self.look_up(session_id, question, stale=True)
        if answer is None and stale == "wait":
            self._commands.changed.wait_for(lambda: not self.is_coming(session_id, question))
            answer = self.look_up(session_id, question)
        return answer

    def look_up(self, session_id: str, question: Question, *, stale: bool = False) -> Answer | None:
        """Return the answer of the newest version, or with `stale` the newest there is."""
        session = self._sessions.get(session_id)
        return session.look_up(question, stale=stale) if session else None

    def is_coming(self, session_id: str, question: Question) -> bool:
        """Whether a registered question is going to have an answer of the newest version."""
        session = self._sessions.get(session_id)
        return bool(session and not self._commands.is_closing and session.is_coming(question))

    def _gated(self, session_id: str, query: FlashQuery, risk: float, entry: From) -> Answer | None:
        """Answer at a risk from what is at hand, if its gate fires."""
        session = self._sessions[session_id]
        answer = session.gated(query, risk)
        if answer is None and entry == "header":
            answer = session.gated_by_header(query, risk, self._verbs.text)
        return answer

    # Computed

    def ask(
        self,
        pending: Pending,
        session_id: str,
        question: Question,
        query: FlashQuery | None,
        risk: float | None,
        **how: Any,
    ) -> None:
        """Submit a question to which no answer is at hand.

        Args:
          query: the question as it is registered, if it is: its answer will be everybody's.
        """
        self._verbs.session(session_id)
        session = self._sessions[session_id]
        query = query and session.board.find(question)  # it may be gone, or another, by now
        if query is None:
            checks.token_ids(question.token_ids, self._verbs.model, "question")
            self._submit(pending, session_id, question, JobClass.QUERY, **how)  # may refuse it
            with self._commands.changed:  # callers look whether there is something to be paid
                session.prepositions.receive(question.token_ids)
        elif risk is not None:
            gate = functools.partial(_first_token, query, risk)
            self.evaluate(pending, session_id, query, asked=1, gate=gate, **how)
        elif not self._join(pending, session_id, query, **how):
            self.evaluate(pending, session_id, query, asked=1, **how)

    def apart(
        self,
        question: Question,
        *,
        commit: bool,
        stop: Sequence[str],
        top_logprobs: int | None,
    ) -> Callable:
        """Return the verb of a question to which no answer at hand can be the answer.

        Raises:
          InputError: it has choices.
        """
        if question.choices:
            raise InputError(
                "choices: expected none with commit, stop or top_logprobs; ask twice, or append "
                "the best choice"
            )
        return functools.partial(
            self._verbs.stream, max_new_tokens=question.max_new_tokens, commit=commit,
            eos_ids=question.eos_ids, sampling=question.sampling, stop=stop,
            top_logprobs=top_logprobs, constraint=question.constraint,
        )  # fmt: skip

    def evaluate(
        self, pending: Pending, session_id: str, query: FlashQuery, *, asked: int, **how: Any
    ) -> None:
        """Have a registered question answered, in idle time or for a caller who waits for it."""
        job_class = JobClass.QUERY if asked else JobClass.FLASH
        ticket = self._submit(pending, session_id, query.question, job_class, keep=True, **how)
        session = self._sessions[session_id]
        evaluation = Evaluation(
            board=session.board, query=query, version=session.version, asked=asked
        )
        self._evaluations.add(ticket, evaluation)

    def advance(self, pending: Pending, session_id: str, entry: Entry, **how: Any) -> Ticket:
        """Submit that an entry is paid for."""
        begin = functools.partial(
            self._verbs.advance, max_new_tokens=entry.max_new_tokens, min_gap=entry.min_gap,
            eos_ids=entry.eos_ids, slot_ids=entry.slot_ids,
        )  # fmt: skip
        cells = len(entry.token_ids) + entry.max_new_tokens
        return self._submissions.submit(
            pending, begin, session_id, entry.token_ids, JobClass.ADVANCE, cells=cells, **how
        )

    def drop(self, session_id: str, now: float) -> None:
        """End what nobody asked for of a version that is about to pass."""
        self._evaluations.drop(session_id, now)
        for ahead in [one for one in self.advancing if one.session == session_id]:
            self._scheduler.cancel(ahead, now)

    def _join(
        self, pending: Pending, session_id: str, query: FlashQuery, *, deadline_s: float = math.inf
    ) -> bool:
        """Let a caller wait for the evaluation that is under way, if there is one to wait for."""
        version = self._sessions[session_id].version
        ticket = self._evaluations.join(query, version, deadline_s, self._clock())
        if ticket is not None:
            self._submissions.attach(pending, ticket)
        return ticket is not None

    def _submit(
        self,
        pending: Pending,
        session_id: str,
        question: Question,
        job_class: JobClass,
        *,
        gate: Callable[[float], Evidence | None] | None = None,
        keep: bool = False,
        **how: Any,
    ) -> Ticket:
        verbs = self._verbs
        if question.choices:
            begin = functools.partial(verbs.choose, choices=question.choices, gate=gate, keep=keep)
            cells = len(question.token_ids)
        else:
            begin = functools.partial(
                verbs.stream, max_new_tokens=question.max_new_tokens, eos_ids=question.eos_ids,
                sampling=question.sampling, keep=keep, constraint=question.constraint,
            )  # fmt: skip
            cells = len(question.token_ids) + question.max_new_tokens
        return self._submissions.submit(
            pending, begin, session_id, question.token_ids, job_class, cells=cells, **how
        )


def _first_token(query: FlashQuery, risk: float, gap: float) -> Evidence | None:
    """Whether the first token alone may decide between a question's choices."""
    evidence = query.first.decide(risk, gap, age=0)
    query.fires += evidence is not None
    return evidence
