"""Random verbs on many sessions side by side, in shared steps, each held to the reference."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxstate.errors import CapacityError
from jaxstate.flash import FlashQuery, Question
from jaxstate.plan import AGE_S, JobClass, Limits
from jaxstate.scheduler import Scheduler, State, Ticket
from oracle import tiny
from oracle.answers import Answers
from oracle.boards import FIRST_VERSION, Boards
from oracle.equality import Rule, require
from oracle.history import History
from oracle.mirror import Mirror

MOST_SESSIONS = 5
CHOICES = ((1, 2), (1,), (3, 4, 5))
BRANCHES = 3  # their beginnings that are not the whole: tokens forwarded behind the question
DEADLINE_S = 0.015
FLASH_AGE_S = 0.05  # verbs hardly pause


class Many:
    """A scheduler on an engine, the reference of every session, and what is under way."""

    def __init__(self, setup: tiny.Setup, seed: int, rule: Rule):
        """Start without sessions."""
        self._rng = np.random.default_rng(seed)
        self._sizes, self._vocab = setup.sizes, setup.model.vocab_size
        self.engine = tiny.engine_on(tiny.compiled(setup), setup)
        shapes = setup.sizes.step_shapes
        self._most_rows = shapes[-1].num_rows
        self._scheduler = Scheduler(
            self.engine.executor, self.engine.pages,
            Limits(
                tokens=shapes[-1].num_tokens, rows=self._most_rows,
                age_s={**AGE_S, JobClass.FLASH: FLASH_AGE_S},
            ),
        )  # fmt: skip
        self._history = History(tiny.params_of(setup), setup.model)
        self._answers = Answers(self._history, rule)
        self._mirrors: dict[str, Mirror] = {}
        self._versions: dict[str, dict[int, Mirror]] = {}
        self._under_way: dict[Ticket, Callable[[Ticket], None]] = {}
        self._pending: collections.Counter[str] = collections.Counter()  # tokens of appends
        self._now = 0.0
        self.events: collections.Counter[str] = collections.Counter()
        self._boards = Boards(self._answers, self.events)

    def play(self, operations: int) -> None:
        """Do random things, then let everything end, then close all sessions."""
        verbs = [
            self._create, self._append, self._query, self._choose, self._cancel, self._close,
            self._move_out, self._advance, self._register, self._ask_registered,
        ]  # fmt: skip
        shares = [0.08, 0.22, 0.22, 0.07, 0.06, 0.03, 0.07, 0.08, 0.09, 0.08]
        for _ in range(operations):
            if self._rng.random() < 0.4:
                self._step()
            else:
                verbs[self._rng.choice(len(verbs), p=shares)]()
        for _ in range(10_000):
            if not self._under_way:
                break
            self._step()
        require(not self._under_way, "the scheduler does not end")
        for session in list(self._mirrors):
            self.engine.close(session)
        held = self.engine.cells_held
        require(held == 0, f"all sessions are closed and {held} cells are still held")

    # Verbs

    def _create(self) -> None:
        if len(self._mirrors) == MOST_SESSIONS:
            return
        frozen = self._ids(int(self._rng.integers(0, 7)))
        when_full = str(self._rng.choice(["error", "slide"]))
        try:
            session = self.engine.create(frozen, when_full=when_full)
        except CapacityError:
            self.events["create refused"] += 1
            return
        context = self._history.extend((), frozen) if frozen else ()
        self._mirrors[session] = Mirror(
            context=context, frozen_len=len(frozen), when_full=when_full, version=FIRST_VERSION
        )
        self.engine.session(session).version = FIRST_VERSION
        self._versions[session] = {FIRST_VERSION: dataclasses.replace(self._mirrors[session])}
        self._boards.open(session)

    def _append(self) -> None:
        session = self._some_session()
        if session is None:
            return
        ids = self._ids(int(self._rng.integers(1, 13)))
        length = len(self._mirrors[session].context) + self._pending[session] + len(ids)
        self._pending[session] += len(ids)
        self._submit(
            self.engine.verbs.append, session, ids, JobClass.APPEND, len(ids),
            functools.partial(self._appended, session, ids),
            exclusive=length > self._sizes.context_len,
        )  # fmt: skip

    def _appended(self, session: str, ids: list[int], ticket: Ticket) -> None:
        mirror = self._mirrors[session]
        self._pending[session] -= len(ids)
        if ticket.state is State.CANCELLED:
            return
        refusal, dropped = mirror.overflow(len(ids), self._sizes)
        if ticket.state is State.FAILED:
            require(isinstance(ticket.error, CapacityError), f"append: {ticket.error!r}")
            self.events["append refused" if refusal else "pool full"] += 1
            return
        require(ticket.state is State.DONE and refusal is None, f"append: {ticket.state}")
        if dropped:
            mirror.evict(dropped)
            self.events["slid"] += 1
        mirror.context += self._history.extend(mirror.context, ids)
        mirror.version += 1
        self._boards.changed(session)
        require(ticket.result == mirror.version, f"append: version {ticket.result}")
        self._versions[session][mirror.version] = dataclasses.replace(mirror)
        self._ask_registered(session)  # before it is evaluated anew

    def _query(self) -> None:
        session = self._some_session()
        if session is None:
            return
        question = self._question(session)
        count = int(self._rng.integers(1, 5))
        late = self._rng.random() < 0.25
        begin = functools.partial(
            self.engine.verbs.stream, max_new_tokens=count, keep=self._rng.random() < 0.3
        )
        self._submit(
            begin, session, question,
            JobClass.QUERY, len(question) + count,
            functools.partial(self._answered, session, question, count),
            deadline=self._now + DEADLINE_S if late else float("inf"),
        )  # fmt: skip

    def _answered(self, session: str, question: list[int], count: int, ticket: Ticket) -> None:
        if self._is_no_answer(ticket):
            return
        answer = ticket.result
        mirror = self._versions[session][answer.version]
        self.events["older version"] += answer.version < self._mirrors[session].version
        require(list(ticket.tokens) == list(answer.tokens), "tokens noted are not the answer's")
        saved = len(question) + len(answer.token_ids) - 1 - answer.tokens_forwarded
        skip = min(saved, len(question))
        self.events["resumed"] += skip > 0
        self.events["decoded ahead"] += saved > skip
        self._answers.check_greedy(
            answer, mirror, question, skip=skip, ahead=saved - skip, max_new_tokens=count
        )

    def _choose(self) -> None:
        session = self._some_session()
        if session is None:
            return
        question = self._question(session)
        begin = functools.partial(
            self.engine.verbs.choose, choices=CHOICES, keep=self._rng.random() < 0.3
        )
        self._submit(
            begin, session, question, JobClass.QUERY, len(question) + 5,
            functools.partial(self._chosen, session, question),
        )  # fmt: skip

    def _chosen(self, session: str, question: list[int], ticket: Ticket) -> None:
        if self._is_no_answer(ticket):
            return
        mirror = self._versions[session][ticket.result.version]
        saved = len(question) + BRANCHES - ticket.result.tokens_forwarded
        self._answers.check_choice(
            ticket.result, mirror, question, CHOICES, skip=max(saved, 0), num_rows=self._most_rows
        )

    def _advance(self) -> None:
        """Pay for what later questions may begin with, and decode ahead behind it."""
        session = self._some_session()
        if session is None:
            return
        entry, count = self._question(session), int(self._rng.integers(0, 4))
        begin = functools.partial(
            self.engine.verbs.advance, max_new_tokens=count, min_gap=0.0, eos_ids=(), slot_ids=()
        )
        self._submit(
            begin, session, entry, JobClass.ADVANCE, len(entry) + count,
            functools.partial(self._advanced, session, entry),
        )  # fmt: skip

    def _advanced(self, session: str, entry: list[int], ticket: Ticket) -> None:
        if not self._is_no_answer(ticket):
            require(list(ticket.result.token_ids[: len(entry)]) == entry, "advance: another entry")
            self.events["advanced"] += 1

    def _register(self) -> None:
        session = self._some_session()
        if session is None or len(self._boards.queries(session)) == 3:
            return
        choices = CHOICES if self._rng.random() < 0.3 else ()
        question = Question(
            token_ids=tuple(self._question(session)), choices=choices,
            max_new_tokens=int(self._rng.integers(1, 5)),
        )  # fmt: skip
        self._boards.register(session, question)

    def _evaluate(self) -> None:
        """Submit what registered questions lack, where no append is on its way."""
        appending = {one.session for one in self._under_way if one.job_class is JobClass.APPEND}
        for session, mirror in self._mirrors.items():
            if session in appending:
                continue
            for query in self._boards.take_outdated(session, mirror.version):
                ids = list(query.question.token_ids)
                if query.question.choices:
                    how: dict = {"choices": query.question.choices}
                    begin, cells = self.engine.verbs.choose, len(ids) + 5
                else:
                    how = {"max_new_tokens": query.question.max_new_tokens}
                    begin = self.engine.verbs.stream
                    cells = len(ids) + query.question.max_new_tokens
                self._submit(
                    functools.partial(begin, keep=True, **how), session, ids, JobClass.FLASH,
                    cells, functools.partial(self._evaluated, session, query),
                )  # fmt: skip

    def _evaluated(self, session: str, query: FlashQuery, ticket: Ticket) -> None:
        question = query.question
        if question.choices:
            self._chosen(session, list(question.token_ids), ticket)
        else:
            self._answered(session, list(question.token_ids), question.max_new_tokens, ticket)
        query.error = ticket.error
        self._boards.note(session, query, ticket.result, self._now)

    def _ask_registered(self, session: str | None = None) -> None:
        session = session or self._some_session()
        queries = self._boards.queries(session) if session else []
        if session and queries:
            query = queries[self._rng.integers(len(queries))]
            self._boards.ask(session, query, self._mirrors[session])

    def _cancel(self) -> None:
        if not self._under_way:
            return
        tickets = list(self._under_way)
        ticket = tickets[self._rng.integers(len(tickets))]
        if self._scheduler.cancel(ticket, self._now):
            self.events[f"{ticket.job_class.name} cancelled"] += 1
        self._note_ends()

    def _close(self) -> None:
        session = self._some_session()
        if session is None or any(one.session == session for one in self._under_way):
            return
        self.engine.close(session)
        self._boards.close(session)
        del self._mirrors[session], self._versions[session]

    def _move_out(self) -> None:
        """Move a session out of the pool, maybe for good: then it is computed anew."""
        session = self._some_session()
        if session is None or self.engine.session(session).running:
            return
        tiers = self.engine.verbs.tiers
        tier = "disk" if self._rng.random() < 0.4 else "host"
        self.engine.move_out(session, tier)
        self.events[f"moved to {tier}"] += 1
        mirror = self._mirrors[session]
        if self._rng.random() < 0.3 and not mirror.evicted:
            tiers.lose(self.engine.session(session))
            self.events["lost"] += 1

    # Inside

    def _step(self) -> None:
        self._now += 0.01
        self._evaluate()
        before = self.engine.executor.steps
        plan = self._scheduler.step(self._now)
        self.events["steps"] += self.engine.executor.steps - before
        self.events["brought back"] = self.engine.verbs.tiers.brought_back
        self.events["rows"] += len(plan.decodes) + len(plan.pieces)
        self._note_ends()

    def _submit(self, begin, session, ids, job_class, cells, ended, **how) -> None:
        """Submit a verb that is begun as begin(session, ids); ended(ticket) judges what came."""
        ticket = self._scheduler.submit(
            functools.partial(begin, session, ids), job_class=job_class, session=session,
            tokens=len(ids), cells=cells, now=self._now, **how,
        )  # fmt: skip
        self._under_way[ticket] = ended

    def _note_ends(self) -> None:
        for ticket in [ticket for ticket in self._under_way if ticket.is_over]:
            self.events[ticket.state.name] += 1
            self._under_way.pop(ticket)(ticket)

    def _is_no_answer(self, ticket: Ticket) -> bool:
        if ticket.state is State.FAILED:
            # A question is refused where positions end, or no page is left and none will be.
            require(isinstance(ticket.error, CapacityError), f"question: {ticket.error!r}")
        return ticket.state is not State.DONE

    def _some_session(self) -> str | None:
        names = list(self._mirrors)
        return names[self._rng.integers(len(names))] if names else None

    def _question(self, session: str) -> list[int]:
        """Draw a question, which often begins as others do, or goes on as they are answered."""
        if self._rng.random() < 0.4:
            return self._ids(int(self._rng.integers(1, 9)))
        paid = self.engine.session(session).paid
        if paid and self._rng.random() < 0.5:
            begin = list(paid[self._rng.integers(len(paid))].token_ids)
            return begin[: int(self._rng.integers(1, min(len(begin), 8) + 1))]
        rng = np.random.default_rng(int(self._rng.integers(3)))
        whole = rng.integers(0, self._vocab, 8).tolist()
        return whole[: int(self._rng.integers(1, 9))]

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab, count).tolist()
