"""An engine and its worker thread in one process: verbs from any thread, many in each step.

    service = LocalService(engine)
    session = service.create(prompt_ids)
    service.append(session, row_ids)                      # goes on in the background
    flash = service.register(session, Question(token_ids=question_ids, max_new_tokens=4))
    for token in service.query(session, question): …     # Pending: tokens as they are drawn
    service.close()

One thread owns engine and scheduler; callers hand it commands and wait for what becomes of them.
Registered questions are answered in its idle time, all of a session's together, after every change
of the session; then what its next questions will begin with is forwarded ahead. An answer that is
there already is looked up by the caller's own thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from jaxstate import checks, drift, session_snapshot
from jaxstate.config import EngineConfig
from jaxstate.constraint import Constraint
from jaxstate.engine import Engine
from jaxstate.errors import BusyError, CancelledError, InputError, UnknownSessionError
from jaxstate.flash import FlashBoard, FlashQuery, Question
from jaxstate.generation import RequestOptions
from jaxstate.metrics import Cells, Metrics, count_cells
from jaxstate.models.config import ModelConfig
from jaxstate.needs import Steps
from jaxstate.plan import JobClass, Limits
from jaxstate.prepositioning import Entry
from jaxstate.scheduler import Scheduler
from jaxstate.serving.after_steps import AfterSteps
from jaxstate.serving.answer_log import FreshAnswer
from jaxstate.serving.commands import Commands
from jaxstate.serving.description import Overview, ServiceInfo, SessionInfo
from jaxstate.serving.durable import Durable
from jaxstate.serving.evaluations import Evaluations
from jaxstate.serving.journal import Journal
from jaxstate.serving.lifecycle import Lifecycle
from jaxstate.serving.open_session import MAX_HEADERS, MAX_REGISTERED, OpenSession
from jaxstate.serving.pending import Pending
from jaxstate.serving.questions import From, Questions, Stale
from jaxstate.serving.quotas import Holdings, QuotaOf, Usage
from jaxstate.serving.snapshots import Snapshots
from jaxstate.serving.submissions import Submissions
from jaxstate.serving.worker import Worker
from jaxstate.serving.write_memory import Number
from jaxstate.serving.writes import Writes
from jaxstate.session import WhenFull


class LocalService:
    """Verbs of an engine for many threads at once."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_tokens: int | None = None,
        max_waiting: int = 1024,
        preposition: int = 4,
        max_registered: int = MAX_REGISTERED,
        max_headers: int = MAX_HEADERS,
        journal: Journal | None = None,
        snapshots: Snapshots | None = None,
        quota_of: QuotaOf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start the worker; from now on nobody else may use the engine.

        Args:
          step_tokens: most tokens of a step, what a question may have to wait for; None = the
            largest compiled step.
          max_waiting: verbs of a class that may wait; more are refused with BusyError.
          preposition: beginnings of questions of a session that are paid for in idle time, after
            every change of it; 0 = only headers that were declared.
          max_registered, max_headers: questions that a session may have registered, and headers
            declared: all of them are computed after every change of it. Those that come with a
            journal or a snapshot stay.
          journal: what must not be lost is in it before a caller is told; sessions that are in it
            are opened again, and their cells computed in idle time or when somebody asks. Closed
            with the service.
          snapshots: where sessions' cells are saved once they rest and at the end, for the next
            start; needs a journal.
          quota_of: see Holdings; of what is computed unasked nothing is counted.
          clock: seconds, never going back.
        Raises:
          ValueError: snapshots without a journal.
          SnapshotError: the journal is damaged, or holds what this engine has no room for.
        """
        if snapshots is not None and journal is None:
            raise ValueError("snapshots: expected a journal that names them, got none")
        largest = engine.executor.config.step_shapes[-1]
        limits = Limits(
            tokens=min(step_tokens or largest.num_tokens, largest.num_tokens),
            rows=largest.num_rows,
        )
        self._engine = engine
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_registered = max_registered
        self._max_headers = max_headers
        self._submitting: collections.Counter[JobClass] = collections.Counter()
        self._sessions: dict[str, OpenSession] = {}
        self._commands = Commands()
        self._changed = self._commands.changed
        self._holdings = Holdings(engine.verbs.sessions, quota_of)
        self.metrics = Metrics()
        self._scheduler = Scheduler(
            engine.executor, engine.pages, limits, prefixes=engine.verbs.prefixes,
            on_end=self.metrics.note_end,
        )  # fmt: skip
        self._durable = Durable(journal, snapshots, engine.verbs, self._commands.soon)
        evaluations = Evaluations(self._scheduler)
        self._submissions = Submissions(
            engine.verbs, self._scheduler, self._commands, self._durable, self._holdings,
            evaluations, clock,
        )  # fmt: skip
        self._questions = Questions(
            engine.verbs, self._sessions, self._scheduler, self._commands, self._submissions,
            evaluations, clock,
        )  # fmt: skip
        self._writes = Writes(
            engine.verbs, self._sessions, self._scheduler, self._durable, self._submissions,
            self._questions, clock,
        )  # fmt: skip
        self._lifecycle = Lifecycle(
            engine, self._sessions, self._scheduler, self._commands, self._durable, self._holdings,
            self._submissions, evaluations, self._writes, clock, preposition=preposition,
        )  # fmt: skip
        self._after_steps = AfterSteps(
            engine.verbs, self._sessions, self._scheduler, self._durable, self._submissions,
            evaluations, self._questions, self._writes, clock,
        )  # fmt: skip
        for saved in self._durable.recover():
            self._lifecycle.recover(saved)
        for session in self._sessions.values():
            self._compile_registered(session.board)
        self._worker = Worker(
            self._commands, engine.executor, self._scheduler, self._durable, self._after_steps,
            self.metrics, clock,
        )  # fmt: skip
        self._worker.start()

    # Sessions

    def create(
        self,
        frozen: Sequence[int] = (),
        *,
        session_id: str | None = None,
        when_full: WhenFull = "error",
        tenant: str = "",
    ) -> str:
        """See Engine.create; returns when the prefix is computed, in steps shared with others."""
        return self.begin_create(
            frozen, session_id=session_id, when_full=when_full, tenant=tenant
        ).result()

    def begin_create(
        self,
        frozen: Sequence[int] = (),
        *,
        session_id: str | None = None,
        when_full: WhenFull = "error",
        tenant: str = "",
        opener: object = None,
        deadline_s: float = math.inf,
    ) -> Pending:
        """Like create, without waiting; its result is the id. Cancelled, there is no session.

        Args:
          opener: see take_back.
        """
        checks.length(frozen, self.model, "frozen")
        begin = functools.partial(
            self._lifecycle.create, frozen, session_id, when_full, tenant, opener
        )

        def submit(pending: Pending) -> None:
            self._submissions.submit_new(
                pending, begin, frozen, "frozen", JobClass.APPEND, cells=len(frozen), sessions=1,
                tenant=tenant, deadline_s=deadline_s, can_stop=True,
            )  # fmt: skip

        return self._pending(JobClass.APPEND, submit)

    def fork(self, session_id: str, *, new_id: str | None = None) -> str:
        """See Engine.fork; registered questions stay with the parent."""
        return self.begin_fork(session_id, new_id=new_id).result()

    def begin_fork(
        self,
        session_id: str,
        *,
        new_id: str | None = None,
        opener: object = None,
        deadline_s: float = math.inf,
    ) -> Pending:
        """Like fork, without waiting: it has to, while the parent is changed. Its result is the id.

        Args:
          opener: see take_back.
        """

        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._lifecycle.fork(session_id, new_id, opener)

        return self._pending(
            JobClass.QUERY,
            lambda pending: self._submissions.submit(
                pending, begin, session_id, (), JobClass.QUERY, cells=0, deadline_s=deadline_s
            ),
        )

    def close_session(self, session_id: str) -> None:
        """Cancel what is under way on a session and free its cells; see Engine.close.

        Raises:
          SessionError: unknown, or an append is being computed.
        """
        self._call(functools.partial(self._lifecycle.close, session_id))

    def take_back(self, session_id: str, *, opener: object) -> None:
        """Close a session that was opened in vain, unless it is another's or in use by now.

        Args:
          opener: what it was opened with; nobody else has this object.
        """
        self._call(functools.partial(self._lifecycle.take_back, session_id, opener))

    def snapshot(self, session_id: str, path: str | pathlib.Path, *, fingerprint: str) -> int:
        """Save a session, its cells and registered questions to a new directory.

        Args:
          fingerprint: of the model, `LoadedModel.fingerprint`.
        Returns:
          the version that was saved.
        Raises:
          SnapshotExistsError: the directory is there already.
          SnapshotSpaceError: it cannot be written.
          SessionError: unknown, or its cells leave the pool as soon as they come.
        """

        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._lifecycle.take(session_id, fingerprint)

        snapshot = self._pending(
            JobClass.QUERY,
            lambda pending: self._submissions.submit(
                pending, begin, session_id, (), JobClass.QUERY, cells=0
            ),
        ).result()
        session_snapshot.write(path, snapshot)
        return snapshot.version

    def restore(
        self,
        path: str | pathlib.Path,
        *,
        fingerprint: str,
        session_id: str | None = None,
        tenant: str | None = None,
        unless: Callable[[], bool] | None = None,
    ) -> str:
        """Open a session from a snapshot, or have it replace an open one, all or nothing.

        Of one that is replaced questions under way are cancelled, and its version goes on.

        Args:
          fingerprint: as for snapshot.
          session_id, tenant: of the session; None = as they were.
          unless: nothing is restored where this is so when the snapshot has been read.
        Returns:
          its id.
        Raises:
          CancelledError: `unless` was so.
          ForeignSnapshotError: it is of another model, dtype or format, or too long.
          SnapshotError: there is none, or it is damaged.
          SessionError: an append to the session that is to be replaced is being computed, or a
            session of this id is being created.
          PoolFullError, QuotaError: there is no room, or none for the tenant.
        """
        snapshot, name, saved = self._lifecycle.read(path, fingerprint, session_id, tenant)
        self._compile_registered(saved.board)

        def put() -> str:
            if unless is not None and unless():
                raise CancelledError(f"session {name}: cancelled, nothing was restored")
            return self._lifecycle.put(snapshot, name, saved)

        return self._call(put)

    def describe(self, session_id: str) -> SessionInfo:
        """Say how a session stands between two steps."""
        return self._call(functools.partial(self._describe, session_id))

    def describe_all(self) -> list[SessionInfo]:
        """Say how all open sessions stand between two steps, by id."""
        return self._call(lambda: [self._describe(name) for name in sorted(self._sessions)])

    def _describe(self, session_id: str) -> SessionInfo:
        session = self._engine.session(session_id)
        lagging = self._writes.under_way(session_id)
        now = self._clock()
        return SessionInfo.of(
            session, num_flash=len(self._sessions[session_id].board.queries),
            lag_tokens=sum(lagging.values()),
            lag_s=max((now - ticket.asked for ticket in lagging), default=0.0),
        )  # fmt: skip

    def version(self, session_id: str) -> int:
        """Return a session's newest computed version."""
        with self._changed:
            if session_id not in self._sessions:
                raise UnknownSessionError(session_id, self._sessions)
            return self._sessions[session_id].version

    # Verbs

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        number: Number | None = None,
        behind: Pending | None = None,
        **how: Any,
    ) -> Pending:
        """See Engine.append; its result is the new version.

        Args:
          number: one that comes again with the same number is applied once, see WriteMemory.
          behind: an earlier append of the session, if that has to be done for this to be run.
          how: deadline_s.
        """
        checks.length(token_ids, self.model, "append")
        return self._pending(
            JobClass.APPEND,
            lambda pending: self._writes.append(
                pending, session_id, token_ids, number, behind, **how
            ),
        )

    def update(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        number: Number | None = None,
        **how: Any,
    ) -> Pending:
        """See Engine.update; its result is the new version. `number`, `how`: as of append."""
        checks.length(token_ids, self.model, "update")
        return self._pending(
            JobClass.APPEND,
            lambda pending: self._writes.update(pending, session_id, token_ids, number, **how),
        )

    def rollback(
        self, session_id: str, count: int, *, number: Number | None = None, **how: Any
    ) -> Pending:
        """See Engine.rollback; its result is the new version. `number`, `how`: as of append."""
        return self._pending(
            JobClass.APPEND,
            lambda pending: self._writes.rollback(pending, session_id, count, number, **how),
        )

    def query(
        self,
        session_id: str,
        question: Question,
        *,
        stale: Stale = "compute",
        risk: float | None = None,
        entry: From = "question",
        commit: bool = False,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        **how: Any,
    ) -> Pending:
        """Ask; its result is the Answer, its tokens come as they are drawn.

        Args:
          stale: what to do where the registered answer is of an older version, see Stale.
          risk: of a registered question: how often an answer that is at hand may differ from the
            full one of the newest version, 0.001 to 0.3. Where shadow evaluations have shown with
            95 % confidence that it is not more often, it is given, with source GATED and its
            evidence; else, and always without a risk, the answer is the full one. None = as
            registered.
          entry: see From.
          commit: question and answer become part of the session, unless cancelled before the end.
          stop, top_logprobs: see generation.Request. With these or commit the answer is computed:
            what is at hand knows nothing of them.
          how: deadline_s, seconds after which it need not be begun any more.
        Raises:
          InputError: a risk that no gate can keep, choices with stop, top_logprobs or commit, or a
            constraint that cannot be kept.
          CapacityError: it is longer than the model's positions.
          ConflictError: commit, and another such turn of the session is under way.
        """
        if commit or stop or top_logprobs is not None:
            begin = self._questions.apart(
                question, commit=commit, stop=stop, top_logprobs=top_logprobs
            )
            self._engine.verbs.check_length(question)
            self._compile(question.constraint)
            submit = self._writes.turn if commit else self._submissions.submit
            cells = len(question.token_ids) + question.max_new_tokens
            return self._pending(
                JobClass.QUERY,
                lambda pending: submit(
                    pending, begin, session_id, question.token_ids, JobClass.QUERY, cells=cells,
                    **how,
                ),
            )  # fmt: skip
        asked = self._clock()
        with self._changed:
            session = self._sessions.get(session_id)
            query = session.board.find(question) if session else None
            if query and risk is None:
                risk = query.risk
            answer = self._questions.at_hand(session_id, question, query, stale, risk, entry)
            if answer is not None:
                took = self._clock() - asked
                self.metrics.note_answer(answer, took, took)
                return Pending(self._changed, None, answer)
        self._engine.verbs.check_length(question)
        self._compile(question.constraint)
        return self._pending(
            JobClass.QUERY,
            lambda pending: self._questions.ask(pending, session_id, question, query, risk, **how),
        )

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tenant: str = "",
        deadline_s: float = math.inf,
        **options: Unpack[RequestOptions],
    ) -> Pending:
        """See Engine.generate; its result is the Answer, its tokens come as they are drawn.

        Of prompts with the same beginning that are under way together, one computes it.
        """
        checks.length(prompt, self.model, "prompt")
        self._compile(options.get("constraint"))

        def submit(pending: Pending) -> None:
            begin = functools.partial(
                self._engine.verbs.stream_generate, prompt, max_new_tokens=max_new_tokens,
                tenant=tenant, **options,
            )  # fmt: skip
            self._submissions.submit_new(
                pending, begin, prompt, "prompt", JobClass.QUERY,
                cells=len(prompt) + max_new_tokens, tenant=tenant, deadline_s=deadline_s,
            )  # fmt: skip

        return self._pending(JobClass.QUERY, submit)

    # Ahead of questions

    def declare(self, session_id: str, header: Entry) -> None:
        """Forward a header in idle time, now and after every change of the session.

        A question that begins with it forwards only the rest; one that is exactly the header is
        answered by what was decoded ahead.

        Raises:
          InputError: no session can ever pay for it, see Verbs.check_entry.
          CapacityError: likewise, or the session has max_headers others.
        """
        self._engine.verbs.check_entry(header)

        def declare() -> None:
            self._engine.session(session_id)
            with self._changed:  # callers look at all that is declared
                self._sessions[session_id].declare(header, self._max_headers)
            self._durable.declared(session_id, header)

        self._call(declare)

    def advance(self, session_id: str, entry: Entry, **how: Any) -> Pending:
        """See Engine.advance; once, in idle time. `how`: deadline_s."""
        checks.length(entry.token_ids, self.model, "entry")
        return self._pending(
            JobClass.ADVANCE,
            lambda pending: self._questions.advance(pending, session_id, entry, **how),
        )

    # Flash Queries

    def register(
        self, session_id: str, question: Question, *, risk: float | None = None
    ) -> FlashQuery:
        """Have a question answered in idle time, now and after every change of the session.

        Args:
          risk: of queries that do not say one, see query; None = they get full answers.
        Raises:
          InputError: no session can ever answer it, see Verbs.check_question, or its constraint
            cannot be kept, or no gate the risk.
          CapacityError: likewise, or the session has max_registered others.
        """
        self._engine.verbs.check_question(question)
        if risk is not None:
            drift.check_risk(risk)
        self._compile(question.constraint)

        def register() -> FlashQuery:
            self._engine.session(session_id)
            with self._changed:  # callers look at all that is registered
                query = self._sessions[session_id].register(question, risk, self._max_registered)
            self._durable.registered(session_id, query)
            return query

        return self._call(register)

    def unregister(self, session_id: str, flash_id: int) -> None:
        """Forget a registered question."""

        def unregister() -> None:
            self._engine.session(session_id)
            with self._changed:
                self._sessions[session_id].board.unregister(flash_id)
            self._durable.unregistered(session_id, flash_id)

        self._call(unregister)

    def flash_queries(self, session_id: str) -> list[FlashQuery]:
        """Return copies of a session's registered questions as they stand between two steps."""

        def copies() -> list[FlashQuery]:
            self._engine.session(session_id)
            return list(map(dataclasses.replace, self._sessions[session_id].board.queries))

        return self._call(copies)

    def answers(self, session_id: str, cursor: str = "") -> tuple[list[FreshAnswer], str]:
        """Return fresh answers to registered questions behind a cursor, and the next cursor.

        Args:
          cursor: "" = begin with the newest answer of every question.
        Raises:
          CursorError: more has come behind it than is kept.
        """
        with self._changed:
            self.version(session_id)  # known, or refused
            return self._sessions[session_id].answers(cursor)

    def is_coming(self, session_id: str, question: Question) -> bool:
        """Say whether a registered question is going to have an answer of the newest version."""
        with self._changed:
            return self._questions.is_coming(session_id, question)

    # All of it

    @property
    def model(self) -> ModelConfig:
        """The model that it runs."""
        return self._engine.model

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes."""
        return self._engine.config

    @property
    def is_closed(self) -> bool:
        """Whether it runs nothing more: it was closed, or its worker has failed."""
        return self._commands.is_closing

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens; "" without a tokenizer."""
        return self._engine.verbs.text(token_ids)

    def stats(self) -> ServiceInfo:
        """Say how it stands between two steps."""
        return self._call(
            lambda: ServiceInfo.of(self._engine, self.metrics, self._scheduler.waiting)
        )

    def usage(self, tenant: str) -> Usage:
        """Say what a tenant has between two steps."""
        return self._call(lambda: self._holdings.usage(tenant))

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have the worker call back behind every step and change; returns what ends that.

        The callback must return at once and may use nothing of the service.
        """
        return self._commands.listen(callback)

    def wait_until_idle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs or waits and all registered questions are answered.

        Raises:
          TimeoutError: it is not so yet.
          CancelledError: the service was closed.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._after_steps.is_idle or self._commands.is_closing, timeout_s
            ):
                raise TimeoutError(f"{self._scheduler.num_waiting} verbs are under way")
            if self._commands.is_closing:
                raise self._commands.closed()

    def overview(self) -> Overview:
        """Say how all of it stands between two steps."""

        def overview() -> Overview:
            waiting, running = self._scheduler.waiting, self._scheduler.running
            return Overview(
                now=self._clock(),
                sessions=tuple(
                    (self._describe(name), tuple(map(dataclasses.replace, session.board.queries)))
                    for name, session in sorted(self._sessions.items())
                ),
                cells=count_cells(self._engine.verbs),
                waiting={one: waiting[one] - running[one] for one in JobClass},
                running={one: running[one] for one in JobClass},
            )

        return self._call(overview)

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker, by whose fault nothing runs any more; None = nothing."""
        return self._commands.failure

    def cells(self) -> Cells:
        """Count cells by owner and tier, between two steps."""
        return self._call(lambda: count_cells(self._engine.verbs))

    def close(self) -> None:
        """End what is under way, and the worker; sessions stay in the engine."""
        self._worker.close()

    # From callers to the worker

    def _compile(self, constraint: Constraint | None) -> None:
        """Compile what an answer has to be in the caller's thread: no step waits for it."""
        if constraint is not None:
            self._engine.verbs.compile(constraint)

    def _compile_registered(self, board: FlashBoard) -> None:
        for query in board.queries:
            # What cannot be compiled any more is said by its evaluation.
            with contextlib.suppress(InputError):
                self._compile(query.question.constraint)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the worker and return what it returns once that is kept, or raise."""

        def kept() -> Any:
            result = function()
            self._durable.commit()
            return result

        return self._commands.call(kept)

    def _pending(self, job_class: JobClass, submit: Callable[[Pending], Any]) -> Pending:
        """Have the worker submit a verb and return when it has."""
        rows = self._scheduler.limits.rows
        with self._changed:
            waiting = self._scheduler.waiting[job_class] + self._submitting[job_class]
            if job_class is JobClass.ADVANCE:  # most of them nobody asked for
                waiting -= len(self._questions.advancing)
            if waiting >= self._max_waiting:
                raise BusyError(
                    f"{self._max_waiting} verbs of class {job_class.name} wait already, which is "
                    "the limit; come again",
                    retry_after_s=self._max_waiting * self._worker.step_s / rows,
                )
            self._submitting[job_class] += 1
        pending = Pending(self._changed, None, asked=self._clock())
        try:
            self._call(functools.partial(submit, pending))
        finally:
            with self._changed:
                self._submitting[job_class] -= 1
        return pending
